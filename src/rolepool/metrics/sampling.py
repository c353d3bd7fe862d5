"""Samples of a node, one per second: what its GPUs and this run's processes on it use, from NVML
and psutil."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple, NotRequired

import psutil
import pynvml
from typing_extensions import TypedDict

from rolepool.reading import Integer, Number

INTERVAL_S = 1.0
MAX_SAMPLES = 3600
"""How many samples a monitor keeps (one hour) until it is asked for them; older ones are
dropped."""


def once_per_second(look: Callable[[], None]) -> Callable[[], None]:
    """Call `look` once per second, in a thread. Returns a function that ends the thread."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(INTERVAL_S):
            look()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


class GpuSample(TypedDict):
    utilization: Number  # percent
    memory_bytes: Integer
    memory_total_bytes: NotRequired[Integer]
    pools: list[str]


class ProcessSample(TypedDict):
    pool: str
    cpu_percent: Number
    memory_bytes: Integer


class Sample(TypedDict):
    """What reports read from a line of `monitor.jsonl`. `NodeMonitor.sample` makes these lines;
    they have more."""

    time_s: Number
    gpus: list[GpuSample]
    processes: list[ProcessSample]


class Watched(NamedTuple):
    """A process of this run on the node, and the index of its GPU."""

    pid: int
    pool: str
    rank: int
    gpu: int | None


class NodeMonitor:
    """Takes samples of its node in a thread and keeps them until `take`. Its node may not see the
    run folder.

    `roles` are the names of the roles of each pool.
    """

    def __init__(
        self, node: str, watched: Sequence[Watched], roles: Mapping[str, list[str]]
    ) -> None:
        self._node = node
        self._samples: deque[dict[str, object]] = deque(maxlen=MAX_SAMPLES)
        self.watch(watched, roles)
        once_per_second(lambda: self._samples.append(self.sample()))

    def watch(self, watched: Sequence[Watched], roles: Mapping[str, list[str]]) -> None:
        """Sample these processes from now on."""
        processes: dict[Watched, psutil.Process] = {}
        for member in watched:
            if psutil.pid_exists(member.pid):
                process = psutil.Process(member.pid)
                process.cpu_percent()  # the next call measures from here
                processes[member] = process
        self._gpus = _handles({member.gpu for member in watched if member.gpu is not None})
        self._roles = roles
        self._processes = processes

    def take(self) -> list[dict[str, object]]:
        """The samples since the last call."""
        # Not `list` and `clear`, because the thread may add a sample in between.
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def sample(self) -> dict[str, object]:
        """What the GPUs use now, and the processes that are still running."""
        gpus = self._sample_gpus()
        processes = self._sample_processes()
        return {"time_s": time.time(), "node": self._node, "gpus": gpus, "processes": processes}

    def _sample_gpus(self) -> list[dict[str, object]]:
        gpus: list[dict[str, object]] = []
        for index, handle in self._gpus.items():
            pools = {member.pool for member in self._processes if member.gpu == index}
            with suppress(pynvml.NVMLError):  # the GPU has failed, or cannot tell one of these
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                gpus.append(
                    {
                        "index": index,
                        "utilization": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                        "memory_bytes": int(memory.used),
                        "memory_total_bytes": int(memory.total),
                        "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                        "pools": sorted(pools),
                    }
                )
        return gpus

    def _sample_processes(self) -> list[dict[str, object]]:
        processes: list[dict[str, object]] = []
        for (pid, pool, rank, _), process in self._processes.items():
            with suppress(psutil.Error):  # the process has ended
                processes.append(
                    {
                        "pid": pid,
                        "pool": pool,
                        "rank": rank,
                        "roles": self._roles.get(pool, []),
                        "cpu_percent": process.cpu_percent(),
                        "memory_bytes": process.memory_info().rss,
                    }
                )
        return processes


def _handles(indices: Collection[int]) -> dict[int, Any]:
    """NVML's handles of the GPUs with these indices.

    A GPU that NVML does not know is left out, because Ray can be told to count more GPUs than the
    node has, and a container may hide some of them from NVML.
    """
    handles: dict[int, Any] = {}
    if not indices:
        return handles
    with suppress(pynvml.NVMLError):  # no driver
        pynvml.nvmlInit()
        for index in sorted(indices):
            with suppress(pynvml.NVMLError):
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
    return handles


def pool_use(sample: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Mean utilization (%) and peak memory (GiB) of each pool, from its GPUs, or from its processes
    if it has no GPU (100% is one core)."""
    of_gpus: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for gpu in sample["gpus"]:
        for pool in gpu["pools"]:
            of_gpus[pool].append((gpu["utilization"], gpu["memory_bytes"]))
    of_processes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for process in sample["processes"]:
        used = (process["cpu_percent"], process["memory_bytes"])
        of_processes[process["pool"]].append(used)

    uses = {}
    for pool, amounts in {**of_processes, **of_gpus}.items():
        percent = fmean(percent for percent, _ in amounts)
        num_bytes = max(num_bytes for _, num_bytes in amounts)
        uses[pool] = (percent, num_bytes / 2**30)
    return uses


def pool_utilization(samples: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """`pool/NAME/utilization` in percent."""
    percents = defaultdict(list)
    for sample in samples:
        for pool, (percent, _) in pool_use(sample).items():
            percents[f"pool/{pool}/utilization"].append(percent)
    return {name: fmean(values) for name, values in percents.items()}
