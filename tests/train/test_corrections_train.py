"""Runs whose engine keeps its first weights, with corrections."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from test_engines_train import NO_VALIDATION
from train_helpers import ONE_RANK, SPLIT, rows_of, train

from old_weights_engine import KEYS
from rolepool.data.demo import Demo

CORRECTION = "algorithm.rollout_correction"
WORDS = [
    *KEYS,
    *NO_VALIDATION,
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "trainer.total_training_steps=4",
]
TRUNCATED = [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=1.05"]

pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.fixture(autouse=True)
def engine_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look for modules in the current folder."""
    source = Path(__file__).parents[1] / "old_weights_engine.py"
    (tmp_path / source.name).write_text(source.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, os.fspath(tmp_path)])


@pytest.mark.slow  # tests/unit/test_corrected_updates.py has the same in one process
def test_weights_are_1_at_first_and_fall_behind_with_the_engine(demo: Demo, tmp_path: Path) -> None:
    train(demo, tmp_path / "run", *ONE_RANK, *WORDS, *TRUNCATED)
    rows = rows_of(tmp_path / "run")
    sizes = [row["rollout_corr/rollout_is_eff_sample_size"] for row in rows]
    assert sizes[0] == pytest.approx(1, abs=1e-9)
    assert sizes[-1] < sizes[1] < 1
    assert [row["rollout_corr/rollout_is_max"] for row in rows[1:]] == [1.05] * 3
    assert rows[0]["rollout_corr/k3_kl"] < 1e-9 < 1e-5 < rows[-1]["rollout_corr/k3_kl"]
    assert all(row["actor/updates"] == 2 for row in rows)
    assert rows[-1]["training/rollout_probs_diff_mean"] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "correction",
    [
        ["preset=decoupled_seq_is_rs"],
        ["preset=bypass_ppo_clip_k3_rs", "rollout_rs_threshold=0.001"],
        ["preset=bypass_pg_geo_rs_token_tis", "rollout_rs_threshold=1.05"],
    ],
    ids=lambda words: words[0],
)
def test_presets_train_in_two_pools(demo: Demo, tmp_path: Path, correction: list[str]) -> None:
    words = [f"{CORRECTION}.{word}" for word in correction]
    train(demo, tmp_path / "run", *SPLIT, *WORDS, *words)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 4
    assert 0 < rows[-1]["rollout_corr/rollout_rs_masked_fraction"] <= 1
    assert all(row["actor/grad_norm"] > 0 for row in rows[:2])
