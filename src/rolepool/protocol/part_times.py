"""How long the parts of a call take, and how much work they are.

Owns the measurement. Roles name the parts, and `rolepool.cluster` collects them with the span of
the call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from rolepool.metrics.spans import Part


class PartTimes(list[tuple[str, int, int, int, Any, Any]]):
    """The parts of a call that were measured, if the call runs in a `with` block of it: name,
    pieces of work, tokens, attended tokens, start and end.

    Start and end are seconds, or CUDA events between kernels, so that measuring does not make the
    host wait for a GPU.
    """

    def __enter__(self) -> PartTimes:
        self._token = _part_times.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _part_times.reset(self._token)

    def added_up(self) -> tuple[Part, ...]:
        """The parts with the same name and pieces of about the same size, added up. Waits until the
        GPU has finished."""
        totals: dict[tuple[str, int], Part] = {}
        for name, num_pieces, num_tokens, num_attended, start, end in self:
            if isinstance(start, float):
                seconds = end - start
            else:
                end.synchronize()
                seconds = start.elapsed_time(end) / 1000
            # Sizes with the same number of bits are about the same.
            size = (num_tokens // max(1, num_pieces)).bit_length()
            before = totals.get((name, size), Part(name, 0.0, 0))
            totals[name, size] = Part(
                name,
                before.seconds + seconds,
                before.num_pieces + num_pieces,
                before.num_tokens + num_tokens,
                before.num_attended + num_attended,
            )
        return tuple(totals.values())


_part_times: ContextVar[PartTimes | None] = ContextVar("part_times", default=None)


@contextmanager
def part(
    name: str, num_tokens: int = 0, num_attended: int = 0, *, num_pieces: int = 1
) -> Iterator[None]:
    """Count the time inside the block as this part of the call and record the work: `num_pieces`
    pieces, such as decode steps, and the tokens and attended tokens of all of them. Outside of a
    call nothing is recorded."""
    times = _part_times.get()
    if times is None:
        yield
        return
    now = _cuda_event if torch.cuda.is_initialized() else time.perf_counter
    start = now()
    yield
    times.append((name, num_pieces, num_tokens, num_attended, start, now()))


def work_of(lengths: Iterable[int]) -> tuple[int, int]:
    """The tokens of rows of these lengths, and the attended tokens: how many tokens each token
    reads, added up."""
    lengths = list(lengths)
    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)


def _cuda_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
