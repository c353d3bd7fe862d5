"""Spans: what one process did, and from when to when.

Every timing that anybody sees is computed from spans. Times are seconds since the epoch on the driver's clock; times
of other nodes are converted to it before they are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rolepool.placement.pools import DRIVER as DRIVER
from rolepool.placement.pools import RULE_POOL as RULE_POOL


class Span(NamedTuple):
    """One call on one rank: queued by the driver at `queued_s`, run by the worker from `start_s` to `end_s`."""

    pool: str
    role: str
    rank: int
    method: str
    queued_s: float
    start_s: float
    end_s: float
    node: str = ""
    device: str = "cpu"
    """`cpu`, or `cuda:N` with the GPU's index on its node."""
    call: int = 0
    """Number of the call within the run; the same on all ranks that ran it."""
    after: tuple[int, ...] = ()
    """The calls whose results were its inputs."""
    num_rows: int = 0
    """Rows of the input batch."""
    num_tokens: int = 0
    """Tokens, without padding, of the output batch, or of the input batch if it returned none."""
    num_bytes: int = 0
    """Size of the input batches."""
    peak_memory_bytes: int = 0
    """Peak memory that torch allocated on the GPU during the call; on a CPU, the process's memory at its end."""
    parts: tuple[tuple[str, float], ...] = ()
    """Seconds spent in named parts of the call: `fetch`, `prefill`, `decode`, `forward`, `backward`, ..."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def on_clock(self, ahead_s: float) -> Span:
        """The same span on another clock, if the worker's clock is `ahead_s` ahead of it."""
        return self._replace(start_s=self.start_s - ahead_s, end_s=self.end_s - ahead_s)


@contextmanager
def driver_span(method: str, call: int, after: tuple[int, ...] = ()) -> Iterator[Callable[[], Span]]:
    """Measure what the driver does in the block. Yields a function that returns the span after the block."""
    start_s = time.time()
    ended: list[Span] = []
    yield lambda: ended[0]
    ended.append(Span(DRIVER, "trainer", 0, method, start_s, start_s, time.time(), node=DRIVER, call=call, after=after))
