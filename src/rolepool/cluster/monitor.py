"""A monitor on every node, whose samples of GPUs and processes the driver takes.

Owns the monitoring processes. What they do needs neither torch nor this package's cluster, so they start in no time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rolepool.cluster.group import WorkerGroup
from rolepool.metrics.sampling import INTERVAL_S, NodeMonitor, Watched

logger = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 10.0


class Monitors:
    """The monitors of all nodes that pools have processes on. One that fails is warned of once, and left out."""

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._actors: dict[str, Any] = {}
        self._ahead_s: dict[str, float] = {}
        self._due_s = 0.0
        roles = {group.name: list(group.roles) for group in groups}
        watched: dict[str, list[Watched]] = {}
        addresses: dict[str, str] = {}
        for group in groups:
            for process in group.processes:
                one = Watched(process.pid, group.name, process.rank, process.gpu)
                watched.setdefault(process.node_id, []).append(one)
                addresses[process.node_id] = process.address
                self._ahead_s[process.node_id] = process.clock_ahead_s
        for node_id, there in watched.items():
            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            actor_class = ray.remote(NodeMonitor).options(num_cpus=0, scheduling_strategy=where)
            self._actors[node_id] = actor_class.remote(addresses[node_id], there, roles)

    def take(self) -> list[dict[str, Any]]:
        """What all monitors saw since the last time, by the driver's clock. They are not asked before they can have
        seen more."""
        if time.monotonic() < self._due_s:
            return []
        self._due_s = time.monotonic() + INTERVAL_S
        samples: list[dict[str, Any]] = []
        for node_id, actor in list(self._actors.items()):
            try:
                taken = ray.get(actor.take.remote(), timeout=TAKE_TIMEOUT_S)
            except RayError as error:
                logger.warning("no more monitoring of node %s: %s", node_id, str(error).splitlines()[0])
                del self._actors[node_id]
                continue
            samples.extend({**sample, "time_s": sample["time_s"] - self._ahead_s[node_id]} for sample in taken)
        return samples

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
