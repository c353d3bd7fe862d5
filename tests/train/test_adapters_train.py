"""Environments of other packages in real runs: the examples of docs/environments.md, as a user
starts them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_demo import RECIPES
from test_environments_train import TURNS, trained_rows

from rolepool.data.demo import Demo


def test_the_example_for_skyrl_gym_trains(demo: Demo, tmp_path: Path) -> None:
    pytest.importorskip("skyrl_gym", reason="the extra skyrl-gym is not installed")
    rows = trained_rows(demo, tmp_path, "environment.path=my_gym.py", "environment.name=rollout")
    assert 1 < rows[0]["num_turns/mean"] <= 2 and rows[0]["num_tool_errors/max"] == 0
    assert rows[0]["critic/score/max"] == 1 and rows[0]["actor/grad_norm"] > 0


def test_the_example_for_verifiers_trains(demo: Demo, tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    names = [
        "environment.path=my_verifiers.py",
        "environment.name=rollout",
        f"{TURNS}.max_turn_tokens=2",
    ]
    shutil.copytree(RECIPES.parent / "examples" / "verifiers_letters", tmp_path, dirs_exist_ok=True)
    subprocess.run([sys.executable, "write_letters.py"], cwd=tmp_path, check=True)
    files = ["data.train_files=letters.jsonl", "data.val_files=letters.jsonl"]
    rows = trained_rows(demo, tmp_path, *names, *files)
    assert rows[0]["num_turns/mean"] == 2 and rows[0]["num_tool_errors/max"] == 0
    assert rows[0]["critic/score/max"] > 0 and rows[0]["actor/grad_norm"] > 0
