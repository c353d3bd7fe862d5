"""Snapshots on several nodes: each file has a second copy on another node, and a node gets what it
lacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from cluster_helpers import wait_until
from ray.cluster_utils import Cluster as RayCluster

from rolepool.cluster.keepers import Keepers
from rolepool.cluster.nodes import live_nodes
from rolepool.placement.estimate import SHARED_MEMORY
from rolepool.protocol.futures import CallFuture

pytestmark = pytest.mark.slow
SIZE = 3 * 2**20
RANKS = [
    [Path("0/role") / name for name in names]
    for names in (("data-0", "rank-0"), ("data-1", "rank-1"))
]


def number_in(files: Sequence[Path]) -> int | None:
    return int(files[-1].read_text()) if files[-1].exists() else None


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """The ids of two nodes of a cluster to which this process is connected."""
    options = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = RayCluster(
        initialize_head=True, head_node_args={"include_dashboard": False, **options}
    )
    cluster.add_node(**options)
    ray.init(address=cluster.address, logging_level="warning")
    yield [node.node_id for node in live_nodes()]
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def keepers(nodes: list[str]) -> Iterator[Keepers]:
    keepers = Keepers(number_in, nodes)
    yield keepers
    folders = [folder for folder, _ in keepers.where(nodes).values()]
    keepers.close()
    assert not [path for folder in folders for path in SHARED_MEMORY.glob(f"{folder.name}*")]


def write(folder: Path, rank: int, number: int) -> CallFuture:
    """What a rank writes."""
    data, marker = (folder / path for path in RANKS[rank])
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(bytes([number]) * SIZE)
    marker.write_text(str(number))
    return CallFuture([SimpleNamespace(objects=[(ray.put(None), None)] * 2)], list)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "0" / "role").iterdir()}


def test_each_file_has_a_second_copy_and_survives_the_keeper_of_its_node(
    keepers: Keepers, nodes: list[str]
) -> None:
    folders = [keepers.where(nodes)[node][0] for node in nodes]
    for number in (3, 5):  # the second one is written to the same files
        for rank, folder in enumerate(folders):
            written = write(folder, rank, number)
        keepers.copy(number, list(zip(RANKS, nodes, strict=True)), written)
        markers = [
            folder / files[-1] for folder, files in zip(folders, reversed(RANKS), strict=True)
        ]
        wait_until(
            lambda number=number, markers=markers: (
                {number_in([marker]) for marker in markers} == {number}
            ),
            30,
        )
    assert content(folders[0]) == content(folders[1])
    assert content(folders[0])["data-1"] == bytes([5]) * SIZE

    os.kill(int(folders[1].name.split("-")[1]), signal.SIGKILL)
    wait_until(lambda: len(keepers.where(nodes)) == 1, 30)  # asks, and does not get an answer
    assert keepers.gather(5, RANKS, nodes)
    new = keepers.where(nodes)[nodes[1]][0]
    assert new != folders[1] and not folders[1].exists()
    assert content(new) == content(folders[0])


def test_a_node_gets_what_it_lacks_if_every_file_is_complete_somewhere(
    keepers: Keepers, nodes: list[str]
) -> None:
    folders = [keepers.where(nodes)[node][0] for node in nodes]
    write(folders[0], 0, 3)
    assert not keepers.gather(3, RANKS, nodes)
    write(folders[1], 1, 4)
    assert not keepers.gather(3, RANKS, nodes), "one rank has written the next one"
    write(folders[1], 1, 3)
    assert keepers.gather(3, RANKS, nodes[:1])
    assert content(folders[0])["data-1"] == content(folders[1])["data-1"]
