"""Snapshots of a run in shared memory: when they are taken, and which one is complete.

Two snapshots are written in turn, so that one is complete while the other is written. The ranks
write them (`rolepool.models.snapshot`) into the folders of keepers (`rolepool.cluster.keepers`);
the driver keeps the position in the data. A run needs no snapshots to train: if there is no room
for them, or if somebody removes them, there is a warning, and the next one is tried again.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rolepool.cluster import Cluster
from rolepool.cluster.keepers import Files, Keepers
from rolepool.config import Config
from rolepool.errors import logger
from rolepool.models.checkpoint import snapshot_files, snapshot_number
from rolepool.placement.estimate import SHARED_MEMORY, snapshot_bytes
from rolepool.protocol.futures import CallFuture
from rolepool.trainer.state import TrainState
from rolepool.trainer.step import Roles, TrainedCalls
from rolepool.units import show_bytes

PLACES = ("a", "b")
"""The folders of the two snapshots."""
COMPLETE_TIMEOUT_S = 60.0
POLL_S = 0.01

Where = Mapping[str, tuple[Path, int]]
"""The folder of each node's keeper, and the bytes that are free there, by node id."""


@dataclass(frozen=True)
class Taken:
    """A snapshot that was queued."""

    position: TrainState
    place: str
    number: int
    files: dict[str, list[Files]]
    """The files of each role's ranks."""
    written: list[CallFuture]
    """Whether each rank could write its files."""


class Snapshots:
    """The last two snapshots of a run."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._every = config.trainer.snapshot_freq
        self._needed = snapshot_bytes(config, cluster.plan)
        self._cluster = cluster
        self._numbers = count(1)
        self._taken: list[Taken] = []
        self._folders: dict[str, Path] = {}
        """The folder of each node's keeper when the last snapshot was taken, by node id."""
        self._of_other_ranks: set[str] = set()
        """The places that have files of ranks before a move."""
        self._has_room = True
        self.keepers = Keepers(snapshot_number, cluster.nodes if self._every > 0 else ())

    def take(self, roles: Roles, position: TrainState, *, is_wanted: bool = False) -> None:
        """Queue a snapshot of the state after this step, if one is due or wanted. The first one is
        always taken."""
        is_due = not self._taken or position.step % self._every == 0
        if self._every < 0 or not (is_due or is_wanted):
            return
        nodes = self._cluster.nodes
        where = self.keepers.where(nodes)
        if where.keys() != nodes.keys():
            return  # the next one is taken
        self._warn_of_lost(where)
        folders = {node: folder for node, (folder, _) in where.items()}
        # The files of earlier snapshots are written again, and take no more room.
        if folders != self._folders and not self._check_room(where):
            return
        self._folders = folders
        earlier = [
            taken for taken in self._taken if taken.position.step < position.step
        ]  # a step may be repeated
        place = next(place for place in PLACES if not earlier or place != earlier[-1].place)
        if place in self._of_other_ranks:
            self._of_other_ranks.remove(place)
            self.keepers.remove(place, nodes)
        taken = Taken(position, place, next(self._numbers), {}, [])
        for name, role in roles.trained.items():
            self._queue(taken, name, role)
        self._taken = [*earlier, taken][-2:]

    def _queue(self, taken: Taken, name: str, role: TrainedCalls) -> None:
        """Queue the role's part of a snapshot, and its copy on another node."""
        folder = Path(taken.place, name)
        nodes = [process.node_id for process in role.group.processes]
        written = role.take_snapshot(
            [str(self._folders[node] / folder) for node in nodes], [taken.number] * len(nodes)
        )
        files: list[Files] = [
            snapshot_files(folder, rank, len(nodes)) for rank in range(len(nodes))
        ]
        self.keepers.copy(taken.number, list(zip(files, nodes, strict=True)), written)
        taken.written.append(written)
        taken.files[name] = files

    def _warn_of_lost(self, where: Where) -> None:
        for node, folder in self._folders.items():
            if node in where and where[node][0] != folder:
                address = self._cluster.nodes[node]
                logger.warning(
                    "the snapshots of node %s in %s are lost; new ones are taken", address, folder
                )

    def _check_room(self, where: Where) -> bool:
        """Whether all nodes have room for the snapshots. If not, there is one warning."""
        free, address = min((free, self._cluster.nodes[node]) for node, (_, free) in where.items())
        had_room, self._has_room = self._has_room, free >= self._needed
        if had_room and not self._has_room:
            needed = f"they need {show_bytes(self._needed)} of {SHARED_MEMORY} on each node"
            has = f"node {address} has {show_bytes(free)} free"
            logger.warning("no snapshots are taken until there is room: %s, and %s", needed, has)
        return self._has_room

    def is_complete(self, roles: Roles, position: TrainState) -> bool:
        """Wait for the snapshot of the state after this step, which is taken now if it was not due.
        False if there is none."""
        deadline = time.monotonic() + COMPLETE_TIMEOUT_S
        taken = self._of_step(position.step)
        if taken is None:
            self.take(roles, position, is_wanted=True)
            taken = self._of_step(position.step)
        if taken is None or not all(ok for written in taken.written for ok in written.get()):
            return False
        while time.monotonic() < deadline:  # a GPU may still write to the files
            _, newest = self.newest(roles, position.step) or (None, None)
            if newest is not None and newest.step == position.step:
                return True
            time.sleep(POLL_S)
        return False

    def _of_step(self, step: int) -> Taken | None:
        of_step = [taken for taken in self._taken if taken.position.step == step]
        return of_step[-1] if of_step else None

    def have_moved(self) -> None:
        """From now on other ranks write the snapshots."""
        self._of_other_ranks.update(PLACES)

    def newest(self, roles: Roles, most: int) -> tuple[dict[str, Path], TrainState] | None:
        """The newest complete snapshot of a step up to `most`: its folder on each node, and the
        state of the run. None if there is none. Each node gets the files that its ranks need and
        that only other nodes have."""
        nodes = {
            name: {process.node_id for process in role.group.processes}
            for name, role in roles.trained.items()
        }
        for taken in reversed(self._taken):
            if taken.position.step > most:
                continue
            self.keepers.where(self._cluster.nodes)  # finds out which have died
            if all(
                self.keepers.gather(taken.number, taken.files[name], there)
                for name, there in nodes.items()
            ):
                where = self.keepers.where(self._cluster.nodes)
                return {
                    node: folder / taken.place for node, (folder, _) in where.items()
                }, taken.position
        return None
