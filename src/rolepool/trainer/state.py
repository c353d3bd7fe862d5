"""The state of a run between two steps: what a checkpoint or a snapshot has besides the models.

Imports neither torch nor ray, because `plan` runs the pipeline on paper.
"""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rolepool.config.run_keys import MAX_STALENESS


class QueuedStep(BaseModel):
    """A batch that waits in the queue of the pipeline. Its responses and scores are stored beside
    the state; its prompts are not, because they can be read again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=1)
    """The step that will learn from it."""
    data: dict[str, Any]
    """The position in the prompts at which the batch begins."""


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
