"""The parity check on a real GPU, where the rollout engines compute in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trainings import Outcome, Training

pytestmark = pytest.mark.gpu

NUM_STEPS = 2
CHECKED = f"""
data.train_batch_size=32 data.max_prompt_length=8 data.max_response_length=8
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=2
actor_rollout_ref.rollout.calculate_log_probs=true actor_rollout_ref.rollout.parity_check=true
trainer.n_gpus_per_node=1 trainer.total_training_steps={NUM_STEPS}
"""
TRAININGS = {
    # As users train: compiled, and with CUDA graphs.
    "native": Training(f"{CHECKED} actor_rollout_ref.rollout.name=native", compiles=True),
    "transformers": Training(f"{CHECKED} actor_rollout_ref.rollout.name=transformers"),
}


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.trains(name)) for name in TRAININGS]
)
def test_the_parity_check_passes_in_16_bits(engine: str, trained: Callable[[str], Outcome]) -> None:
    rows = list(trained(engine).metrics.values())
    difference = rows[-1]["training/rollout_probs_diff_mean"]
    print(f"{engine}: probabilities differ by {difference:.1e} (mean)")
    assert len(rows) == NUM_STEPS
    assert all(row["actor/updates"] == 2 for row in rows)
