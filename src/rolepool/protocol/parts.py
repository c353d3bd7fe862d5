"""Where the time of a call goes: the seconds of each named part of it.

On a GPU the time is measured by CUDA events between kernels, so that measuring does not make the host wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch


class PartTimes:
    """Seconds by part, added up over a call."""

    def __init__(self) -> None:
        self._host: list[tuple[str, float]] = []
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        on_gpu = torch.cuda.is_initialized()
        start = _event() if on_gpu else time.perf_counter()
        yield
        if isinstance(start, float):
            self._host.append((name, time.perf_counter() - start))
        else:
            self._events.append((name, start, _event()))

    def seconds(self) -> tuple[tuple[str, float], ...]:
        """The seconds by part. Waits until the GPU has finished."""
        if self._events:
            torch.cuda.synchronize()
        on_gpu = [(name, start.elapsed_time(end) / 1000) for name, start, end in self._events]
        totals: dict[str, float] = {}
        for name, seconds in (*self._host, *on_gpu):
            totals[name] = totals.get(name, 0.0) + seconds
        return tuple(totals.items())


_under_way: ContextVar[PartTimes | None] = ContextVar("part_times", default=None)


@contextmanager
def part_times() -> Iterator[PartTimes]:
    """Record the parts of the call that runs inside the block."""
    times = PartTimes()
    token = _under_way.set(times)
    try:
        yield times
    finally:
        _under_way.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Count the time inside the block as this part of the call. Outside of a call nothing is recorded."""
    times = _under_way.get()
    if times is None:
        yield
    else:
        with times.measure(name):
            yield


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
