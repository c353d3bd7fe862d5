"""A run as a trace in Chrome's JSON format, which Perfetto (ui.perfetto.dev) shows.

Owns the format: a process for each pool, a thread for each rank, a slice for each span, and an arrow for each result
that a call was given. Times are whole microseconds since the first one known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

from rolepool.errors import explained
from rolepool.metrics.analysis import Timeline
from rolepool.metrics.run_folder import write_whole
from rolepool.report.run import Run

Event = dict[str, Any]


def write_trace(run: Run, path: str | Path) -> None:
    """Write the trace of a run; whole, or not at all."""
    events = (("\n" if number == 0 else ",\n") + json.dumps(event) for number, event in enumerate(_events(run)))
    with explained(f"trace {path}: cannot be written", "give another file with -o"):
        write_whole(Path(path), chain(['{"displayTimeUnit": "ms", "traceEvents": ['], events, ["\n]}\n"]))


def _events(run: Run) -> Iterator[Event]:
    timeline = Timeline(run.spans)
    origin_s = timeline[0].span.start_s if timeline else 0.0
    processes = {pool: number for number, pool in enumerate(sorted({pool for pool, _ in timeline.of_rank}), start=1)}
    # Perfetto takes a thread with its process's number for the main one, so their numbers begin after those.
    threads = {rank: number for number, rank in enumerate(timeline.of_rank, start=len(processes) + 1)}
    for name, process in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for (pool, number), thread in threads.items():
        where = {"pid": processes[pool], "tid": thread}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": f"{pool} rank {number}"}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": number}}
    yield from _slices_and_arrows(timeline, processes, threads, origin_s)


def _slices_and_arrows(
    timeline: Timeline, processes: dict[str, int], threads: dict[tuple[str, int], int], origin_s: float
) -> Iterator[Event]:
    """In the order of time on each thread: an arrow leaves the slice it starts in before the next slice begins."""
    arriving: dict[int, list[int]] = {}
    leaving: dict[int, list[tuple[int, float]]] = {}
    numbers = count(1)
    for position, recorded in enumerate(timeline):
        for source in timeline.given(position):
            if timeline[source].span.start_s <= recorded.span.start_s:
                number = next(numbers)
                arriving.setdefault(position, []).append(number)
                leaving.setdefault(source, []).append((number, recorded.span.start_s))
    for position, recorded in enumerate(timeline):
        span = recorded.span
        start_us, end_us = _us(span.start_s - origin_s), _us(span.end_s - origin_s)
        where = {"pid": processes[span.pool], "tid": threads[span.pool, span.rank]}
        args = {"step": recorded.step, **span._asdict(), "parts": dict(span.parts)}
        times = {"ts": start_us, "dur": end_us - start_us}
        yield {"ph": "X", "name": recorded.operation, "cat": span.role, **where, **times, "args": args}
        arrow = {"name": "data", "cat": "data", **where}
        for number in arriving.get(position, ()):
            yield {"ph": "f", "bp": "e", **arrow, "id": number, "ts": start_us}
        # The last microsecond, as a slice does not contain its end.
        departures = sorted(
            (min(end_us - 1, _us(to_s - origin_s)), number) for number, to_s in leaving.get(position, ())
        )
        for time_us, number in departures:
            yield {"ph": "s", **arrow, "id": number, "ts": max(time_us, start_us)}


def _us(time_s: float) -> int:
    return int(time_s * 1e6)
