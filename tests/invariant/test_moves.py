"""A run that moves computes what a run computes that does not move: every role, to one pool, two,
and its own pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from commands import load_benchmark
from rolepool.data.demo import Demo
from rolepool.report.run import read_run

TOLERANCE = 1e-9
STILL = ("timing_", "perf/", "pool/", "overlap/", "training/num_steps", "global_seqlen/")


moves = load_benchmark("moves")
FAST = ["split to standard"]


@pytest.fixture(scope="module")
def keys(demo: Demo) -> list[str]:
    keys = [
        *moves.KEYS.split(),
        f"actor_rollout_ref.model.path={demo.model}",
        f"data.train_files={demo.train_file}",
    ]
    return [*keys, "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]


def differences(keys: Sequence[str], names: Sequence[str], tmp_path: Path) -> list[str]:
    """Metrics that differ between a run with these moves and one without any."""
    words = [moves.MOVES[name] for name in names]
    moving = moves.run(tmp_path / "moving", keys, words, 1, waits=True)
    still = moves.run(
        tmp_path / "still",
        [*keys, f"trainer.total_training_steps={max(moving)}"],
        every=max(moving),
    )
    assert moving.keys() == still.keys()
    compared = [
        (step, name) for step, row in still.items() for name in row if not name.startswith(STILL)
    ]
    assert len(compared) > 20 * len(still)
    wrong = [
        (step, name)
        for step, name in compared
        if abs(moving[step][name] - still[step][name]) > TOLERANCE
    ]
    return [
        f"step {step} {name}: {moving[step][name]} is not {still[step][name]}"
        for step, name in wrong
    ]


@pytest.mark.timeout(300)
def test_losses_do_not_change_when_a_run_moves(keys: list[str], tmp_path: Path) -> None:
    start = ["placement.strategy=split"]
    assert not differences([*keys, *start], FAST, tmp_path)
    run = read_run(tmp_path / "moving")
    assert [len(planned.plan.pools) for planned in run.plans] == [2, 1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_do_not_change_when_every_role_moves(keys: list[str], tmp_path: Path) -> None:
    assert not differences(keys, list(moves.MOVES), tmp_path)
