"""Saving a model in training from all ranks of its pool, and loading it on any number of ranks.

Owns which tensors are saved under which names, and the checks before anything is changed. torch.distributed.checkpoint
writes and reads the tensor files.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rolepool.errors import ConfigError, RolepoolError
from rolepool.models.training import TrainedModel

FILE_BYTES = 2**30
"""Approximate size of a file, and of the host memory that a rank needs to write it."""

STEP, *MOMENTS = OPTIMIZER_STATES = ("step", "exp_avg", "exp_avg_sq")
_SHOWN_MISFITS = 3


class RankState(BaseModel):
    """What a rank writes after all its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = 2
    num_updates: int
    num_bytes: int
    """Size of all tensors of all ranks."""
    rng: dict[str, Any]


@dataclass(frozen=True)
class SavedRole:
    """A complete saved role."""

    ranks: list[RankState]
    tensors: Mapping[str, TensorStorageMetadata]


def save_trained(trained: TrainedModel, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Write weights, optimizer states, number of updates and random states into a new folder.

    All ranks of the pool call it, and each writes its own shards; replicas and tied weights are written once. The
    folder is complete when the last rank has returned; the caller waits for that before it publishes the folder.
    """
    rank, num_ranks = _rank_and_count()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder}: not empty; a checkpoint is saved into a new folder")
    if dist.is_initialized():
        dist.barrier()  # no rank writes before all have checked the folder
    tensors = {**_weights(trained.model), **_optimizer_tensors(trained)}
    bytes_so_far = list(accumulate(tensor.nbytes for tensor in tensors.values()))
    file_of = {name: 1 + end // file_bytes for name, end in zip(tensors, bytes_so_far, strict=True)}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of, save_distributed=True)
    with _plain_errors(folder):
        save(tensors, storage_writer=writer)
    if rank == 0 and isinstance(trained.model, PreTrainedModel):
        (folder / "config.json").write_text(_hf_config(trained.model), encoding="utf-8")
    state = RankState(num_updates=trained.num_updates, num_bytes=bytes_so_far[-1], rng=_random_states())
    (folder / _rank_file(rank, num_ranks)).write_text(state.model_dump_json(), encoding="utf-8")


def load_trained(trained: TrainedModel, folder: Path) -> None:
    """Load a saved state, whatever number of ranks and sharding saved it; each rank reads only its own rows.

    Weights, optimizer states and number of updates are exact. Random states are restored if the number of ranks is the
    same; otherwise they stay as seeded. Everything is checked before anything is changed.
    """
    saved = read_saved(folder)
    misfits = list(_misfits(saved.tensors, trained))
    if misfits:
        more = f"; and {len(misfits) - _SHOWN_MISFITS} more" if len(misfits) > _SHOWN_MISFITS else ""
        raise ConfigError(
            f"{folder}: was saved from another model ({'; '.join(misfits[:_SHOWN_MISFITS])}{more}); set the model that "
            "it was saved from, or start a new run with trainer.resume_mode=disable and no trainer.resume_from_path"
        )
    trained.optimizer.state.clear()
    with trained.on_device(training=True), torch.no_grad():
        _make_states(trained, saved.tensors)
        read_tensors(folder, {**_weights(trained.model), **_optimizer_tensors(trained)})
    trained.num_updates = saved.ranks[0].num_updates
    rank, num_ranks = _rank_and_count()
    if len(saved.ranks) == num_ranks:
        _restore_random_states(saved.ranks[rank].rng)


def read_saved(folder: Path) -> SavedRole:
    """What is saved in a role's folder. Raises ConfigError unless it is complete."""
    names = sorted(path.name for path in folder.glob("rank_*_of_*.json"))
    if not names:
        raise ConfigError(f"{folder}: not a saved role; it has no rank_*_of_*.json")
    num_ranks = int(names[0].removesuffix(".json").rsplit("_", 1)[1])
    expected = [_rank_file(rank, num_ranks) for rank in range(num_ranks)]
    if names != expected:
        missing = [f"{folder / name}: missing" for name in sorted({*expected} - {*names})]
        others = [f"{folder / name}: does not belong to a save by {num_ranks} ranks" for name in names]
        raise ConfigError(missing or others[num_ranks:])
    ranks = [_read_rank(folder / name) for name in names]
    if len({(state.num_updates, state.num_bytes) for state in ranks}) > 1:
        raise ConfigError(f"{folder}: its rank files belong to different saves")
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass  # opening a file checks it
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: not a complete safetensors file ({error})") from None
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, TensorStorageMetadata)}
    num_bytes = 0
    for name, tensor in tensors.items():
        num_elements = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if num_elements != tensor.size.numel():
            raise ConfigError(f"{folder}: {name} is incomplete; a file is missing")
        num_bytes += num_elements * tensor.properties.dtype.itemsize
    if num_bytes != ranks[0].num_bytes:
        raise ConfigError(f"{folder}: {num_bytes} of {ranks[0].num_bytes} bytes were found; a file is missing")
    return SavedRole(ranks, tensors)


def read_tensors(folder: Path, into: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, with the values saved under their names."""
    with _plain_errors(folder):
        load(into, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Raise RolepoolError instead of torch's error, which is no Exception; hide its warning for a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            failed = ", ".join(f"{failure!r} on rank {rank}" for rank, (failure, _) in error.failures.items())
            raise RolepoolError(f"{folder}: {failed}") from error


def _rank_and_count() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _rank_file(rank: int, num_ranks: int) -> str:
    return f"rank_{rank:05d}_of_{num_ranks:05d}.json"


def _read_rank(path: Path) -> RankState:
    try:
        return RankState.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        raise ConfigError(f"{path}: not a valid rank file ({str(error).splitlines()[0]})") from None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by Hugging Face name; tied weights are listed once."""
    # Reading the state dict also makes FSDP2 reshard parameters that a forward pass gathered.
    tensors = model.state_dict()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = names - {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def _parameters(trained: TrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters of the optimizer, which has all parameters in the model's order."""
    given = [parameter for group in trained.optimizer.param_groups for parameter in group["params"]]
    names = [name for name, _ in trained.model.named_parameters()]
    return zip(names, given, strict=True)


def _optimizer_tensors(trained: TrainedModel) -> dict[str, Tensor]:
    return {
        f"{name}/{state}": value
        for name, parameter in _parameters(trained)
        for state, value in trained.optimizer.state.get(parameter, {}).items()
    }


def _make_states(trained: TrainedModel, saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Allocate the saved states as AdamW does: moments like the parameter, the step on the device."""
    for name, parameter in _parameters(trained):
        if (step := saved.get(f"{name}/{STEP}")) is not None:
            trained.optimizer.state[parameter] = {
                STEP: torch.zeros((), dtype=step.properties.dtype, device=trained.device),
                **{moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in MOMENTS},
            }


def _misfits(saved: Mapping[str, TensorStorageMetadata], trained: TrainedModel) -> Iterator[str]:
    """Differences between saved and expected tensors. A parameter that never had a gradient has no optimizer states."""
    wanted = _weights(trained.model)
    for name, parameter in _parameters(trained):
        if any(f"{name}/{state}" in saved for state in OPTIMIZER_STATES):
            wanted |= {f"{name}/{STEP}": torch.zeros(()), **{f"{name}/{moment}": parameter for moment in MOMENTS}}
    for name, tensor in wanted.items():
        if name not in saved:
            yield f"{name} is not saved, but the model has it"
            continue
        there, dtype = saved[name], saved[name].properties.dtype
        if there.size != tensor.shape or (dtype != tensor.dtype and not name.endswith(f"/{STEP}")):
            has = f"{list(tensor.shape)} {tensor.dtype}"
            yield f"{name} is {list(there.size)} {dtype}, but the model has {has}".replace("torch.", "")
    yield from (f"{name} is saved, but the model does not have it" for name in sorted(saved.keys() - wanted.keys()))


def _hf_config(model: PreTrainedModel) -> str:
    """The model's configuration, including the user's overrides and the class of the head."""
    config = json.loads(model.config.to_json_string())
    own_class = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    return json.dumps({**config, "architectures": [own_class.__name__]}, indent=2)


def _random_states() -> dict[str, Any]:
    """States of this process's random generators: torch (CPU and GPU), Python, numpy."""
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": numpy,
    }


def _restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore them; the state of a GPU is ignored if there is none."""
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy"])
