"""Averages over the steps of a run: where each pool's time went, and the critical path.

The report shows these numbers, and the findings are based on them. The first step is left out if there are others,
because it includes warm-up.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolepool.metrics.analysis import Recorded, Timeline, critical_path, lanes, step_metrics
from rolepool.metrics.spans import DRIVER

MAX_STEPS = 200
MAX_REPLAYED_STEPS = 12

SpansByStep = Mapping[int, Sequence[Recorded]]


@dataclass
class PoolUse:
    """Where a pool's time went: seconds per step, averaged over its ranks."""

    num_ranks: int
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By operation."""
    waits_s: dict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    """By kind of wait, and the pool and operation that it waited for."""

    @property
    def busy_fraction(self) -> float:
        busy_s = sum(self.busy_s.values())
        return busy_s / (busy_s + sum(self.waits_s.values()))


@dataclass(frozen=True)
class Summary:
    """Averages over `steps`."""

    steps: list[int]
    step_s: float
    pools: dict[str, PoolUse]
    path_s: dict[tuple[str, str], float]
    """Seconds of the critical path per step, by pool and operation; hand-overs between calls have two empty names."""
    saved_s: float


def by_step(spans: Sequence[Recorded]) -> SpansByStep:
    grouped: dict[int, list[Recorded]] = defaultdict(list)
    for recorded in spans:
        grouped[recorded.step].append(recorded)
    return grouped


def around(grouped: SpansByStep, first: int, last: int) -> Timeline:
    """The spans of these steps, and of the steps before and after, which may overlap or explain them."""
    return Timeline(recorded for step in range(first - 1, last + 2) for recorded in grouped.get(step, ()))


def summarise(grouped: SpansByStep, bounds: Mapping[int, tuple[float, float]]) -> Summary:
    """Averages over at most `MAX_STEPS` steps, evenly spaced."""
    all_steps = sorted(bounds)[1:] or sorted(bounds)
    count = min(len(all_steps), MAX_STEPS)
    steps = [all_steps[len(all_steps) * index // count] for index in range(count)]
    pools: dict[str, PoolUse] = {}
    path_s: dict[tuple[str, str], float] = defaultdict(float)
    saved_s = 0.0
    for step in steps:
        spans, (start_s, end_s) = around(grouped, step, step), bounds[step]
        step_lanes = lanes(spans, start_s, end_s)
        for lane in step_lanes:
            num_ranks = sum(other.pool == lane.pool for other in step_lanes)
            use = pools.setdefault(lane.pool, PoolUse(num_ranks))
            for _, operation, span in lane.spans:
                use.busy_s[operation] += span.duration_s / num_ranks / count
            for wait in lane.waits:
                waited_s = (wait.end_s - wait.start_s) / num_ranks / count
                use.waits_s[wait.kind, wait.pool, wait.operation] += waited_s
        for link in critical_path(spans, start_s, end_s):
            key = (link.pool, link.operation) if link.kind == "work" else ("", "")
            path_s[key] += (link.end_s - link.start_s) / count
        saved_s += step_metrics(spans, start_s, end_s)["overlap/saved_s"] / count
    step_s = statistics.fmean(bounds[step][1] - bounds[step][0] for step in steps) if steps else 0.0
    return Summary(steps, step_s, pools, dict(path_s), saved_s)


def replayed_step_s(grouped: SpansByStep, scales: Mapping[str, float]) -> float | None:
    """Duration of a step if each call of a pool took `scales[pool]` times as long; None if there are too few steps.

    Replays the recorded calls. Each starts as early as it can: after the earlier calls of its pool, after the calls
    whose results are its inputs, and after the driver.
    """
    steps = sorted(grouped)[1:]
    middle = max(0, (len(steps) - MAX_REPLAYED_STEPS) // 2)
    calls: dict[tuple[float, int, str], list[Recorded]] = defaultdict(list)
    for step in steps[middle : middle + MAX_REPLAYED_STEPS]:
        for recorded in grouped[step]:
            span = recorded.span
            calls[span.start_s if span.pool == DRIVER else span.queued_s, span.call, span.pool].append(recorded)
    ends: dict[int, float] = {}
    free: dict[str, float] = defaultdict(float)
    starts: dict[int, float] = {}
    for (_, number, pool), ranks in sorted(calls.items()):
        step, operation, span = ranks[0]
        start = max(free[pool], free[DRIVER], *(ends.get(call, 0.0) for call in span.after))
        if operation == "gen":
            starts.setdefault(step, start)
        slowest_s = max(recorded.span.duration_s for recorded in ranks)
        ends[number] = free[pool] = start + slowest_s * scales.get(pool, 1.0)
    first, *others = list(starts.values())[(len(starts) - 1) // 2 :] or [0.0]  # the first half is the ramp-up
    return (others[-1] - first) / len(others) if others else None
