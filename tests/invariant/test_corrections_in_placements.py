"""With an engine that is behind the actor, corrections are the same under every placement: weights
of tokens with mean 1, and sequences that are left out."""

from __future__ import annotations

import pytest
from test_placements import PLACEMENTS, TOLERANCE, Course, assert_same, one_ray, run

from old_weights_engine import KEYS
from rolepool.data.demo import Demo

# Half a minute for the first of them; weights and masks have unit tests, too.
pytestmark = pytest.mark.slow

__all__ = ["one_ray"]  # one Ray for all tests of this module

CORRECTION = "algorithm.rollout_correction"
DECOUPLED = [
    f"{CORRECTION}.preset=decoupled_geo_rs_token_tis",
    f"{CORRECTION}.rollout_is_threshold=1.2",
    f"{CORRECTION}.rollout_is_batch_normalize=true",
    f"{CORRECTION}.rollout_rs_threshold=1.5",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
]
BYPASS = [
    f"{CORRECTION}.preset=bypass_pg_is",
    f"{CORRECTION}.rollout_is_batch_normalize=true",
    f"{CORRECTION}.rollout_rs=token_k2",
    f"{CORRECTION}.rollout_rs_threshold=0.05",
]
WITHOUT_CRITIC = [
    *DECOUPLED,
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.use_kl_loss=false",
]


def assert_corrects(course: Course) -> None:
    """The last step has weights other than 1, and leaves out some tokens, but not all."""
    # Those of an update have its number before the name.
    last = {name[name.find("rollout_corr/") :]: value for name, value in course.metrics[-1].items()}
    assert last["rollout_corr/rollout_is_eff_sample_size"] < 1 - 1e-3
    assert 0 < last["rollout_corr/rollout_rs_masked_fraction"] < 1


@pytest.mark.parametrize(
    ("correction", "placement"),
    [
        (WITHOUT_CRITIC, "standard, 2 ranks"),
        (WITHOUT_CRITIC, "rollout alone"),
        (DECOUPLED, "rollout alone"),
        (DECOUPLED, "standard, 4 ranks, by tokens"),
        (DECOUPLED, "split, 2 and 1, padded"),
        (BYPASS, "rollout alone"),
        (BYPASS, "standard, 4 ranks, by tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} keys",
)
def test_placement_changes_no_number_of_it(
    demo: Demo, correction: list[str], placement: str
) -> None:
    assert TOLERANCE == 1e-9
    keys = [*KEYS, *correction]
    one_rank = run(demo, [*PLACEMENTS["standard, 1 rank"], *keys])
    assert_corrects(one_rank)
    assert_same(one_rank, run(demo, [*PLACEMENTS[placement], *keys]))
