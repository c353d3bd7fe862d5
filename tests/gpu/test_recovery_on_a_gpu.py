"""A process on a GPU dies, and a run on a GPU moves: training goes on, and the metrics stay the
same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from trainings import Outcome, Training

pytestmark = pytest.mark.gpu

COMPARED = ("critic/score/mean", "critic/vf_loss", "actor/entropy", "actor/grad_norm")
TOLERANCE = 2e-3
"""Relative difference that sums in another order on the GPU may have grown to after a few
updates."""
SMALL = """
data.train_batch_size=16 data.max_prompt_length=8 data.max_response_length=4
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.optim.lr=1e-4
critic.optim.lr=1e-4 actor_rollout_ref.rollout.n=2 trainer.n_gpus_per_node=1
"""
ONE_POOL = "placement.strategy=standard"
TWO_POOLS = "placement.strategy=split placement.split.share=0.5"
KILLED = f"{SMALL} {TWO_POOLS} trainer.total_training_steps=4"
NUM_STILL_STEPS = 20
"""At least as many as the run that moves makes, which are about fourteen."""
TRAININGS = {
    "undisturbed": Training(KILLED),
    "killed_in_update": Training(KILLED, kills="critic:update"),
    "killed_in_snapshot": Training(KILLED, kills="critic:snapshot"),
    "still": Training(f"{SMALL} {ONE_POOL} trainer.total_training_steps={NUM_STILL_STEPS}"),
    "moving": Training(
        f"{SMALL} {ONE_POOL} trainer.total_epochs=1000", moves=(TWO_POOLS, ONE_POOL)
    ),
}


def differences(found: dict[int, Any], expected: dict[int, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    compared = [(step, name) for step, row in expected.items() for name in COMPARED if name in row]
    assert len(compared) == len(COMPARED) * len(expected)
    wrong = [
        (step, name)
        for step, name in compared
        if abs(found[step][name] - expected[step][name])
        > TOLERANCE * max(abs(expected[step][name]), 0.1)
    ]
    return [
        f"step {step} {name}: {found[step][name]} is not {expected[step][name]}"
        for step, name in wrong
    ]


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("update", marks=pytest.mark.trains("undisturbed", "killed_in_update")),
        pytest.param("snapshot", marks=pytest.mark.trains("undisturbed", "killed_in_snapshot")),
    ],
)
def test_training_goes_on_from_a_snapshot_of_the_gpu(
    phase: str, trained: Callable[[str], Outcome]
) -> None:
    killed = trained(f"killed_in_{phase}")
    assert killed.more["gap_s"] is not None, "the victim was not killed"
    print(f"{phase}: {killed.more['gap_s']:.1f} s from the kill to the next row")
    (restart,) = killed.more["restarts"]
    assert restart["pools"] == ["critic_pool"]
    assert not differences(killed.metrics, trained("undisturbed").metrics)


@pytest.mark.trains("moving", "still")
def test_a_run_moves_between_one_pool_and_two_that_share_the_gpu(
    trained: Callable[[str], Outcome],
) -> None:
    moving, still = trained("moving"), trained("still").metrics
    lines = (moving.folder / "run" / "metrics.jsonl").read_text().splitlines()
    for move in (row["move"] for row in map(json.loads, lines) if "move" in row):
        print(f"move after step {move['after_step']}: {move['seconds']:.2f} s")
    assert [len(planned.plan.pools) for planned in moving.run.plans] == [1, 2, 1]
    same_steps = {step: still[step] for step in moving.metrics}
    assert not differences(moving.metrics, same_steps)
