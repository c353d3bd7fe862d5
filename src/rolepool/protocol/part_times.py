"""How long the parts of a call take, and how much work they are.

Owns the measurement. Roles name the parts, and `rolepool.cluster` collects them with the span of
the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from rolepool.metrics.spans import Part

Moment = float | torch.cuda.Event
"""Seconds, or a CUDA event between kernels, so that measuring does not make the host wait for a
GPU."""


class _Measured(NamedTuple):
    """A part of a call that has ended."""

    name: str
    num_pieces: int
    num_tokens: int
    num_attended: int
    start: Moment
    end: Moment

    def seconds(self) -> float:
        """How long it took. Waits until the GPU has finished it."""
        start = self.start
        end = self.end
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
            return milliseconds / 1000
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start


class PartTimes(list[_Measured]):
    """The parts of a call that were measured, if the call runs in a `with` block of it."""

    def __enter__(self) -> PartTimes:
        self._token = _part_times.set(self)
        _noted.clear()
        return self

    def __exit__(self, *error: object) -> None:
        _part_times.reset(self._token)

    def added_up(self) -> tuple[Part, ...]:
        """The parts with the same name and pieces of about the same size, added up. Waits until the
        GPU has finished."""
        totals: dict[tuple[str, int], Part] = {}
        for measured in self:
            tokens_per_piece = measured.num_tokens // max(1, measured.num_pieces)
            # Sizes with the same number of bits are about the same.
            key = (measured.name, tokens_per_piece.bit_length())
            before = totals.get(key, Part(measured.name, 0.0, 0))
            totals[key] = Part(
                measured.name,
                before.seconds + measured.seconds(),
                before.num_pieces + measured.num_pieces,
                before.num_tokens + measured.num_tokens,
                before.num_attended + measured.num_attended,
            )
        return (*totals.values(), *_noted_parts())


_noted: list[tuple[str, float]] = []
"""What was noted since the call of this process began: names and seconds. It is not a variable of
the call's context, because torch compiles a backward pass in a thread of its own."""


def note(name: str, seconds: float) -> None:
    """The call did something for so long that is also inside of other parts, such as compiling."""
    _noted.append((name, seconds))


def _noted_parts() -> Iterator[Part]:
    """A part for each name that was noted."""
    seconds_of: dict[str, list[float]] = {}
    for name, seconds in _noted:
        seconds_of.setdefault(name, []).append(seconds)
    for name, times in seconds_of.items():
        yield Part(name, sum(times), num_pieces=len(times))


_part_times: ContextVar[PartTimes | None] = ContextVar("part_times", default=None)


@contextmanager
def part(
    name: str,
    num_tokens: int = 0,
    num_attended: int = 0,
    *,
    num_pieces: int = 1,
) -> Iterator[None]:
    """Count the time inside the block as this part of the call and record the work: `num_pieces`
    pieces, such as decode steps, and the tokens and attended tokens of all of them. Outside of a
    call nothing is recorded."""
    times = _part_times.get()
    if times is None:
        yield
        return
    now: Callable[[], Moment] = time.perf_counter
    if torch.cuda.is_initialized():
        now = _cuda_event
    start = now()
    yield
    times.append(_Measured(name, num_pieces, num_tokens, num_attended, start, now()))


def work_of(lengths: Iterable[int]) -> tuple[int, int]:
    """The tokens of rows of these lengths, and the attended tokens: how many tokens each token
    reads, added up."""
    num_tokens = 0
    num_attended = 0
    for length in lengths:
        num_tokens += length
        num_attended += length * (length + 1) // 2
    return num_tokens, num_attended


def _cuda_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
