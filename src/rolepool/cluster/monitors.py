"""What the nodes and processes of a run use: a monitor on each node, and their samples.

The monitors take the samples (`rolepool.metrics.sampling`). This module starts them, tells them
which processes to sample, and collects what they have sampled, with times of the driver's clock.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

import ray
from ray.exceptions import RayError

from rolepool.cluster.answers import ActorHandle, outcomes
from rolepool.cluster.group import WorkerGroup
from rolepool.cluster.launch import Process
from rolepool.cluster.nodes import pinned_to
from rolepool.errors import logger, one_line
from rolepool.metrics.sampling import INTERVAL_S, NodeMonitor, Sample, Watched

TAKE_TIMEOUT_S = 10.0
"""A monitor that does not answer in this time is not asked again."""


class _Monitor(NamedTuple):
    """The monitor of a node, and how far the clock of the node is ahead of the driver's clock."""

    actor: ActorHandle
    clock_ahead_s: float


class Monitors:
    """A monitor on each node of the pools. If one fails, there is one warning, and it is not asked
    again."""

    def __init__(self, groups: Mapping[str, WorkerGroup], cleanup: ExitStack) -> None:
        self._groups = groups
        self._cleanup = cleanup
        self._monitors: dict[str, _Monitor] = {}
        """By the id of the node."""
        self._due_s = 0.0
        self.watch()

    def watch(self) -> None:
        """Sample the processes that the groups have now. A monitor that failed is started again."""
        roles: dict[str, list[str]] = {}
        for name, group in self._groups.items():
            roles[name] = list(group.roles)
        for node_id, processes in self._processes_by_node().items():
            watched = [_watched(process) for process in processes]
            if node_id in self._monitors:
                monitor = self._monitors[node_id]
                monitor.actor.watch.remote(watched, roles)
                continue
            actor_class = ray.remote(NodeMonitor)
            with_options = actor_class.options(
                num_cpus=0,
                scheduling_strategy=pinned_to(node_id),
            )
            any_process = processes[0]  # address and clock are those of the node
            actor: ActorHandle = with_options.remote(any_process.address, watched, roles)
            self._monitors[node_id] = _Monitor(actor, any_process.clock_ahead_s)
            self._cleanup.callback(ray.kill, actor)

    def take(self) -> list[Sample]:
        """The samples of all monitors since the last call, with times of the driver's clock. Within
        one interval, only the first call asks the monitors."""
        if time.monotonic() < self._due_s:
            return []
        self._due_s = time.monotonic() + INTERVAL_S
        monitors = list(self._monitors.items())
        asked: list[ray.ObjectRef[list[Sample]]] = []
        for _, monitor in monitors:
            asked.append(monitor.actor.take.remote())
        answers = outcomes(asked, TAKE_TIMEOUT_S)
        samples: list[Sample] = []
        for (node_id, monitor), answer in zip(monitors, answers, strict=True):
            if isinstance(answer, RayError):
                problem = one_line(answer)
                logger.warning("node %s is not monitored any more: %s", node_id, problem)
                del self._monitors[node_id]
                continue
            for sample in answer:
                driver_time_s = sample["time_s"] - monitor.clock_ahead_s
                samples.append({**sample, "time_s": driver_time_s})
        return samples

    def _processes_by_node(self) -> dict[str, list[Process]]:
        by_node: dict[str, list[Process]] = defaultdict(list)
        for group in self._groups.values():
            for process in group.processes:
                by_node[process.node_id].append(process)
        return by_node


def _watched(process: Process) -> Watched:
    gpu = process.gpus[0] if process.gpus else None
    return Watched(process.pid, process.pool, process.rank, gpu)
