"""With the engine's log-probs in place of the actor's, a run is the same run.

The native engine computes the log-probs of the actor, but in another order: with a cache, token by
token. In float64 both agree almost to the last bit. In float32 they differ by rounding, and the
update sees no more than that.
"""

from __future__ import annotations

import pytest
import torch
from test_placements import PLACEMENTS, TOLERANCE, Course, one_ray, run

from rolepool.data.demo import Demo

__all__ = ["one_ray"]  # one Ray for all tests of this module

BYPASS = "algorithm.rollout_correction.bypass_mode=true"
ONE_RANK = PLACEMENTS["standard, 1 rank"]
ESTIMATORS = {
    "gae": [],
    "grpo": ["algorithm.adv_estimator=grpo"],
    "remax": ["algorithm.adv_estimator=remax"],
}
ROUNDING = 1e-11
FLOAT32_ROUNDING = 2e-4


def assert_alike(one: Course, other: Course, tolerance: float) -> None:
    """All metrics that both have are equal, and so are advantages and weights."""
    assert one.rows_that_differ(other) == 0
    for mine, theirs in zip(one.metrics, other.metrics, strict=True):
        for name in mine.keys() & theirs.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
    for mine_t, theirs_t in zip(one.advantages, other.advantages, strict=True):
        assert torch.allclose(mine_t, theirs_t, rtol=tolerance, atol=tolerance)
    for name, weight in one.weights.items():
        assert torch.allclose(weight, other.weights[name], rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_run_with_the_engines_log_probs_is_the_same_run_in_float64(
    demo: Demo, estimator: str
) -> None:
    """With a KL penalty, a KL loss, two mini-batches, two epochs and an entropy bonus."""
    keys = [*ONE_RANK, *ESTIMATORS[estimator]]
    computed = run(demo, keys)
    bypassed = run(demo, [*keys, BYPASS])
    assert_alike(computed, bypassed, ROUNDING)
