"""The state of a run between two steps: what a checkpoint or a snapshot has besides the models.

Imports neither torch nor ray, because `plan` runs the pipeline on paper.
"""

from itertools import pairwise
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rolepool.config.run_keys import MAX_STALENESS


class FilteredGroups(BaseModel):
    """What `algorithm.filter_groups` has chosen for a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gen_batch_size: int = Field(ge=1)
    """Prompts in one batch of generation."""
    num_batches: int = Field(ge=1)
    num_filtered: int = Field(ge=0)
    """Groups whose responses all had the same metric."""
    kept: tuple[int, ...]
    """The numbers of the groups that the step learns from, among those of all its batches."""

    @property
    def num_surplus(self) -> int:
        """Groups of the last batch that could have been learned from, but were too many."""
        return self.gen_batch_size * self.num_batches - self.num_filtered - len(self.kept)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """A damaged file is refused here."""
        is_in_order = all(first < second for first, second in pairwise(self.kept))
        num_groups = self.gen_batch_size * self.num_batches
        if not self.kept or not is_in_order or self.kept[0] < 0 or self.kept[-1] >= num_groups:
            raise ValueError("the groups of a step are not in the order of its prompts")
        if self.num_surplus < 0:
            raise ValueError("a step has more groups than were generated")
        return self


class QueuedStep(BaseModel):
    """A batch that waits in the queue of the pipeline. Its responses and scores are stored beside
    the state; its prompts are not, because they can be read again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=1)
    """The step that will learn from it."""
    data: dict[str, Any]
    """The position in the prompts at which the batch begins."""
    groups: FilteredGroups | None = None
    """None without `algorithm.filter_groups`."""


class TrainState(BaseModel):
    """The content of `trainer.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0)
    """The last step that was learned from."""
    data: dict[str, Any]
    """The position in the prompts: where the next batch that is generated begins."""
    kl_controller: dict[str, float]
    queue: tuple[QueuedStep, ...] = ()
    """What was generated and not learned from, in the order of steps. It is empty without
    `algorithm.max_staleness`."""

    @field_validator("queue")
    @classmethod
    def _in_order(cls, queue: tuple[QueuedStep, ...]) -> tuple[QueuedStep, ...]:
        """A damaged file is refused here."""
        steps = [queued.step for queued in queue]
        if steps and steps != list(range(steps[0], steps[0] + len(steps))):
            raise ValueError("the steps of the queue do not follow each other")
        if len(steps) > MAX_STALENESS:
            raise ValueError(f"the queue has more than {MAX_STALENESS} batches")
        return queue

    @model_validator(mode="after")
    def _follows_step(self) -> Self:
        if self.queue and self.queue[0].step != self.step + 1:
            raise ValueError("the queue does not begin with the next step")
        return self

    def to_json(self) -> str:
        """The text of `trainer.json`. An empty queue is left out."""
        return self.model_dump_json(indent=2, exclude_defaults=True)
