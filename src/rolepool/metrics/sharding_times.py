"""`sharding.json`: how much longer a small model takes if it is sharded. A run measures this when
it starts.

Owns the format of the file. `rolepool.models.sharding_times` measures, and
`rolepool.planner.sharding` computes from it what sharding costs in other models.
"""

from typing import Annotated

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

SHARDING_FILE = "sharding.json"


Count = Annotated[int, Field(gt=0, lt=2**63)]
Time = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


@dataclass(frozen=True)
class ShardingTime:
    """A part of the work, with a small model, on one rank: a median of some repetitions."""

    num_ranks: Count
    """Ranks that the model is sharded over."""
    part: str
    """The name that the part has in spans, such as `forward`."""
    num_units: Count
    """Layers that are gathered one after another; everything outside of the layers counts as one
    more."""
    num_params: Count
    """All parameters of the model."""
    sharded_s: Time
    alone_s: Time
    """Without sharding, on the same data."""

    @property
    def added_s(self) -> float:
        """What sharding adds. Less than 0 if it saves time, because each rank updates only its
        shard."""
        return self.sharded_s - self.alone_s


class ShardingTimes(BaseModel):
    """The content of the file."""

    times: list[ShardingTime]
