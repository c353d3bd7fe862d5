"""Where the time of a step went: what each rank did or waited for, and the chain of causes that made it that long.

Owns the explanation of spans after the fact. It knows the rules calls run by (those of a rank one after another, a
call after those whose results it was given, a call after the driver made it), and no operation but generation, with
which a step begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from rolepool.metrics.spans import Span


class Recorded(NamedTuple):
    """A line of `spans.jsonl`: the span, and the step and operation it belongs to."""

    step: int
    operation: str
    span: Span


class Wait(NamedTuple):
    """A time in which a rank did nothing, and the pool and operation it waited for, "" where there is none."""

    kind: Literal["imbalance", "data", "turn", "nothing"]
    pool: str
    operation: str
    start_s: float
    end_s: float


class Lane(NamedTuple):
    """What a rank did from `start_s` to `end_s`. Spans (cut at the ends) and waits fill it without a gap."""

    pool: str
    rank: int
    start_s: float
    end_s: float
    spans: list[Recorded]
    waits: list[Wait]


class Link(NamedTuple):
    """A piece of the critical path: a rank at work, or the time until it was after what it had waited for."""

    pool: str
    operation: str
    rank: int
    start_s: float
    end_s: float
    kind: Literal["work", "hand-over"]


class Timeline(list[Recorded]):
    """Spans in the order they began, indexed once. Hand one to the functions below to ask them about many steps.

    Give a step's functions the calls around it, too, or best a whole run: what a rank waits for at a step's end is
    explained by the next step's calls.
    """

    def __init__(self, spans: Iterable[Recorded]) -> None:
        super().__init__(spans)


def step_bounds(spans: Sequence[Recorded]) -> dict[int, tuple[float, float]]:
    """Start and end of each step: its generation's start and the next one's; the last step's last end."""
    raise NotImplementedError


def lanes(spans: Sequence[Recorded], start_s: float, end_s: float) -> list[Lane]:
    """What each rank, and the driver, did and waited for in that time; by pool and rank."""
    raise NotImplementedError


def critical_path(spans: Sequence[Recorded], start_s: float, end_s: float) -> list[Link]:
    """The chain of causes that ends at `end_s`, back to `start_s` without a gap; earliest first."""
    raise NotImplementedError


def step_metrics(spans: Sequence[Recorded], start_s: float, end_s: float) -> dict[str, float]:
    """`pool/NAME/*` and `overlap/*` of a step."""
    raise NotImplementedError
