"""Averages over the steps of a run: where the time of each pool went, and the critical path.

Owns which steps are averaged. The report page shows the averages, and `findings` explains them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from rolepool.metrics.spans import Recorded
from rolepool.metrics.timeline import Timeline, critical_path, lanes, step_metrics

MAX_STEPS = 200
"""Steps over which averages are computed."""

SpansByStep = Mapping[int, Sequence[Recorded]]
KindOfTime = tuple[str, str, str]
"""A kind of time ("busy" or a kind of wait), and the pool and operation that a rank worked on or
waited for."""
Link = tuple[str, str]
"""A pool and an operation on the critical path; two empty names for hand-overs between calls."""


class Summary(NamedTuple):
    """Averages over `steps`."""

    steps: list[int]
    step_s: float
    num_ranks: Mapping[str, int]
    """Ranks of each pool."""
    pools_s: dict[str, dict[KindOfTime, float]]
    """Where each pool's time went: seconds per step, averaged over its ranks."""
    path_s: dict[Link, float]
    """Seconds of the critical path per step."""
    saved_s: float


def by_step(spans: Sequence[Recorded]) -> SpansByStep:
    """The spans of each step, in the order of steps."""
    grouped: dict[int, list[Recorded]] = defaultdict(list)
    for recorded in spans:
        grouped[recorded.step].append(recorded)
    return dict(sorted(grouped.items()))


def around(grouped: SpansByStep, first: int, last: int) -> Timeline:
    """The spans of these steps, and of the steps before and after, which may overlap or explain
    them. Responses of even later steps may be generated meanwhile (`algorithm.max_staleness`)."""
    near: list[Recorded] = []
    end_s = 0.0
    for step, spans in grouped.items():
        if step < first - 1:
            continue
        if step > last + 1 and all(recorded.span.start_s >= end_s for recorded in spans):
            break
        near += spans
        if step <= last:
            end_s = max(end_s, max(recorded.span.end_s for recorded in spans))
    return Timeline(near)


def summarise(grouped: SpansByStep, bounds: Mapping[int, tuple[float, float]]) -> Summary:
    """Averages over at most `MAX_STEPS` steps, evenly spaced."""
    steps = _choose_steps(sorted(bounds))
    count = len(steps)
    num_ranks: Counter[str] = Counter()
    pools_s: dict[str, dict[KindOfTime, float]] = defaultdict(lambda: defaultdict(float))
    path_s: dict[Link, float] = defaultdict(float)
    saved_s = 0.0

    for step in steps:
        spans = around(grouped, step, step)
        start_s, end_s = bounds[step]
        # The union of two counters has the larger count of each pool.
        num_ranks |= Counter(pool for pool, _ in spans.of_rank)

        lanes_of_ranks = lanes(spans, start_s, end_s)
        for (pool, _), lane in lanes_of_ranks.items():
            pool_s = pools_s[pool]
            for piece in lane:
                kind_of_time = (piece.kind, piece.pool, piece.operation)
                pool_s[kind_of_time] += piece.duration_s / num_ranks[pool] / count

        for piece in critical_path(spans, start_s, end_s):
            link = (piece.pool, piece.operation)
            path_s[link] += piece.duration_s / count

        metrics = step_metrics(spans, start_s, end_s)
        saved_s += metrics["overlap/saved_s"] / count

    return Summary(
        steps=steps,
        step_s=_mean_step_s(steps, bounds),
        num_ranks=num_ranks,
        pools_s=pools_s,
        path_s=path_s,
        saved_s=saved_s,
    )


def _choose_steps(steps: Sequence[int]) -> list[int]:
    """At most `MAX_STEPS` steps, evenly spaced. The first step is skipped if there are others,
    because it includes the warm-up."""
    candidates = steps[1:] or steps
    num_candidates = len(candidates)
    count = min(num_candidates, MAX_STEPS)
    chosen = []
    for index in range(count):
        place = num_candidates * index // count
        chosen.append(candidates[place])
    return chosen


def _mean_step_s(steps: Sequence[int], bounds: Mapping[int, tuple[float, float]]) -> float:
    if not steps:
        return 0.0
    durations_s = []
    for step in steps:
        start_s, end_s = bounds[step]
        durations_s.append(end_s - start_s)
    return fmean(durations_s)
