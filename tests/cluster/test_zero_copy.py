"""Batches in Ray's shared memory: read there without a copy, written to in private, freed when
nobody holds them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from rolepool.protocol import DataProto, Encoded, encode
from rolepool.protocol.columns import same_value
from rolepool.protocol.encoding import SharedMemory, make_private, places_of

MIB = 2**20
IMPORT_PATHS = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)]


@ray.remote(num_cpus=1)
class Reader:
    """A worker that keeps what it is told to keep, and can read or overwrite it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.zeros(8).sum()
        self.kept: Any = None

    def keep(self, value: Any) -> None:
        self.kept = value.decode() if isinstance(value, Encoded) else value

    def drop(self) -> tuple[int, int]:
        """Forget it; returns the mappings of shared memory and descriptors that are left."""
        self.kept = None
        gc.collect()
        return plasma_mappings(), len(list(Path("/proc/self/fd").iterdir()))

    def get(self) -> Any:
        return self.kept

    def overwrite(self) -> int:
        """Write to every tensor and numeric array that was received; returns how many."""
        tensors = [t.values() if t.is_nested else t for t in self.kept.batch.values()]
        tensors += [
            value for value in self.kept.meta_info.values() if isinstance(value, torch.Tensor)
        ]
        tensors += [row["pixels"] for row in self.kept.non_tensor_batch["images"]]
        arrays = [array for array in self.kept.non_tensor_batch.values() if array.dtype != object]
        for tensor in tensors:
            tensor.fill_(1)
            assert (tensor == 1).all()
        for array in arrays:
            array[:] = 1
        return len(tensors) + len(arrays)

    def sum_of(self, key: str) -> int:
        return int(self.kept.batch[key].view(torch.int64).sum())

    def overwrite_row(self, key: str, row: int) -> None:
        self.kept.batch[key][row] = 0

    def unique_bytes(self) -> int:
        gc.collect()
        return int(psutil.Process().memory_full_info().uss)

    def mappings(self) -> int:
        return plasma_mappings()


def plasma_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/plasma")


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    environment = {
        "PYTHONPATH": os.pathsep.join(IMPORT_PATHS),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=768 * MIB,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def readers(local_ray: None) -> tuple[Any, Any]:
    pair = (Reader.remote(), Reader.remote())
    ray.get([reader.keep.remote(None) for reader in pair])
    return pair


def rich_batch() -> DataProto:
    """Every kind of column, large ones that are mapped and small ones that are copied."""
    lengths = torch.arange(64) * 200
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return DataProto.from_dict(
        {
            "int64": torch.arange(64 * 4000).reshape(64, 4000),
            "bf16": torch.arange(64 * 10_000).reshape(64, 10_000).to(torch.bfloat16) + 2,
            "bool": torch.zeros(64, 20_000, dtype=torch.bool),
            "jagged": torch.nested.nested_tensor_from_jagged(
                torch.zeros(int(offsets[-1])), offsets
            ),
            "small": torch.zeros(64),
            "no columns": torch.zeros(64, 0),
        },
        {
            "images": [
                {"pixels": torch.full((200, 100), float(i)), "name": f"image {i}"}
                for i in range(64)
            ],
            "text": [f"row {i}" for i in range(64)],
            "scores": np.zeros((64, 500)),
        },
        {
            "step": 3,
            "baseline": torch.zeros(400_000),
            "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
        },
    )


def parts_of(data: DataProto) -> list[Any]:
    return [dict(data.batch.items()), data.non_tensor_batch, data.meta_info]


def test_a_write_to_every_received_tensor_is_seen_by_nobody_else(readers: tuple[Any, Any]) -> None:
    first, second = readers
    expected = parts_of(rich_batch())
    reference = ray.put(rich_batch())
    in_driver = ray.get(reference)
    ray.get([reader.keep.remote(reference) for reader in readers])

    assert ray.get(first.overwrite.remote()) == 6 + 2 + 64 + 1
    assert same_value(parts_of(in_driver), expected), "the driver's earlier read"
    assert same_value(parts_of(ray.get(second.get.remote())), expected), "the other worker"
    assert same_value(parts_of(ray.get(reference)), expected), "a later read"

    in_driver.batch["int64"].zero_()
    in_driver.non_tensor_batch["scores"][:] = 5
    ray.get(second.keep.remote(reference))
    assert same_value(parts_of(ray.get(second.get.remote())), expected), (
        "after a write by the driver"
    )
    assert ray.get(first.get.remote()).batch["int64"].eq(1).all(), "the writer keeps what it wrote"


def test_a_write_to_results_of_one_worker_does_not_reach_the_store_either(
    readers: tuple[Any, Any],
) -> None:
    first, _ = readers
    ray.get(first.keep.remote(ray.put(rich_batch())))
    result = first.get.remote()
    one, other = ray.get(result), ray.get(result)
    for tensor in one.batch.values():
        (tensor.values() if tensor.is_nested else tensor).fill_(1)
    assert same_value(parts_of(other), parts_of(rich_batch()))


@pytest.mark.parametrize(
    "data",
    [
        rich_batch()[:0],
        DataProto(),
        DataProto.from_dict(non_tensors={"n": ["a", None]}),
        rich_batch()[3:5],
    ],
    ids=["no rows", "nothing", "objects only", "two rows"],
)
def test_small_and_empty_batches_survive(readers: tuple[Any, Any], data: DataProto) -> None:
    first, _ = readers
    ray.get(first.keep.remote(data))
    received = ray.get(first.get.remote())
    assert same_value(received.non_tensor_batch, data.non_tensor_batch)
    assert same_value(received.meta_info, data.meta_info)
    assert (received.batch is None) == (data.batch is None)
    if data.batch is not None:
        assert same_value(dict(received.batch.items()), dict(data.batch.items()))


def test_reading_a_large_tensor_takes_no_memory_and_writing_takes_only_the_pages_written(
    readers: tuple[Any, Any],
) -> None:
    first, second = readers
    ray.get(first.drop.remote())
    tensor = torch.ones(128, MIB, dtype=torch.bfloat16)  # 256 MiB
    reference = ray.put(DataProto.from_dict({"x": tensor}))
    del tensor
    before = ray.get(first.unique_bytes.remote())
    ray.get(first.keep.remote(reference))
    ray.get(second.keep.remote(reference))
    expected = ray.get(second.sum_of.remote("x"))
    assert ray.get(first.sum_of.remote("x")) == expected
    growth = ray.get(first.unique_bytes.remote()) - before
    assert growth < 8 * MIB, f"reading 256 MiB made the worker grow by {growth / MIB:.1f} MiB"

    ray.get(
        first.overwrite_row.remote("x", 5)
    )  # 2 MiB, of which other memory that is freed meanwhile takes a little
    growth = ray.get(first.unique_bytes.remote()) - before
    assert 1.5 * MIB <= growth < 10 * MIB, (
        f"writing 2 MiB made the worker grow by {growth / MIB:.1f} MiB"
    )
    assert ray.get(second.sum_of.remote("x")) == expected
    ray.get([reader.drop.remote() for reader in readers])


def test_an_object_lives_as_long_as_a_tensor_on_it_and_no_longer(readers: tuple[Any, Any]) -> None:
    """The store holds 768 MiB: twenty times 128 MiB pass through it only if all are freed, the kept
    one excepted."""
    first, _ = readers
    idle_mappings, idle_descriptors = ray.get(first.drop.remote())
    kept = ray.put(DataProto.from_dict({"x": torch.full((16, MIB), 7)}))  # 128 MiB
    ray.get(first.keep.remote(kept))
    expected = 7 * 16 * MIB
    assert ray.get(first.sum_of.remote("x")) == expected
    row = ray.get(kept).batch["x"][3]
    del kept
    gc.collect()
    for i in range(20):
        passing = ray.put(DataProto.from_dict({"x": torch.full((16, MIB), i)}))
        assert int(ray.get(passing).batch["x"][0, 0]) == i
        del passing
    assert (row == 7).all(), "a row keeps its object, though its reference and its batch are gone"
    assert ray.get(first.sum_of.remote("x")) == expected
    assert ray.get(first.mappings.remote()) == idle_mappings + 1
    assert ray.get(first.drop.remote()) == (idle_mappings, idle_descriptors)

    mappings = plasma_mappings()
    del row
    gc.collect()
    assert plasma_mappings() == mappings - 1
    wait_until(lambda: used_bytes() < 128 * MIB)


def test_any_value_can_be_sent_encoded_and_is_private_when_decoded(
    readers: tuple[Any, Any],
) -> None:
    weights = {"layer": [torch.zeros(400_000), torch.zeros(3)]}
    reference = ray.put(encode(weights))
    first, second = ray.get(reference).decode(), ray.get(reference).decode()
    first["layer"][0].fill_(1)
    first["layer"][1].fill_(1)
    assert same_value(second, weights)


def test_without_the_capability_to_open_its_own_mappings_a_process_goes_through_the_raylet(
    readers: tuple[Any, Any],
) -> None:
    def places_of_the_raylet(memory: SharedMemory) -> Iterator[str]:
        return (path for path in places_of(memory) if "map_files" not in path)

    shared = ray.get(ray.put(np.zeros(MIB, np.float32)))
    mappings = plasma_mappings()
    private = make_private(shared.view(np.uint8), places_of_the_raylet)
    assert plasma_mappings() == mappings + 1
    private[:] = 1
    assert not shared.any()


def used_bytes() -> float:
    total, free = ray.cluster_resources(), ray.available_resources()
    return float(total["object_store_memory"] - free.get("object_store_memory", 0))


def wait_until(condition: Any, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
