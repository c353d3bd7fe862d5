"""A batch in the queue between the two phases of its step, and its results in the driver's memory.

With `algorithm.max_staleness` a state of the run has such batches. Their results are data that was
computed with weights that nobody has any more, so the driver holds them as long as a saved state
needs them. Imports neither torch nor ray, because `plan` runs the pipeline on paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rolepool.trainer.recorder import NotedCall
from rolepool.trainer.state import FilteredGroups, QueuedStep

if TYPE_CHECKING:
    from rolepool.protocol import DataProto
    from rolepool.trainer.results import Results

HOLD_TIMEOUT_S = 1800.0
"""The longest wait for responses and scores that belong to a state. A stalled process is noticed
much earlier, by the watchdog."""


class StoredBatch(NamedTuple):
    """A batch of the queue as data."""

    queued: QueuedStep
    results: Results


@dataclass
class QueuedBatch:
    """A batch whose first phase was made. Its calls may still run."""

    number: int
    """The step that learns from it."""
    prompts: DataProto
    epoch: int
    position: Mapping[str, Any]
    """The position in the prompts before this batch was taken."""
    generated: Any
    """What the first phase of the step has returned: `Generated`, if it waits for another step."""
    calls: Sequence[NotedCall] = ()
    """The calls of the first phase. A batch that comes from a saved state has none."""
    results: Results | None = None
    """What its calls have returned, as soon as the driver holds it."""
    is_open: bool = False
    """Whether further prompts may have to be generated, because groups are filtered and the driver
    has not read their scores yet."""
    groups: FilteredGroups | None = None
    """What was filtered, if groups are filtered."""

    @property
    def queued(self) -> QueuedStep:
        return QueuedStep(step=self.number, data=dict(self.position), groups=self.groups)

    def hold(self) -> StoredBatch:
        """Wait until its calls have ended, and hold their results. Then no death of a process or a
        node loses them. Raises WorkerError if that takes too long."""
        from rolepool.trainer.results import results_of

        if self.results is None:
            what = f"the responses and scores of step {self.number}"
            self.results = results_of(self.generated, what, HOLD_TIMEOUT_S)
        return StoredBatch(self.queued, self.results)

    def can_be_held(self) -> bool:
        """Hold the results if all calls have ended. Returns whether they are held."""
        from rolepool.trainer.results import results_if_ended

        if self.results is None:
            self.results = results_if_ended(self.generated)
        return self.results is not None
