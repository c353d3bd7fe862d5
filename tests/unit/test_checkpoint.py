"""A state of training is saved by any number of ranks and read by any other; a checkpoint is whole
or absent."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rolepool.config.model_keys import FsdpConfig, OptimConfig
from rolepool.errors import ConfigError, RolepoolError
from rolepool.models.checkpoint import (
    check_hashes,
    checkpoint_folder,
    export_hf,
    load_trained,
    newest_checkpoint,
    publish,
    remove_old,
    save_trained,
    snapshot_files,
    snapshot_number,
    temporary_folder,
)
from rolepool.models.ranks import PartSums, rank_and_count, whole
from rolepool.models.snapshot import SnapshotWriter
from rolepool.models.training import TrainedModel
from rolepool.placement import ParallelDims

# More than a minute of real processes. Runs that save and resume are among the other tests.
pytestmark = pytest.mark.slow

# Two ranks cut these sizes into halves, three into uneven pieces, and the critic's head of one row
# into empty ones.
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
# Computes in float64 throughout; Llama's norms go through float32, where a loss taken three times
# rounds differently.
CRITIC_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "classifier_dropout": 0.0,
    "num_labels": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROWS = 12


class Setting(NamedTuple):
    """What is trained, and how it lies on the ranks."""

    head: str = "tied"
    dtype: torch.dtype = torch.float32
    fsdp_size: int = -1


# What runs on the ranks


def build(setting: Setting, **sizes: Any) -> TrainedModel:
    """A model in training, the same on every rank and before every save."""
    torch.manual_seed(0)
    model: Any
    if setting.head == "value":
        model = GPT2ForTokenClassification(GPT2Config(**CRITIC_SIZES))  # type: ignore[no-untyped-call]
    else:
        config = LlamaConfig(**{**SIZES, **sizes, "tie_word_embeddings": setting.head == "tied"})
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return TrainedModel(
        model.to(setting.dtype),
        device="cpu",
        dims=ParallelDims.over(rank_and_count()[1], shard=setting.fsdp_size),
        optim=OptimConfig(lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=2),
        fsdp=FsdpConfig(fsdp_size=setting.fsdp_size),
        grad_clip=1.0,
        num_steps=8,
    )


def train(trained: TrainedModel, num_steps: int, *, noisy: bool = False) -> list[float]:
    """Losses of the next steps, over all ranks. A noisy loss depends on all the random states of a
    process."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for _ in range(num_steps):
        rows = torch.randint(
            50, (ROWS, 8), generator=torch.Generator().manual_seed(trained.num_updates)
        )

        def loss_of(taken: Any, rows: Tensor = rows) -> tuple[Tensor, dict[str, Tensor]]:
            logits = trained.model(input_ids=rows[taken], use_cache=False).logits
            noise = float(torch.rand(())) + random.random() + np.random.normal() if noisy else 0.0
            loss = (
                (logits.logsumexp(-1) - logits[..., 0] + logits[..., 0] ** 2).mean()
                * len(taken)
                / ROWS
            )
            return (1 + noise) * loss, {"loss": (1 + noise) * loss.detach().double()}

        mine = list(range(ROWS))[rank::num_ranks]
        share = float(trained.step([mine[:1], mine[1:]], loss_of)["loss"])
        losses.append(PartSums(trained.dims, "cpu").sum([share])[0])
        trained.num_updates += 1
    return losses


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def whole_state(trained: TrainedModel) -> dict[str, Any]:
    """Weights and optimizer states put together by torch, to compare with what is read back."""
    state = {name: whole(tensor) for name, tensor in trained.model.state_dict().items()}
    for name, parameter in trained.model.named_parameters():
        for key, value in trained.optimizer.state[parameter].items():
            state[f"{name}/{key}"] = whole(value)
    return {name: tensor.detach().clone().numpy() for name, tensor in state.items()}


def save_and_go_on(
    setting: Setting, folder: Path, noisy: bool = False
) -> tuple[dict[str, Any], list[float]]:
    """Three steps, a save, and two more: the state as saved, and the losses after."""
    trained = build(setting)
    seed_all(dist.get_rank() if dist.is_initialized() else 0)
    train(trained, 3, noisy=noisy)
    with (
        torch.no_grad()
    ):  # leaves the outermost parameters of FSDP2 whole, as computing log-probs does
        trained.model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    save_trained(trained, folder, file_bytes=4000)
    state = whole_state(trained)
    return state, train(trained, 2, noisy=noisy)


def load_and_go_on(
    setting: Setting, folder: Path, noisy: bool = False
) -> tuple[dict[str, Any], list[float]]:
    """The state as read back by a process that has done other things before, and the losses of the
    next two steps."""
    trained = build(setting)
    seed_all(99)
    train(trained, 1)
    load_trained(trained, folder)
    assert trained.num_updates == 3
    state = whole_state(trained)
    return state, train(trained, 2, noisy=noisy)


def snapshot_and_go_on(setting: Setting, folder: Path) -> tuple[dict[str, Any], list[float]]:
    """Three steps with a snapshot after each, all in the same folder, and two more: the last state,
    and the losses."""
    trained = build(setting)
    seed_all(dist.get_rank() if dist.is_initialized() else 0)
    snapshots = SnapshotWriter(trained)
    snapshots.write(folder, 0)  # before there are optimizer states
    for step in (1, 2, 3):
        train(trained, 1)
        snapshots.write(folder, step)
    trained.wait_for_copies()
    state = whole_state(trained)
    return state, train(trained, 2)


def draws_after_load(folder: Path) -> tuple[float, float, float]:
    trained = build(Setting())
    seed_all(99)
    load_trained(trained, folder)
    return float(torch.rand(())), random.random(), float(np.random.normal())


def error_of_load(setting: Setting, folder: Path) -> str:
    try:
        load_trained(build(setting), folder)
    except ConfigError as error:
        return str(error)
    return ""


def save_and_die_on_rank_1(folder: Path) -> str:
    """Rank 1 is killed by the system in the middle of its first file."""
    trained = build(Setting())
    train(trained, 1)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    with pytest.raises(RuntimeError):
        save_trained(trained, folder)
    return "its partner died"


def error_of_a_save_without_room(folder: Path) -> str:
    """What is said where no file may be longer than 2,000 bytes, and the process lives on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        save_trained(build(Setting()), folder)
    except RolepoolError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


# Ranks: real processes that talk over gloo


class Ranks:
    """Processes that run a function together, again and again."""

    def __init__(self, num_ranks: int, store: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["transformers.models.llama.modeling_llama", "rolepool.models.checkpoint"]
        )
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(rank, num_ranks, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def __call__(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """What the function returned on each rank; `EOFError` for one that died."""
        for connection in self.connections:
            connection.send((function, arguments))
        results = []
        for connection in self.connections:
            assert connection.poll(120), f"{function.__name__} did not end"
            try:
                failed, result = connection.recv()
            except EOFError:
                failed, result = False, EOFError
            assert not failed, result
            results.append(result)
        return results

    def stop(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def serve(rank: int, num_ranks: int, store: Path, connection: Connection) -> None:
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
        )
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, function(*arguments)))
        except BaseException:
            connection.send((True, traceback.format_exc()))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """As many ranks as asked for; one is a plain process without torch.distributed."""
    started: dict[int, Ranks] = {}

    def of(num_ranks: int) -> Ranks:
        if num_ranks not in started:
            started[num_ranks] = Ranks(num_ranks, tmp_path_factory.mktemp("store") / "store")
        return started[num_ranks]

    yield of
    for group in started.values():
        group.stop()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


# Any number of ranks to any other


FLOAT32, FLOAT64 = Setting("tied"), Setting("value", torch.float64)


@pytest.mark.parametrize(
    ("setting", "tolerance"), [(FLOAT32, 1e-5), (FLOAT64, 1e-12)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("num_saving", [1, 2, 3])
def test_any_number_of_ranks_reads_what_any_other_saved(
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
    num_saving: int,
    setting: Setting,
    tolerance: float,
) -> None:
    saved, losses = ranks(num_saving)(save_and_go_on, setting, tmp_path / "role")[0]
    assert sum(name.endswith("/exp_avg_sq") for name in saved) == len(
        list(build(setting).model.parameters())
    )
    for num_loading in (1, 2, 3):
        for state, losses_after in ranks(num_loading)(load_and_go_on, setting, tmp_path / "role"):
            assert_same(state, saved)
            assert losses_after == pytest.approx(losses, rel=tolerance, abs=0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_going_on_with_as_many_ranks_is_the_same_bit_for_bit(
    ranks: Callable[[int], Ranks], tmp_path: Path, num_ranks: int
) -> None:
    uninterrupted = ranks(num_ranks)(save_and_go_on, Setting("untied"), tmp_path / "role", True)
    resumed = ranks(num_ranks)(load_and_go_on, Setting("untied"), tmp_path / "role", True)
    assert [losses for _, losses in resumed] == [losses for _, losses in uninterrupted]


@pytest.mark.parametrize(
    "setting", [FLOAT32, FLOAT64, Setting("untied", fsdp_size=1)], ids=["tied", "value", "replicas"]
)
@pytest.mark.parametrize("num_saving", [1, 2, 3])
def test_any_number_of_ranks_reads_a_snapshot(
    ranks: Callable[[int], Ranks], tmp_path: Path, num_saving: int, setting: Setting
) -> None:
    saved, losses = ranks(num_saving)(snapshot_and_go_on, setting, tmp_path / "role")[0]
    files = [snapshot_files(tmp_path / "role", rank, num_saving) for rank in range(num_saving)]
    assert list(map(snapshot_number, files)) == [3] * num_saving
    for num_loading in (1, 2, 3):
        for state, losses_after in ranks(num_loading)(load_and_go_on, setting, tmp_path / "role"):
            assert_same(state, saved)
            assert losses_after == pytest.approx(losses, rel=1e-5, abs=0)


def test_the_snapshot_of_a_rank_is_complete_when_its_own_file_has_its_number(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    *_, first = files = snapshot_files(tmp_path / "role", 0, 2)
    assert snapshot_number(files) is None
    ranks(2)(snapshot_and_go_on, FLOAT32, tmp_path / "role")
    assert snapshot_number(files) == 3
    first.unlink()
    assert snapshot_number(files) is None


class CopiesLater:
    """A model in training whose copies end when the test says so, as those of a GPU end after the
    call that began them."""

    def __init__(self, trained: Any) -> None:
        self._trained = trained
        self.ends: list[Callable[[], object]] = []

    def copy_later(
        self, sources: Any, copies: Any, then: Callable[[], object], prepare: object = None
    ) -> None:
        self.ends.append(then)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trained, name)


def test_a_snapshot_has_its_number_only_after_its_copies_are_done(tmp_path: Path) -> None:
    trained: Any = CopiesLater(build(FLOAT32))
    snapshots, files = SnapshotWriter(trained), snapshot_files(tmp_path / "role", 0, 1)
    for number in (1, 2):
        snapshots.write(tmp_path / "role", number)
        assert snapshot_number(files) is None
        trained.ends.pop()()
        assert snapshot_number(files) == number


def test_a_snapshot_that_cannot_be_written_is_one_warning_and_the_next_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "place"
    place.touch()  # a file, so no folder can be made below it
    trained = build(FLOAT32)
    snapshots = SnapshotWriter(trained)
    assert not snapshots.write(place / "role", 1)
    assert not snapshots.write(place / "role", 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a snapshot is missing" in caplog.text
    place.unlink()
    assert snapshots.write(place / "role", 3)
    trained.wait_for_copies()
    assert snapshot_number(snapshot_files(place / "role", 0, 1)) == 3


@pytest.mark.parametrize("is_replaced", [False, True])
def test_files_that_somebody_removed_or_replaced_are_made_again(
    is_replaced: bool, tmp_path: Path
) -> None:
    trained = build(FLOAT32)
    snapshots, folder = SnapshotWriter(trained), tmp_path / "place" / "role"
    data, _ = snapshot_files(folder, 0, 1)
    snapshots.write(folder, 1)
    trained.wait_for_copies()
    content = data.read_bytes()
    shutil.rmtree(folder)
    if is_replaced:
        folder.mkdir()
        data.write_bytes(b"something else")
    assert snapshots.write(folder, 2)
    trained.wait_for_copies()
    assert snapshot_number(snapshot_files(folder, 0, 1)) == 2
    assert data.read_bytes() == content


def test_random_states_come_back_on_each_rank_and_only_for_as_many_ranks(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(2)(save_and_go_on, Setting(), tmp_path / "role")
    first, second = ranks(2)(draws_after_load, tmp_path / "role")
    assert all(one != other for one, other in zip(first, second, strict=True))
    seed_all(99)
    as_seeded = (float(torch.rand(())), random.random(), float(np.random.normal()))
    assert ranks(3)(draws_after_load, tmp_path / "role") == [as_seeded] * 3


@pytest.mark.parametrize(("num_ranks", "fsdp_size"), [(2, 1), (4, 2)])
def test_replicas_are_written_once(
    ranks: Callable[[int], Ranks], tmp_path: Path, num_ranks: int, fsdp_size: int
) -> None:
    setting = Setting(fsdp_size=fsdp_size)
    saved, _ = ranks(num_ranks)(save_and_go_on, setting, tmp_path / "role")[0]
    assert rows_on_disk(tmp_path / "role") == rows_of(saved)
    for num_loading, of_loading in ((1, -1), (3, -1), (num_ranks, fsdp_size)):
        for state, _ in ranks(num_loading)(
            load_and_go_on, Setting(fsdp_size=of_loading), tmp_path / "role"
        ):
            assert_same(state, saved)


def test_a_rank_writes_its_own_rows_only_and_nothing_is_pickled(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    saved, _ = ranks(2)(save_and_go_on, Setting(), tmp_path / "role")[0]
    assert {path.suffix for path in (tmp_path / "role").iterdir()} == {
        ".json",
        ".safetensors",
        ".sha256",
    }
    assert rows_on_disk(tmp_path / "role") == rows_of(saved)
    halves = [
        tensors[name]
        for tensors in map(load_file, shards(tmp_path / "role"))
        for name in tensors
        if name == EMBED
    ]
    np.testing.assert_array_equal(halves[0], saved[EMBED][:25])
    np.testing.assert_array_equal(halves[1], saved[EMBED][25:])


@pytest.mark.parametrize(("num_ranks", "fsdp_size"), [(2, -1), (2, 1), (3, -1)])
def test_each_rank_hashes_what_it_wrote(
    ranks: Callable[[int], Ranks], tmp_path: Path, num_ranks: int, fsdp_size: int
) -> None:
    role = tmp_path / "role"
    ranks(num_ranks)(save_and_go_on, Setting(fsdp_size=fsdp_size), role)
    check_hashes(role)
    hashed = [
        line.split("  ")[1]
        for file in role.glob("*.sha256")
        for line in file.read_text().splitlines()
    ]
    assert sorted(hashed) == sorted(
        path.name for path in role.iterdir() if path.suffix != ".sha256"
    )
    hold_other_rows(shards(role)[-1])
    with pytest.raises(ConfigError, match="its hash is not the one that was saved"):
        check_hashes(role)


EMBED = "model.embed_tokens.weight"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def rows_on_disk(folder: Path) -> dict[str, int]:
    """Rows of each tensor, counted over all files."""
    rows: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            rows[name] = rows.get(name, 0) + (len(tensor) if tensor.dim() else 1)
    return rows


def rows_of(state: dict[str, Any]) -> dict[str, int]:
    """Rows of each tensor of a state; of tied weights those of one."""
    return {
        name: len(value) if value.ndim else 1
        for name, value in state.items()
        if name != "lm_head.weight"
    }


def test_a_model_that_has_not_been_updated_is_saved_without_optimizer_states(
    tmp_path: Path,
) -> None:
    save_trained(build(Setting()), tmp_path / "role")
    trained = build(Setting())
    train(trained, 1)
    load_trained(trained, tmp_path / "role")
    assert trained.num_updates == 0
    assert not trained.optimizer.state
    assert train(trained, 2) == train(build(Setting()), 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_save_that_finds_no_room_is_an_error_with_its_folder_on_every_rank(
    ranks: Callable[[int], Ranks], tmp_path: Path, num_ranks: int
) -> None:
    for said in ranks(num_ranks)(error_of_a_save_without_room, tmp_path / "role"):
        assert said.startswith(f"{tmp_path / 'role'}: ")
        assert "File too large" in said and "on rank 0" in said


# What does not fit, or is damaged, changes nothing


@pytest.fixture
def role(tmp_path: Path) -> Path:
    """A saved role of one rank, in files of a few tensors each."""
    trained = build(Setting("untied"))
    train(trained, 2)
    save_trained(trained, tmp_path / "role", file_bytes=4000)
    return tmp_path / "role"


def assert_refused(trained: TrainedModel, folder: Path, *expected: str) -> None:
    """Loading is refused in these words, and nothing of the model, the optimizer or the random
    states is changed."""
    before, updates, rng = whole_state(trained), trained.num_updates, torch.get_rng_state()
    with pytest.raises(ConfigError) as caught:
        load_trained(trained, folder)
    assert isinstance(caught.value, RolepoolError)
    for words in expected:
        assert words in str(caught.value)
    assert_same(whole_state(trained), before)
    assert trained.num_updates == updates
    assert torch.equal(torch.get_rng_state(), rng)


def trained_otherwise(setting: Setting, **sizes: Any) -> TrainedModel:
    trained = build(setting, **sizes)
    train(trained, 1)
    return trained


@pytest.mark.parametrize(
    ("setting", "sizes", "expected"),
    [
        (
            Setting("untied", torch.float64),
            {},
            ["model.embed_tokens.weight is [50, 16] float32, but the model has [50, 16] float64"],
        ),
        (
            Setting("untied"),
            {"vocab_size": 51},
            ["model.embed_tokens.weight is [50, 16] float32", "[51, 16] float32"],
        ),
        (
            Setting("untied"),
            {"num_hidden_layers": 3},
            ["model.layers.2.self_attn.q_proj.weight is not saved", "more"],
        ),
        (
            Setting("untied"),
            {"num_hidden_layers": 1},
            ["(model.layers.1.", " is saved, but the model does not have it; "],
        ),
        (
            Setting("tied"),
            {},
            ["lm_head.weight is saved, but the model does not", "lm_head.weight/exp_avg is saved"],
        ),
    ],
    ids=["dtype", "shape", "missing", "unexpected", "tied"],
)
def test_a_state_of_another_model_is_refused(
    role: Path, setting: Setting, sizes: dict[str, Any], expected: list[str]
) -> None:
    remedy = "was saved from another model (", "or start a new run with trainer.resume_mode=disable"
    assert_refused(trained_otherwise(setting, **sizes), role, *remedy, *expected)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def damage_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:9] + b"\0" + data[10:])


def hold_other_rows(path: Path) -> None:
    """Another tensor of the same size in place of the first."""
    tensors, metadata = load_file(path), safe_open(path, framework="pt").metadata()
    first = min(tensors)
    save_file({**tensors, first: tensors[first].reshape(-1, 2)}, path, metadata)


def lose_a_tensor(path: Path) -> None:
    tensors, metadata = load_file(path), safe_open(path, framework="pt").metadata()
    del tensors[min(tensors)]
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "bytes were found; a file is missing"),
        (cut_off, "not a complete safetensors file"),
        (damage_header, "not a complete safetensors file"),
        (hold_other_rows, "but the model has"),
        (lose_a_tensor, "bytes were found; a file is missing"),
    ],
    ids=["missing", "cut off", "header", "other shape", "tensor lost"],
)
@pytest.mark.parametrize("place", [0, -1])
def test_a_damaged_file_changes_nothing(
    role: Path, place: int, damage: Callable[[Path], None], words: str
) -> None:
    path = shards(role)[place]
    damage(path)
    assert_refused(
        trained_otherwise(Setting("untied")),
        role,
        str(path if "safetensors" in words else role),
        words,
    )


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}', "[1"])
def test_a_damaged_state_of_a_rank_is_named_and_changes_nothing(role: Path, text: str) -> None:
    file = role / "rank_00000_of_00001.json"
    file.write_text(text)
    assert_refused(trained_otherwise(Setting("untied")), role, f"{file}: not a valid rank file")


def test_rows_that_no_file_has_are_an_error(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks(2)(save_and_go_on, Setting(), tmp_path / "role")
    next(path for path in shards(tmp_path / "role") if EMBED in load_file(path)).unlink()
    assert_refused(
        trained_otherwise(Setting()), tmp_path / "role", "bytes were found; a file is missing"
    )


def test_a_folder_that_is_not_a_save_is_named(tmp_path: Path) -> None:
    assert_refused(
        trained_otherwise(Setting()),
        tmp_path / "nothing",
        str(tmp_path / "nothing"),
        "not a saved role",
    )


def test_the_state_of_a_rank_that_is_missing_is_named_on_every_rank(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(2)(save_and_go_on, Setting(), tmp_path / "role")
    missing = tmp_path / "role" / "rank_00001_of_00002.json"
    missing.unlink()
    line = f"{missing}: not a valid rank file ({missing}: No such file or directory); copy the checkpoint again"
    assert ranks(3)(error_of_load, Setting(), tmp_path / "role") == [line] * 3


# Whole or absent


def save_step(run_dir: Path, step: int, *parts: str) -> Path:
    """A checkpoint as a trainer makes it."""
    final = checkpoint_folder(run_dir, step)
    temporary = temporary_folder(final)
    for part in parts or ("actor", "critic"):
        save_trained(SMALL, temporary / part)
    (temporary / "trainer.json").write_text(json.dumps({"step": step}))
    publish(temporary, final)
    return final


SMALL = build(Setting())


def steps(run_dir: Path) -> dict[str, list[str]]:
    return {
        path.name: sorted(part.name for part in path.iterdir() if part.is_dir())
        for path in sorted((run_dir / "checkpoints").iterdir())
    }


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it_the_newest(
    tmp_path: Path,
) -> None:
    before = save_step(tmp_path, 10)
    temporary = temporary_folder(checkpoint_folder(tmp_path, 20))
    group = Ranks(2, tmp_path / "store")
    assert group(save_and_die_on_rank_1, temporary / "actor") == ["its partner died", EOFError]
    group.stop()
    assert group.processes[1].exitcode == -signal.SIGXFSZ
    assert shards(temporary / "actor")
    assert not list((temporary / "actor").glob("rank_*"))
    assert newest_checkpoint(tmp_path) == before
    load_trained(build(Setting()), before / "actor")

    # Even under the final name it would not be taken for a checkpoint.
    (temporary / "trainer.json").write_text("{}")
    publish(temporary, checkpoint_folder(tmp_path, 20))
    assert newest_checkpoint(tmp_path) == before


def test_a_kill_before_publishing_leaves_the_checkpoint_before_it_the_newest(
    tmp_path: Path,
) -> None:
    before = save_step(tmp_path, 10)
    temporary = temporary_folder(checkpoint_folder(tmp_path, 20))
    save_trained(SMALL, temporary / "actor")
    (temporary / "trainer.json").write_text("{}")
    assert newest_checkpoint(tmp_path) == before
    after = save_step(tmp_path, 20)  # the next try is not in the way of the last
    assert newest_checkpoint(tmp_path) == after
    assert list(steps(tmp_path)) == ["step_000010", "step_000020"]


def test_the_newest_is_the_highest_step_and_not_the_last_in_the_alphabet(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (999_999, 1_000_000, 20):
        save_step(tmp_path, step, "actor")
    (tmp_path / "checkpoints" / "step_old").mkdir()
    (tmp_path / "checkpoints" / "step_9000000").write_text("a file")
    assert newest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 1_000_000)


@pytest.mark.parametrize("lost", ["trainer.json", "critic/rank_00000_of_00001.json", "critic"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(
    tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = save_step(tmp_path, 1), save_step(tmp_path, 2)
    (after / lost).rename(tmp_path / "lost")
    assert newest_checkpoint(tmp_path, ["actor", "critic"]) == before
    assert newest_checkpoint(tmp_path, ["actor"]) == (after if lost == "critic" else before)
    assert ("skipping " in caplog.text) == (lost != "critic")


def test_publishing_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    (
        tmp_path / "checkpoints" / ".tmp-replaced-step_000010"
    ).mkdir()  # a kill while it was replaced before
    save_step(tmp_path, 10, "actor")
    assert steps(tmp_path) == {"step_000010": ["actor"]}


def test_each_part_is_kept_as_often_as_asked_for(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step)
    (tmp_path / "checkpoints" / ".tmp-removed-step_000000").mkdir()  # a kill while that was removed
    remove_old(tmp_path, "critic", keep=3)
    assert list(steps(tmp_path)) == [f"step_00000{step}" for step in (1, 2, 3, 4)]
    assert steps(tmp_path)["step_000001"] == ["actor"]
    remove_old(tmp_path, "actor", keep=2)
    both = ["actor", "critic"]
    assert steps(tmp_path) == {"step_000002": ["critic"], "step_000003": both, "step_000004": both}
    remove_old(tmp_path, "actor", keep=1)
    remove_old(tmp_path, "critic", keep=1)
    assert steps(tmp_path) == {"step_000004": both}


def test_the_newest_whole_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (checkpoint_folder(tmp_path, 3) / "critic" / "rank_00000_of_00001.json").unlink()
    remove_old(tmp_path, "actor", keep=1)
    remove_old(tmp_path, "critic", keep=1)
    assert newest_checkpoint(tmp_path, ["actor", "critic"]) == checkpoint_folder(tmp_path, 2)
    assert list(steps(tmp_path)) == ["step_000002", "step_000003"]


# Export


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder as users have it: configuration, tokenizer, weights."""
    folder = tmp_path / "model"
    build(Setting()).model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    vocabulary = {f"t{number}": number for number in range(50)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)  # type: ignore[no-untyped-call]
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"not to be copied")
    return folder


def own_export(setting: Setting, folder: Path, out_dir: Path) -> dict[str, Tensor]:
    """What the model's own `save_pretrained` writes of a saved role."""
    trained = build(setting)
    load_trained(trained, folder)
    trained.model.save_pretrained(out_dir)  # type: ignore[operator]
    return load_file(out_dir / "model.safetensors")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("head", ["tied", "untied", "value"])
def test_an_export_is_what_save_pretrained_writes_and_from_pretrained_loads(
    ranks: Callable[[int], Ranks], tmp_path: Path, model_folder: Path, num_ranks: int, head: str
) -> None:
    saved, _ = ranks(num_ranks)(save_and_go_on, Setting(head), tmp_path / "role")[0]
    export_hf(tmp_path / "role", model_folder, tmp_path / "out")
    own = own_export(Setting(head), tmp_path / "role", tmp_path / "own")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == own.keys()
    assert all(torch.equal(exported[name], own[name]) for name in own)
    auto: Any = AutoModelForTokenClassification if head == "value" else AutoModelForCausalLM
    model, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert_same(
        {name: tensor.numpy() for name, tensor in model.state_dict().items()}, weights_of(saved)
    )
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 50


def weights_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if "/" not in name}


def test_an_export_takes_what_lies_beside_the_weights(
    role: Path, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    export_hf(role, model_folder, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} <= names
    assert not {"model.safetensors.index.json", "pytorch_model.bin"} & names
    assert not list(tmp_path.glob(".tmp-*"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("float32", ["LlamaForCausalLM"])


def test_an_export_has_the_tokenizer_that_the_run_used(
    role: Path, model_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}", encoding="utf-8")
    (other / "config.json").write_text("{}", encoding="utf-8")
    export_hf(role, model_folder, tmp_path / "out", tokenizer_dir=other)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert "vocab_size" in (tmp_path / "out" / "config.json").read_text(), "that of the model"


def test_a_large_export_is_spread_over_files_of_bounded_size(
    role: Path, model_folder: Path, tmp_path: Path
) -> None:
    export_hf(role, model_folder, tmp_path / "out", file_bytes=4000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {file: load_file(tmp_path / "out" / file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    assert all(
        sum(tensor.nbytes for tensor in tensors.values()) <= 4000 for tensors in held.values()
    )
    own = own_export(Setting("untied"), role, tmp_path / "own")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


def test_an_export_does_not_write_over_anything(
    role: Path, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="already exists"):
        export_hf(role, model_folder, model_folder)
    cut_off(shards(role)[0])
    with pytest.raises(ConfigError, match="not a complete"):
        export_hf(role, model_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))
