"""Samples of a node, every second: what its GPUs and our processes on it use. NVML and psutil, nothing of ours.

A sample is a JSON-like dict: `time_s`, `node`, `gpus` (index, utilization in percent, memory_bytes,
memory_total_bytes, power_w, pools) and `processes` (pid, pool, rank, roles, cpu_percent, memory_bytes).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import psutil
import pynvml

INTERVAL_S = 1.0
MAX_HELD = 3600
"""Samples a monitor holds: an hour of them, after which the oldest go."""


class Watched(NamedTuple):
    """A process of ours on the node, and the GPU it holds."""

    pid: int
    pool: str
    rank: int
    gpu: int | None


class NodeMonitor:
    """Samples its node in a thread, and holds the samples until asked: the run folder may be out of its sight."""

    def __init__(self, node: str, watched: Sequence[Watched], roles: Mapping[str, Sequence[str]]) -> None:
        self._node = node
        self._roles = roles
        self._processes = {one: psutil.Process(one.pid) for one in watched if psutil.pid_exists(one.pid)}
        indices = sorted({one.gpu for one in watched if one.gpu is not None})
        if indices:
            pynvml.nvmlInit()
        self._gpus: dict[int, Any] = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
        self._held: deque[dict[str, Any]] = deque(maxlen=MAX_HELD)
        for process in self._processes.values():
            process.cpu_percent()  # those of the first sample count from here
        threading.Thread(target=self._run, daemon=True).start()

    def take(self) -> list[dict[str, Any]]:
        """The samples since the last time."""
        return [self._held.popleft() for _ in range(len(self._held))]

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s += INTERVAL_S
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._held.append(self.sample())

    def sample(self) -> dict[str, Any]:
        return {
            "time_s": time.time(),
            "node": self._node,
            "gpus": [self._gpu(index, handle) for index, handle in self._gpus.items()],
            "processes": [row for one in self._processes if (row := self._process(one)) is not None],
        }

    def _gpu(self, index: int, handle: Any) -> dict[str, Any]:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "index": index,
            "utilization": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_bytes": int(memory.used),
            "memory_total_bytes": int(memory.total),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "pools": sorted({one.pool for one in self._processes if one.gpu == index}),
        }

    def _process(self, one: Watched) -> dict[str, Any] | None:
        """None when the process is gone."""
        try:
            cpu_percent, memory = self._processes[one].cpu_percent(), self._processes[one].memory_info().rss
        except psutil.Error:
            return None
        return {
            "pid": one.pid,
            "pool": one.pool,
            "rank": one.rank,
            "roles": list(self._roles.get(one.pool, ())),
            "cpu_percent": cpu_percent,
            "memory_bytes": memory,
        }


def pool_use(sample: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Of each pool its utilization in percent (mean) and memory in GiB (most): of its GPUs, or of its processes, of a
    core each, where it has none."""
    of_gpus: dict[str, list[tuple[float, int]]] = {}
    of_processes: dict[str, list[tuple[float, int]]] = {}
    for gpu in sample["gpus"]:
        for pool in gpu["pools"]:
            of_gpus.setdefault(pool, []).append((gpu["utilization"], gpu["memory_bytes"]))
    for process in sample["processes"]:
        of_processes.setdefault(process["pool"], []).append((process["cpu_percent"], process["memory_bytes"]))
    return {
        pool: (fmean(percent for percent, _ in used), max(num_bytes for _, num_bytes in used) / 2**30)
        for pool, used in {**of_processes, **of_gpus}.items()
    }


def pool_utilization(samples: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """`pool/NAME/utilization` in percent."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for pool, (percent, _) in pool_use(sample).items():
            found.setdefault(pool, []).append(percent)
    return {f"pool/{pool}/utilization": fmean(percents) for pool, percents in found.items()}
