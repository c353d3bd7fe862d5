"""Samples of a node, one per second: what its GPUs and our processes on it use, from NVML and psutil."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, NotRequired

import psutil
import pynvml
from typing_extensions import TypedDict

INTERVAL_S = 1.0
MAX_SAMPLES = 3600
"""How many samples a monitor keeps (one hour) until it is asked for them; older ones are dropped."""


class GpuSample(TypedDict):
    index: int
    utilization: float  # percent
    memory_bytes: int
    memory_total_bytes: NotRequired[int]
    power_w: float
    pools: list[str]


class ProcessSample(TypedDict):
    pid: int
    pool: str
    rank: int
    roles: list[str]
    cpu_percent: float
    memory_bytes: int


class Sample(TypedDict):
    """A line of `monitor.jsonl`."""

    time_s: float
    node: str
    gpus: list[GpuSample]
    processes: list[ProcessSample]


class Watched(NamedTuple):
    """A process of ours on the node, and the index of its GPU."""

    pid: int
    pool: str
    rank: int
    gpu: int | None


class NodeMonitor:
    """Takes samples of its node in a thread and keeps them until `take`. Its node may not see the run folder."""

    def __init__(self, node: str, watched: Sequence[Watched], roles: Mapping[str, Sequence[str]]) -> None:
        self._node = node
        self._roles = roles
        self._processes = {one: psutil.Process(one.pid) for one in watched if psutil.pid_exists(one.pid)}
        indices = sorted({one.gpu for one in watched if one.gpu is not None})
        if indices:
            pynvml.nvmlInit()
        self._gpus: dict[int, Any] = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        for process in self._processes.values():
            process.cpu_percent()  # the next call measures from here
        threading.Thread(target=self._run, daemon=True).start()

    def take(self) -> list[Sample]:
        """The samples since the last call."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s += INTERVAL_S
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._samples.append(self.sample())

    def sample(self) -> Sample:
        return {
            "time_s": time.time(),
            "node": self._node,
            "gpus": [self._gpu(index, handle) for index, handle in self._gpus.items()],
            "processes": [row for one in self._processes if (row := self._process(one)) is not None],
        }

    def _gpu(self, index: int, handle: Any) -> GpuSample:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "index": index,
            "utilization": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_bytes": int(memory.used),
            "memory_total_bytes": int(memory.total),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "pools": sorted({one.pool for one in self._processes if one.gpu == index}),
        }

    def _process(self, one: Watched) -> ProcessSample | None:
        """None if the process has ended."""
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
    """Mean utilization (%) and peak memory (GiB) of each pool, from its GPUs, or from its processes if it has no GPU
    (100% is one core)."""
    gpus, processes = defaultdict(list), defaultdict(list)
    for gpu in sample["gpus"]:
        for pool in gpu["pools"]:
            gpus[pool].append((gpu["utilization"], gpu["memory_bytes"]))
    for process in sample["processes"]:
        processes[process["pool"]].append((process["cpu_percent"], process["memory_bytes"]))
    return {
        pool: (fmean(percent for percent, _ in used), max(num_bytes for _, num_bytes in used) / 2**30)
        for pool, used in {**processes, **gpus}.items()
    }


def pool_utilization(samples: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """`pool/NAME/utilization` in percent."""
    percents = defaultdict(list)
    for sample in samples:
        for pool, (percent, _) in pool_use(sample).items():
            percents[f"pool/{pool}/utilization"].append(percent)
    return {name: fmean(values) for name, values in percents.items()}
