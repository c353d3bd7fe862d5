"""A run as a trace in Chrome's JSON format, which Perfetto (ui.perfetto.dev) shows.

Owns the format: a process for each pool, a thread for each rank, a slice for each span, and an arrow from each result
to the call that used it. Times are integer microseconds since the first span.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

from rolepool.errors import explained
from rolepool.files import write_atomically
from rolepool.metrics.analysis import Timeline
from rolepool.report.run import Run

Event = dict[str, Any]


def write_trace(run: Run, path: Path) -> Path:
    """Write the trace of a run and return its path."""
    events = (("\n" if number == 0 else ",\n") + json.dumps(event) for number, event in enumerate(_events(run)))
    with explained(f"trace {path}: cannot be written", "give another file with -o"):
        return write_atomically(path, chain(['{"displayTimeUnit": "ms", "traceEvents": ['], events, ["\n]}\n"]))


def _events(run: Run) -> Iterator[Event]:
    timeline = Timeline(run.spans)
    pools = {pool: number for number, pool in enumerate(sorted({pool for pool, _ in timeline.of_rank}), start=1)}
    # Perfetto treats a thread that has the number of its process as the main thread, so thread numbers start higher.
    ranks = {
        (pool, rank): {"pid": pools[pool], "tid": number}
        for number, (pool, rank) in enumerate(timeline.of_rank, start=len(pools) + 1)
    }
    for pool, number in pools.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": pool}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
    for (pool, rank), thread in ranks.items():
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"{pool} rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": rank}}
    yield from _slices_and_arrows(timeline, ranks)


def _slices_and_arrows(timeline: Timeline, ranks: dict[tuple[str, int], dict[str, int]]) -> Iterator[Event]:
    """In the order of time on each thread: an arrow leaves its slice before the next slice begins."""
    arriving: dict[int, list[int]] = defaultdict(list)
    leaving: dict[int, list[tuple[int, int]]] = defaultdict(list)
    numbers = count(1)

    def microseconds(time_s: float) -> int:
        return int((time_s - timeline[0].span.start_s) * 1e6)

    for position, recorded in enumerate(timeline):
        for source in timeline.given(position):
            if timeline[source].span.start_s <= recorded.span.start_s:
                number = next(numbers)
                arriving[position].append(number)
                leaving[source].append((microseconds(recorded.span.start_s), number))
    for position, (step, operation, span) in enumerate(timeline):
        start_us, end_us = microseconds(span.start_s), microseconds(span.end_s)
        thread = ranks[span.pool, span.rank]
        args = {"step": step, **span._asdict(), "parts": dict(span.parts)}
        times = {"ts": start_us, "dur": end_us - start_us}
        yield {"ph": "X", "name": operation, "cat": span.role, **thread, **times, "args": args}
        arrow = {"name": "data", "cat": "data", **thread}
        for number in arriving.get(position, ()):
            yield {"ph": "f", "bp": "e", **arrow, "id": number, "ts": start_us}
        # A slice does not contain its end, so an arrow leaves in its last microsecond at the latest.
        for time_us, number in sorted((min(end_us - 1, to_us), number) for to_us, number in leaving.get(position, ())):
            yield {"ph": "s", **arrow, "id": number, "ts": max(time_us, start_us)}
