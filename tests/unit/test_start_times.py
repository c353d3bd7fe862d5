"""What a run records about its start, and how the report shows it."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from synthetic_runs import write_run

from rolepool.metrics.run_folder import RUN_FILES
from rolepool.metrics.spans import CAPTURE, COMPILE, Part, Span, preparation_times
from rolepool.metrics.start_times import START_FILE, Entry, StartTimes
from rolepool.models.sharding import measure_compiling
from rolepool.protocol.part_times import PartTimes, note, part
from rolepool.report.page import page_data
from rolepool.report.run import read_run
from rolepool.trainer.phases import Phases

TIMES = StartTimes(
    phases=[
        Entry("driver", "reading prompts", 100.0, 102.0),
        Entry("driver", "loading models", 102.0, 107.0),
    ],
    processes=[Entry("pool rank 0", "importing", 101.0, 103.5)],
)


def test_one_phase_begins_where_the_one_before_it_ends() -> None:
    phases = Phases()
    began_s = time.time()
    phases.begin("first")
    time.sleep(0.05)
    phases.begin("second")
    phases.end()
    phases.end()
    first, second = phases.entries
    assert [first.what, second.what] == ["first", "second"]
    assert began_s <= first.start_s
    assert first.duration_s >= 0.05
    assert first.end_s <= second.start_s <= second.end_s


def test_compiling_in_any_thread_is_a_part_of_the_call_with_the_parts_around_it() -> None:
    note(COMPILE, 9.0)  # before the call
    with PartTimes() as times:
        with part("forward", num_tokens=3):
            note(COMPILE, 2.0)
        note(COMPILE, 0.5)
        note(CAPTURE, 0.25)
    parts = {each.name: each for each in times.added_up()}
    assert list(parts) == ["forward", COMPILE, CAPTURE]
    assert parts["forward"].num_tokens == 3
    assert (parts[COMPILE].seconds, parts[COMPILE].num_pieces) == (2.5, 2)


def test_what_torch_compiles_is_noted_once() -> None:
    measure_compiling()
    function = torch.compile(lambda x: x * 2, backend="eager")
    parts = []
    for _ in range(2):
        with PartTimes() as times:
            function(torch.ones(3))
            parts.append(times.added_up())
    (compiling,), nothing = parts
    assert compiling.name == COMPILE
    assert compiling.seconds > 0
    assert nothing == ()


def test_the_time_of_the_slowest_process_counts() -> None:
    def span(rank: int, *parts: Part) -> Span:
        return Span("pool", "role", rank, "method", 0.0, 0.0, 9.0, parts=parts)

    spans = [
        span(0, Part(COMPILE, 1.0), Part("forward", 2.0)),
        span(0, Part(COMPILE, 3.0)),
        span(1, Part(COMPILE, 3.5), Part(CAPTURE, 0.5)),
    ]
    assert preparation_times(spans) == {COMPILE: 4.0, CAPTURE: 0.5}
    assert preparation_times([span(0, Part("forward", 2.0))]) == {}


def test_the_report_shows_the_start_in_seconds_since_the_command(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=2)
    assert START_FILE in RUN_FILES
    assert page_data(read_run(tmp_path))["start"] == []
    (tmp_path / START_FILE).write_text(TIMES.model_dump_json())
    assert page_data(read_run(tmp_path))["start"] == [
        ("driver", "reading prompts", 0.0, 2.0),
        ("driver", "loading models", 2.0, 5.0),
        ("pool rank 0", "importing", 1.0, 2.5),
    ]


def test_a_file_that_is_not_a_start_is_named_and_not_shown(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=2)
    (tmp_path / START_FILE).write_text('{"phases": [{"who": 1}], "processes": []}')
    run = read_run(tmp_path)
    assert run.start is None
    assert any(START_FILE in note for note in run.notes)
