"""Of the two snapshots of a run one is always complete, also if what waits in the queue of the newest
one is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rolepool.errors import WorkerError
from rolepool.trainer.queue import QueuedBatch, StoredBatch
from rolepool.trainer.snapshots import Snapshots, Taken
from rolepool.trainer.state import TrainState


class Batch(QueuedBatch):
    """A batch whose calls end when the test says so, or are lost."""

    def __init__(self, number: int) -> None:
        super().__init__(number, prompts=None, epoch=0, position={}, generated=None)  # type: ignore[arg-type]
        self.has_ended = False
        self.is_held = False

    def hold(self) -> StoredBatch:
        if not (self.has_ended or self.is_held):
            raise WorkerError("a process died", is_death=True)
        self.is_held = True
        return StoredBatch(self.queued, None)  # type: ignore[arg-type]

    def can_be_held(self) -> bool:
        self.is_held = self.is_held or self.has_ended
        return self.is_held


@pytest.fixture
def snapshots() -> Snapshots:
    """Snapshots that need no processes: the files of all of them are there."""
    made = Snapshots.__new__(Snapshots)
    made._every = 1
    made._taken = []
    made._cluster = SimpleNamespace(nodes={})  # type: ignore[assignment]
    made.keepers = SimpleNamespace(where=lambda nodes: {})  # type: ignore[assignment]
    return made


def take(snapshots: Snapshots, step: int, *batches: Batch) -> None:
    """Take a snapshot, as `save` does, without the models."""
    snapshots._hold_queues(step)
    state = TrainState(step=step, data={}, kl_controller={})
    taken = Taken(state, batches, place="a", number=step, files={}, written=[])
    snapshots._taken = [*snapshots._taken, taken][-2:]


def newest_step(snapshots: Snapshots, at_most: int) -> int | None:
    newest = snapshots.newest({}, at_most)
    return None if newest is None else newest.state.step


def test_a_snapshot_whose_queue_has_not_ended_is_not_complete(snapshots: Snapshots) -> None:
    one, two = Batch(2), Batch(3)
    one.has_ended = True
    take(snapshots, 1, one)
    take(snapshots, 2, two)
    assert newest_step(snapshots, at_most=2) == 1
    two.has_ended = True
    newest: Any = snapshots.newest({}, at_most=2)
    assert newest.state.step == 2
    assert [batch.queued.step for batch in newest.queue] == [3]
    assert newest_step(snapshots, at_most=1) == 1


def test_the_queue_of_the_last_snapshot_is_held_before_the_next_one_is_taken(
    snapshots: Snapshots,
) -> None:
    one = Batch(2)
    take(snapshots, 1, one)
    with pytest.raises(WorkerError):  # it would overwrite the snapshot before, which is complete
        take(snapshots, 2, Batch(3))
    assert [taken.state.step for taken in snapshots._taken] == [1]
    one.has_ended = True
    take(snapshots, 2, Batch(3))
    one.has_ended = False  # its process has died since
    assert newest_step(snapshots, at_most=2) == 1


def test_a_batch_of_both_snapshots_is_held_for_both(snapshots: Snapshots) -> None:
    two, three, four = Batch(2), Batch(3), Batch(4)
    for batch in (two, three, four):
        batch.has_ended = True
    take(snapshots, 1, two, three)
    take(snapshots, 2, three, four)
    assert (two.is_held, three.is_held, four.is_held) == (True, True, False)


def test_between_snapshots_every_few_steps_the_last_one_is_held_after_the_next_step(
    snapshots: Snapshots,
) -> None:
    snapshots._every = 4
    one = Batch(5)
    one.has_ended = True
    take(snapshots, 4, one)
    state = TrainState(step=5, data={}, kl_controller={})
    snapshots.save(None, state, [Batch(6)])  # type: ignore[arg-type]
    assert one.is_held
    assert [taken.state.step for taken in snapshots._taken] == [4]
