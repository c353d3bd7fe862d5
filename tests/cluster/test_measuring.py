"""Before a run has roles, a function can measure something on all its processes, also over several
pools."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray
from cluster_helpers import start

from rolepool.errors import WorkerError


def place_in_group() -> Callable[[str], tuple[str, int, int, float]]:
    """A function that tells the device, the rank and the size of the process group, and the sum
    over its ranks. It is made here because Ray then sends its code; the processes cannot import
    this module."""

    def tell(device: str) -> tuple[str, int, int, float]:
        import torch
        import torch.distributed as dist

        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        return device, dist.get_rank(), dist.get_world_size(), float(total)

    return tell


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ({"actor": [1], "critic": [1]}, [("cpu", 0, 2, 3.0)]),
        ({"actor": [2], "critic": [1]}, [("cpu", 0, 3, 6.0)]),
        ({"all": [1]}, []),
    ],
)
def test_processes_of_all_pools_measure_together_and_return_to_their_pools(
    pools: dict[str, list[int]], expected: list[tuple[str, int, int, float]]
) -> None:
    with start(pools) as cluster:
        for _ in range(2):
            assert cluster.measure(place_in_group()) == expected
        for name, (size,) in pools.items():
            answers = [
                process.actor.measure.remote(place_in_group())
                for process in cluster.groups[name].processes
            ]
            places = [ray.get(answer, timeout=60.0) for answer in answers]
            assert places == [("cpu", rank, size, size * (size + 1) / 2) for rank in range(size)]


def test_an_error_in_a_measurement_names_the_process() -> None:
    def fail(device: str) -> None:
        raise ValueError(f"no clock on {device}")

    with start({"pool": [2]}) as cluster, pytest.raises(WorkerError, match="no clock on cpu"):
        cluster.measure(fail)
