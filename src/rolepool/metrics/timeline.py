"""Where the time of a step went: what each rank did and waited for, and the critical path.

Spans are explained after the fact, from three rules: a rank runs its calls one after another; a
call starts after the calls whose results are its inputs; a call starts after the driver has queued
it.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

from rolepool.metrics.spans import (
    DRIVER,
    RULE_POOL,
    Recorded,
    Span,
    first_calls_of,
    may_begin_step,
)

NONE = -1
"""The position of a span that does not exist."""


class Interval(NamedTuple):
    """A piece of time, of one `kind`, and the pool and operation that explain it ("" if there is
    none).

    On the critical path: "work" of that pool, or the "hand-over" from the end of a cause to the
    start of its effect. On a rank: "busy", or why it waits. "imbalance": for the slowest rank of
    its own call; "data": for data that the pool is computing; "turn": the data is ready, but the
    driver or the hand-over takes time; "nothing": no call comes.
    """

    kind: Literal["work", "hand-over", "busy", "imbalance", "data", "turn", "nothing"]
    pool: str
    operation: str
    start_s: float
    end_s: float
    position: int = NONE
    """The position of the span that a busy rank ran; it may start before the interval, or end after
    it."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


Rank = tuple[str, int]
"""A pool and a rank of it."""
Bar = tuple[str, float, float]
"""An operation, its start and its end."""


class Cause(NamedTuple):
    """What a span waited for."""

    began_s: float
    """When the span started to work."""
    position: int
    """The position of the span that this one waited for."""
    cause_s: float
    """When that one had ended."""


class Ended(NamedTuple):
    """A span that ended before another one."""

    position: int
    end_s: float


_UNKNOWN = Ended(NONE, float("-inf"))
"""Stands for what a span waited for if that is not known."""
_end = attrgetter("end_s")


CallKey = tuple[int, str, int, str]
"""The number of a call, its pool, step and operation. The number alone does not identify it,
because a resumed run numbers its calls from 0 again."""


def _start_and_end(recorded: Recorded) -> tuple[float, float]:
    return recorded.span.start_s, recorded.span.end_s


class Timeline(list[Recorded]):
    """Spans in the order of their starts, with an index. Build it once to ask the functions below
    about many steps.

    A span is named by its position in the list. Include the steps before and after the one you ask
    about, because calls of the next step explain what a rank waits for at the end of a step.
    """

    def __init__(self, spans: Iterable[Recorded]) -> None:
        in_order = sorted(spans, key=_start_and_end)
        super().__init__(in_order)
        of_rank: dict[Rank, list[int]] = defaultdict(list)
        of_call: dict[CallKey, list[int]] = defaultdict(list)
        for position, (step, operation, span) in enumerate(self):
            rank = (span.pool, span.rank)
            call = (span.call, span.pool, step, operation)
            of_rank[rank].append(position)
            of_call[call].append(position)

        self.of_rank = dict(sorted(of_rank.items()))
        """Positions of the spans of each pool and rank."""
        self.starts_of_rank: dict[Rank, list[float]] = {}
        self._previous: dict[int, int] = {}
        """Position of the previous span of the same rank, for each span that has one."""
        for rank, positions in self.of_rank.items():
            starts = [self[position].span.start_s for position in positions]
            self.starts_of_rank[rank] = starts
            for before, after in pairwise(positions):
                self._previous[after] = before

        self.call_ends_s = [0.0] * len(self)
        """When the slowest rank of the same call ended, for each span."""
        self._slowest: dict[int, list[int]] = defaultdict(list)
        """Positions of the slowest spans by call number; after a resume, several calls have the
        same number."""
        self._find_slowest(of_call)
        self.step_begins = self._find_step_begins(of_call)
        """Position of the span with which each step begins, by its start."""

    def _find_slowest(self, of_call: Mapping[CallKey, Sequence[int]]) -> None:
        """Fill `call_ends_s` and `_slowest`."""

        def end_s_of(position: int) -> float:
            return self[position].span.end_s

        for (number, pool, _, _), positions in of_call.items():
            slowest = max(positions, key=end_s_of)
            call_end_s = end_s_of(slowest)
            for position in positions:
                self.call_ends_s[position] = call_end_s
            if pool != DRIVER:
                self._slowest[number].append(slowest)

    def _find_step_begins(self, of_call: Mapping[CallKey, Sequence[int]]) -> dict[float, int]:
        """A step begins with its first call, and this one with its first span."""
        first_calls = first_calls_of(self)
        begins: dict[float, int] = {}
        for (number, _, step, _), positions in of_call.items():
            position = positions[0]
            start_s = self[position].span.start_s
            is_first = first_calls.get(step) == (number, start_s)
            if is_first and may_begin_step(self[position]):
                # If several steps begin at the same time, the first one counts.
                begins.setdefault(start_s, position)
        return begins

    def inputs_of(self, position: int) -> Iterator[int]:
        """For each call whose result was an input of a span: the position of that call's slowest
        span."""
        span = self[position].span
        for call in span.after:
            newest_first = reversed(self._slowest.get(call, ()))
            for slowest in newest_first:
                if self[slowest].span.start_s <= span.end_s:
                    # Earlier ones with this number are from before a resume.
                    yield slowest
                    break

    def causes(self, position: int, time_s: float, until_s: float) -> Iterator[Interval]:
        """The chain of causes of a span's state at `time_s`, latest first, back to `until_s`."""
        seen: set[tuple[int, float]] = set()
        while time_s > until_s:
            _, operation, span = self[position]
            began_s, cause, cause_s = self._cause(position, time_s)
            if (cause, cause_s) in seen:  # spans without duration that name each other
                cause = NONE
                cause_s = until_s
            seen.add((cause, cause_s))
            if began_s < time_s:
                work_start_s = max(began_s, until_s)
                yield Interval("work", span.pool, operation, work_start_s, time_s)
            if cause_s < began_s and until_s < began_s:
                hand_over_start_s = max(cause_s, until_s)
                yield Interval("hand-over", "", "", hand_over_start_s, began_s)
            if cause == NONE:
                return
            position = cause
            time_s = cause_s

    def cause_s(self, position: int) -> float:
        """When what a span waited for had ended, before the span started; minus infinity if that is
        not known."""
        return self._cause(position, self[position].span.start_s).cause_s

    def _cause(self, position: int, time_s: float) -> Cause:
        """Why a span that was running at `time_s` did not start to work earlier."""
        span = self[position].span
        ended = [_UNKNOWN, *self._inputs_before(position, time_s)]
        latest = max(ended, key=_end)
        if latest.end_s >= span.start_s:
            return Cause(
                began_s=latest.end_s,
                position=latest.position,
                cause_s=latest.end_s,
            )

        if position in self._previous:
            previous = self._previous[position]
            previous_end_s = min(self[previous].span.end_s, span.start_s)
            ended.append(Ended(previous, previous_end_s))
        if span.pool != DRIVER:
            ended.extend(self._queued_by(span))
        latest = max(ended, key=_end)
        return Cause(
            began_s=span.start_s,
            position=latest.position,
            cause_s=latest.end_s,
        )

    def _inputs_before(self, position: int, time_s: float) -> Iterator[Ended]:
        """The calls whose results a span had at a time."""
        span = self[position].span
        for slowest in self.inputs_of(position):
            source = self[slowest].span
            # The driver waits inside its spans, so it has only the results of calls that have
            # ended. A worker has all its inputs when it starts: an input that ends later is a
            # difference between two clocks.
            available_s = source.end_s if span.pool == DRIVER else source.start_s
            if available_s <= time_s:
                yield Ended(slowest, min(source.end_s, time_s))

    def _queued_by(self, span: Span) -> Iterator[Ended]:
        """What the driver did before it queued a call, if that is known."""
        driver: Rank = (DRIVER, 0)
        queued_s = min(span.queued_s, span.start_s)
        starts_of_driver = self.starts_of_rank.get(driver, ())
        index = bisect_right(starts_of_driver, queued_s) - 1
        if index >= 0:
            position = self.of_rank[driver][index]
            end_s = min(self[position].span.end_s, queued_s)
            yield Ended(position, end_s)


def lanes(
    timeline: Timeline,
    start_s: float,
    end_s: float,
    *,
    explain: bool = True,
) -> dict[Rank, list[Interval]]:
    """What each rank, and the driver, did and waited for in a time window, by pool and rank. The
    intervals of a rank are in the order of time and fill the window without a gap.

    With `explain=False`, the causes of waits are not looked for, which is much faster: each wait
    for data or for a turn is then one interval of the kind "data", without a pool.
    """
    return {rank: _lane(timeline, rank, start_s, end_s, explain) for rank in timeline.of_rank}


def _lane(
    timeline: Timeline,
    rank: Rank,
    start_s: float,
    end_s: float,
    explain: bool,
) -> list[Interval]:
    """What one rank did and waited for in a time window."""
    pool, _ = rank
    positions = timeline.of_rank[rank]
    starts = timeline.starts_of_rank[rank]
    # The span that runs when the window begins, and the first one that starts after it.
    first = max(bisect_right(starts, start_s) - 1, 0)
    after_window = bisect_left(starts, end_s)
    lane: list[Interval] = []
    previous = NONE
    filled_s = start_s
    for index in range(first, after_window + 1):
        is_inside = index < after_window
        # The span after the window explains the wait at the window's end, if there is one.
        position = positions[index] if index < len(positions) else NONE
        begin_s = starts[index] if is_inside else end_s

        if previous != NONE:
            call_end_s = min(timeline.call_ends_s[previous], begin_s)
            if call_end_s > filled_s:
                operation = timeline[previous].operation
                lane.append(Interval("imbalance", pool, operation, filled_s, call_end_s))
                filled_s = call_end_s
        if begin_s > filled_s:
            if position == NONE:
                lane.append(Interval("nothing", "", "", filled_s, begin_s))
            elif explain:
                latest_first = list(_explain(timeline, position, filled_s, begin_s))
                lane.extend(reversed(latest_first))
            else:
                lane.append(Interval("data", "", "", filled_s, begin_s))
            filled_s = begin_s
        if is_inside:
            recorded = timeline[position]
            until_s = min(recorded.span.end_s, end_s)
            if until_s > filled_s:
                lane.append(Interval("busy", pool, recorded.operation, filled_s, until_s, position))
                filled_s = until_s
        previous = position
    return lane


def first_rank_lanes(
    spans: Iterable[Recorded], start_s: float, end_s: float
) -> dict[str, list[Bar]]:
    """What the first rank of each pool did in a time window. Times are seconds since its start."""
    bars: dict[str, list[Bar]] = {}
    timeline = Timeline(spans)
    all_lanes = lanes(timeline, start_s, end_s, explain=False)
    for (pool, rank), lane in all_lanes.items():
        if pool == DRIVER or rank != 0:
            continue
        bars[pool] = []
        for interval in lane:
            if interval.kind != "busy":
                continue
            bar_start_s = interval.start_s - start_s
            bar_end_s = interval.end_s - start_s
            bars[pool].append((interval.operation, bar_start_s, bar_end_s))
    return bars


def _explain(
    timeline: Timeline,
    following: int,
    start_s: float,
    end_s: float,
) -> Iterator[Interval]:
    """What a rank waited for until its next span, latest first."""
    begins_s = timeline[following].span.start_s
    for cause in timeline.causes(following, begins_s, start_s):
        if cause.start_s < end_s:
            kind: Literal["turn", "data"] = "data"
            if cause.pool in ("", DRIVER):
                kind = "turn"
            yield cause._replace(kind=kind, end_s=min(cause.end_s, end_s))


def critical_path(timeline: Timeline, start_s: float, end_s: float) -> list[Interval]:
    """The chain of causes from `start_s` to `end_s`, without a gap, earliest first.

    A step ends when the next one starts, so the chain leads to that start. After the last step it
    leads to the span that ended last.
    """
    path: list[Interval] = []
    last_s = start_s
    last = _last_span(timeline, end_s)
    if last != NONE:
        last_end_s = min(timeline[last].span.end_s, end_s)
        last_s = max(start_s, last_end_s)
    if last_s < end_s:
        path.append(Interval("hand-over", "", "", last_s, end_s))
    path.extend(timeline.causes(last, last_s, start_s))
    path.reverse()
    return path


def _last_span(timeline: Timeline, end_s: float) -> int:
    """The position of the span with which a step ends."""
    if end_s in timeline.step_begins:
        return timeline.step_begins[end_s]
    last = NONE
    last_end_s = float("-inf")
    for position, recorded in enumerate(timeline):
        if recorded.span.start_s >= end_s:
            break  # and so do all later ones
        span_end_s = min(recorded.span.end_s, end_s)
        if span_end_s > last_end_s:
            last = position
            last_end_s = span_end_s
    return last


def step_metrics(timeline: Timeline, start_s: float, end_s: float) -> dict[str, float]:
    """`pool/NAME/*`, means over the pool's ranks, and `overlap/*`: the time saved by pools that
    work simultaneously."""
    wall_s = end_s - start_s
    lanes_of_pools: dict[str, list[list[Interval]]] = defaultdict(list)
    all_lanes = lanes(timeline, start_s, end_s, explain=False)
    for (pool, _), lane in all_lanes.items():
        if pool != DRIVER:
            lanes_of_pools[pool].append(lane)

    metrics: dict[str, float] = {}
    for pool, pool_lanes in lanes_of_pools.items():
        metrics.update(_pool_metrics(timeline, pool, pool_lanes, wall_s))
    overlap_s, saved_s = _overlap(lanes_of_pools)
    overlap_fraction = 0.0
    if wall_s:
        overlap_fraction = overlap_s / wall_s
    metrics["overlap/fraction"] = overlap_fraction
    metrics["overlap/saved_s"] = saved_s
    return metrics


def _pool_metrics(
    timeline: Timeline,
    pool: str,
    pool_lanes: list[list[Interval]],
    wall_s: float,
) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    peak_bytes = 0
    for lane in pool_lanes:
        for interval in lane:
            seconds[interval.kind] += interval.duration_s
            if interval.kind == "busy":
                span = timeline[interval.position].span
                peak_bytes = max(peak_bytes, span.peak_memory_bytes)
    num_ranks = len(pool_lanes)
    busy_s = seconds["busy"] / num_ranks
    busy_fraction = 0.0
    if wall_s:
        busy_fraction = busy_s / wall_s
    return {
        f"pool/{pool}/busy_s": busy_s,
        f"pool/{pool}/idle_s": wall_s - busy_s,
        f"pool/{pool}/busy_fraction": busy_fraction,
        f"pool/{pool}/wait_s": seconds["data"] / num_ranks,
        f"pool/{pool}/peak_memory_gb": peak_bytes / 2**30,
    }


def _overlap(lanes_of_pools: dict[str, list[list[Interval]]]) -> tuple[float, float]:
    """The time in which several pools work, and the time that is saved in this way."""
    changes: list[tuple[float, int, str]] = []
    """When a rank of a pool begins (1) and ends (-1) to work."""
    for pool, pool_lanes in lanes_of_pools.items():
        if pool == RULE_POOL:
            continue
        for lane in pool_lanes:
            for interval in lane:
                if interval.kind == "busy":
                    begins = (interval.start_s, 1, pool)
                    ends = (interval.end_s, -1, pool)
                    changes += [begins, ends]
    changes.sort()

    overlap_s = 0.0
    saved_s = 0.0
    num_busy_ranks: Counter[str] = Counter()
    for (time_s, change, pool), (next_s, _, _) in pairwise(changes):
        num_busy_ranks[pool] += change
        num_busy_pools = sum(count != 0 for count in num_busy_ranks.values())
        if num_busy_pools > 1:
            passed_s = next_s - time_s
            overlap_s += passed_s
            saved_s += passed_s * (num_busy_pools - 1)
    return overlap_s, saved_s
