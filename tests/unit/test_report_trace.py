"""The trace obeys the rules of Chrome's format, as Perfetto reads it, and tells what the spans
tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolepool.metrics.spans import DRIVER, Part, Recorded, Span
from rolepool.report.run import ReadRun
from rolepool.report.trace import trace_pieces

AT_S = 1.7e9
Event = dict[str, Any]


def recorded(
    operation: str,
    pool: str,
    rank: int,
    start: float,
    end: float,
    call: int,
    after: tuple[int, ...] = (),
) -> Recorded:
    span = Span(
        pool,
        "role",
        rank,
        operation,
        AT_S,
        AT_S + start,
        AT_S + end,
        "n0",
        "cuda:0",
        call,
        after,
        4,
        99,
        7,
        12,
    )
    return Recorded(1, operation, span._replace(parts=(Part("forward", 0.5),)))


SPANS = [
    recorded("gen", "a", 0, 0.0, 3.0, 1),
    recorded("gen", "a", 1, 0.0, 4.0, 1),
    recorded("old_log_prob", "a", 0, 3.0, 5.0, 2, (1,)),
    recorded("old_log_prob", "a", 1, 4.0, 5.0, 2, (1,)),
    recorded("values", "b", 0, 3.999, 6.0, 3, (1,)),  # by a clock that is 1 ms off
    recorded("ref", "b", 0, 6.0, 6.0, 4, (1,)),
    recorded("adv", DRIVER, 0, 6.0, 7.0, 0, (2, 3, 4, 77)),
]


def trace_of(path: Path, spans: list[Recorded]) -> list[Event]:
    run = ReadRun(path, "run", {}, [], spans, {}, [], {})
    events: list[Event] = json.loads("".join(trace_pieces(run)))["traceEvents"]
    return events


@pytest.fixture
def events(tmp_path: Path) -> list[Event]:
    return trace_of(tmp_path, SPANS)


def of_kind(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["ph"] == kind]


def names(events: list[Event], what: str) -> dict[int, str]:
    number = "pid" if what == "process_name" else "tid"
    return {
        event[number]: event["args"]["name"]
        for event in of_kind(events, "M")
        if event["name"] == what
    }


def test_every_event_has_the_fields_its_kind_needs(events: list[Event]) -> None:
    needed = {"M": {"pid", "args"}, "X": {"ts", "dur", "tid"}, "s": {"id"}, "f": {"id", "bp"}}
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert {"name", "pid", *needed[event["ph"]]} <= set(event)
        if event["ph"] in "Xsf":
            assert event["cat"]
            assert event["tid"] not in names(events, "process_name")
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0


def test_pools_are_processes_and_ranks_are_threads_by_name(events: list[Event]) -> None:
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    assert list(processes.values()) == ["a", "b", DRIVER]
    assert list(threads.values()) == ["a rank 0", "a rank 1", "b rank 0", "driver rank 0"]
    for event in of_kind(events, "X"):
        assert threads[event["tid"]] == f"{processes[event['pid']]} rank {event['args']['rank']}"


def test_slices_are_the_spans_in_microseconds(events: list[Event]) -> None:
    slices = of_kind(events, "X")
    found = {(each["name"], each["args"]["pool"], each["args"]["rank"]): each for each in slices}
    assert len(found) == len(SPANS)
    origin_s = SPANS[0].span.start_s
    for each in SPANS:
        event = found[each.operation, each.span.pool, each.span.rank]
        assert event["ts"] == pytest.approx((each.span.start_s - origin_s) * 1e6, abs=1)
        assert event["dur"] == pytest.approx(each.span.duration_s * 1e6, abs=1)
    args = found["gen", "a", 0]["args"]
    kept = {
        name: args[name]
        for name in ("step", "role", "num_rows", "num_tokens", "peak_memory_bytes", "parts")
    }
    assert kept == {
        "step": 1,
        "role": "role",
        "num_rows": 4,
        "num_tokens": 99,
        "peak_memory_bytes": 12,
        "parts": {"forward": 0.5},
    }


def test_slices_of_a_thread_are_in_the_order_of_time_and_do_not_overlap(
    events: list[Event],
) -> None:
    free: dict[int, int] = {}
    for event in of_kind(events, "X"):
        assert event["ts"] >= free.get(event["tid"], 0)
        free[event["tid"]] = event["ts"] + event["dur"]


def slice_at(events: list[Event], arrow: Event) -> Event:
    """The slice that an arrow's end is on: it begins at that time or before, and lasts longer, or
    no time at all."""
    (found,) = [
        event
        for event in of_kind(events, "X")
        if event["tid"] == arrow["tid"]
        and event["ts"] <= arrow["ts"] < event["ts"] + max(event["dur"], 1)
    ]
    assert events.index(found) < events.index(arrow)
    return found


def test_arrows_lead_from_the_slowest_rank_of_each_call_to_every_span_it_fed(
    events: list[Event],
) -> None:
    starts = {event["id"]: event for event in of_kind(events, "s")}
    ends = {event["id"]: event for event in of_kind(events, "f")}
    assert set(starts) == set(ends)
    assert len(ends) == len(of_kind(events, "f"))
    drawn = []
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]
        one, other = slice_at(events, start)["args"], slice_at(events, end)["args"]
        drawn.append((one["method"], one["rank"], other["method"], other["rank"]))
    assert sorted(drawn) == [
        ("gen", 1, "old_log_prob", 0),
        ("gen", 1, "old_log_prob", 1),
        ("gen", 1, "ref", 0),
        ("gen", 1, "values", 0),
        ("old_log_prob", 0, "adv", 0),
        ("ref", 0, "adv", 0),
        ("values", 0, "adv", 0),
    ]


def test_a_run_without_spans_gives_a_trace_without_slices(tmp_path: Path) -> None:
    assert trace_of(tmp_path, []) == []
