"""The code blocks of docs/extending.md, each trained for two steps by the command that the page names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from train_helpers import ONE_RANK, small_keys

from rolepool.data.demo import Demo

TWO_STEPS = [*ONE_RANK, "trainer.total_training_steps=2", "trainer.val_before_train=false"]
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def write_blocks(root: Path, folder: Path) -> None:
    """Write every Python block that begins with a comment of its file name into that file."""
    page = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, flags=re.DOTALL)
    assert {name for name, _ in blocks} >= {"my_estimator.py", "my_loss.py"}
    for name, text in blocks:
        (folder / name).write_text(text, encoding="utf-8")


def rolepool_train(folder: Path, *keys: str) -> subprocess.CompletedProcess[str]:
    """`rolepool train` as a user starts it: the program, in the folder of the user's files."""
    program = "import sys; from rolepool.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", program, "train", *keys],  # -P: like `rolepool`, without the folder on sys.path
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("override", "metric"),
    [
        ("algorithm.adv_estimator=my_estimator:batch_mean", "actor/pg_clipfrac"),
        (f"{LOSS_MODE}=my_loss:truncated", "actor/truncated_fraction"),
    ],
)
def test_the_functions_of_the_page_train(root: Path, demo: Demo, tmp_path: Path, override: str, metric: str) -> None:
    write_blocks(root, tmp_path)
    ended = rolepool_train(tmp_path, *small_keys(demo, tmp_path / "run", *TWO_STEPS, override))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "actor/updates" in row]
    assert [row["actor/updates"] for row in updates] == [2, 2]
    assert all(metric in row and row["actor/grad_norm"] > 0 for row in updates)
    has_critic = "critic/vf_loss" in updates[0]
    assert has_critic == override.startswith(LOSS_MODE), "an estimator without needs has no critic"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "algorithm.adv_estimator=no_module:f",
            "cannot be imported (ModuleNotFoundError: ",
        ),
        ("algorithm.adv_estimator=mine:f", "cannot be imported (AttributeError: module 'mine' has no attribute 'f')"),
        (f"{LOSS_MODE}=broken:f", "cannot be imported (SyntaxError: "),
        (f"{LOSS_MODE}=mine:strict", "must accept further keyword arguments; add **kwargs to it"),
        ("algorithm.adv_estimator=mine:with_values", "it needs values; set critic.enable=true"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_line_before_a_process_starts(
    demo: Demo, tmp_path: Path, override: str, problem: str
) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "from rolepool import register_adv_est\n"
        "def strict(log_prob): ...\n"
        "@register_adv_est('mine', needs=['values'])\n"
        "def with_values(values, **_): ...\n",
        encoding="utf-8",
    )
    ended = rolepool_train(tmp_path, *small_keys(demo, tmp_path / "run", *TWO_STEPS, override))
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, line.startswith(f"error: {override}: ")) == (2, True), line
    assert problem in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
