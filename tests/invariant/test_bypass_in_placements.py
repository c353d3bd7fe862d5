"""With the engine's log-probs in place of the actor's, a run is the same run.

The native engine computes the log-probs of the actor, but in another order: with a cache, token by
token. In float64 both agree almost to the last bit. In float32 they differ by rounding.
"""

from __future__ import annotations

import pytest
import torch
from test_placements import PLACEMENTS, TOLERANCE, Course, one_ray, run

from rolepool.data.demo import Demo

__all__ = ["one_ray"]  # one Ray for all tests of this module

BYPASS = "algorithm.rollout_correction.bypass_mode=true"
ONE_RANK = PLACEMENTS["standard, 1 rank"]
ONE_UPDATE = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_epochs=1",
    "algorithm.adv_estimator=grpo",
]

FLOAT32_ROUNDING = 2e-4
ENTROPY = "actor/entropy"


def assert_alike(one: Course, other: Course, tolerance: float) -> None:
    """Metrics that both have are equal, and so are advantages. The entropy of an update
    is left out, because it is that of the first mini-batch only if nobody has computed it
    before."""
    for mine, theirs in zip(one.metrics, other.metrics, strict=True):
        names = [name for name in mine.keys() & theirs.keys() if not name.endswith(ENTROPY)]
        assert any(name.endswith("actor/grad_norm") for name in names)
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
    for mine_t, theirs_t in zip(one.advantages, other.advantages, strict=True):
        assert torch.allclose(mine_t, theirs_t, rtol=tolerance, atol=tolerance)


def assert_same_weights(one: Course, other: Course, tolerance: float) -> None:
    for name, weight in one.weights.items():
        assert torch.allclose(weight, other.weights[name], rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize(
    "keys",
    [
        [],
        pytest.param(
            # With a penalty, the last bit of a KL decides the sign of an advantage that is 0.
            ["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=false"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["actor_rollout_ref.rollout.temperature=0.7"], marks=pytest.mark.slow),
        pytest.param(["actor_rollout_ref.rollout.name=transformers"], marks=pytest.mark.slow),
    ],
    ids=["gae", "grpo", "remax", "temperature", "transformers"],
)
def test_a_run_with_the_engines_log_probs_is_the_same_run_in_float64(
    demo: Demo, keys: list[str]
) -> None:
    """With a KL penalty, a KL loss, two mini-batches, two epochs and an entropy bonus."""
    computed = run(demo, [*ONE_RANK, *keys])
    bypassed = run(demo, [*ONE_RANK, *keys, BYPASS])
    assert computed.rows_that_differ(bypassed) == 0
    assert_alike(computed, bypassed, TOLERANCE)
    assert_same_weights(computed, bypassed, TOLERANCE)


@pytest.mark.slow  # 50 s
def test_with_one_update_in_a_step_the_update_tells_the_entropy_of_the_whole_batch(
    demo: Demo,
) -> None:
    computed = run(demo, [*ONE_RANK, *ONE_UPDATE])
    bypassed = run(demo, [*ONE_RANK, *ONE_UPDATE, BYPASS])
    for mine, theirs in zip(computed.metrics, bypassed.metrics, strict=True):
        assert ENTROPY not in theirs, "nobody computes it before the update"
        assert theirs[f"0/{ENTROPY}"] == pytest.approx(mine[ENTROPY], rel=TOLERANCE)


@pytest.mark.parametrize(
    "placement",
    [
        "rollout alone",
        pytest.param("split, 2 and 1, padded", marks=pytest.mark.slow),
        pytest.param("standard, 4 ranks, by tokens", marks=pytest.mark.slow),
    ],
)
def test_placement_changes_no_number_of_it(demo: Demo, placement: str) -> None:
    one_rank = run(demo, [*ONE_RANK, BYPASS])
    placed = run(demo, [*PLACEMENTS[placement], BYPASS])
    assert one_rank.rows_that_differ(placed) == 0
    assert_alike(one_rank, placed, TOLERANCE)
    assert_same_weights(one_rank, placed, TOLERANCE)
    for mine, theirs in zip(one_rank.metrics, placed.metrics, strict=True):
        (entropy,) = [name for name in mine if name.endswith(ENTROPY)]
        assert theirs[entropy] == pytest.approx(mine[entropy], rel=TOLERANCE)


@pytest.mark.slow  # 15 s; in float64 it is in every run of the tests
def test_in_float32_the_difference_is_rounding(demo: Demo) -> None:
    """Both runs learn from the same responses, so that no tie between two tokens decides. AdamW
    turns rounding of tiny gradients into different weights, so they are not compared."""
    bypassed = run(demo, [*ONE_RANK, BYPASS], torch.float32)
    computed = run(demo, ONE_RANK, torch.float32, replayed=bypassed)
    assert_alike(computed, bypassed, FLOAT32_ROUNDING)
