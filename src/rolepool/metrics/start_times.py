"""`start.json`: where the time went between the command and the first step.

Owns the format of the file. A run that resumes writes it again. What is compiled and captured in the
first steps is in their spans (parts `compile` and `capture`).
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

START_FILE = "start.json"
MAX_ENTRIES = 10_000

Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Seconds since the epoch, on the driver's clock."""
Name = Annotated[str, Field(max_length=200)]


@dataclass(frozen=True)
class Entry:
    """Something that the driver or a process did during the start."""

    who: Name
    """`driver`, or a process: `actor_pool rank 0`."""
    what: Name
    start_s: Time
    end_s: Time

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class StartTimes(BaseModel):
    """The content of the file. The phases of the driver follow each other. What processes do runs
    beside them."""

    phases: Annotated[list[Entry], Field(max_length=MAX_ENTRIES)]
    processes: Annotated[list[Entry], Field(max_length=MAX_ENTRIES)]

    @property
    def in_order(self) -> Sequence[Entry]:
        """The phases, and then what the processes did, each by time."""
        processes = sorted(self.processes, key=lambda entry: (entry.who, entry.start_s))
        return [*self.phases, *processes]

    @property
    def began_s(self) -> float:
        return min((entry.start_s for entry in self.in_order), default=0.0)
