"""Spans: what one worker did, and from when to when.

Every timing that anybody sees is computed from these. Times are seconds since the epoch, by the worker's own clock,
except `queued_s`, which is the driver's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """One call on one rank: made by the driver at `queued_s`, run by the worker from `start_s` to `end_s`."""

    pool: str
    role: str
    rank: int
    method: str
    queued_s: float
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def extent_s(spans: Iterable[Span]) -> float:
    """Time from the first start to the last end."""
    spans = list(spans)
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def overlap_s(one: Iterable[Span], other: Iterable[Span]) -> float:
    """How long both sets of spans were under way at the same time, each taken from its first start to its last end."""
    one, other = list(one), list(other)
    start = max(min(span.start_s for span in spans) for spans in (one, other))
    end = min(max(span.end_s for span in spans) for spans in (one, other))
    return max(0.0, end - start)
