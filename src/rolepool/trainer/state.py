"""The state of a run between two steps: what a checkpoint or a snapshot has besides the models.

Imports neither torch nor ray, because `plan` runs the pipeline on paper.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class TrainState(BaseModel):
    """The content of `trainer.json`.

    What waits in the queue of the pipeline belongs to the state, too, but nothing of it is stored:
    `data` is the position of the oldest batch that was not learned from, and a run that is restored
    generates from there again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0)
    """The last step that was learned from."""
    data: dict[str, Any]
    """The position in the prompts."""
    kl_controller: dict[str, float]
