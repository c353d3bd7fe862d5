"""CUDA MPS for pools that share GPUs: who gets it, when it ends, and what is said where it does not
start. There is no GPU: a script stands in for NVIDIA's program, and GPUs are only counted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from cluster_helpers import all_ended, plan_of, wait_until
from ray.cluster_utils import Cluster as RayCluster
from roles_for_tests import Place

from rolepool.cluster import Cluster, mps
from rolepool.cluster.mps import CONTROL, MpsDaemon
from rolepool.cluster.nodes import Node
from rolepool.cluster.reservation import reserve
from rolepool.errors import PlacementError

FAKE = Path(__file__).with_name("fake_mps") / CONTROL
GPUS = [1, 2]
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
MIB = 2**20


@pytest.fixture
def with_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(FAKE.parent), prepend=os.pathsep)


def server_pids(environment: dict[str, str]) -> list[int]:
    ask = [str(FAKE)]
    answer = subprocess.run(
        ask, input="get_server_list\n", text=True, capture_output=True, env=environment, check=True
    )
    return [int(pid) for pid in answer.stdout.split()]


def daemon_and_servers(environment: dict[str, str]) -> list[int]:
    daemon = int((Path(environment[PIPES]) / f"{CONTROL}.pid").read_text())
    return [daemon, *server_pids({**os.environ, **environment})]


def is_gone(environment: dict[str, str], pids: list[int]) -> bool:
    return all_ended(pids) and not Path(environment[PIPES]).parent.exists()


# One daemon


def test_a_daemon_has_a_private_folder_with_short_paths_and_sees_all_gpus(
    with_fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv(PIPES, "/the/users/own")
    daemon = MpsDaemon()
    pids = daemon_and_servers(daemon.environment)
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    folder = Path(daemon.environment[PIPES]).parent
    assert folder.stat().st_mode & 0o777 == 0o700 and len(str(folder)) < 40
    seen = Path(daemon.environment[LOGS], "environment").read_text()
    assert "CUDA_VISIBLE_DEVICES" not in seen
    assert f"{PIPES}={daemon.environment[PIPES]}\n" in seen, (
        "ours, whatever the user runs beside it"
    )
    daemon.close()
    wait_until(lambda: is_gone(daemon.environment, pids))


def test_a_daemon_ends_with_the_process_that_started_it_even_when_that_is_killed(
    with_fake: None,
) -> None:
    program = (
        "import json, runpy, sys, time; daemon = runpy.run_path(sys.argv[1])['MpsDaemon'](); "
        "print(json.dumps(daemon.environment), flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(mps.__file__)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        environment = json.loads(holder.stdout.readline())
        pids = daemon_and_servers(environment)
        assert psutil.Process(holder.pid).children() == [], (
            "a child would be killed by Ray before it can clean up"
        )
        holder.kill()
    wait_until(lambda: is_gone(environment, pids))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuses", f"{CONTROL} -d failed: cannot use this driver;"),
        (
            "no_server",
            "waited 0.5 s for its server to start; the last line of its log: no memory for a context;",
        ),
    ],
)
def test_what_hinders_the_daemon_is_told_in_its_own_words_and_nothing_is_left(
    with_fake: None, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    monkeypatch.setenv("FAKE_MPS", how)
    before = set(Path("/tmp").glob("rolepool-mps-*"))
    with pytest.raises(PlacementError) as caught:
        MpsDaemon(start_timeout_s=0.5)
    (line,) = caught.value.problems
    assert line.startswith("placement.mps=true: CUDA MPS does not start on ")
    assert said in line and "set placement.mps=false" in line
    wait_until(lambda: set(Path("/tmp").glob("rolepool-mps-*")) <= before)


def test_a_node_without_the_program_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlacementError) as caught:
        MpsDaemon()
    assert (
        f"start on {socket.gethostname()}: {CONTROL} is not on the PATH; set placement.mps=false"
        in str(caught.value)
    )


def test_a_plan_with_mps_is_refused_where_no_node_has_a_gpu() -> None:
    plan = plan_of({"half": {"per_node": [1], "share": 0.5}}, [1], device="auto", mps=True)
    with pytest.raises(
        PlacementError, match=r"^placement\.mps=true: needs GPUs, and the cluster has none"
    ):
        reserve(
            plan, [Node("id", "address", num_gpus=0, num_cpus=4)], ExitStack(), timeout_s=1, held={}
        )


# In a cluster


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The stand-in, where a test can change it."""
    copy = tmp_path / CONTROL
    copy.write_text(FAKE.read_text())
    copy.chmod(0o755)
    return copy


@pytest.fixture
def address(program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A running cluster of two nodes, with 1 and 2 GPUs, that finds the stand-in."""
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    options = {"num_cpus": 4, "object_store_memory": 80 * MIB}
    head = {"num_gpus": GPUS[0], "include_dashboard": False, **options}
    nodes = RayCluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_gpus=GPUS[1], **options)
    yield nodes.address
    nodes.shutdown()


@pytest.mark.slow
def test_sharing_pools_use_one_daemon_per_node_that_ends_with_the_run(
    address: str, program: Path
) -> None:
    pools = {
        "wide": {"per_node": [1, 1], "share": 0.5},
        "beside": {"per_node": [0, 1], "share": 0.5},
        "whole": [0, 1],
    }
    plan = plan_of(pools, GPUS, device="auto", mps=True)
    with Cluster(plan, address=address) as cluster:
        roles = {name: group.add_role("place", Place) for name, group in cluster.groups.items()}
        found = {name: role.environment(PIPES, LOGS) for name, role in roles.items()}
        first, second = found["wide"]
        assert found["beside"] == [second], "one daemon for all that share GPUs on a node"
        assert found["whole"] == [{}], "a pool of whole GPUs has no use for it"
        assert first.keys() == second.keys() == {PIPES, LOGS}
        pids = {
            node: daemon_and_servers(environment)
            for node, environment in enumerate((first, second))
        }
        assert len({*pids[0], *pids[1]}) == 4, "a daemon and a server on each node"
    wait_until(lambda: is_gone(first, pids[0]) and is_gone(second, pids[1]))

    program.write_text("#!/bin/sh\necho no such driver; exit 1\n")
    half = plan_of({"half": {"per_node": [1], "share": 0.5}}, GPUS, device="auto", mps=True)
    with pytest.raises(PlacementError) as caught:
        Cluster(half, address=address)
    (line,) = caught.value.problems
    assert f"{CONTROL} -d failed: no such driver; set placement.mps=false" in line
