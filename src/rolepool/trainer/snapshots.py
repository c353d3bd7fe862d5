"""Snapshots of a run in shared memory: when they are taken, and which one is complete.

Two snapshots are written in turn, so that one is complete while the other is written. The ranks write them
(`rolepool.models.snapshot`) into the folders of keepers (`rolepool.cluster.keepers`); the driver keeps the position in
the data.
"""

import time
from itertools import count
from pathlib import Path

from rolepool.cluster import Cluster
from rolepool.cluster.keepers import Files, Keepers
from rolepool.config import Config
from rolepool.errors import logger
from rolepool.models.checkpoint import snapshot_files, snapshot_number
from rolepool.placement.estimate import GIB, SHARED_MEMORY, snapshot_bytes
from rolepool.trainer.checkpoint import Position
from rolepool.trainer.step import Roles

PLACES = ("a", "b")
"""The folders of the two snapshots."""
COMPLETE_TIMEOUT_S = 60.0


class Snapshots:
    """The last two snapshots of a run."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._every = config.trainer.snapshot_freq
        self._needed = snapshot_bytes(config, cluster.plan)
        self._cluster = cluster
        self._numbers = count(1)
        self._taken: list[tuple[Position, str, int, dict[str, list[Files]]]] = []
        """The snapshots that were queued, with their places, numbers, and the files of each role's ranks."""
        self._of_other_ranks: set[str] = set()
        """The places that have files of ranks before a move."""
        self.keepers = Keepers(snapshot_number, cluster.nodes if self._every > 0 else ())

    def take(self, roles: Roles, position: Position, *, is_wanted: bool = False) -> None:
        """Queue a snapshot of the state after this step, if one is due or wanted. The first one is always taken."""
        if self._every < 0 or (self._taken and position.step % self._every and not is_wanted):
            return
        nodes, where = self._cluster.nodes, self.keepers.where(self._cluster.nodes)
        if where.keys() != nodes.keys():
            return  # the next one is taken
        free, address = min((where[node][1], nodes[node]) for node in nodes)
        if free < self._needed and not self._taken:
            needed = f"they need {self._needed / GIB:.1f} GiB of {SHARED_MEMORY} on each node"
            logger.warning("no snapshots are taken: %s, and node %s has %.1f GiB free", needed, address, free / GIB)
            self._every = -1
            return
        earlier = [one for one in self._taken if one[0].step < position.step]  # a step may be repeated
        place = next(place for place in PLACES if not earlier or place != earlier[-1][1])
        if place in self._of_other_ranks:
            self._of_other_ranks.remove(place)
            self.keepers.remove(place, nodes)
        number, ranks = next(self._numbers), dict[str, list[Files]]()
        for name, role in roles.trained.items():
            there = [process.node_id for process in role.group.processes]
            folders = [str(where[node][0] / place / name) for node in there]
            written = role.take_snapshot(folders, [number] * len(there))
            ranks[name] = [snapshot_files(Path(place, name), rank, len(there)) for rank in range(len(there))]
            self.keepers.copy(number, list(zip(ranks[name], there, strict=True)), written)
        self._taken = [*earlier, (position, place, number, ranks)][-2:]

    def is_complete(self, roles: Roles, position: Position) -> bool:
        """Wait for the snapshot of the state after this step, which is taken now if it was not due. False if there are
        no snapshots."""
        deadline = time.monotonic() + COMPLETE_TIMEOUT_S
        if all(one[0].step != position.step for one in self._taken):
            self.take(roles, position, is_wanted=True)
        while self._every > 0 and time.monotonic() < deadline:
            _, newest = self.newest(roles, position.step) or (None, None)
            if newest is not None and newest.step == position.step:
                return True
            time.sleep(0.01)
        return False

    def have_moved(self) -> None:
        """From now on other ranks write the snapshots."""
        self._of_other_ranks.update(PLACES)

    def newest(self, roles: Roles, most: int) -> tuple[dict[str, Path], Position] | None:
        """The newest complete snapshot of a step up to `most`: its folder on each node, and the state of the run. None
        if there is none. Each node gets the files that its ranks need and that only other nodes have."""
        nodes = {name: {process.node_id for process in role.group.processes} for name, role in roles.trained.items()}
        for position, place, number, ranks in reversed([one for one in self._taken if one[0].step <= most]):
            self.keepers.where(self._cluster.nodes)  # finds out which have died
            if all(self.keepers.gather(number, ranks[name], there) for name, there in nodes.items()):
                where = self.keepers.where(self._cluster.nodes)
                return {node: folder / place for node, (folder, _) in where.items()}, position
        return None
