"""Runs whose old log-probs are those of the engine: without `old_log_prob`, with the parity check,
resumed, and with conversations."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from test_engines_train import NO_VALIDATION, STALE_ENGINE
from test_environments_train import CLASS, trained_rows
from train_helpers import ONE_RANK, SPLIT, rows_of, small_keys, train

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.errors import WorkerError
from rolepool.report.run import read_run
from rolepool.trainer.loop import Trainer

BYPASS = "algorithm.rollout_correction.bypass_mode=true"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=true"

pytestmark = pytest.mark.usefixtures("one_ray")


def test_a_run_has_no_old_log_prob_and_the_entropy_of_its_updates(
    demo: Demo, tmp_path: Path
) -> None:
    words = [*SPLIT, BYPASS, LOG_PROBS, "trainer.total_training_steps=3", "trainer.critic_warmup=1"]
    train(demo, tmp_path, *words, *NO_VALIDATION)
    run = read_run(tmp_path)
    operations = {recorded.operation for recorded in run.spans}
    assert "old_log_prob" not in operations and {"gen", "update_actor"} <= operations
    rows = rows_of(tmp_path)
    assert ["actor/entropy" in row for row in rows] == [False, True, True], "not in a warm-up step"
    assert not any("training/rollout_probs_diff_max" in row for row in rows)


def stale_run(demo: Demo, folder: Path, patch: pytest.MonkeyPatch, *words: str) -> str:
    """Train with an engine that ignores the update of the second step. Returns the only line of the
    error."""
    (folder / "stale_engine.py").write_text(STALE_ENGINE)
    patch.chdir(folder)
    patch.setattr(sys, "path", [*sys.path, str(folder)])
    words = ("actor_rollout_ref.rollout.name=stale_engine:StaleEngine", BYPASS, *words)
    keys = small_keys(
        demo, folder / "run", "trainer.total_training_steps=5", *NO_VALIDATION, *words
    )
    with pytest.raises(WorkerError) as caught:
        Trainer(load_config([], keys)).run()
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    "keys",
    [
        ONE_RANK,
        ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_epochs=2"],
    ],
    ids=["one rank", "two ranks and epochs"],
)
def test_an_engine_that_keeps_old_weights_stops_the_run(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """Weights change between the mini-batches of a step, too, which must not count."""
    line = stale_run(demo, tmp_path, monkeypatch, *keys, "trainer.save_freq=1")
    assert line.startswith(
        "actor_rollout_ref.rollout.name=stale_engine:StaleEngine: the engine's log-probs, with "
    )
    assert "version 2 of the weights, are " in line and "parity_limit is 0.0002" in line
    rows = rows_of(tmp_path / "run")
    steps = [row["training/global_step"] for row in rows if "training/global_step" in row]
    assert steps == [1, 2]
    saved = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == ["step_000001", "step_000002"], "weights of the wrong update are not saved"


def test_a_resumed_run_is_the_same_run(demo: Demo, tmp_path: Path) -> None:
    words = [*ONE_RANK, BYPASS, "trainer.save_freq=2", "trainer.total_training_steps=4"]
    whole = tmp_path / "whole"
    train(demo, whole, *words, *NO_VALIDATION)
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    shutil.rmtree(cut / "checkpoints" / "step_000004")
    train(demo, cut, *words, *NO_VALIDATION)
    assert rows_of(cut) == rows_of(whole)


@pytest.mark.slow  # 21 s
def test_conversations_are_learned_from_alike(demo: Demo, tmp_path: Path) -> None:
    """Tokens that the environment wrote have no log-prob of the engine and do not count. The parity
    check compares all others."""
    rows: list[dict[str, float]] = []
    for name, keys in (("computed", []), ("bypassed", [BYPASS])):
        folder = tmp_path / name
        folder.mkdir()
        first, *_ = trained_rows(demo, folder, *CLASS, *ONE_RANK, *keys)
        rows.append(first)
    computed, bypassed = rows
    assert computed["environment_length/max"] >= 2
    for key in ("num_turns/mean", "critic/score/mean"):
        assert bypassed[key] == computed[key]
    for key in ("actor/pg_loss", "actor/grad_norm"):
        assert bypassed[key] == pytest.approx(computed[key], abs=1e-4), key
