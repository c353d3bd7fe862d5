"""A run as a trace in Chrome's JSON format, for Perfetto.

Owns the events of a trace. Knows spans, and no placement.
"""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rolepool.metrics.timeline import Rank, Timeline
from rolepool.report.run import ReadRun

Event = Mapping[str, object]
Thread = Mapping[str, int]
"""The numbers of a process and of a thread in it: a rank of a pool."""


class Slice(NamedTuple):
    """A span on its thread, in integer microseconds since the first span."""

    thread: Thread
    start_us: int
    end_us: int


def trace_pieces(run: ReadRun) -> Iterator[str]:
    """The text of a trace: a process for each pool, a thread for each rank, a slice for each span,
    and an arrow from each result to the call that used it."""
    yield '{"displayTimeUnit": "ms", "traceEvents": ['
    for number, event in enumerate(_events(Timeline(run.spans))):
        yield ",\n" if number else "\n"
        yield json.dumps(event)
    yield "\n]}\n"


def _events(timeline: Timeline) -> Iterator[Event]:
    """The events of a trace: first the names, then all slices, then all arrows."""
    threads = _number_threads(timeline)
    yield from _names(threads)

    slices: list[Slice] = []
    for step, operation, span in timeline:
        piece = Slice(
            thread=threads[span.pool, span.rank],
            start_us=_microseconds(span.start_s, timeline),
            end_us=_microseconds(span.end_s, timeline),
        )
        slices.append(piece)
        yield {
            "ph": "X",
            "name": operation,
            "cat": span.role,
            **piece.thread,
            "ts": piece.start_us,
            "dur": piece.end_us - piece.start_us,
            "args": {"step": step, **span._asdict(), "parts": span.part_seconds},
        }
    for target in range(len(slices)):
        for source in timeline.inputs_of(target):
            identity = source * len(timeline) + target  # one number for each pair
            yield from _arrow(identity, slices[source], slices[target])


def _microseconds(time_s: float, timeline: Timeline) -> int:
    return int((time_s - timeline[0].span.start_s) * 1e6)


def _number_threads(timeline: Timeline) -> dict[Rank, Thread]:
    pools = sorted({pool for pool, _ in timeline.of_rank})
    processes = {pool: number for number, pool in enumerate(pools, start=1)}
    # Perfetto treats a thread that has the number of its process as the main thread, so thread
    # numbers start higher.
    threads: dict[Rank, Thread] = {}
    for number, (pool, rank) in enumerate(timeline.of_rank, start=len(pools) + 1):
        threads[pool, rank] = {"pid": processes[pool], "tid": number}
    return threads


def _names(threads: Mapping[Rank, Thread]) -> Iterator[Event]:
    """The names of processes and threads, and their order on the screen."""
    processes = {pool: thread["pid"] for (pool, _), thread in threads.items()}
    for pool, number in sorted(processes.items()):
        yield from _name_and_place("process", {"pid": number}, name=pool, place=number)
    for (pool, rank), thread in threads.items():
        name = f"{pool} rank {rank}"
        yield from _name_and_place("thread", thread, name=name, place=rank)


def _name_and_place(
    kind: str,
    numbers: Mapping[str, int],
    name: str,
    place: int,
) -> Iterator[Event]:
    """The name of a process or a thread, and its place among the others on the screen."""
    yield {
        "ph": "M",
        "name": f"{kind}_name",
        **numbers,
        "args": {"name": name},
    }
    yield {
        "ph": "M",
        "name": f"{kind}_sort_index",
        **numbers,
        "args": {"sort_index": place},
    }


def _arrow(identity: int, source: Slice, target: Slice) -> Iterator[Event]:
    """From the end of a slice to the start of one that used its result."""
    arrives_us = target.start_us
    if source.start_us > arrives_us:
        return
    # A slice does not contain its end, so an arrow leaves in its last microsecond at the latest.
    leaves_us = min(source.end_us - 1, arrives_us)
    leaves_us = max(leaves_us, source.start_us)
    arrow = {"name": "data", "cat": "data", "id": identity}
    yield {
        "ph": "s",
        **arrow,
        **source.thread,
        "ts": leaves_us,
    }
    yield {
        "ph": "f",
        "bp": "e",  # binds the arrow to the slice that encloses its end
        **arrow,
        **target.thread,
        "ts": arrives_us,
    }
