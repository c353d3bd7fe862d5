"""What a run's spans say about its pools, averaged over steps: the numbers the report shows and findings rest on.

Of a long run it takes steps at even distances. The first step, which warms up, is left out where there are others.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolepool.metrics.analysis import Recorded, Timeline, critical_path, lanes, step_bounds, step_metrics
from rolepool.metrics.spans import DRIVER
from rolepool.report.run import Run

MAX_STEPS = 200
MAX_REPLAYED_STEPS = 12
HAND_OVER = "hand-over"


@dataclass
class PoolUse:
    """Where the time of a pool's ranks went: seconds a step, the average of its ranks."""

    num_ranks: int
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By operation."""
    imbalance_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By operation whose slowest rank was waited for."""
    data_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By pool and operation waited for."""
    turn_s: float = 0.0
    nothing_s: float = 0.0

    @property
    def total_s(self) -> float:
        parts = (self.busy_s, self.imbalance_s, self.data_s)
        return sum(sum(part.values()) for part in parts) + self.turn_s + self.nothing_s

    @property
    def busy_fraction(self) -> float:
        return sum(self.busy_s.values()) / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class Memory:
    """The most that was used of any GPU of a pool, and how much such a GPU has."""

    used_bytes: int
    total_bytes: int

    @property
    def used_fraction(self) -> float:
        return self.used_bytes / self.total_bytes


@dataclass(frozen=True)
class Summary:
    """Averages over `steps`; `step_times` are those of all steps."""

    steps: list[int]
    step_times: dict[int, float]
    step_s: float
    pools: dict[str, PoolUse]
    path_s: dict[tuple[str, str], float]
    """Seconds of the critical path a step, by pool and operation, longest first; hand-overs under `HAND_OVER`."""
    saved_s: float
    memory: dict[str, Memory]


def by_step(spans: Sequence[Recorded]) -> dict[int, list[Recorded]]:
    """Spans by step, steps in order."""
    grouped: dict[int, list[Recorded]] = defaultdict(list)
    for recorded in spans:
        grouped[recorded.step].append(recorded)
    return dict(sorted(grouped.items()))


def around(grouped: Mapping[int, list[Recorded]], first: int, last: int) -> list[Recorded]:
    """The spans of steps and of those next to them, which may reach into their time or explain it."""
    return [recorded for step in range(first - 1, last + 2) for recorded in grouped.get(step, ())]


def summarise(run: Run, grouped: Mapping[int, list[Recorded]] | None = None) -> Summary:
    grouped = by_step(run.spans) if grouped is None else grouped
    bounds = step_bounds(run.spans)
    steps = sorted(bounds)[1:] or sorted(bounds)
    steps = [steps[index] for index in _evenly(len(steps), MAX_STEPS)]
    pools: dict[str, PoolUse] = {}
    path: dict[tuple[str, str], float] = defaultdict(float)
    saved_s = 0.0
    for step in steps:
        spans, (start_s, end_s) = Timeline(around(grouped, step, step)), bounds[step]
        step_lanes = lanes(spans, start_s, end_s)
        num_ranks = Counter(lane.pool for lane in step_lanes)
        for lane in step_lanes:
            use = pools.setdefault(lane.pool, PoolUse(num_ranks[lane.pool]))
            part = 1 / (len(steps) * num_ranks[lane.pool])
            for recorded in lane.spans:
                use.busy_s[recorded.operation] += recorded.span.duration_s * part
            for wait in lane.waits:
                _add_wait(use, wait.kind, wait.pool, wait.operation, (wait.end_s - wait.start_s) * part)
        for link in critical_path(spans, start_s, end_s):
            key = (link.pool, link.operation) if link.kind == "work" else (HAND_OVER, "")
            path[key] += (link.end_s - link.start_s) / len(steps)
        saved_s += step_metrics(spans, start_s, end_s).get("overlap/saved_s", 0.0) / len(steps)
    step_times = {step: end_s - start_s for step, (start_s, end_s) in sorted(bounds.items())}
    step_s = statistics.fmean([step_times[step] for step in steps]) if steps else 0.0
    longest_first = dict(sorted(path.items(), key=lambda item: -item[1]))
    return Summary(steps, step_times, step_s, pools, longest_first, saved_s, _memory(run.monitor))


def _add_wait(use: PoolUse, kind: str, pool: str, operation: str, seconds: float) -> None:
    if kind == "imbalance":
        use.imbalance_s[operation] += seconds
    elif kind == "data":
        use.data_s[f"{pool} {operation}"] += seconds
    elif kind == "turn":
        use.turn_s += seconds
    else:
        use.nothing_s += seconds


def _evenly(count: int, most: int) -> list[int]:
    """At most so many indices below `count`, at even distances."""
    return list(range(count)) if count <= most else [count * index // most for index in range(most)]


def _memory(monitor: Sequence[Mapping[str, Any]]) -> dict[str, Memory]:
    """By pool, where the monitor knows how much memory a GPU has."""
    found: dict[str, Memory] = {}
    for sample in monitor:
        for gpu in sample.get("gpus", ()):
            for pool in gpu.get("pools", ()) if gpu.get("memory_total_bytes") else ():
                here = Memory(gpu["memory_bytes"], gpu["memory_total_bytes"])
                found[pool] = max(here, found.get(pool, here), key=lambda memory: memory.used_fraction)
    return found


def replayed_step_s(grouped: Mapping[int, list[Recorded]], scales: Mapping[str, float]) -> float | None:
    """Length of a step when every call lasts as long as it did times its pool's scale and starts as early as it can:
    after earlier calls on its pool, the calls that fed it, and the driver. None where too few steps were recorded."""
    steps = list(grouped)[1:] or list(grouped)
    middle = max(0, (len(steps) - MAX_REPLAYED_STEPS) // 2)
    ends: dict[int, float] = {}
    free: dict[str, float] = defaultdict(float)
    generations: dict[int, float] = {}
    for calls in _calls(grouped, steps[middle : middle + MAX_REPLAYED_STEPS]):
        _, operation, span = calls[0]
        fed = max((ends.get(call, 0.0) for call in span.after), default=0.0)
        start = max(free[span.pool], free[DRIVER], fed)
        if operation == "gen":
            generations.setdefault(calls[0].step, start)
        slowest = max(recorded.span.duration_s for recorded in calls)
        ends[span.call] = free[span.pool] = start + slowest * scales.get(span.pool, 1.0)
    starts = list(generations.values())
    return (starts[-1] - starts[0]) / (len(starts) - 1) if len(starts) > 1 else None


def _calls(grouped: Mapping[int, list[Recorded]], steps: Sequence[int]) -> Iterator[list[Recorded]]:
    """The spans of each call, in the order in which the driver made them; its own spans where it began them."""
    calls: dict[tuple[str, int, float], list[Recorded]] = defaultdict(list)
    for step in steps:
        for recorded in grouped[step]:
            span = recorded.span
            made_s = span.start_s if span.pool == DRIVER else span.queued_s
            calls[span.pool, span.call, made_s].append(recorded)
    return iter([calls[key] for key in sorted(calls, key=lambda key: key[2])])
