"""The responses on the report page: which are shown, and that no folder makes the page large or
break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_run

from rolepool.metrics.run_folder import RunFolder
from rolepool.report import samples as limits
from rolepool.report.page import render
from rolepool.report.run import read_run
from rolepool.report.samples import samples_of


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(write_run(tmp_path / "run", num_steps=2))


def sample(**columns: Any) -> dict[str, Any]:
    return {
        "prompt": "user: 1+1? assistant:",
        "question": "1+1?",
        "response": "2",
        "score": 1.0,
        **columns,
    }


def test_the_newest_validation_comes_first_with_questions_scores_and_other_numbers(
    folder: RunFolder,
) -> None:
    folder.add_samples(
        0, [sample(score=0.0, ground_truth=["2", "two"], data_source="sums", format=0.5)]
    )
    folder.add_samples(2, [sample(), sample(score=0.5)])
    newest, first = samples_of(read_run(folder.path))["groups"]
    assert (newest["step"], newest["num"]) == (2, 2)
    assert (newest["score"], first["score"]) == (
        pytest.approx(2 / 7),
        0.1,
    )  # those of all responses, not of these
    assert first["rows"] == [("1+1?", "2", '["2", "two"]', 0.0, "sums", {"format": 0.5})]


def test_responses_of_training_steps_come_after_validations(folder: RunFolder) -> None:
    for step in (1, 2):
        folder.add_samples(step, [sample(response=f"answer {step}")], "training_responses")
    folder.add_samples(0, [sample()])
    run = read_run(folder.path)
    found = samples_of(run)["groups"]
    assert [(one["kind"], one["step"]) for one in found] == [
        ("validation", 0),
        ("training", 2),
        ("training", 1),
    ]
    assert found[1]["rows"][0][1] == "answer 2"
    assert found[1]["score"] == run.metrics[2]["critic/score/mean"]


def test_a_run_of_an_older_version_shows_its_prompts(folder: RunFolder) -> None:
    older = sample()
    del older["question"]
    folder.add_samples(1, [older])
    (validation,) = samples_of(read_run(folder.path))["groups"]
    assert validation["rows"][0][0] == "user: 1+1? assistant:"


def test_of_many_validations_the_first_the_last_and_some_between_are_shown(
    folder: RunFolder,
) -> None:
    for step in range(100):
        folder.add_samples(step, [sample()])
    found = samples_of(read_run(folder.path))
    steps = [one["step"] for one in found["groups"]]
    assert (steps[0], steps[-1], len(steps)) == (99, 0, limits.MAX_STEPS)
    assert found["num_hidden"] == 100 - limits.MAX_STEPS


def test_long_texts_and_many_responses_are_cut_and_said(folder: RunFolder) -> None:
    for step in range(12):
        folder.add_samples(step, [sample(response="x" * 100_000)] * 64)
    run = read_run(folder.path)
    validations = samples_of(run)["groups"]
    assert validations[0]["num"] == 64 > len(validations[0]["rows"]) > 5
    assert validations[0]["rows"][0][1].endswith("x … (98,000 more letters)")
    assert len(render(run)) < 1.2 * limits.MAX_LETTERS + 200_000


def test_what_is_no_response_is_skipped_and_counted(folder: RunFolder) -> None:
    folder.add_samples(
        3, [sample(score=float("nan"), extra=10**400), sample(score="high", response=None)]
    )
    file = folder.path / "validation" / "step_000003.jsonl"
    deep = "[" * 5_000 + "]" * 5_000
    with file.open("ab") as lines:
        lines.write(b'\xff\n[]\n{"question": ' + deep.encode() + b'}\n{"question": "cut off')
    (folder.path / "validation" / "step_000004.jsonl").mkdir()
    (folder.path / "validation" / "step_x.jsonl").write_text("{}\n", encoding="utf-8")
    run = read_run(folder.path)
    (validation,) = samples_of(run)["groups"]
    assert [row[3] for row in validation["rows"]] == [None, None]
    assert validation["score"] is None
    assert run.notes == ["skipped 3 unreadable lines of validation/step_000003.jsonl"]
    assert "Infinity" not in render(run)


def test_only_the_beginning_of_a_large_file_is_read(folder: RunFolder) -> None:
    long = sample(response="x" * 2**20)
    num_whole = limits.MAX_FILE_BYTES // (len(json.dumps(long)) + 1)
    folder.add_samples(3, [long] * (num_whole + 5))
    run = read_run(folder.path)
    (validation,) = samples_of(run)["groups"]
    assert (validation["num"], run.notes) == (num_whole, [])
