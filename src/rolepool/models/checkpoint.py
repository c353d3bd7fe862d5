"""Checkpoints of models in training: all ranks write them, any number of ranks can read them, and
they can be exported.

Owns what a checkpoint looks like on disk (safetensors and JSON, nothing pickled), and the folders
under `checkpoints/`: a folder is complete or absent. torch.distributed.checkpoint writes and reads
the tensor files. The trainer owns what else a run saves (data position, metrics) and when.

    checkpoints/step_000010/
      trainer.json                       written by the trainer; a checkpoint without it is not complete
      actor/                             one folder for each saved role
        rank_00000_of_00002.json         size of all tensors, number of updates, random states
        shard-*.safetensors              weights by Hugging Face name; NAME/exp_avg, NAME/exp_avg_sq, NAME/step
        config.json                      the model's configuration, if it is a Hugging Face model
        rank_00000_of_00002.sha256       hashes of the files that the rank wrote, as `sha256sum --check` reads them

A name that begins with `.tmp-` belongs to a save, an export or a removal that did not finish, and
is never read.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rolepool.errors import ConfigError, RolepoolError, explained, first_few, logger
from rolepool.models.ranks import rank_and_count
from rolepool.models.training import TrainedModel
from rolepool.models.weights import weights_of
from rolepool.protocol.random_state import random_state, set_random_state
from rolepool.reading import open_regular, parse_json, read_small

FILE_BYTES = 2**30
"""Approximate size of a file, and of the host memory that a rank needs to write it."""
STEP = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER_STATES = (STEP, *MOMENTS)

STEP_FOLDER = re.compile(r"step_(\d{6,})")
_RANK_FILE = re.compile(r"rank_\d{5,}_of_(\d{5,})\.json")
_HASHES = ".sha256"
_COPY_AGAIN = "copy the checkpoint again"
_INVALID = (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError)
"""What parsing a file and restoring a random state raise if the file is damaged (RecursionError:
deeply nested)."""
_OF_TOKENIZERS = (
    "tokenizer",
    "vocab",
    "merges",
    "special_tokens_map",
    "added_tokens",
    "chat_template",
    "spiece",
)
"""How the names of a tokenizer's files begin."""
_COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
"""Suffixes of files that an export copies: configurations, tokenizers, chat templates, model
code."""

Check = Callable[[Path], object]
"""A function that raises ConfigError if something is wrong with a folder."""
Saved = dict[str, TensorStorageMetadata]
"""Size and dtype of saved tensors by name."""


class RankState(BaseModel):
    """What a rank writes after all its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = 2
    num_updates: int
    num_bytes: int
    """Size of all tensors of all ranks."""
    rng: dict[str, Any]
    number: int | None = None
    """The number of a snapshot in memory. A snapshot that is taken again has a new number."""


# One role


def save_trained(trained: TrainedModel, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Write weights, optimizer states, number of updates and random states into a new folder.

    All ranks of the pool call it, and each writes its own shards; replicas and tied weights are
    written once. The folder is complete when the last rank has returned; the caller waits for that
    before it publishes the folder.
    """
    rank, num_ranks = rank_and_count()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = all_tensors(trained)
    # Each tensor goes to the file that is reached when it and all before it are written.
    file_of: dict[str, int] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        num_bytes += tensor.nbytes
        file_of[name] = 1 + num_bytes // file_bytes
    writer = HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping=file_of,
        save_distributed=True,
    )
    with _plain_errors(folder):
        save(tensors, storage_writer=writer)
    if rank == 0 and isinstance(trained.model, PreTrainedModel):
        _write_config(trained.model, folder / "config.json")
    text = rank_state_text(trained, tensors)
    own_file = folder / rank_file(rank, num_ranks)
    own_file.write_text(text, encoding="utf-8")
    written = [own_file, *folder.glob(f"shard-{rank + 1:05d}-*.safetensors")]
    if rank == 0:
        written += folder.glob("config.json")
    write_hashes(own_file, written)


def _write_config(model: PreTrainedModel, file: Path) -> None:
    """Write the configuration of a model, which includes the user's overrides."""
    # FSDP2 has replaced the model's class with a subclass.
    classes = type(model).__mro__
    own_class = next(kind for kind in classes if not issubclass(kind, FSDPModule))
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [own_class.__name__]
    text = json.dumps(config, indent=2)
    file.write_text(text, encoding="utf-8")


def rank_state_text(
    trained: TrainedModel,
    tensors: Mapping[str, Tensor],
    number: int | None = None,
) -> str:
    """The content of a rank's own file. `tensors` are all that are saved, and `number` is that of a
    snapshot."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    state = RankState(
        num_updates=trained.num_updates,
        num_bytes=num_bytes,
        rng=random_state(),
        number=number,
    )
    return state.model_dump_json(fallback=lambda array: array.tolist())


def load_trained(trained: TrainedModel, folder: Path) -> None:
    """Load a saved state, whatever number of ranks and sharding saved it; each rank reads only its
    own rows.

    Weights, optimizer states and number of updates are exact. Random states are restored if the
    number of ranks is the same; otherwise they stay as seeded. Everything is checked before
    anything is changed.
    """
    ranks, saved = _read_saved(folder)
    misfits = list(_misfits(saved, trained))
    if misfits:
        differences = first_few(misfits, 3, "; ")
        problem = (
            f"was saved from another model ({differences}); set the model that it was saved from"
        )
        fix = "start a new run with trainer.resume_mode=disable and no trainer.resume_from_path"
        raise ConfigError(f"{folder}: {problem}, or {fix}")
    trained.optimizer.state.clear()
    trained.failure = None
    with trained.on_device(training=True), torch.no_grad():
        for name, parameter in _parameters(trained):
            step = saved.get(f"{name}/{STEP}")
            # A parameter that never had a gradient has no optimizer states.
            if step is None:
                continue
            # As AdamW allocates them.
            dtype = step.properties.dtype
            states = {STEP: torch.zeros((), dtype=dtype, device=trained.device)}
            for moment in MOMENTS:
                states[moment] = torch.zeros_like(
                    parameter,
                    memory_format=torch.preserve_format,
                )
            trained.optimizer.state[parameter] = states
        _read_tensors(folder, all_tensors(trained))
    trained.num_updates = ranks[0].num_updates
    rank, num_ranks = rank_and_count()
    if len(ranks) == num_ranks:
        set_random_state(ranks[rank].rng)


def snapshot_files(folder: Path, rank: int, num_ranks: int) -> tuple[Path, Path]:
    """The files that a rank writes for a snapshot: its shard, and then its own file, with the
    snapshot's number."""
    shard = folder / f"shard-{rank:05d}.safetensors"
    own_file = folder / rank_file(rank, num_ranks)
    return shard, own_file


def snapshot_number(files: Sequence[Path]) -> int | None:
    """The number of the snapshot that a rank wrote to these files; None if it is not complete."""
    with suppress(OSError):  # not written yet, or just removed
        own_file = files[-1]
        state = json.loads(own_file.read_bytes())
        number: int = state["number"]
        return number
    return None


def all_tensors(trained: TrainedModel) -> dict[str, Tensor]:
    """Weights, buffers and optimizer states by the name under which they are saved; tied weights
    are listed once."""
    tensors = weights_of(trained.model)
    for name, parameter in _parameters(trained):
        states = trained.optimizer.state.get(parameter, {})
        for state, value in states.items():
            tensors[f"{name}/{state}"] = value
    return tensors


def future_states(trained: TrainedModel) -> dict[str, Tensor]:
    """The optimizer states that do not exist before the first update, by the name under which they
    will be saved. The tensors have their shapes and dtypes. The states are 0 until then."""
    states: dict[str, Tensor] = {}
    for name, parameter in _parameters(trained):
        if trained.optimizer.state.get(parameter) or not parameter.requires_grad:
            continue
        states[f"{name}/{STEP}"] = torch.zeros(())
        for moment in MOMENTS:
            states[f"{name}/{moment}"] = parameter
    return states


def _parameters(trained: TrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters of the optimizer, which has all parameters in the model's order."""
    parameters: list[Tensor] = []
    for group in trained.optimizer.param_groups:
        parameters += group["params"]
    names = [name for name, _ in trained.model.named_parameters()]
    return zip(names, parameters, strict=True)


def _misfits(saved: Saved, trained: TrainedModel) -> Iterator[str]:
    """Differences between saved and expected tensors. A parameter that never had a gradient has no
    optimizer states."""
    wanted = weights_of(trained.model)
    for name, parameter in _parameters(trained):
        has_states = any(f"{name}/{state}" in saved for state in OPTIMIZER_STATES)
        if has_states:
            wanted[f"{name}/{STEP}"] = torch.zeros(())
            for moment in MOMENTS:
                wanted[f"{name}/{moment}"] = parameter
    for name, tensor in wanted.items():
        if name not in saved:
            yield f"{name} is not saved, but the model has it"
            continue
        size = saved[name].size
        dtype = saved[name].properties.dtype
        has_other_size = size != tensor.shape
        # AdamW reads a step of any dtype.
        is_step = name.endswith(f"/{STEP}")
        has_other_dtype = dtype != tensor.dtype and not is_step
        if has_other_size or has_other_dtype:
            has = f"{list(tensor.shape)} {tensor.dtype}"
            yield f"{name} is {list(size)} {dtype}, but the model has {has}".replace("torch.", "")
    for name in sorted(saved.keys() - wanted.keys()):
        yield f"{name} is saved, but the model does not have it"


def _read_saved(folder: Path) -> tuple[list[RankState], Saved]:
    """What is saved in a role's folder, by rank and by tensor. Raises ConfigError unless it is
    complete."""
    ranks = _read_ranks(folder)
    for path in sorted(folder.glob("*.safetensors")):
        # Opening a file checks it. To open a pipe could take forever.
        problem = f"{path}: not a complete safetensors file"
        with explained(problem, _COPY_AGAIN, SafetensorError):
            open_regular(path).close()
            with safe_open(path, "pt"):
                pass
    problem = f"{folder}: what its files contain cannot be read"
    with explained(problem, _COPY_AGAIN, *_INVALID):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        entries = metadata.state_dict_metadata
    tensors: Saved = {}
    num_bytes = 0
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        tensors[name] = entry
        # What the files contain: a file may be missing, and with it a chunk.
        num_elements = sum(chunk.sizes.numel() for chunk in entry.chunks)
        num_bytes += num_elements * entry.properties.dtype.itemsize
    expected_bytes = ranks[0].num_bytes
    if num_bytes != expected_bytes:
        raise ConfigError(
            f"{folder}: {num_bytes} of {expected_bytes} bytes were found; a file is missing"
        )
    return ranks, tensors


def _read_ranks(folder: Path) -> list[RankState]:
    """What each rank wrote after its tensors. Raises ConfigError unless all belong to one save."""
    counts: set[int] = set()
    for path in folder.glob("rank_*_of_*.json"):
        match = _RANK_FILE.fullmatch(path.name)
        if match is not None:
            counts.add(int(match[1]))
    if not counts:
        raise ConfigError(f"{folder}: not a saved role; it has no rank_*_of_*.json")
    ranks: list[RankState] = []
    num_ranks = min(counts)
    for rank in range(num_ranks):
        file = folder / rank_file(rank, num_ranks)
        problem = f"{file}: not a valid rank file"
        with explained(problem, _COPY_AGAIN, *_INVALID), ExitStack() as restored:
            state = RankState.model_validate_json(read_small(file))
            ranks.append(state)
            restored.callback(set_random_state, random_state())
            set_random_state(state.rng)  # fails if it is not a random state
    saves = {(state.num_updates, state.num_bytes) for state in ranks}
    if len(counts) > 1 or len(saves) > 1:
        raise ConfigError(f"{folder}: its rank files belong to different saves; {_COPY_AGAIN}")
    return ranks


def write_hashes(beside: Path, files: Iterable[Path]) -> None:
    """Write the hashes of files into a file next to `beside`, with the same name and another
    suffix."""
    lines: list[str] = []
    for file, digest in _hashes(files).items():
        lines.append(f"{digest}  {file.name}\n")
    list_of_hashes = beside.with_suffix(_HASHES)
    list_of_hashes.write_text("".join(lines), encoding="utf-8")


def check_hashes(folder: Path) -> None:
    """Read every file of a checkpoint, or of one role, and raise ConfigError if one has changed
    since it was saved, or if no list has its hash."""
    expected: dict[Path, str] = {}
    fix = f"{_COPY_AGAIN}, or use another one"
    for file in sorted(folder.rglob(f"*{_HASHES}")):
        with explained(f"{file}: not a list of hashes", fix, ValueError):
            text = read_small(file).decode()
            for line in text.splitlines():
                digest, name = line.split("  ", 1)
                # A list is for its own folder only.
                if Path(name).name == name:
                    expected[file.parent / name] = digest
    with explained(f"{folder}: cannot be read", fix):
        for file in sorted(folder.rglob("*")):
            if _is_read(file) and file not in expected:
                raise ConfigError(_missing_hash(file))
        hashes = _hashes(expected)
    for file, digest in hashes.items():
        if digest != expected[file]:
            raise ConfigError(
                f"{file}: damaged, because its hash is not the one that was saved; {fix}"
            )


def _is_read(file: Path) -> bool:
    """Whether loading or exporting a checkpoint reads this file. Other files may be in its folders,
    too."""
    if file.name in ("trainer.json", "config.json") or file.suffix == ".safetensors":
        return True
    return _RANK_FILE.fullmatch(file.name) is not None


def _missing_hash(file: Path) -> str:
    """The problem that no list of hashes has this file, and what to do about it."""
    reason = f"a {_HASHES} file is missing, empty or incomplete"
    what = f"{file}: damaged, because no list has its hash ({reason})"
    if file.name == "trainer.json":
        names = "trainer.json"
    else:
        names = "*.json *.safetensors"
    by_hand = f"run `sha256sum {names} > hashes{_HASHES}` in {file.parent}"
    fix = f"{_COPY_AGAIN}, or, if you are sure that it is complete and right"
    return f"{what}; {fix}, {by_hand}"


def _hashes(files: Iterable[Path]) -> dict[Path, str]:
    """The hash of each file. Several files are read at the same time."""

    def hash_of(file: Path) -> str:
        with open_regular(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    files = sorted(files)
    with ThreadPoolExecutor() as threads:
        digests = threads.map(hash_of, files)
        return dict(zip(files, digests, strict=True))


def _read_tensors(folder: Path, into: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, with the values saved under their names."""
    with _plain_errors(folder):
        reader = HuggingFaceStorageReader(str(folder))
        load(into, storage_reader=reader, no_dist=True)


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Raise RolepoolError instead of torch's error, which is no Exception; hide its warning for a
    single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            failures: list[str] = []
            for rank, (failure, _) in error.failures.items():
                failures.append(f"{failure!r} on rank {rank}")
            raise RolepoolError(f"{folder}: {', '.join(failures)}") from error


def rank_file(rank: int, num_ranks: int) -> str:
    return f"rank_{rank:05d}_of_{num_ranks:05d}.json"


def export_hf(
    folder: Path,
    model_config_dir: Path,
    out_dir: Path,
    *,
    tokenizer_dir: Path | None = None,
    file_bytes: int = 4 * 2**30,
) -> None:
    """Write a folder that `from_pretrained` loads: the saved weights, in files of at most
    `file_bytes`, and the other files (such as the tokenizer) of the original model folder. The
    folder appears under its name when it is complete. `tokenizer_dir` is the folder of the
    tokenizer, if it is another one.

    config.json is that of the saved model, which includes the user's overrides and the head; its
    `dtype` is that of the saved weights.
    """
    is_empty_folder = out_dir.is_dir() and not any(out_dir.iterdir())
    if out_dir.exists() and not is_empty_folder:
        raise ConfigError(f"{out_dir}: already exists; export into a new folder")
    _, saved = _read_saved(folder)
    check_hashes(folder)
    weights: dict[str, Tensor] = {}
    for name, tensor in saved.items():
        # The names of optimizer states have a slash.
        if "/" not in name:
            dtype = tensor.properties.dtype
            weights[name] = torch.empty(tensor.size, dtype=dtype)
    _read_tensors(folder, weights)
    out_dir = out_dir.absolute()
    temporary = temporary_folder(out_dir)
    try:
        _copy_files(model_config_dir, temporary, _is_copied)
        if tokenizer_dir is not None:
            _copy_files(tokenizer_dir, temporary, lambda name: name.startswith(_OF_TOKENIZERS))
        save_torch_state_dict(weights, temporary, max_shard_size=file_bytes)
        saved_config = folder / "config.json"
        config_file = temporary / "config.json"
        source = saved_config if saved_config.is_file() else config_file
        text = _exported_config(source, weights.values())
        config_file.write_text(text, encoding="utf-8")
        publish(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_files(source: Path, target: Path, is_wanted: Callable[[str], bool]) -> None:
    """Copy the files of a folder whose names are wanted."""
    for path in sorted(source.iterdir()):
        if path.is_file() and is_wanted(path.name):
            shutil.copyfile(path, target / path.name)


def _is_copied(name: str) -> bool:
    """Whether an export copies a file of the original model. An index belongs to its weights."""
    is_index = name.endswith(".index.json")
    return Path(name).suffix in _COPIED and not is_index


def _exported_config(source: Path, weights: Iterable[Tensor]) -> str:
    """The content of config.json for these weights, from the configuration of a saved model."""
    problem = f"{source}: not the configuration of a model"
    with explained(problem, _COPY_AGAIN, *_INVALID):
        text = source.read_text(encoding="utf-8")
        config = dict(json.loads(text))
    dtypes: set[str] = set()
    for weight in weights:
        if weight.is_floating_point():
            dtype = str(weight.dtype)
            dtypes.add(dtype.removeprefix("torch."))
    if len(dtypes) == 1:
        config.pop("torch_dtype", None)  # its name in older releases of transformers
        config["dtype"] = dtypes.pop()
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


# The folders of a run


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """The folder of a step's complete checkpoint."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def temporary_folder(final_folder: Path) -> Path:
    """A new, empty folder next to the final one, to write into before `publish`; leftovers are
    removed."""
    folder = final_folder.parent / f".tmp-{final_folder.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(tmp_folder: Path, final_folder: Path) -> None:
    """Rename a written folder to its final name, after all of it is on disk.

    An existing folder of that name is replaced. If the process is killed between the two renames,
    there is no folder of that name.
    """
    for path in (*tmp_folder.rglob("*"), tmp_folder):
        _sync(path)
    replaced = final_folder.parent / f".tmp-replaced-{final_folder.name}"
    shutil.rmtree(replaced, ignore_errors=True)
    if final_folder.exists():
        final_folder.rename(replaced)
    tmp_folder.rename(final_folder)
    _sync(final_folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def newest_checkpoint(run_dir: Path, parts: Collection[str] = ()) -> Path | None:
    """The complete checkpoint of the highest step that has these parts. Damaged ones are skipped
    with a warning."""
    for folder in _newest_first(run_dir):
        problem = _problem(folder)
        if problem is not None:
            logger.warning("skipping %s: %s", folder, problem)
        elif all((folder / part).is_dir() for part in parts):
            return folder
    return None


def checkpoint_to_resume(run_dir: Path, check: Check) -> Path | None:
    """The complete checkpoint of the highest step; None if the run has saved none. `check` raises
    ConfigError if something else is wrong with one.

    Damaged ones are skipped with a warning. If all are damaged, this raises ConfigError with the
    reason for each one, because otherwise the run would start at step 1 although nobody has asked
    for that.
    """
    problems: list[str] = []
    for folder in _newest_first(run_dir):
        problem = _problem(folder, check)
        if problem is None:
            for skipped in problems:
                logger.warning("skipping %s", skipped)
            return folder
        problems.append(f"{folder}: {problem}")
    if problems:
        if len(problems) == 1:
            number = "the only checkpoint"
        else:
            number = f"all {len(problems)} checkpoints"
        what = f"{number} of {run_dir} cannot be used, and nothing was changed"
        fix = "repair one, or set trainer.resume_mode=disable to start a new run (this one is moved to `earlier/`)"
        raise ConfigError([f"trainer.resume_mode=auto: {what}; {fix}", *problems])
    return None


def remove_old(run_dir: Path, part: str, keep: int) -> None:
    """Remove a part (such as `actor`) from all checkpoints except the `keep` newest complete ones
    that have it.

    A checkpoint is removed with its last part. Damaged ones are not counted, so the newest complete
    one always stays.
    """
    assert keep >= 1
    remove_unfinished(run_dir)
    num_kept = 0
    for folder in _newest_first(run_dir):
        parts = _parts(folder)
        if folder / part not in parts:
            continue
        if num_kept < keep:
            if _problem(folder) is None:
                num_kept += 1
            continue
        removed = folder if len(parts) == 1 else folder / part
        # Renamed first, so that an interrupted removal does not leave a partial checkpoint.
        renamed = removed.rename(folder.parent / f".tmp-removed-{folder.name}-{part}")
        shutil.rmtree(renamed)


def remove_unfinished(run_dir: Path) -> None:
    """Remove what unfinished saves and removals have left."""
    for leftover in (run_dir / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _newest_first(run_dir: Path) -> list[Path]:
    folders: dict[int, Path] = {}
    for path in (run_dir / "checkpoints").glob("step_*"):
        match = STEP_FOLDER.fullmatch(path.name)
        if match is not None and path.is_dir():
            folders[int(match[1])] = path
    return [folders[step] for step in sorted(folders, reverse=True)]


def _parts(folder: Path) -> list[Path]:
    """The folders of saved roles in a checkpoint."""
    parts: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            parts.append(path)
    return parts


def _problem(folder: Path, check: Check | None = None) -> str | None:
    """Why a checkpoint is not complete; None if it is."""
    fix = "only complete checkpoints are used"
    try:
        with explained("trainer.json cannot be read", fix, *_INVALID):
            parse_json(read_small(folder / "trainer.json"))
        parts = _parts(folder)
        for part in parts:
            _read_saved(part)
        if check is not None:
            check(folder)
    except ConfigError as error:
        return error.problems[0]
    if not parts:
        return "it has no saved role"
    return None
