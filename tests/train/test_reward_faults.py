"""Runs with a reward function that fails, never returns, or prints too much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from train_helpers import ONE_RANK, small_keys

from rolepool.data.demo import Demo

REWARD = """
import os, sys, time

seen = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    seen.append(solution_str)
    {code}
    return float(solution_str == ground_truth)
"""


def train(demo: Demo, folder: Path, code: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A run of two steps from the command line, as a user starts it."""
    (folder / "mine.py").write_text(REWARD.format(code=code), encoding="utf-8")
    keys = small_keys(
        demo, folder / "run", *ONE_RANK, "trainer.total_training_steps=2", "trainer.val_before_train=false"
    )
    keys += [f"custom_reward_function.path={folder / 'mine.py'}", *more]
    command = [sys.executable, "-m", "rolepool.trainer.main_ppo", *keys]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["raise KeyboardInterrupt", "sys.exit()"])
def test_a_function_that_wants_to_end_the_program_is_an_error_that_names_the_row(
    demo: Demo, tmp_path: Path, code: str
) -> None:
    ended = train(demo, tmp_path, f"if len(seen) == 40: {code}")
    assert ended.returncode == 2
    assert f"error: custom_reward_function.path={tmp_path / 'mine.py'}: compute_score: " in ended.stderr
    assert "at mine.py:8: , for " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_run_goes_on_after_samples_that_fail_and_a_flood_of_lines_is_only_in_a_file(
    demo: Demo, tmp_path: Path
) -> None:
    marker = tmp_path / "was here"
    code = f"""
    print("\\n".join(["a line"] * 20_000), flush=True)
    if len(seen) == 3 and not os.path.exists({str(marker)!r}):
        open({str(marker)!r}, "w").close()
        sum(range(10**13))"""
    ended = train(demo, tmp_path, code, "custom_reward_function.timeout_s=2", "custom_reward_function.on_error=zero")
    assert ended.returncode == 0, ended.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["reward/failed/mean"] for step in steps] == [1 / 32, 0]
    assert "no score after custom_reward_function.timeout_s=2, for " in ended.stdout + ended.stderr
    assert ended.stdout.count("a line") < 2_000
    assert "more lines are not shown here; all lines are in" in ended.stdout
    assert (tmp_path / "run" / "logs" / "reward_cpu-0.log").read_text().count("a line") >= 64 * 20_000
