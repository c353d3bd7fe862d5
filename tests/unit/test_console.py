"""What a training run prints: its start, a short line for each step, and on request verl's long
line."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from pathlib import Path

import pytest

from rolepool.report.console_logs import parse_log
from rolepool.trainer.console import TrainingConsole, short_line, validations_in_words
from rolepool.trainer.samples import MAX_RECORDED_STEPS, question_of, records_responses

STEP = {
    "training/num_steps": 60.0,
    "critic/score/mean": 0.5125,
    "actor/ppo_kl": 0.00123,
    "response_length/mean": 211.6,
    "timing_s/step": 2.0,
    "perf/total_num_tokens": 16428.0,
}
SHORT = "step 3/60  reward 0.512  KL 0.0012  length 212  2.00 s  8,214 tokens/s"
LONG = "step:3 - training/num_steps:60 - critic/score/mean:0.5125 - actor/ppo_kl:0.00123 - "


def test_the_short_line_has_the_six_numbers_of_a_step() -> None:
    assert short_line(3, STEP) == SHORT


def test_the_kl_is_the_one_that_the_run_penalizes_if_there_is_one() -> None:
    assert "KL 0.2500" in short_line(3, {**STEP, "actor/kl_loss": 0.25})
    assert "KL 0.7500" in short_line(
        3, {**STEP, "actor/kl_loss": 0.25, "actor/reward_kl_penalty": 0.75}
    )
    warmup = {name: number for name, number in STEP.items() if name != "actor/ppo_kl"}
    assert short_line(3, warmup) == SHORT.replace("  KL 0.0012", "")


@pytest.mark.parametrize(
    ("loggers", "starts"),
    [
        ([], []),
        (["console"], [SHORT]),
        (["verl"], [LONG]),
        (["console", "verl"], [LONG, SHORT]),
        (["wandb"], []),
    ],
)
def test_loggers_choose_the_lines(
    capsys: pytest.CaptureFixture[str], loggers: list[str], starts: list[str]
) -> None:
    console = TrainingConsole(loggers)
    with console.progress_of(60):
        console.on_row(3, STEP)
        console.on_row(3, {"timing_s/save_checkpoint": 1.0})
    lines = capsys.readouterr().out.splitlines()
    if "verl" in loggers:
        assert lines.pop() == "step:3 - timing_s/save_checkpoint:1"
        assert parse_log(lines) == [{3: STEP}]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [
        True
    ] * len(starts)


@pytest.mark.parametrize("loggers", [[], ["console"]])
def test_the_start_is_printed_without_a_terminal_with_the_time_of_each_part(
    capsys: pytest.CaptureFixture[str], loggers: list[str]
) -> None:
    console = TrainingConsole(loggers)
    console.on_phase("reading prompts")
    assert capsys.readouterr().out == "reading prompts ...\n", (
        "at once, not when the part has ended"
    )
    with console.progress_of(60):
        console.on_phase("starting 8 processes")
    said = r"starting 8 processes \.\.\. \(reading prompts took \d+\.\d s\)\n"
    assert re.fullmatch(said, capsys.readouterr().out)


def test_only_rays_note_that_it_uses_a_token_is_dropped() -> None:
    from ray._private.authentication import authentication_token_setup as ray_tokens

    import rolepool.cluster.connection  # noqa: F401 (which sets the filter)

    written = io.StringIO()
    handler = logging.StreamHandler(
        written
    )  # Ray's own writes to where standard error was when Ray was imported
    ray_tokens.logger.addHandler(handler)
    try:
        ray_tokens._warn_token_auth_enabled()
        ray_tokens._warn_token_auth_disabled()
    finally:
        ray_tokens.logger.removeHandler(handler)
    assert written.getvalue().startswith("Token authentication is disabled for this Ray cluster")


SAMPLE = {
    "prompt": "system You are helpful. user 2 + 2 =",
    "question": "2 + 2 =\nhow much?",
    "response": "4",
}


def summary_of(console: TrainingConsole, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    console.print_summary(tmp_path)
    return capsys.readouterr().out


def test_the_table_shows_questions_and_rounded_scores_and_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = TrainingConsole([])
    console.on_samples(7, [{**SAMPLE, "ground_truth": "4", "score": 0.1 + 0.2}])
    summary = summary_of(console, tmp_path, capsys)
    assert summary.startswith("validation after step 7\n")
    assert "2 + 2 = how much?" in summary, "a question with line breaks stays in its row"
    assert "You are helpful" not in summary
    assert " 0.300 " in summary


def test_the_newest_responses_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = TrainingConsole([])
    console.on_samples(0, [{**SAMPLE, "ground_truth": "4", "score": 0.0}])
    console.on_training_samples(
        9, [{**SAMPLE, "response": "four", "ground_truth": None, "score": 1.0}]
    )
    summary = summary_of(console, tmp_path, capsys)
    assert summary.startswith("responses of training step 9\n")
    assert " four " in summary


def test_a_score_is_said_once_for_each_validation() -> None:
    assert validations_in_words([(0, 0.4375)]) == "validation: 0.438 after step 0"
    three = [(0, 0.25), (15, 0.5), (30, 0.75)]
    assert validations_in_words(three) == "validation: 0.250 after step 0, 0.750 after step 30"


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("a b c =", "a b c ="),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}], "Why?"),
        ([{"role": name, "content": name * 2} for name in ("user", "assistant", "tool")], "useruser"),
        ([{"role": "user", "content": "1"}, {"role": "user", "content": "2"}], "2"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "a b"),
        ([{"role": "system", "content": "only this"}], "only this"),
        ([{"role": "user"}], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_the_question_is_what_the_user_asked_last(prompt: object, question: str) -> None:
    assert question_of(prompt) == question


@pytest.mark.parametrize(
    ("are_terminals", "no_color", "expected"),
    [
        ((True, True), None, None),
        ((True, False), None, "0"),
        ((False, True), None, "0"),
        ((True, True), "1", "0"),
    ],
)
def test_ray_prints_colours_only_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    are_terminals: tuple[bool, bool],
    no_color: str | None,
    expected: str | None,
) -> None:
    from rolepool.cluster import connection

    monkeypatch.setenv(connection.COLOUR_SWITCH, "")  # so that it is as before after the test
    monkeypatch.delenv(connection.COLOUR_SWITCH)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    for name, is_terminal in zip(("stdout", "stderr"), are_terminals, strict=True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda answer=is_terminal: answer)
        monkeypatch.setattr(sys, name, stream)
    connection._limit_what_ray_prints()
    assert os.environ.get(connection.COLOUR_SWITCH) == expected


def test_the_paragraph_that_ray_prints_after_a_kill_is_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import ray
    from ray._private.ray_logging import stdout_deduplicator

    from rolepool.cluster import connection

    connection._limit_what_ray_prints()
    binary = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    paragraph = connection.RAY_PARAGRAPHS[1]
    assert paragraph.encode() in binary.read_bytes(), "Ray has other words for it now"
    lines = [
        f"{paragraph} by an unexpected system error. To troubleshoot ...",
        "a line of a worker",
    ]
    (batch,) = stdout_deduplicator.deduplicate({"lines": lines, "pid": "raylet", "is_err": False})
    assert batch["lines"] == ["a line of a worker"]


@pytest.mark.parametrize("num_steps", [1, 2, 19, 20, 60, 10_000])
def test_responses_of_some_steps_are_recorded_always_of_the_first_and_last(num_steps: int) -> None:
    recorded = [step for step in range(1, num_steps + 1) if records_responses(step, num_steps)]
    assert (recorded[0], recorded[-1]) == (1, num_steps)
    assert min(num_steps, MAX_RECORDED_STEPS) <= len(recorded) <= MAX_RECORDED_STEPS + 2
