"""A run folder is read back as it was written, and what was damaged is left out and counted."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from rolepool.config import load_config
from rolepool.errors import ConfigError
from rolepool.metrics.run_folder import RunFolder
from rolepool.metrics.spans import Part, Recorded, Span
from rolepool.placement import build_plan
from rolepool.report.page import page_data
from rolepool.report.run import read_run

PARTS = (Part("fetch", 0.5),)
SPAN = Span(
    "a", "actor", 1, "update_actor", 1.0, 2.0, 3.5, "n0", "cuda:1", 7, (5, 6), 8, 9, 10, 11, PARTS
)
GPU = {"utilization": 50, "memory_bytes": 1, "memory_total_bytes": 4, "pools": ["a"]}
PROCESS = {"pool": "a", "cpu_percent": 9.5, "memory_bytes": 2}
READ_MOMENT = {"time_s": 5.0, "gpus": [GPU], "processes": [PROCESS]}
MOMENT = {
    "time_s": 5.0,
    "node": "n0",
    "gpus": [{"index": 0, "power_w": 80.5, **GPU}],
    "processes": [{"pid": 1, "rank": 0, "roles": ["actor"], **PROCESS}],
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of two steps."""
    loaded = load_config()
    written = RunFolder(tmp_path / "my_run")
    written.path.mkdir()
    written.write("config.yaml", loaded.to_yaml())
    written.add_plan(1, build_plan(loaded.config))
    for step in (1, 2):
        written.add_metrics(step, {"critic/score/mean": 0.5 * step, "training/epoch": 0})
        written.add_spans([Recorded(step, "update_actor", SPAN)])
    (written.path / "monitor.jsonl").write_text(json.dumps(MOMENT) + "\n", encoding="utf-8")
    return written


def append(folder: RunFolder, name: str, text: str | bytes) -> None:
    with (folder.path / name).open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def test_the_end_of_a_long_file_begins_with_a_whole_line_and_a_whole_step(
    folder: RunFolder,
) -> None:
    for step in (3, 3, 4, 4):
        folder.add_spans([Recorded(step, "update_actor", SPAN)])
    length = (folder.path / "spans.jsonl").stat().st_size // 6
    for num_bytes, steps in (
        (0, []),
        (length - 1, []),
        (length, []),  # the first line of step 4 may be missing, and is
        (3 * length - 1, []),
        (3 * length, [4, 4]),
        (5 * length, [3, 3, 4, 4]),
        (6 * length - 1, [3, 3, 4, 4]),
        (6 * length, [1, 2, 3, 3, 4, 4]),
    ):
        run = read_run(folder.path, num_bytes)
        assert [recorded.step for recorded in run.spans] == steps, num_bytes
        assert run.notes == []


def test_a_run_is_read_back_as_it_was_written(folder: RunFolder) -> None:
    run = read_run(str(folder.path))
    loaded = load_config()
    assert (run.folder, run.name, run.skipped) == (folder.path, "my_run", {})
    assert run.config == loaded.config.model_dump(mode="json")
    assert run.plan == build_plan(loaded.config)
    assert run.spans == [Recorded(1, "update_actor", SPAN), Recorded(2, "update_actor", SPAN)]
    assert run.metrics[2] == {"critic/score/mean": 1.0, "training/epoch": 0}
    assert run.monitor == [READ_MOMENT]


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nowhere: is not a folder; give the folder a run wrote to"
    ):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.yaml, metrics\.jsonl or spans\.jsonl"):
        read_run(tmp_path)


def test_a_run_that_was_killed_before_its_first_step_is_a_run_without_rows(
    folder: RunFolder,
) -> None:
    for name in ("plan.json", "metrics.jsonl", "spans.jsonl", "monitor.jsonl"):
        (folder.path / name).unlink()
    run = read_run(folder.path)
    assert (run.plan, run.metrics, run.spans, run.monitor, run.skipped) == (None, {}, [], [], {})


SPAN_LINE = json.dumps({"step": 3, "operation": "gen", **SPAN._asdict()})
UNREADABLE = {
    "cut off": SPAN_LINE[:-20],
    "two in one": SPAN_LINE + SPAN_LINE,
    "no object": "[1, 2]",
    "zeros of a full disk": b"\0" * 100,
    "not UTF-8": b'{"step": 3, "operation": "\xff"}',
    "nested without end": "[" * 100_000,
    "field missing": SPAN_LINE.replace('"start_s": 2.0, ', ""),
    "text for a number": SPAN_LINE.replace("2.0", '"2.0"'),
    "number for a text": SPAN_LINE.replace('"a"', "7"),
    "truth for a number": SPAN_LINE.replace('"rank": 1', '"rank": true'),
    "no number": SPAN_LINE.replace("3.5", "NaN"),
    "no calls": SPAN_LINE.replace("[5, 6]", "[5, null]"),
    "ends before it starts": SPAN_LINE.replace("3.5", "1.5"),
}


@pytest.mark.parametrize("line", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_span_is_skipped_and_counted_and_the_next_one_read(
    folder: RunFolder, line: str | bytes
) -> None:
    append(folder, "spans.jsonl", line)
    append(folder, "spans.jsonl", "\n")
    folder.add_spans([Recorded(4, "gen", SPAN)])
    run = read_run(folder.path)
    assert [recorded.step for recorded in run.spans] == [1, 2, 4]
    assert run.skipped == {"spans.jsonl": 1}


def test_fields_unknown_here_are_ignored(folder: RunFolder) -> None:
    append(
        folder, "spans.jsonl", SPAN_LINE.replace('"step": 3', '"step": 3, "new": {"x": []}') + "\n"
    )
    append(folder, "monitor.jsonl", json.dumps({**MOMENT, "new": 1}) + "\n")
    run = read_run(folder.path)
    assert run.spans[2] == Recorded(3, "gen", SPAN)
    assert run.monitor == [READ_MOMENT, READ_MOMENT]
    assert run.skipped == {}


def test_unreadable_rows_and_moments_are_counted_by_file_and_a_loss_that_is_not_a_number_is_no_damage(
    folder: RunFolder,
) -> None:
    for line in (
        '{"step": 3, "a": "b"}',
        '{"step": 3, "a": true}',
        '{"a": 1.0}',
        '{"step": 1.5}',
        '{"step": 3, "a"',
    ):
        append(folder, "metrics.jsonl", line + "\n")
    folder.add_metrics(3, {"actor/pg_loss": math.nan})
    append(folder, "monitor.jsonl", json.dumps({**MOMENT, "gpus": [{"index": 0}]}) + '\n{"time_s"')
    run = read_run(folder.path)
    assert list(run.metrics) == [1, 2, 3]
    assert math.isnan(run.metrics[3]["actor/pg_loss"])
    assert run.skipped == {"metrics.jsonl": 5, "monitor.jsonl": 2}


def test_rows_about_restarts_are_listed_apart_from_the_metrics(folder: RunFolder) -> None:
    folder.add_event("restart", 2, "driver, killed by signal 9", 12.34, repeated_from_step=1)
    folder.add_event("restart", 3, "rank 1 of left", 2.0, repeated_from_step=3)
    append(folder, "metrics.jsonl", '{"step": 3, "restart": {"what": "no number"}}\n')
    run = read_run(folder.path)
    assert [*run.metrics] == [1, 2]
    first = ("restart", 2, "driver, killed by signal 9", 12.3, 1)
    assert run.events == [first, ("restart", 3, "rank 1 of left", 2.0, 3)]
    assert run.skipped == {"metrics.jsonl": 1}
    assert page_data(run)["events"][0]["what"] == "driver, killed by signal 9"
    assert folder.begin(after_step=1) is not None
    assert [event.step for event in read_run(folder.path).events] == [2, 3], (
        "they are kept, although their steps are not"
    )


def test_whole_files_that_cannot_be_read_are_left_out(folder: RunFolder) -> None:
    folder.write("plan.json", "{}")
    folder.write("config.yaml", "a: [1")
    run = read_run(folder.path)
    assert (run.config, run.plan, len(run.metrics)) == ({}, None, 2)
    assert run.unread.keys() == {"config.yaml", "plan.json"}


def test_damage_anywhere_never_keeps_the_rest_from_being_read(folder: RunFolder) -> None:
    for step in range(3, 30):
        folder.add_spans([Recorded(step, "gen", SPAN)])
    (folder.path / "config.yaml").unlink()  # the slowest to read
    file = folder.path / "spans.jsonl"
    whole = file.read_bytes()
    for seed in range(200):
        dice = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(5):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        file.write_bytes(damaged[: dice.randrange(len(damaged) // 2, len(damaged))])
        run = read_run(folder.path)
        skipped = run.skipped.get("spans.jsonl", 0)
        assert len(run.spans) + skipped == len(file.read_bytes().removesuffix(b"\n").split(b"\n"))
        assert skipped <= 2 * 5 + 1
