"""The code blocks of docs/extending.md, each trained for two steps by the command that the page names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_helpers import ONE_RANK, small_keys

from rolepool.data.demo import Demo

EXAMPLES = ["estimator", "loss", "engine", "placement", "role", "style", "step"]
TWO_STEPS = [*ONE_RANK, "trainer.total_training_steps=2", "trainer.val_before_train=false"]
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
ENGINE = "actor_rollout_ref.rollout.name=my_engine:MyEngine"
STRATEGY = "placement.strategy=my_placement:reward_alone"


def write_blocks(root: Path, folder: Path) -> None:
    """Write every Python block that begins with a comment of its file name into that file."""
    page = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, flags=re.DOTALL)
    assert {name for name, _ in blocks} == {f"my_{name}" for name in EXAMPLES}
    for name, text in blocks:
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def rolepool(command: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command as a user starts it: the program, in the folder of the user's files."""
    program = "import sys; from rolepool.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", program, command, *words],  # -P: like `rolepool`, without the folder on sys.path
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def train_two_steps(demo: Demo, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train in the folder of the user's files; the rows of metrics of the two steps."""
    ended = rolepool("train", folder, *small_keys(demo, folder / "run", *TWO_STEPS, *overrides))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "actor/updates" in row]
    assert [row["actor/updates"] for row in updates] == [2, 2]
    assert all(row["actor/grad_norm"] > 0 for row in updates)
    return updates


@pytest.mark.parametrize(
    ("override", "metric"),
    [
        ("algorithm.adv_estimator=my_estimator:batch_mean", "actor/pg_clipfrac"),
        (f"{LOSS_MODE}=my_loss:truncated", "actor/truncated_fraction"),
    ],
)
def test_the_functions_of_the_page_train(root: Path, demo: Demo, tmp_path: Path, override: str, metric: str) -> None:
    write_blocks(root, tmp_path)
    updates = train_two_steps(demo, tmp_path, override)
    assert all(metric in row for row in updates)
    has_critic = "critic/vf_loss" in updates[0]
    assert has_critic == override.startswith(LOSS_MODE), "an estimator without needs has no critic"


def test_the_engine_of_the_page_samples_with_the_weights_of_each_step(root: Path, demo: Demo, tmp_path: Path) -> None:
    """The actor's own log-probs of its tokens are those of the engine, also after an update; validation is greedy."""
    write_blocks(root, tmp_path)
    compare = "actor_rollout_ref.rollout.calculate_log_probs=true"
    updates = train_two_steps(demo, tmp_path, ENGINE, compare, "trainer.val_before_train=true")
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in updates)
    assert "val-core/" in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")


def test_the_strategy_of_the_page_gives_the_reward_model_a_gpu_of_its_own(
    root: Path, demo: Demo, tmp_path: Path
) -> None:
    write_blocks(root, tmp_path)
    reward_model = ["reward_model.enable=true", f"reward_model.model.path={demo.reward_model}"]
    two_nodes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    planned = rolepool("plan", tmp_path, "--json", STRATEGY, *reward_model, *two_nodes)
    pools = json.loads(planned.stdout)["pools"]
    assert {name: pool["per_node"] for name, pool in pools.items()} == {"main": [4, 3], "reward": [0, 1]}
    assert pools["reward"]["roles"] == ["reward_model"]
    assert train_two_steps(demo, tmp_path, STRATEGY, *reward_model, "trainer.n_gpus_per_node=2")


def test_the_role_of_the_page_is_planned_placed_called_and_measured(root: Path, demo: Demo, tmp_path: Path) -> None:
    """Its files are in a folder below that of the command, and in the path that names the extension."""
    (tmp_path / "parts").mkdir()
    write_blocks(root, tmp_path / "parts")
    words = [
        "trainer.extensions=parts/my_role.py",
        "trainer.step=my_step:style_step",
        f"roles.style.model.path={demo.reward_model}",
        "roles.style.weight=0.25",
    ]
    split = ["trainer.n_gpus_per_node=2", "placement.strategy=split"]
    keys = small_keys(demo, tmp_path / "run", *words, *split)
    planned = json.loads(rolepool("plan", tmp_path, "--json", *keys).stdout)
    assert planned["pools"]["critic_pool"]["roles"] == ["critic", "style"]
    assert ["style", "old_log_prob"] in planned["overlaps"]
    assert "style" in json.dumps(planned["memory"])
    updates = train_two_steps(demo, tmp_path, *words, *split)
    for row in updates:
        assert row["timing_s/style"] > 0
        rule = row["critic/score/mean"] - 0.25 * row["reward/style/mean"]
        assert rule * 32 * 4 == pytest.approx(round(rule * 32 * 4), abs=1e-3), "32 responses, scored in quarters"
    spans = [json.loads(line) for line in (tmp_path / "run" / "spans.jsonl").read_text().splitlines()]
    assert {span["pool"] for span in spans if span["operation"] == "style"} == {"critic_pool"}
    assert rolepool("report", tmp_path, "run").returncode == 0
    explained = rolepool("config", tmp_path, "trainer.extensions=parts/my_role.py", "roles.style.weight")
    assert "Weight of the style score" in explained.stdout


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
    ended = rolepool("train", tmp_path, *small_keys(demo, tmp_path / "run", *TWO_STEPS, override))
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, line.startswith(f"error: {override}: ")) == (2, True), line
    assert problem in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.extensions=no_module", "cannot be imported (ModuleNotFoundError: No module named 'no_module')"),
        ("trainer.extensions=parts/none.py", "cannot be imported (ModuleNotFoundError: No module named 'none')"),
        ("trainer.extensions=json.py", "has the same module name; rename your file"),
        ("trainer.extensions=twice", "ConfigError: register_role: the name critic is already used"),
        ("trainer.step=mine:no_step", "cannot be imported (AttributeError: module 'mine' has no attribute 'no_step')"),
        ("placement.strategy=no_module:f", "cannot be imported (ModuleNotFoundError: "),
        ("placement.strategy=mine:no_actor", "but the run needs actor, rollout, critic"),
        ("actor_rollout_ref.rollout.name=no_module:Engine", "cannot be imported (ModuleNotFoundError: "),
    ],
)
def test_an_extension_that_cannot_be_used_is_one_line_of_plan_and_of_train(
    demo: Demo, tmp_path: Path, command: str, override: str, problem: str
) -> None:
    (tmp_path / "json.py").write_text("", encoding="utf-8")
    (tmp_path / "twice.py").write_text(
        "from dataclasses import replace\n"
        "from rolepool.placement.roles import ROLE_SPECS, Role, register_role\n"
        "register_role(ROLE_SPECS[Role.Critic])\n",
        encoding="utf-8",
    )
    (tmp_path / "mine.py").write_text(
        "from rolepool import ResourcePoolManager, Role\n"
        "def no_actor(config, gpus_per_node):\n"
        "    return ResourcePoolManager({'all': gpus_per_node}, {Role.Critic: 'all'})\n",
        encoding="utf-8",
    )
    ended = rolepool(command, tmp_path, *small_keys(demo, tmp_path / "run", *ONE_RANK, override))
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, line.startswith(f"error: {override}: ")) == (2, True), line
    assert problem in line
