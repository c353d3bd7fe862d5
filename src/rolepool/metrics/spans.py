"""Spans: what one process did, and from when to when.

Every timing that anybody sees is computed from these. Times are seconds since the epoch by the driver's clock; those
of other nodes are moved to it before they are written down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rolepool.placement.pools import DRIVER as DRIVER
from rolepool.placement.pools import RULE_POOL as RULE_POOL


class Span(NamedTuple):
    """One call on one rank: made by the driver at `queued_s`, run by the worker from `start_s` to `end_s`."""

    pool: str
    role: str
    rank: int
    method: str
    queued_s: float
    start_s: float
    end_s: float
    node: str = ""
    device: str = "cpu"
    """`cpu`, or `cuda:N` with the number the GPU has on its node."""
    call: int = 0
    """Number of the call within the run; the same on all ranks it ran on."""
    after: tuple[int, ...] = ()
    """The calls whose results it was given."""
    num_rows: int = 0
    """Of the batch it was given."""
    num_tokens: int = 0
    """Not padding; of the batch it made, or else of the one it was given."""
    num_bytes: int = 0
    """Of the batches it was given."""
    peak_memory_bytes: int = 0
    """Most that torch had allocated on the GPU during the call; on a CPU, what the process held at its end."""
    parts: tuple[tuple[str, float], ...] = ()
    """Seconds spent in parts of the call by name: `fetch`, `prefill`, `decode`, `forward`, `backward`, ..."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def on_clock(self, ahead_s: float) -> Span:
        """The same span by a clock that the worker's is `ahead_s` ahead of."""
        return self._replace(start_s=self.start_s - ahead_s, end_s=self.end_s - ahead_s)


@contextmanager
def driver_span(method: str, call: int, after: tuple[int, ...] = ()) -> Iterator[Callable[[], Span]]:
    """Measure what the driver does inside the block; what is handed in gives the span once it has ended."""
    start_s = time.time()
    ended: list[Span] = []
    yield lambda: ended[0]
    ended.append(Span(DRIVER, "trainer", 0, method, start_s, start_s, time.time(), node=DRIVER, call=call, after=after))
