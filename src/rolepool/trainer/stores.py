"""Stores of the state of a run: what snapshots in shared memory and checkpoints on disk have in
common.

Owns the interface. `rolepool.trainer.snapshots` and `rolepool.trainer.checkpoint` are the two
stores. The ranks that load a state may be other ones than those that saved it, and their number may
be another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolepool.cluster import WorkerGroup
from rolepool.protocol import CallFuture
from rolepool.trainer.queue import QueuedBatch, StoredBatch
from rolepool.trainer.state import TrainState
from rolepool.trainer.step import Roles, TrainedCalls

Groups = Mapping[str, WorkerGroup]
"""The processes of each trained role, by the name of the role."""


class Saved(Protocol):
    """A complete state that was saved."""

    @property
    def state(self) -> TrainState:
        """The state without the models."""

    @property
    def queue(self) -> Sequence[StoredBatch]:
        """The batches of the state's queue."""

    @property
    def has_models(self) -> bool:
        """Whether the models were saved, too. If not, they are those of their own files."""

    def load(self, name: str, role: TrainedCalls) -> list[CallFuture]:
        """Queue what brings the models of a role to this state."""


class Store(Protocol):
    """Keeps states of a run."""

    def save(self, roles: Roles, state: TrainState, queue: Sequence[QueuedBatch]) -> None:
        """Save the models as they are after the calls that are queued, together with this state
        and its queue."""

    def newest(self, groups: Groups, at_most: int) -> Saved | None:
        """The complete state of the latest step up to `at_most`, for models in these processes."""


@dataclass(frozen=True)
class Beginning:
    """The state before the first step: the models are those of their own files, which a role reads
    when it is built."""

    state: TrainState
    queue: Sequence[StoredBatch] = ()
    has_models: bool = False

    def load(self, name: str, role: TrainedCalls) -> list[CallFuture]:
        return []
