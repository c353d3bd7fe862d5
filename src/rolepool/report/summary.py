"""What a run's spans say about its pools, averaged over steps: the numbers the report shows and findings rest on.

Of a long run it takes steps at even distances. The first step, which warms up, is left out where there are others.
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

ByStep = Mapping[int, Sequence[Recorded]]


@dataclass
class PoolUse:
    """Where the time of a pool's ranks went: seconds a step, the average of its ranks."""

    num_ranks: int
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By operation."""
    waits_s: dict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    """By kind of waiting, and the pool and operation waited for."""

    @property
    def busy_fraction(self) -> float:
        busy_s = sum(self.busy_s.values())
        return busy_s / (busy_s + sum(self.waits_s.values()))


@dataclass(frozen=True)
class Summary:
    """Averages over `steps`; `step_times` are those of all steps."""

    steps: list[int]
    step_times: dict[int, float]
    step_s: float
    pools: dict[str, PoolUse]
    path_s: dict[tuple[str, str], float]
    """Seconds of the critical path a step, by pool and operation; two empty names for handing over between calls."""
    saved_s: float


def by_step(spans: Sequence[Recorded]) -> ByStep:
    grouped: dict[int, list[Recorded]] = defaultdict(list)
    for recorded in spans:
        grouped[recorded.step].append(recorded)
    return grouped


def around(grouped: ByStep, first: int, last: int) -> Timeline:
    """The spans of steps and of those next to them, which may reach into their time or explain it."""
    return Timeline(recorded for step in range(first - 1, last + 2) for recorded in grouped.get(step, ()))


def summarise(grouped: ByStep, bounds: Mapping[int, tuple[float, float]]) -> Summary:
    """Averages over at most `MAX_STEPS` steps."""
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
    step_times = {step: bounds[step][1] - bounds[step][0] for step in sorted(bounds)}
    step_s = statistics.fmean(step_times[step] for step in steps) if steps else 0.0
    return Summary(steps, step_times, step_s, pools, dict(path_s), saved_s)


def replayed_step_s(grouped: ByStep, scales: Mapping[str, float]) -> float | None:
    """Length of a step if calls on a pool lasted `scales` times as long and started as early as they can: after earlier
    calls on their pool, the calls that fed them, and the driver. None where too few steps were recorded."""
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
    first, *others = list(starts.values())[(len(starts) - 1) // 2 :] or [0.0]  # until the pools have fallen into step
    return (others[-1] - first) / len(others) if others else None
