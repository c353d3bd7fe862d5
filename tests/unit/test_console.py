"""What a training run prints: its start, a short line for each step, and on request verl's long line."""

from __future__ import annotations

import io
import logging
import re

import pytest

from rolepool.report.run import parse_log
from rolepool.trainer.console import TrainingConsole, short_line

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
    assert "KL 0.7500" in short_line(3, {**STEP, "actor/kl_loss": 0.25, "actor/reward_kl_penalty": 0.75})
    warmup = {name: number for name, number in STEP.items() if name != "actor/ppo_kl"}
    assert short_line(3, warmup) == SHORT.replace("  KL 0.0012", "")


@pytest.mark.parametrize(
    ("loggers", "starts"),
    [([], []), (["console"], [SHORT]), (["verl"], [LONG]), (["console", "verl"], [LONG, SHORT]), (["wandb"], [])],
)
def test_loggers_choose_the_lines(capsys: pytest.CaptureFixture[str], loggers: list[str], starts: list[str]) -> None:
    console = TrainingConsole(loggers)
    with console.progress_of(60):
        console.on_row(3, STEP)
        console.on_row(3, {"timing_s/save_checkpoint": 1.0})
    lines = capsys.readouterr().out.splitlines()
    if "verl" in loggers:
        assert lines.pop() == "step:3 - timing_s/save_checkpoint:1"
        assert parse_log(lines) == [{3: STEP}]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * len(starts)


@pytest.mark.parametrize("loggers", [[], ["console"]])
def test_the_start_is_printed_without_a_terminal_with_the_time_of_each_part(
    capsys: pytest.CaptureFixture[str], loggers: list[str]
) -> None:
    console = TrainingConsole(loggers)
    console.on_phase("reading prompts")
    assert capsys.readouterr().out == "reading prompts ...\n", "at once, not when the part has ended"
    with console.progress_of(60):
        console.on_phase("starting 8 processes")
    said = r"starting 8 processes \.\.\. \(reading prompts took \d+\.\d s\)\n"
    assert re.fullmatch(said, capsys.readouterr().out)


def test_only_rays_note_that_it_uses_a_token_is_dropped() -> None:
    from ray._private.authentication import authentication_token_setup as ray_tokens

    import rolepool.cluster  # noqa: F401 (which sets the filter)

    written = io.StringIO()
    handler = logging.StreamHandler(written)  # Ray's own writes to where standard error was when Ray was imported
    ray_tokens.logger.addHandler(handler)
    try:
        ray_tokens._warn_token_auth_enabled()
        ray_tokens._warn_token_auth_disabled()
    finally:
        ray_tokens.logger.removeHandler(handler)
    assert written.getvalue().startswith("Token authentication is disabled for this Ray cluster")
