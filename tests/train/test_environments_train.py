"""Environments in real runs: the examples of docs/environments.md, and the demo that learns to call
a tool."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_demo import RECIPES, start
from test_engines_train import NEEDS_VLLM
from test_extending import TWO_STEPS, rolepool
from train_helpers import SPLIT, rows_of, small_keys

from rolepool.data.demo import Demo
from vllm_pythons import REAL_PYTHON

TURNS = "actor_rollout_ref.rollout.multi_turn"
KEYS = [f"{TURNS}.enable=true", f"{TURNS}.max_turn_tokens=2", "data.max_response_length=8"]
KEYS += ["actor_rollout_ref.rollout.parity_check=true"]  # of sampled tokens only


def trained_rows(demo: Demo, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    page = (RECIPES.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, flags=re.DOTALL):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    ended = rolepool(
        "train", folder, *small_keys(demo, folder / "run", *TWO_STEPS, *KEYS, *overrides)
    )
    assert ended.returncode == 0, ended.stderr
    return [row for row in rows_of(folder / "run") if "actor/updates" in row]


CLASS = [
    "environment.path=my_environment.py",
    "environment.name=Lookup",
    f"{TURNS}.format=my_environment:parse",
]


def test_the_class_of_the_page_trains(demo: Demo, tmp_path: Path) -> None:
    row, *_ = trained_rows(demo, tmp_path, *CLASS)
    assert 1 <= row["num_turns/mean"] <= 5 and row["actor/grad_norm"] > 0
    assert row["environment_length/max"] >= 2 and row["num_tool_errors/max"] == 0


@pytest.mark.slow
def test_placement_does_not_change_conversations(demo: Demo, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one, two = (
        trained_rows(demo, folder, *CLASS, *keys)
        for folder, keys in zip(folders, ([], SPLIT), strict=True)
    )
    for key in (
        "num_turns/mean",
        "num_tool_calls/mean",
        "critic/score/mean",
        "response_length/mean",
    ):
        assert two[0][key] == pytest.approx(one[0][key]), key
    assert two[0]["actor/pg_loss"] == pytest.approx(one[0]["actor/pg_loss"], abs=1e-4)


@pytest.mark.slow
@NEEDS_VLLM
def test_vllm_trains_conversations(demo: Demo, tmp_path: Path) -> None:
    """Its log-probs of all turns are those of the actor, or the parity check would stop the run."""
    vllm = [
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.vllm_python={REAL_PYTHON}",
    ]
    row, *_ = trained_rows(
        demo, tmp_path, *CLASS, *vllm, "actor_rollout_ref.rollout.calculate_log_probs=true"
    )
    assert row["environment_length/max"] >= 2 and row["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.slow
def test_the_function_of_the_page_trains(demo: Demo, tmp_path: Path) -> None:
    rows = trained_rows(
        demo, tmp_path, "environment.path=my_rollout.py", "environment.name=rollout"
    )
    assert rows[0]["num_turns/mean"] == 2 and rows[0]["num_tool_calls/mean"] == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_with_a_tool_learns_to_call_it(demo: Demo, tmp_path: Path) -> None:
    run = start(demo, str(RECIPES / "demo_tools.yaml"), f"trainer.default_local_dir={tmp_path}")
    output, _ = run.communicate(timeout=900)
    assert run.returncode == 0, output
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    held_out = [
        value for row in rows for name, value in row.items() if name.startswith("val-core/")
    ]
    assert held_out[0] < 0.2 and held_out[-1] > 0.9
    last = [row for row in rows if "num_tool_calls/mean" in row][-1]
    assert last["num_tool_calls/mean"] > 0.95 and last["num_tool_errors/max"] == 0
