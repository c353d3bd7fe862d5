"""Samples of a node, one per second: what its GPUs and this run's processes on it use, from NVML
and psutil."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import NamedTuple, NotRequired

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
    """What a GPU uses."""

    utilization: Number
    """In percent."""
    memory_bytes: Integer
    memory_total_bytes: NotRequired[Integer]
    pools: list[str]
    """The pools that have processes on it."""


class ProcessSample(TypedDict):
    """What a process of a pool uses."""

    pool: str
    cpu_percent: Number
    memory_bytes: Integer


class Sample(TypedDict):
    """What reports read from a line of `monitor.jsonl`. `NodeMonitor.sample` makes these lines;
    they have more."""

    time_s: Number
    gpus: list[GpuSample]
    processes: list[ProcessSample]


class MeasuredGpu(GpuSample):
    """A GPU as it is written."""

    index: int
    power_w: float


class MeasuredProcess(ProcessSample):
    """A process as it is written."""

    pid: int
    rank: int
    roles: list[str]


class MeasuredSample(Sample):
    """A sample as it is written."""

    node: str


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
        self,
        node: str,
        watched: Sequence[Watched],
        roles: Mapping[str, list[str]],
    ) -> None:
        self._node = node
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self.watch(watched, roles)
        once_per_second(lambda: self._samples.append(self.sample()))

    def watch(self, watched: Sequence[Watched], roles: Mapping[str, list[str]]) -> None:
        """Sample these processes from now on."""
        processes: dict[Watched, psutil.Process] = {}
        gpu_indices: set[int] = set()
        for member in watched:
            if member.gpu is not None:
                gpu_indices.add(member.gpu)
            if psutil.pid_exists(member.pid):
                process = psutil.Process(member.pid)
                process.cpu_percent()  # the next call measures from here
                processes[member] = process
        self._gpus = _handles(gpu_indices)
        self._roles = roles
        self._processes = processes

    def take(self) -> list[Sample]:
        """The samples since the last call."""
        # Not `list` and `clear`, because the thread may add a sample in between.
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def sample(self) -> Sample:
        """What the GPUs use now, and the processes that are still running."""
        sample: MeasuredSample = {
            "time_s": time.time(),
            "node": self._node,
            "gpus": self._sample_gpus(),
            "processes": self._sample_processes(),
        }
        return sample

    def _sample_gpus(self) -> list[GpuSample]:
        gpus: list[GpuSample] = []
        for index, handle in self._gpus.items():
            pools = {member.pool for member in self._processes if member.gpu == index}
            with suppress(pynvml.NVMLError):  # the GPU has failed, or cannot tell one of these
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                gpu: MeasuredGpu = {
                    "index": index,
                    "utilization": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                    "memory_bytes": int(memory.used),
                    "memory_total_bytes": int(memory.total),
                    "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    "pools": sorted(pools),
                }
                gpus.append(gpu)
        return gpus

    def _sample_processes(self) -> list[ProcessSample]:
        processes: list[ProcessSample] = []
        for member, process in self._processes.items():
            with suppress(psutil.Error):  # the process has ended
                measured: MeasuredProcess = {
                    "pid": member.pid,
                    "pool": member.pool,
                    "rank": member.rank,
                    "roles": self._roles.get(member.pool, []),
                    "cpu_percent": process.cpu_percent(),
                    "memory_bytes": process.memory_info().rss,
                }
                processes.append(measured)
        return processes


def _handles(indices: Collection[int]) -> dict[int, object]:
    """NVML's handles of the GPUs with these indices.

    A GPU that NVML does not know is left out, because Ray can be told to count more GPUs than the
    node has, and a container may hide some of them from NVML.
    """
    handles: dict[int, object] = {}
    if not indices:
        return handles
    with suppress(pynvml.NVMLError):  # no driver
        pynvml.nvmlInit()
        for index in sorted(indices):
            with suppress(pynvml.NVMLError):
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
    return handles


class PoolUse(NamedTuple):
    """What a pool uses."""

    percent: float
    """The mean utilization of its GPUs, or of its processes if it has no GPU (100% is one core)."""
    memory_gib: float
    """The memory of the GPU, or of the process, that uses the most."""


class _Uses:
    """What the GPUs, or the processes, of each pool use."""

    def __init__(self) -> None:
        self.percents: dict[str, list[float]] = defaultdict(list)
        self.num_bytes: dict[str, list[int]] = defaultdict(list)

    def by_pool(self) -> dict[str, PoolUse]:
        uses: dict[str, PoolUse] = {}
        for pool, percents in self.percents.items():
            most_bytes = max(self.num_bytes[pool])
            uses[pool] = PoolUse(
                percent=fmean(percents),
                memory_gib=most_bytes / 2**30,
            )
        return uses


def pool_use(sample: Sample) -> dict[str, PoolUse]:
    """What each pool uses: its GPUs, or its processes if it has no GPU."""
    of_processes = _Uses()
    for process in sample["processes"]:
        pool = process["pool"]
        of_processes.percents[pool].append(process["cpu_percent"])
        of_processes.num_bytes[pool].append(process["memory_bytes"])
    of_gpus = _Uses()
    for gpu in sample["gpus"]:
        for pool in gpu["pools"]:
            of_gpus.percents[pool].append(gpu["utilization"])
            of_gpus.num_bytes[pool].append(gpu["memory_bytes"])
    return {**of_processes.by_pool(), **of_gpus.by_pool()}


def pool_utilization(samples: Iterable[Sample]) -> dict[str, float]:
    """`pool/NAME/utilization` in percent."""
    percents: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for pool, use in pool_use(sample).items():
            name = f"pool/{pool}/utilization"
            percents[name].append(use.percent)
    return {name: fmean(values) for name, values in percents.items()}
