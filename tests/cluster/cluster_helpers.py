"""Plans for tests in one line, and looking at what processes and shared memory are there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rolepool.cluster import Cluster
from rolepool.placement import Plan, ResourcePoolManager
from rolepool.placement.plan import place

SHARED_MEMORY = Path("/dev/shm")


def plan_of(
    pools: Mapping[str, Any],
    gpus_per_node: Sequence[int] | None = None,
    device: str = "cpu",
    **options: Any,
) -> Plan:
    """A plan of these pools; on one node that is large enough, unless told otherwise."""
    if gpus_per_node is None:
        gpus_per_node = [sum(sum(per_node) for per_node in pools.values())]
    return place(ResourcePoolManager(pools, {}), gpus_per_node, device=device, **options)


def start(pools: Mapping[str, Any], **options: Any) -> Cluster:
    """These pools on CPU slots of one node."""
    return Cluster(plan_of(pools), **options)


def pids_of(cluster: Cluster) -> list[int]:
    return [process.pid for group in cluster.groups.values() for process in group.processes]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory() -> set[str]:
    """What lies there, but for semaphores of Python's multiprocessing, which other tests use and
    Ray does not."""
    return {str(path) for path in SHARED_MEMORY.rglob("*") if not path.name.startswith("sem.mp-")}


def leaked_since(before: set[str]) -> set[str]:
    """What is new in shared memory and used by no process: others may run a Ray of their own beside
    the tests."""
    new = shared_memory() - before
    return new - {path for path in new if _is_used(path)} if new else set()


def _is_used(path: str) -> bool:
    snapshot = re.match(r"/dev/shm/rolepool-(\d+)-", path)
    if snapshot is not None:
        return is_running(
            int(snapshot[1])
        )  # nothing maps the files of a run that takes snapshots beside the tests
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if path in (process / "maps").read_text():
                return True
        except OSError:
            continue
    return False


def wait_until(condition: Callable[[], Any], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def seconds_to(action: Callable[[], Any]) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def all_ended(pids: Iterable[int]) -> bool:
    return not any(is_running(pid) for pid in pids)


def listening_addresses() -> dict[str, list[str]]:
    """The addresses on which this process and all its children listen, with the names of the
    processes."""
    found: dict[str, list[str]] = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.setdefault(connection.laddr.ip, []).append(process.name())
    return found
