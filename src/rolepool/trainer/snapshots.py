"""Snapshots of a run in shared memory: when they are taken, and which one is complete.

Two snapshots are written in turn, so that one is complete while the other is written. The ranks write them
(`rolepool.models.snapshot`) into the folders of keepers (`rolepool.cluster.keepers`); the driver keeps the position in
the data.
"""

import logging
from itertools import count
from pathlib import Path

from rolepool.cluster import Cluster
from rolepool.cluster.keepers import SHARED_MEMORY, Files, Keepers
from rolepool.config import Config
from rolepool.models.checkpoint import snapshot_files, snapshot_number
from rolepool.placement import Plan
from rolepool.placement.estimate import GIB, snapshot_bytes
from rolepool.trainer.checkpoint import Position
from rolepool.trainer.step import Roles

logger = logging.getLogger(__name__)


class Snapshots:
    """The last two snapshots of a run."""

    def __init__(self, config: Config, plan: Plan, cluster: Cluster) -> None:
        # Snapshots from GPUs were not tried yet, so they must be asked for.
        self._every = config.trainer.snapshot_freq or (1 if cluster.gpu_memory_bytes is None else -1)
        self._needed = snapshot_bytes(config, plan)
        self._cluster = cluster
        self._numbers = count(1)
        self._taken: list[tuple[Position, int, dict[str, list[Files]]]] = []
        """The snapshots that were queued, with their numbers and the files of each role's ranks."""
        self._keepers = Keepers(snapshot_number, cluster.nodes if self._every > 0 else ())

    def close(self) -> None:
        """Remove the snapshots."""
        self._keepers.close()

    def take(self, roles: Roles, position: Position) -> None:
        """Queue a snapshot of the state after this step, if one is due. The first one is always taken."""
        if self._every < 1 or (self._taken and position.step % self._every):
            return
        nodes, place = self._cluster.nodes, self._place(position)
        where = self._keepers.where(nodes)
        if where.keys() != nodes.keys():
            return  # the next one is taken
        free, address = min((where[node][1], nodes[node]) for node in nodes)
        if free < self._needed and not self._taken:
            needed = f"they need {self._needed / GIB:.1f} GiB of {SHARED_MEMORY} on each node"
            logger.warning("no snapshots are taken: %s, and node %s has %.1f GiB free", needed, address, free / GIB)
            self._every = -1
            return
        number, ranks = next(self._numbers), dict[str, list[Files]]()
        for name, role in roles.trained.items():
            there = [process.node_id for process in role.group.processes]
            folders = [str(where[node][0] / place / name) for node in there]
            written = role.take_snapshot(folders, [number] * len(there))
            ranks[name] = [snapshot_files(Path(place, name), rank, len(there)) for rank in range(len(there))]
            self._keepers.copy(number, list(zip(ranks[name], there, strict=True)), written)
        # A step that is repeated is written to the same place.
        self._taken = [*(one for one in self._taken if one[0].step < position.step), (position, number, ranks)][-2:]

    def newest(self, roles: Roles, most: int) -> tuple[dict[str, Path], Position] | None:
        """The newest complete snapshot of a step up to `most`: its folder on each node, and the state of the run. None
        if there is none. Each node gets the files that its ranks need and that only other nodes have."""
        nodes = {name: {process.node_id for process in role.group.processes} for name, role in roles.trained.items()}
        for position, number, ranks in reversed([one for one in self._taken if one[0].step <= most]):
            self._keepers.where(self._cluster.nodes)  # finds out which have died
            if all(self._keepers.gather(number, ranks[name], there) for name, there in nodes.items()):
                where = self._keepers.where(self._cluster.nodes)
                return {node: folder / self._place(position) for node, (folder, _) in where.items()}, position
        return None

    def _place(self, position: Position) -> str:
        return str(position.step // self._every % 2)
