"""The timeline on the page of a run: which steps it shows, and what is in its lanes.

Limits its size: long runs show a few steps, and large ones a limited number of lanes.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypedDict

from rolepool.metrics.spans import Recorded
from rolepool.metrics.timeline import NONE, Interval, lanes
from rolepool.report.summary import SpansByStep, around

MAX_SPANS = 10_000
MAX_LANES = 500
MAX_STEPS_SHOWN = 12
"""Steps on the timeline of a run that has more than `MAX_SPANS` spans."""

Bounds = Mapping[int, tuple[float, float]]

SpanRow = tuple[int, int, float, float, int, int, int, list[tuple[str, float]]]
"""A span for the page: the place of its operation, its step, start and duration, its numbers of
rows and tokens, its peak memory in bytes, and the seconds of its parts."""
WaitRow = tuple[str, str, str, float, float]
"""A wait for the page: its kind, the pool and operation that explain it, start and duration."""


class Lane(TypedDict):
    """What a rank did in a window."""

    pool: str
    rank: int
    spans: list[SpanRow]
    waits: list[WaitRow]


class Window(TypedDict):
    """Consecutive steps. All times count from the start of the first one."""

    why: str
    """Why these steps are shown."""
    starts: list[tuple[int, float]]
    seconds: float
    lanes: list[Lane]
    num_hidden: int
    """Lanes that are not shown."""


def windows(grouped: SpansByStep, bounds: Bounds, operations: Sequence[str]) -> list[Window]:
    """The windows that the page can show; it opens with the first one."""
    shown = []
    for why, steps in _choose_steps(grouped, bounds).items():
        shown.append(_window(why, grouped, bounds, steps, operations))
    return shown


def _choose_steps(grouped: SpansByStep, bounds: Bounds) -> dict[str, list[int]]:
    """The median step, on which the page opens, the slowest one, and all steps or as many of the
    first and last as fit. The first step includes warm-up, so it is neither median nor slowest."""

    def duration_s(step: int) -> float:
        start_s, end_s = bounds[step]
        return end_s - start_s

    steps = sorted(bounds)
    if not steps:
        return {}
    by_length = sorted(steps[1:] or steps, key=duration_s)
    median = [by_length[len(by_length) // 2]]
    slowest = [by_length[-1]]

    num_spans = [len(grouped[step]) for step in steps]
    num_steps_shown = min(MAX_STEPS_SHOWN, MAX_SPANS // max(num_spans))
    # Median and slowest step have a window of their own; the others are at both ends.
    num_at_each_end = num_steps_shown // 2 - 1
    if len(steps) < 2 or num_at_each_end < 1:
        return {"median": median}
    if sum(num_spans) <= MAX_SPANS:
        return {"median": median, "slowest": slowest, "all": steps}
    return {
        "median": median,
        "slowest": slowest,
        "first": steps[:num_at_each_end],
        "last": steps[-num_at_each_end:],
    }


def _window(
    why: str,
    grouped: SpansByStep,
    bounds: Bounds,
    steps: Sequence[int],
    operations: Sequence[str],
) -> Window:
    """A window of steps. Spans that start before it or end after it are shown with their full
    length. Lanes after the first `MAX_LANES` are skipped."""
    first_step = steps[0]
    last_step = steps[-1]
    start_s, _ = bounds[first_step]
    _, end_s = bounds[last_step]
    timeline = around(grouped, first_step, last_step)
    all_lanes = lanes(timeline, start_s, end_s)
    shown: list[Lane] = []
    for (pool, rank), pieces in islice(all_lanes.items(), MAX_LANES):
        spans: list[SpanRow] = []
        waits: list[WaitRow] = []
        for piece in pieces:
            if piece.position == NONE:
                waits.append(_wait_row(piece, start_s))
            else:
                recorded = timeline[piece.position]
                spans.append(_span_row(recorded, operations, start_s))
        lane: Lane = {
            "pool": pool,
            "rank": rank,
            "spans": spans,
            "waits": waits,
        }
        shown.append(lane)

    starts = []
    for step in steps:
        step_start_s, _ = bounds[step]
        starts.append((step, step_start_s - start_s))
    return {
        "why": why,
        "starts": starts,
        "seconds": end_s - start_s,
        "lanes": shown,
        "num_hidden": len(all_lanes) - len(shown),
    }


def _span_row(recorded: Recorded, operations: Sequence[str], window_start_s: float) -> SpanRow:
    step, operation, span = recorded
    return (
        operations.index(operation),
        step,
        span.start_s - window_start_s,
        span.duration_s,
        span.num_rows,
        span.num_tokens,
        span.peak_memory_bytes,
        list(span.part_seconds.items()),
    )


def _wait_row(wait: Interval, window_start_s: float) -> WaitRow:
    start_s = wait.start_s - window_start_s
    return wait.kind, wait.pool, wait.operation, start_s, wait.duration_s
