"""Spans: what one process did, and from when to when.

Every timing that anybody sees is computed from spans. Times are seconds since the epoch on the
driver's clock; times of other nodes are converted to it before they are written.
`metrics.timeline` explains where the time of a step went.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

from rolepool.placement.built_in_roles import SAVE_CHECKPOINT, TESTING
from rolepool.placement.plan import DRIVER as DRIVER
from rolepool.placement.plan import RULE_POOL as RULE_POOL
from rolepool.reading import Integer, Number

BETWEEN_STEPS = (TESTING.name, SAVE_CHECKPOINT.name)
"""Operations that start after a step has ended."""


COMPILE = "compile"
CAPTURE = "capture"
PREPARATIONS = (COMPILE, CAPTURE)
"""Parts that only the first calls have: compiling functions, and capturing CUDA graphs. They lie
inside of other parts of the call."""


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
        seconds: dict[str, float] = {}
        for part in self.parts:
            seconds[part.name] = seconds.get(part.name, 0) + part.seconds
        return seconds

    def on_clock(self, ahead_s: float) -> Self:
        """The same span on another clock, if the worker's clock is `ahead_s` ahead of it."""
        return self._replace(
            start_s=self.start_s - ahead_s,
            end_s=self.end_s - ahead_s,
        )


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
            pool=DRIVER,
            role="trainer",
            rank=0,
            method=method,
            queued_s=start_s,
            start_s=start_s,
            end_s=time.time(),
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


def operation_times(spans: Iterable[Recorded]) -> dict[str, float]:
    """`timing_s/NAME` of each operation: the time of each call's slowest rank, summed over calls.
    Time that the driver waited is not included."""
    slowest_s: dict[tuple[str, int], float] = defaultdict(float)
    for _, operation, span in spans:
        call = (operation, span.call)
        slowest_s[call] = max(slowest_s[call], span.duration_s)

    times: dict[str, float] = defaultdict(float)
    for (operation, _), seconds in slowest_s.items():
        name = f"timing_s/{operation}"
        times[name] += seconds
    return dict(times)


def preparation_times(spans: Iterable[Span]) -> dict[str, float]:
    """The seconds of each of `PREPARATIONS` that occurred, in the process where it took longest."""
    seconds: dict[tuple[str, str, int], float] = defaultdict(float)
    for span in spans:
        for part in span.parts:
            if part.name in PREPARATIONS:
                seconds[part.name, span.pool, span.rank] += part.seconds
    longest: dict[str, float] = {}
    for (name, _, _), in_process in seconds.items():
        longest[name] = max(longest.get(name, 0.0), in_process)
    return longest


def may_begin_step(recorded: Recorded) -> bool:
    """Whether a span is of a call of its step. The driver works between calls, or after a step."""
    return recorded.span.pool != DRIVER and recorded.operation not in BETWEEN_STEPS


def first_calls_of(spans: Iterable[Recorded]) -> dict[int, tuple[int, float]]:
    """The number and the start of the call with which each step begins.

    It is the first one that was queued after all calls of the step before. With
    `algorithm.max_staleness` the responses of a step are generated while earlier steps train, and
    this does not begin it: otherwise the first steps would seem to have no training.
    """
    by_step: dict[int, list[Span]] = defaultdict(list)
    last_queued_s: dict[int, float] = {}
    for recorded in spans:
        if may_begin_step(recorded):
            step, _, span = recorded
            by_step[step].append(span)
            last_queued_s[step] = max(span.queued_s, last_queued_s.get(step, span.queued_s))

    first_calls: dict[int, tuple[int, float]] = {}
    for step, spans_of_step in by_step.items():
        before_s = last_queued_s.get(step - 1, float("-inf"))
        own = [span for span in spans_of_step if span.queued_s >= before_s]
        # A recording without times of queueing has none.
        begins = own or spans_of_step
        first_calls[step] = min((span.call, span.start_s) for span in begins)
    return first_calls


def step_bounds(spans: Iterable[Recorded]) -> dict[int, tuple[float, float]]:
    """Start and end of each step. A step starts with its first call (`first_calls_of`). It ends
    when the next step starts; if it is the last step, or a validation or save follows, it ends with
    its last span."""
    recorded_spans = list(spans)
    first_calls = first_calls_of(recorded_spans)
    ends: dict[int, float] = {}
    paused: set[int] = set()
    for step, operation, span in recorded_spans:
        if operation in BETWEEN_STEPS:
            paused.add(step)
            continue
        end_s = span.end_s
        if step in ends:
            end_s = max(end_s, ends[step])
        ends[step] = end_s

    bounds: dict[int, tuple[float, float]] = {}
    for step, (_, start_s) in sorted(first_calls.items()):
        end_s = ends[step]
        following = step + 1
        if step not in paused and following in first_calls:
            _, end_s = first_calls[following]
        bounds[step] = (start_s, end_s)
    return bounds
