"""The memory of snapshots: allocated in the background, written in place, and given back."""

from __future__ import annotations

import errno
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from rolepool.cluster.keepers import Keeper
from rolepool.config.model_keys import FsdpConfig, OptimConfig
from rolepool.models.checkpoint import load_trained, snapshot_files, snapshot_number
from rolepool.models.shared_files import PIECE_BYTES, SharedFile, form_of
from rolepool.models.snapshot import SnapshotWriter
from rolepool.models.training import TrainedModel
from rolepool.placement import ParallelDims

TIMEOUT_S = 60.0
BLOCK_BYTES = 512


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="snapshot-test-") as folder:
        yield Path(folder)


def build(width: int = 8) -> TrainedModel:
    torch.manual_seed(0)
    return TrainedModel(
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)),
        device="cpu",
        dims=ParallelDims(),
        optim=OptimConfig(lr=1e-2),
        fsdp=FsdpConfig(),
        grad_clip=1.0,
        num_steps=10,
    )


def train(trained: TrainedModel, num_steps: int) -> list[float]:
    """The losses of the next steps."""
    losses: list[float] = []
    for _ in range(num_steps):
        width = trained.model[0].in_features  # type: ignore[index, union-attr]
        generator = torch.Generator().manual_seed(trained.num_updates)
        rows = torch.randn(4, int(width), generator=generator)  # type: ignore[arg-type]

        def loss_of(taken: Sequence[int], rows: Tensor = rows) -> tuple[Tensor, dict[str, Tensor]]:
            loss = trained.model(rows[taken]).square().mean()
            return loss, {"loss": loss.detach()}

        losses.append(float(trained.step([[0, 1, 2, 3]], loss_of)["loss"]))
        trained.num_updates += 1
    return losses


def await_true(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:.0f} s for {what}"
        time.sleep(0.01)


def allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * BLOCK_BYTES


# Files


def test_a_file_is_one_that_safetensors_reads(shared_memory: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "weight": torch.randn(3, 5),
        "empty": torch.zeros(0, 2),
        "step": torch.tensor(3, dtype=torch.int64),
        "half": torch.randn(7).bfloat16(),
        "wide": torch.randn(2, 2, dtype=torch.float64),
    }
    path = shared_memory / "file.safetensors"
    file = SharedFile(path, form_of(tensors), {"format": "pt", "note": 'with "quotes"'})
    assert all(not tensor.any() for tensor in load_file(path).values())
    for name, tensor in tensors.items():
        file.copies[name].copy_(tensor)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": 'with "quotes"'}


def test_memory_is_allocated_by_two_threads_and_keeps_what_was_written(shared_memory: Path) -> None:
    tensors = {"weight": torch.arange(PIECE_BYTES).float()}
    path = shared_memory / "file.safetensors"
    file = SharedFile(path, form_of(tensors), {})
    assert allocated_bytes(path) < 2**20
    file.allocate_in_background()
    file.allocate()
    assert file.is_allocated and allocated_bytes(path) >= file.num_bytes
    file.copies["weight"].copy_(tensors["weight"])
    # The other thread may still allocate the piece that it had begun.
    await_true(lambda: not allocating_threads(), "the thread in the background")
    assert torch.equal(file.copies["weight"], tensors["weight"])


def allocating_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "allocate shared memory"]


def test_the_thread_pauses_between_pieces_and_gives_back_what_it_has_without_room(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, piece_s = os.posix_fallocate, 0.2
    starts_s: list[float] = []

    def without_room(file: int, offset: int, size: int) -> None:
        starts_s.append(time.monotonic())
        if len(starts_s) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, size)
        time.sleep(piece_s)

    monkeypatch.setattr(os, "posix_fallocate", without_room)
    path = shared_memory / "file.safetensors"
    file = SharedFile(path, {"weight": (torch.Size([PIECE_BYTES]), torch.float32)}, {})
    file.allocate_in_background()
    await_true(lambda: not path.exists(), "the file to be removed")
    first_s, second_s = starts_s
    assert second_s - first_s >= 2 * piece_s, "as long again as the piece took"
    assert not file.is_current


# Snapshots


def test_a_state_before_the_first_update_is_loaded_as_it_was(shared_memory: Path) -> None:
    """The snapshot has optimizer states, which are 0, and training continues bit for bit."""
    folder = shared_memory / "place" / "role"
    trained = build()
    snapshots = SnapshotWriter(trained)
    assert snapshots.write(folder, 1)
    expected = train(trained, 3)  # the first update waits for the snapshot
    assert snapshot_number(snapshot_files(folder, 0, 1)) == 1
    other = build()
    train(other, 2)
    load_trained(other, folder)
    assert other.num_updates == 0
    assert train(other, 3) == expected


def test_a_state_before_the_first_update_may_follow_a_later_one_in_the_same_files(
    shared_memory: Path,
) -> None:
    folder = shared_memory / "place" / "role"
    trained = build()
    snapshots = SnapshotWriter(trained)
    train(trained, 2)
    snapshots.write(folder, 1)
    trained.wait_for_copies()
    trained.optimizer.state.clear()
    snapshots.write(folder, 2)
    states = load_file(snapshot_files(folder, 0, 1)[0])
    assert not any(states[name].any() for name in states if name.endswith("/exp_avg"))
    assert any("/exp_avg" in name for name in states)


def test_the_next_snapshot_finds_its_memory_and_all_are_written_in_place(
    shared_memory: Path,
) -> None:
    first, second = (shared_memory / place / "role" for place in "ab")
    trained = build(width=2000)
    snapshots = SnapshotWriter(trained)
    snapshots.write(first, 1, second)
    data, own_file = snapshot_files(second, 0, 1)
    num_bytes = 3 * 4 * 2000 * 2000
    await_true(lambda: allocated_bytes(data) >= num_bytes, "the memory of the second snapshot")
    assert not own_file.exists(), "nobody takes it for a snapshot"
    train(trained, 1)
    inodes = [snapshot_files(folder, 0, 1)[0].stat().st_ino for folder in (first, second)]
    for number, folder in ((2, second), (3, first), (4, second)):
        await_true(lambda: not allocating_threads(), "the thread in the background")
        assert snapshots.write(folder, number)
        assert snapshot_number(snapshot_files(folder, 0, 1)) == number, "at once"
        expected = trained.model.state_dict()["0.weight"].clone()
        assert torch.equal(load_file(snapshot_files(folder, 0, 1)[0])["0.weight"], expected)
        train(trained, 1)
    assert inodes == [snapshot_files(folder, 0, 1)[0].stat().st_ino for folder in (first, second)]


def test_a_snapshot_that_comes_before_its_memory_is_allocated_takes_it_over(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate
    goes_on = threading.Event()

    def held(file: int, offset: int, size: int) -> None:
        if threading.current_thread().name == "allocate shared memory":
            assert goes_on.wait(TIMEOUT_S), "the test did not end"
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", held)
    first, second = (shared_memory / place / "role" for place in "ab")
    trained = build(width=1000)
    snapshots = SnapshotWriter(trained)
    try:
        snapshots.write(first, 1, second)
        train(trained, 1)
        snapshots.write(second, 2)
        weight = trained.model.state_dict()["0.weight"].clone()
        train(trained, 1)  # waits for the snapshot, and not for the thread
        assert snapshot_number(snapshot_files(second, 0, 1)) == 2
    finally:
        goes_on.set()
    await_true(lambda: not allocating_threads(), "the thread in the background")
    assert torch.equal(load_file(snapshot_files(second, 0, 1)[0])["0.weight"], weight)


def test_without_room_there_is_one_warning_and_the_next_snapshot_is_tried_again(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_room(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = shared_memory / "place" / "role"
    trained = build()
    snapshots = SnapshotWriter(trained)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", without_room)
        for number in (1, 2):
            snapshots.write(folder, number)
            train(trained, 1)
    data, own_file = snapshot_files(folder, 0, 1)
    assert not data.exists() and not own_file.exists()
    (record,) = caplog.records
    assert "a snapshot is missing" in record.getMessage()
    snapshots.write(folder, 3)
    trained.wait_for_copies()
    assert snapshot_number((data, own_file)) == 3


def allocate_until_killed(folder: Path, said: Connection) -> None:
    writer = SnapshotWriter(build(width=4000))
    writer.write(folder / "a" / "role", 1, folder / "b" / "role")
    said.send(True)
    time.sleep(300)


def test_a_process_that_is_killed_while_it_allocates_leaves_nothing_behind(
    shared_memory: Path,
) -> None:
    keeper = Keeper(lambda files: None, shared_memory)
    folder, _ = keeper.where()
    parent, said = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=allocate_until_killed, args=(folder, said))
    process.start()
    try:
        assert parent.poll(TIMEOUT_S) and parent.recv() is True
    finally:
        process.kill()
        process.join()
    assert (folder / "b" / "role").is_dir()
    keeper.close()
    assert not list(shared_memory.iterdir())
