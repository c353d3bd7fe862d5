"""Snapshots: the store of states in shared memory. Owns when they are taken, and which one is
complete.

Two snapshots are written in turn, so that one is complete while the other is written. The ranks
write them (`rolepool.models.snapshot`) into the folders of keepers (`rolepool.cluster.keepers`);
the driver keeps the position in the data, and the results that wait in the queue of the state. A run
needs no snapshots to train: if there is no room for them, or if somebody removes them, there is a
warning, and the next one is tried again.

A snapshot is complete only if the driver holds its queue. So it waits for the queue of the last
snapshot before it takes the next one, which overwrites the one before. Of two snapshots one is then
always complete, and no old weights have to be kept to generate a batch again.
"""

import time
from collections.abc import Collection, Mapping, Sequence
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
from rolepool.trainer.queue import QueuedBatch, StoredBatch
from rolepool.trainer.state import TrainState
from rolepool.trainer.step import Roles, TrainedCalls
from rolepool.trainer.stores import Groups
from rolepool.units import show_bytes

PLACES = ("a", "b")
"""The folders of the two snapshots."""
COMPLETE_TIMEOUT_S = 60.0
POLL_S = 0.01

Where = Mapping[str, tuple[Path, int]]
"""The folder of each node's keeper, and the bytes that are free there, by node id."""


@dataclass(frozen=True)
class SavedSnapshot:
    """A complete snapshot."""

    state: TrainState
    queue: Sequence[StoredBatch]
    folders: Mapping[str, Path]
    """Its folder on each node, by node id."""
    has_models: bool = True

    def load(self, name: str, role: TrainedCalls) -> list[CallFuture]:
        folders = []
        for process in role.group.processes:
            folders.append(str(self.folders[process.node_id] / name))
        return [role.load_checkpoint(folders)]


@dataclass(frozen=True)
class Taken:
    """A snapshot that was queued."""

    state: TrainState
    queue: Sequence[QueuedBatch]
    place: str
    number: int
    files: dict[str, list[Files]]
    """The files of each role's ranks."""
    written: list[CallFuture]
    """Whether each rank could write its files."""

    @property
    def stored_queue(self) -> list[StoredBatch]:
        """The queue of the state. Waits until all of it has been generated and scored."""
        return [batch.hold() for batch in self.queue]

    @property
    def queue_is_held(self) -> bool:
        """Whether the driver holds the queue, or can do so now without waiting."""
        return all(batch.can_be_held() for batch in self.queue)


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
        nodes_with_keeper: Collection[str] = ()
        if self._every > 0:
            nodes_with_keeper = cluster.nodes
        self.keepers = Keepers(snapshot_number, nodes_with_keeper)

    def save(self, roles: Roles, state: TrainState, queue: Sequence[QueuedBatch]) -> None:
        """Queue a snapshot of this state if one is due. The first one always is."""
        self._hold_queues(state.step)
        if not self._taken or state.step % self._every == 0:
            self._take(roles, state, queue)

    def _hold_queues(self, step: int) -> None:
        """Hold the queues of the snapshots of earlier steps. They have ended, or end soon: the
        newest one was generated before the rollout got the weights of its own step."""
        for taken in self._taken:
            if taken.state.step < step:
                for batch in taken.queue:
                    batch.hold()

    def _take(self, roles: Roles, state: TrainState, queue: Sequence[QueuedBatch]) -> None:
        """Queue a snapshot, if there is room for it."""
        if self._every < 0:
            return
        nodes = self._cluster.nodes
        where = self.keepers.where(nodes)
        if where.keys() != nodes.keys():
            return  # the next one is taken
        self._warn_of_lost(where)
        folders = _folders_of(where)
        # The files of earlier snapshots are written again, and take no more room.
        if folders != self._folders and not self._check_room(where):
            return
        self._folders = folders
        # A step may be repeated. Its snapshot replaces the one of the first time.
        earlier = [taken for taken in self._taken if taken.state.step < state.step]
        place = PLACES[0]
        if earlier and earlier[-1].place == place:
            place = PLACES[1]
        if place in self._of_other_ranks:
            self._of_other_ranks.remove(place)
            self.keepers.remove(place, nodes)
        taken = Taken(
            state=state,
            queue=queue,
            place=place,
            number=next(self._numbers),
            files={},
            written=[],
        )
        next_place = self._new_place(earlier, place)
        for name, role in roles.trained.items():
            self._queue(taken, name, role, next_place)
        self._taken = [*earlier, taken][-2:]

    def _new_place(self, earlier: Sequence[Taken], place: str) -> str | None:
        """The other place, if it is new, so that its memory can be allocated before it is needed.
        None if it has files, because they may be the newest complete snapshot."""
        (other,) = set(PLACES) - {place}
        is_used = other in self._of_other_ranks or any(taken.place == other for taken in earlier)
        return None if is_used else other

    def _queue(self, taken: Taken, name: str, role: TrainedCalls, next_place: str | None) -> None:
        """Queue the role's part of a snapshot, and its copy on another node. The ranks allocate
        memory in the next place, if there is one."""
        folder = Path(taken.place, name)
        nodes = [process.node_id for process in role.group.processes]
        num_ranks = len(nodes)
        folders = [str(self._folders[node] / folder) for node in nodes]
        next_folders: list[str | None] = [None] * num_ranks
        if next_place is not None:
            next_folders = [str(self._folders[node] / next_place / name) for node in nodes]
        numbers = [taken.number] * num_ranks
        written = role.take_snapshot(folders, numbers, next_folders)
        files: list[Files] = []
        for rank in range(num_ranks):
            files.append(snapshot_files(folder, rank, num_ranks))
        files_and_nodes = list(zip(files, nodes, strict=True))
        self.keepers.copy(taken.number, files_and_nodes, written)
        taken.written.append(written)
        taken.files[name] = files

    def _warn_of_lost(self, where: Where) -> None:
        for node, folder in self._folders.items():
            if node not in where:
                continue
            folder_now, _ = where[node]
            if folder_now != folder:
                logger.warning(
                    "the snapshots of node %s in %s are lost; new ones are taken",
                    self._cluster.nodes[node],
                    folder,
                )

    def _check_room(self, where: Where) -> bool:
        """Whether all nodes have room for the snapshots. If not, there is one warning."""
        free_on_nodes: list[tuple[int, str]] = []
        for node, (_, free) in where.items():
            free_on_nodes.append((free, self._cluster.nodes[node]))
        least_free, address = min(free_on_nodes)
        had_room = self._has_room
        self._has_room = least_free >= self._needed
        if had_room and not self._has_room:
            needed = f"they need {show_bytes(self._needed)} of {SHARED_MEMORY} on each node"
            has = f"node {address} has {show_bytes(least_free)} free"
            logger.warning(
                "no snapshots are taken until there is room: %s, and %s",
                needed,
                has,
            )
        return self._has_room

    def complete(
        self,
        roles: Roles,
        groups: Groups,
        state: TrainState,
        queue: Sequence[QueuedBatch],
    ) -> bool:
        """Wait for the snapshot of this state, which is taken now if it was not due. Returns
        whether there is one."""
        taken = self._of_step(state.step)
        if taken is None:
            self._take(roles, state, queue)
            taken = self._of_step(state.step)
        if taken is None:
            return False
        for batch in taken.queue:
            batch.hold()
        deadline = time.monotonic() + COMPLETE_TIMEOUT_S
        for written in taken.written:
            if not all(written.get()):
                return False
        # A GPU may still write to the files.
        while time.monotonic() < deadline:
            newest = self.newest(groups, state.step)
            if newest is not None and newest.state.step == state.step:
                return True
            time.sleep(POLL_S)
        return False

    def _of_step(self, step: int) -> Taken | None:
        of_step = [taken for taken in self._taken if taken.state.step == step]
        return of_step[-1] if of_step else None

    def have_moved(self) -> None:
        """From now on other ranks write the snapshots."""
        self._of_other_ranks.update(PLACES)

    def newest(self, groups: Groups, at_most: int) -> SavedSnapshot | None:
        """The newest complete snapshot of a step up to `at_most`. Each node gets the files that its
        ranks need and that only other nodes have."""
        for taken in reversed(self._taken):
            if taken.state.step > at_most or not taken.queue_is_held:
                continue
            self.keepers.where(self._cluster.nodes)  # finds out which have died
            if self._is_everywhere(taken, groups):
                where = self.keepers.where(self._cluster.nodes)
                folders: dict[str, Path] = {}
                for node, folder in _folders_of(where).items():
                    folders[node] = folder / taken.place
                return SavedSnapshot(taken.state, taken.stored_queue, folders)
        return None

    def _is_everywhere(self, taken: Taken, groups: Groups) -> bool:
        """Whether each node has, or gets now, the files that its ranks need."""
        for name, group in groups.items():
            nodes = {process.node_id for process in group.processes}
            if not self.keepers.gather(taken.number, taken.files[name], nodes):
                return False
        return True


def _folders_of(where: Where) -> dict[str, Path]:
    """The folder of each node's keeper, by node id."""
    return {node: folder for node, (folder, _) in where.items()}
