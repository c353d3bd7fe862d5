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
        demo,
        folder / "run",
        *ONE_RANK,
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
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
    assert (
        f"error: custom_reward_function.path={tmp_path / 'mine.py'}: compute_score: "
        in ended.stderr
    )
    assert "at mine.py:8: , for " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_run_goes_on_after_samples_that_fail_and_a_flood_of_lines_is_only_in_a_file(
    demo: Demo, tmp_path: Path
) -> None:
    marker = tmp_path / "was here"
    code = f"""
    print("\\n".join(["a line"] * 20_000), flush=True)
    time.sleep(0.2)  # the console says after some seconds how many lines it does not show
    if len(seen) == 3 and not os.path.exists({str(marker)!r}):
        open({str(marker)!r}, "w").close()
        sum(range(10**13))"""
    ended = train(
        demo,
        tmp_path,
        code,
        "custom_reward_function.timeout_s=2",
        "custom_reward_function.on_error=zero",
    )
    assert ended.returncode == 0, ended.stderr
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [step["reward/failed/mean"] for step in steps] == [1 / 32, 0]
    assert "no score after custom_reward_function.timeout_s=2, for " in ended.stdout + ended.stderr
    assert ended.stdout.count("a line") < 2_000
    assert "more lines are not shown here; all lines are in" in ended.stdout
    assert (tmp_path / "run" / "logs" / "reward_cpu-0.log").read_text().count(
        "a line"
    ) >= 64 * 20_000


JUDGES = """
import asyncio

async def judge(solution_str, **kwargs):
    await asyncio.sleep(0.01 * (len(solution_str) % 3))
    return float(solution_str.startswith("a"))

def lengths(prompts, completions, **kwargs):
    return [len(messages[0]["content"]) / 10 for messages in completions]  # prompts of the demo are chats
"""


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 16])
def test_a_run_with_async_functions_and_functions_of_batches(
    demo: Demo, tmp_path: Path, concurrency: int
) -> None:
    (tmp_path / "mine.py").write_text(JUDGES, encoding="utf-8")
    keys = small_keys(demo, tmp_path / "run", *ONE_RANK, "trainer.total_training_steps=2")
    names = ",".join(f"{tmp_path / 'mine.py'}:{name}" for name in ("judge", "lengths"))
    keys += [f"reward.functions=[{names}]", f"custom_reward_function.max_concurrency={concurrency}"]
    keys += [f"trainer.rollout_data_dir={tmp_path / 'samples'}"]
    command = [sys.executable, "-m", "rolepool.trainer.main_ppo", *keys]
    subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    samples = [
        json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 32
    for sample in samples:
        text = sample["output"]
        assert sample["score"] == pytest.approx(text.startswith("a") + len(text) / 10)
