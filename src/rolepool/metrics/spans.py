"""Spans: what one process did, and from when to when. From them: where the time of a step went.

Every timing that anybody sees is computed from spans. Times are seconds since the epoch on the
driver's clock; times of other nodes are converted to it before they are written. Spans are
explained after the fact, from three rules: a rank runs its calls one after another; a call starts
after the calls whose results are its inputs; a call starts after the driver has queued it. The
table of roles says which operation begins a step.
"""

import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, groupby, islice, pairwise
from operator import itemgetter
from typing import Literal, NamedTuple, Self

from rolepool.placement.plan import DRIVER as DRIVER
from rolepool.placement.plan import RULE_POOL as RULE_POOL
from rolepool.placement.roles import FIRST_OPERATION
from rolepool.reading import Integer, Number

NONE = -1
"""The position of a span that does not exist."""

BETWEEN_STEPS = ("testing", "save_checkpoint")
"""Operations that start after a step has ended."""


class Part(NamedTuple):
    """Time inside a call, and the work that was done in it."""

    name: str
    """`fetch`, `prefill`, `decode`, `forward`, `backward`, ..."""
    seconds: Number
    num_pieces: Integer = 1
    """Pieces of work, such as micro-batches or decode steps."""
    num_tokens: Integer = 0
    num_attended: Integer = 0
    """How many tokens each of these tokens reads in attention, added up."""


class Span(NamedTuple):
    """One call on one rank: queued by the driver at `queued_s`, run by the worker from `start_s` to
    `end_s`."""

    pool: str
    role: str
    rank: Integer
    method: str
    queued_s: Number
    start_s: Number
    end_s: Number
    node: str = ""
    device: str = "cpu"
    """`cpu`, or `cuda:N` with the GPU's index on its node."""
    call: Integer = 0
    """Number of the call within the run; the same on all ranks that ran it."""
    after: tuple[Integer, ...] = ()
    """The calls whose results were its inputs."""
    num_rows: Integer = 0
    """Rows of the input batch."""
    num_tokens: Integer = 0
    """Tokens, without padding, of the output batch, or of the input batch if it returned none."""
    num_bytes: Integer = 0
    """Size of the input batches."""
    peak_memory_bytes: Integer = 0
    """Peak memory that torch allocated on the GPU during the call; on a CPU, the process's memory
    at its end."""
    parts: tuple[Part, ...] = ()
    """Named parts of the call. A name is repeated if its pieces of work have different sizes."""
    reserved_memory_bytes: Integer = 0
    """The same for the memory that torch reserved on the GPU; on a CPU, the same number."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def part_seconds(self) -> dict[str, float]:
        """The seconds of each part by name."""
        names = dict.fromkeys(part.name for part in self.parts)
        return {
            name: sum(part.seconds for part in self.parts if part.name == name) for name in names
        }

    def on_clock(self, ahead_s: float) -> Self:
        """The same span on another clock, if the worker's clock is `ahead_s` ahead of it."""
        return self._replace(start_s=self.start_s - ahead_s, end_s=self.end_s - ahead_s)


@contextmanager
def driver_span(
    method: str, call: int, after: tuple[int, ...] = ()
) -> Iterator[Callable[[], Span]]:
    """Measure what the driver does in the block. Yields a function that returns the span after the
    block."""
    start_s = time.time()
    ended: list[Span] = []
    yield lambda: ended[0]
    ended.append(
        Span(
            DRIVER,
            "trainer",
            0,
            method,
            start_s,
            start_s,
            time.time(),
            node=DRIVER,
            call=call,
            after=after,
        )
    )


class Recorded(NamedTuple):
    """A line of `spans.jsonl`: a span with its step and operation."""

    step: int
    operation: str
    span: Span


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


class Timeline(list[Recorded]):
    """Spans in the order of their starts, with an index. Build it once to ask the functions below
    about many steps.

    A span is named by its position in the list. Include the steps before and after the one you ask
    about, because calls of the next step explain what a rank waits for at the end of a step.
    """

    def __init__(self, spans: Iterable[Recorded]) -> None:
        super().__init__(
            sorted(spans, key=lambda recorded: (recorded.span.start_s, recorded.span.end_s))
        )
        of_rank: dict[Rank, list[int]] = defaultdict(list)
        of_call: dict[tuple[int, str, int, str], list[int]] = defaultdict(list)
        for position, (step, operation, span) in enumerate(self):
            of_rank[span.pool, span.rank].append(position)
            of_call[span.call, span.pool, step, operation].append(
                position
            )  # a resumed run numbers from 0 again
        self.of_rank = dict(sorted(of_rank.items()))
        """Positions of the spans of each pool and rank."""
        self.starts_of_rank = {
            rank: [self[at].span.start_s for at in of_rank[rank]] for rank in self.of_rank
        }
        self._previous = {
            after: before for positions in of_rank.values() for before, after in pairwise(positions)
        }
        """Position of the previous span of the same rank, for each span that has one."""
        self.call_ends_s = [0.0] * len(self)
        """When the slowest rank of the same call ended, for each span."""
        self._numbered: dict[int, list[int]] = defaultdict(list)
        """Positions of the slowest spans by call number; after a resume, several calls have the
        same number."""
        for (number, pool, _, _), positions in of_call.items():
            slowest = max(positions, key=lambda at: self[at].span.end_s)
            for position in positions:
                self.call_ends_s[position] = self[slowest].span.end_s
            if pool != DRIVER:
                self._numbered[number].append(slowest)

    def inputs_of(self, position: int) -> Iterator[int]:
        """For each call whose result was an input of a span: the position of that call's slowest
        span."""
        span = self[position].span
        for call in span.after:
            slowest = reversed(self._numbered.get(call, ()))
            yield from islice((at for at in slowest if self[at].span.start_s <= span.end_s), 1)

    def causes(self, position: int, time_s: float, until_s: float) -> Iterator[Interval]:
        """The chain of causes of a span's state at `time_s`, latest first, back to `until_s`."""
        seen: set[tuple[int, float]] = set()
        while time_s > until_s:
            _, operation, span = self[position]
            began_s, cause, cause_s = self._cause(position, time_s)
            if (cause, cause_s) in seen:  # spans without duration that name each other
                cause, cause_s = NONE, until_s
            seen.add((cause, cause_s))
            if began_s < time_s:
                yield Interval("work", span.pool, operation, max(began_s, until_s), time_s)
            if cause_s < began_s and until_s < began_s:
                yield Interval("hand-over", "", "", max(cause_s, until_s), began_s)
            if cause == NONE:
                return
            position, time_s = cause, cause_s

    def cause_s(self, position: int) -> float:
        """When what a span waited for had ended, before the span started; minus infinity if that is
        not known."""
        return self._cause(position, self[position].span.start_s)[2]

    def _cause(self, position: int, time_s: float) -> tuple[float, int, float]:
        """When a span that was running at `time_s` started to work, and the position and time of
        what it waited for."""
        span = self[position].span
        causes = [(NONE, float("-inf"))]
        for slowest in self.inputs_of(position):
            given = self[slowest].span
            # The driver waits inside its spans, so it has only the results of calls that have
            # ended. A worker has all its inputs when it starts: an input that ends later is a
            # difference between two clocks.
            if (given.end_s if span.pool == DRIVER else given.start_s) <= time_s:
                causes.append((slowest, min(given.end_s, time_s)))
        cause, cause_s = max(causes, key=itemgetter(1))
        if cause_s >= span.start_s:
            return cause_s, cause, cause_s
        if position in self._previous:
            before = self._previous[position]
            causes.append((before, min(self[before].span.end_s, span.start_s)))
        queued_s = min(span.queued_s, span.start_s)
        index = bisect_right(self.starts_of_rank.get((DRIVER, 0), ()), queued_s) - 1
        if span.pool != DRIVER and index >= 0:
            queued_by = self.of_rank[DRIVER, 0][index]
            causes.append((queued_by, min(self[queued_by].span.end_s, queued_s)))
        return span.start_s, *max(causes, key=itemgetter(1))


def operation_times(spans: Iterable[Recorded]) -> dict[str, float]:
    """`timing_s/NAME` of each operation: the time of each call's slowest rank, summed over calls.
    Time that the driver waited is not included."""
    slowest_s: dict[tuple[str, int], float] = defaultdict(float)
    for _, operation, span in spans:
        slowest_s[operation, span.call] = max(slowest_s[operation, span.call], span.duration_s)
    times: dict[str, float] = defaultdict(float)
    for (operation, _), seconds in slowest_s.items():
        times[f"timing_s/{operation}"] += seconds
    return dict(times)


def step_bounds(spans: Iterable[Recorded]) -> dict[int, tuple[float, float]]:
    """Start and end of each step. A step starts with its generation. It ends when the next
    generation starts; if it is the last step, or a validation or save follows, it ends with its
    last span."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    paused: set[int] = set()
    for step, operation, span in spans:
        if operation in BETWEEN_STEPS:
            paused.add(step)
            continue
        ends[step] = max(ends.get(step, span.end_s), span.end_s)
        if operation == FIRST_OPERATION:
            starts[step] = min(starts.get(step, span.start_s), span.start_s)
    following = {step: start_s for step, start_s in starts.items() if step - 1 not in paused}
    return {step: (starts[step], following.get(step + 1, ends[step])) for step in sorted(starts)}


def lanes(
    timeline: Timeline, start_s: float, end_s: float, *, explain: bool = True
) -> dict[Rank, list[Interval]]:
    """What each rank, and the driver, did and waited for in a time window, by pool and rank. The
    intervals of a rank are in the order of time and fill the window without a gap.

    With `explain=False`, the causes of waits are not looked for, which is much faster: each wait
    for data or for a turn is then one interval of the kind "data", without a pool.
    """
    found: dict[Rank, list[Interval]] = {}
    for rank, positions in timeline.of_rank.items():
        lane = found[rank] = []
        starts = timeline.starts_of_rank[rank]
        first, last = max(bisect_right(starts, start_s) - 1, 0), bisect_left(starts, end_s)
        previous, filled_s = NONE, start_s
        for index in range(
            first, last + 1
        ):  # the last one is the first span after the window, if there is one
            position = positions[index] if index < len(positions) else NONE
            begin_s = starts[index] if index < last else end_s
            if (
                previous != NONE
                and (call_end_s := min(timeline.call_ends_s[previous], begin_s)) > filled_s
            ):
                lane.append(
                    Interval(
                        "imbalance", rank[0], timeline[previous].operation, filled_s, call_end_s
                    )
                )
                filled_s = call_end_s
            if begin_s > filled_s:
                if explain and position != NONE:
                    lane.extend(reversed([*_explain(timeline, position, filled_s, begin_s)]))
                else:
                    lane.append(
                        Interval(
                            "nothing" if position == NONE else "data", "", "", filled_s, begin_s
                        )
                    )
                filled_s = begin_s
            if index < last and (until_s := min(timeline[position].span.end_s, end_s)) > filled_s:
                lane.append(
                    Interval(
                        "busy", rank[0], timeline[position].operation, filled_s, until_s, position
                    )
                )
                filled_s = until_s
            previous = position
    return found


def first_rank_lanes(
    spans: Iterable[Recorded], start_s: float, end_s: float
) -> dict[str, list[Bar]]:
    """What the first rank of each pool did in a time window. Times are seconds since its start."""
    found = {}
    for (pool, rank), lane in lanes(Timeline(spans), start_s, end_s, explain=False).items():
        if pool != DRIVER and rank == 0:
            busy = [part for part in lane if part.kind == "busy"]
            found[pool] = [
                (part.operation, part.start_s - start_s, part.end_s - start_s) for part in busy
            ]
    return found


def _explain(
    timeline: Timeline, following: int, start_s: float, end_s: float
) -> Iterator[Interval]:
    """What a rank waited for until its next span, latest first."""
    for cause in timeline.causes(following, timeline[following].span.start_s, start_s):
        if cause.start_s < end_s:
            kind: Literal["turn", "data"] = "turn" if cause.pool in ("", DRIVER) else "data"
            yield cause._replace(kind=kind, end_s=min(cause.end_s, end_s))


def critical_path(timeline: Timeline, start_s: float, end_s: float) -> list[Interval]:
    """The chain of causes from `start_s` to `end_s`, without a gap, earliest first.

    A step ends when the next generation starts, so the chain leads to that start. After the last
    step it leads to the span that ended last.
    """
    starting = [
        at
        for at, one in enumerate(timeline)
        if one.operation == FIRST_OPERATION and one.span.start_s == end_s
    ]
    started = [at for at, one in enumerate(timeline) if one.span.start_s < end_s]
    last = max(
        starting[:1] or started, key=lambda at: min(timeline[at].span.end_s, end_s), default=NONE
    )
    last_s = max(start_s, min(timeline[last].span.end_s, end_s)) if last != NONE else start_s
    path = list(timeline.causes(last, last_s, start_s))
    if last_s < end_s:
        path.insert(0, Interval("hand-over", "", "", last_s, end_s))
    return path[::-1]


def step_metrics(timeline: Timeline, start_s: float, end_s: float) -> dict[str, float]:
    """`pool/NAME/*`, means over the pool's ranks, and `overlap/*`: the time saved by pools that
    work simultaneously."""
    metrics: dict[str, float] = {}
    changes: list[tuple[float, int, str]] = []
    wall_s = end_s - start_s
    for pool, group in groupby(
        lanes(timeline, start_s, end_s, explain=False).items(), key=lambda item: item[0][0]
    ):
        if pool == DRIVER:
            continue
        ranks = [lane for _, lane in group]
        seconds: dict[str, float] = defaultdict(float)
        peak_bytes = 0
        for kind, _, _, since_s, until_s, position in chain.from_iterable(ranks):
            seconds[kind] += until_s - since_s
            if kind == "busy":
                peak_bytes = max(peak_bytes, timeline[position].span.peak_memory_bytes)
                changes += [(since_s, 1, pool), (until_s, -1, pool)] if pool != RULE_POOL else []
        busy_s = seconds["busy"] / len(ranks)
        metrics[f"pool/{pool}/busy_s"] = busy_s
        metrics[f"pool/{pool}/idle_s"] = wall_s - busy_s
        metrics[f"pool/{pool}/busy_fraction"] = busy_s / wall_s if wall_s else 0.0
        metrics[f"pool/{pool}/wait_s"] = seconds["data"] / len(ranks)
        metrics[f"pool/{pool}/peak_memory_gb"] = peak_bytes / 2**30
    overlap_s = saved_s = 0.0
    num_busy_ranks: Counter[str] = Counter()
    for (time_s, change, pool), (next_s, _, _) in pairwise(sorted(changes)):
        num_busy_ranks[pool] += change
        num_busy_pools = sum(map(bool, num_busy_ranks.values()))
        overlap_s += next_s - time_s if num_busy_pools > 1 else 0.0
        saved_s += (next_s - time_s) * max(num_busy_pools - 1, 0)
    metrics["overlap/fraction"] = overlap_s / wall_s if wall_s else 0.0
    metrics["overlap/saved_s"] = saved_s
    return metrics
