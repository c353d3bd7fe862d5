"""Plans on a Ray cluster of several nodes (here on one machine, with GPUs that are only counted):
every process is on the GPU that the plan says, or there is one error that says what is in the
way."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from cluster_helpers import all_ended, pids_of, plan_of, wait_until
from ray.cluster_utils import Cluster as RayCluster
from roles_for_tests import Place

from rolepool.cluster import Cluster
from rolepool.cluster.begin import MIN_CPUS
from rolepool.cluster.nodes import Node, live_nodes, nodes_with_slots
from rolepool.errors import ConfigError, PlacementError, WorkerError
from rolepool.placement import Plan

GPUS = [4, 2, 2]
MIB = 2**20


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A running cluster of three nodes, with 4, 2 and 2 GPUs."""
    options = {"num_cpus": 8, "object_store_memory": 80 * MIB}
    head = {"num_gpus": GPUS[0], "include_dashboard": False, **options}
    nodes = RayCluster(initialize_head=True, head_node_args=head)
    for num_gpus in GPUS[1:]:
        nodes.add_node(num_gpus=num_gpus, **options)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture
def connected(address: str) -> Iterator[None]:
    """This process on that cluster, for tests that look at it or hold some of it."""
    ray.init(address=address, logging_level="warning")
    yield
    ray.shutdown()


def on_gpus(pools: dict[str, Any]) -> Plan:
    return plan_of(pools, GPUS, device="auto")


@ray.remote(num_cpus=0)
class Holder:
    """Another job's actor."""

    def gpus(self) -> list[int]:
        return [int(gpu) for gpu in ray.get_gpu_ids()]


# Where processes are


def test_every_process_has_exactly_the_gpu_of_the_plan_and_the_cluster_is_left_running(
    address: str,
) -> None:
    """Two pools share GPUs by halves, and one has whole ones, on nodes of different sizes."""
    plan = on_gpus(
        {
            "wide": {"per_node": [2, 1], "share": 0.5},
            "beside": {"per_node": [1], "share": 0.5},
            "whole": [0, 0, 1],
        }
    )
    with Cluster(plan, address=address) as cluster:
        nodes = live_nodes()
        index_of = {node.node_id: index for index, node in enumerate(nodes)}
        assert [node.num_gpus for node in nodes] == GPUS, "the driver's node is the first"
        roles = {
            name: group.add_role("place", Place, blocking=False)
            for name, group in cluster.groups.items()
        }
        found = {name: role.where().get() for name, role in roles.items()}
        for name, pool in plan.pools.items():
            places = found[name]
            assert [(index_of[place["node_id"]], *place["gpus"]) for place in places] == list(
                pool.slots
            ), name
            assert [place["visible"] for place in places] == [
                str(slot.gpu) for slot in pool.slots
            ], name
            assert [place["rank"] for place in places] == list(range(pool.world_size))
            assert roles[name].meet() == [pool.world_size] * pool.world_size, (
                "one process group over the nodes"
            )
        assert [place["gpus"] for place in found["wide"]][:1] == [
            place["gpus"] for place in found["beside"]
        ]
        assert [place["local"] for place in found["wide"]] == [(0, 2), (1, 2), (0, 1)]
        assert [place["environment"] for place in found["wide"]] == [
            ("0", "2"),
            ("1", "2"),
            ("0", "1"),
        ]
        assert {place["device"] for places in found.values() for place in places} == {"cpu"}, (
            "GPUs that do not exist"
        )
        pids = pids_of(cluster)

    assert not ray.is_initialized()
    wait_until(lambda: all_ended(pids))
    ray.init(address=address, logging_level="warning")
    try:
        assert [node.num_gpus for node in live_nodes()] == GPUS, "the cluster runs on"
        wait_until(lambda: ray.available_resources().get("GPU") == sum(GPUS))
    finally:
        ray.shutdown()


def test_nodes_are_in_one_order_for_everybody(connected: None) -> None:
    nodes = live_nodes()
    assert nodes[0].node_id == ray.get_runtime_context().get_node_id(), "the driver's own"
    others = [(node.address, node.node_id) for node in nodes[1:]]
    assert others == sorted(others)
    assert all(live_nodes() == nodes for _ in range(3))


def test_a_head_without_gpus_is_not_counted_if_the_cluster_has_gpus() -> None:
    head, worker = (
        Node("a", "10.0.0.1", num_gpus=0, num_cpus=8),
        Node("b", "10.0.0.2", num_gpus=8, num_cpus=64),
    )
    assert (
        nodes_with_slots("cuda", [head, worker])
        == nodes_with_slots("auto", [head, worker])
        == ("cuda", [worker])
    )
    assert nodes_with_slots("cpu", [head, worker]) == ("cpu", [head, worker])
    assert nodes_with_slots("cuda", [head]) == ("cuda", [head]), "what it lacks is reported later"


def test_relative_paths_mean_the_folder_of_the_driver_and_what_a_node_lacks_is_named(
    connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # after Ray was started elsewhere
    (tmp_path / "model").mkdir()
    with Cluster(on_gpus({"pool": [1, 1]})) as cluster:
        group = cluster.groups["pool"]
        assert [place["folder"] for place in group.add_role("place", Place).where().get()] == [
            str(tmp_path)
        ] * 2
        for path in ("model", tmp_path / "model"):
            group.check_exists("some.path=model", path, "copy it there")
        with pytest.raises(ConfigError) as caught:
            group.check_exists("some.path=weights", "weights", "copy it there")
        address = group.processes[0].address
        assert (
            str(caught.value)
            == f"some.path=weights: node {address} has no {tmp_path}/weights; copy it there"
        )


# What does not fit


@pytest.mark.parametrize(
    ("gpus_per_node", "pools", "problem"),
    [
        (
            [8],
            {"big": [5]},
            r"Not enough GPUs: big needs 5 on node 0 \(.*\), up to number 4; the node has 4",
        ),
        (
            [4, 4],
            {"a": [4], "b": [0, 3]},
            r"Not enough GPUs: b needs 3 on node 1 \(.*\), .*the node has 2",
        ),
        (
            [2, 2, 2, 2],
            {"far": [0, 0, 0, 2]},
            r"Not enough nodes: far needs 2 GPUs on node 3, .*has 3 nodes",
        ),
    ],
    ids=["a node that is too small", "one pool of two", "a node that is not there"],
)
def test_what_can_never_fit_is_refused_at_once(
    connected: None, gpus_per_node: list[int], pools: dict[str, Any], problem: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(PlacementError, match=problem):
        Cluster(plan_of(pools, gpus_per_node, device="auto"), timeout_s=60)
    assert time.monotonic() - begin < 30


def test_everything_that_is_missing_is_said_in_one_error(address: str) -> None:
    plan = plan_of({"a": [6], "b": [0, 3], "c": [0, 0, 0, 1]}, [8, 4, 4, 4], device="auto")
    with pytest.raises(PlacementError) as caught:
        Cluster(plan, address=address)
    assert not ray.is_initialized(), "and the connection is closed"
    assert [re.search(r": (\w) needs", problem).group(1) for problem in caught.value.problems] == [
        "a",
        "b",
        "c",
    ]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_too_few_cpus_for_the_processes_are_refused_at_once(connected: None, device: str) -> None:
    shared = {f"pool {i}": {"per_node": [4], "share": 0.25} for i in range(3)}
    begin = time.monotonic()
    with pytest.raises(
        PlacementError, match=r"Not enough CPUs: 12 processes on node 0 .* Ray has 8 there"
    ):
        Cluster(plan_of(shared, [4], device=device), timeout_s=60)
    assert time.monotonic() - begin < 30


def test_gpus_that_another_job_holds_are_waited_for_and_then_named_with_the_holder(
    address: str, connected: None
) -> None:
    with OtherJob(address, num_gpus=3) as (pid, _):
        begin = time.monotonic()
        with pytest.raises(PlacementError) as caught:
            Cluster(on_gpus({"wide": [2], "far": [0, 1]}), timeout_s=2)
        assert 2 <= time.monotonic() - begin < 30
    problem = next(problem for problem in caught.value.problems if ": wide needs" in problem)
    assert "Not enough GPUs within placement.timeout_s=2: wide needs 2 on node 0" in problem
    assert "1 of 4 are free" in problem
    assert re.search(rf"actor Holder \(pid \d+\) of job \w+ \(pid {pid} on ", problem), problem
    wait_until(lambda: ray.available_resources().get("GPU") == sum(GPUS))


@pytest.mark.slow
def test_two_runs_share_a_cluster_and_gpus_that_become_free_in_time_are_taken(
    connected: None,
) -> None:
    held = Holder.options(num_gpus=2, **on_node(1)).remote()
    assert ray.get(held.gpus.remote()) == [0, 1]
    threading.Timer(1.0, lambda: ray.kill(held)).start()
    with (
        Cluster(on_gpus({"far": [0, 1]}), timeout_s=30) as one,
        Cluster(on_gpus({"farther": [0, 0, 1]})) as other,
    ):
        for cluster, name, node in ((one, "far", 1), (other, "farther", 2)):
            (where,) = cluster.groups[name].add_role("place", Place).where().get()
            assert (where["node_id"], where["gpus"]) == (live_nodes()[node].node_id, [0])


def test_cuda_that_is_asked_for_and_not_there_is_an_error_of_the_worker(connected: None) -> None:
    with pytest.raises(WorkerError, match=r"^trainer\.device=cuda: torch sees no CUDA device"):
        Cluster(plan_of({"gpu": [1]}, GPUS, device="cuda"))


def test_a_planned_gpu_that_another_job_holds_is_named_though_others_are_free(
    address: str, connected: None
) -> None:
    with OtherJob(address, num_gpus=1) as (pid, gpus):
        assert gpus == [0]
        with pytest.raises(PlacementError) as caught:
            Cluster(on_gpus({"pair": [2]}), timeout_s=10)
    assert "pair rank 0 is planned for node 0 GPU 0, but Ray assigned node 0 GPU 2" in str(
        caught.value
    )
    assert "GPU 0 is held by another job" in str(caught.value)
    assert re.search(rf"actor Holder \(pid \d+\) of job \w+ \(pid {pid} on ", str(caught.value)), (
        str(caught.value)
    )
    wait_until(lambda: ray.available_resources().get("GPU") == sum(GPUS))


def on_node(index: int) -> dict[str, Any]:
    return {"label_selector": {"ray.io/node-id": live_nodes()[index].node_id}}


class OtherJob:
    """A driver of its own that holds GPUs of the first node with one actor; gives its pid and the
    GPUs."""

    def __init__(self, address: str, num_gpus: int) -> None:
        self._code = f"""
import ray, sys
ray.init(address={address!r}, logging_level="error")
class Holder:
    def gpus(self):
        return [int(gpu) for gpu in ray.get_gpu_ids()]
here = {{"ray.io/node-id": ray.get_runtime_context().get_node_id()}}
holder = ray.remote(Holder).options(num_cpus=0, num_gpus={num_gpus}, label_selector=here).remote()
print("holding", *ray.get(holder.gpus.remote()), flush=True)
sys.stdin.read()
"""

    def __enter__(self) -> tuple[int, list[int]]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith("holding"))
        return self._process.pid, [int(gpu) for gpu in line.split()[1:]]

    def __exit__(self, *error: object) -> None:
        self._process.communicate("", timeout=120)


# Which Ray


def test_an_address_at_which_nobody_answers_is_refused_soon_with_the_key() -> None:
    begin = time.monotonic()
    with pytest.raises(
        PlacementError, match=r"ray_init\.address=127\.0\.0\.1:1: no Ray cluster answers there"
    ):
        Cluster(plan_of({"a": [1]}), address="127.0.0.1:1")
    assert time.monotonic() - begin < 30, "Ray itself tries for minutes"
    assert not ray.is_initialized()


def test_without_an_address_a_ray_that_happens_to_run_is_not_joined(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with Cluster(plan_of({"a": [1]})) as cluster:
        nodes = live_nodes()
        assert len(nodes) == 1 and nodes[0].num_cpus == MIN_CPUS, "one node of our own"
        assert ray.get_runtime_context().gcs_address != address
        assert cluster.groups["a"].add_role("place", Place).meet() == [1]
    assert not ray.is_initialized()
    monkeypatch.delenv("RAY_ADDRESS")
    ray.init(address=address, logging_level="warning")
    try:
        assert len(live_nodes()) == 3, "and the other one runs on"
    finally:
        ray.shutdown()
