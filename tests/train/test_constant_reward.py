"""From rewards that are all equal there is nothing to learn: the weights stay as they are, bit for
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import ONE_RANK, rows_of, small_keys

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.trainer.loop import Trainer

NO_DECAY = "actor_rollout_ref.actor.optim.weight_decay=0"
"""Weight decay changes weights without a gradient. Without it AdamW adds lr * 0 / (0 + eps), which
is 0. The loss has no other term either: entropy_coeff is 0 and use_kl_loss is false by default."""

pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_equal_rewards_leave_every_weight_as_it_was(
    estimator: str, demo: Demo, tmp_path: Path
) -> None:
    reward = tmp_path / "constant.py"
    reward.write_text("def compute_score(*_, **__):\n    return 0.1\n")
    keys = small_keys(
        demo,
        tmp_path / "run",
        *ONE_RANK,
        f"algorithm.adv_estimator={estimator}",
        f"custom_reward_function.path={reward}",
        "actor_rollout_ref.rollout.n=8",
        NO_DECAY,
        "trainer.total_training_steps=4",
        "trainer.save_freq=4",
        "trainer.val_before_train=false",
    )
    Trainer(load_config([], keys)).run()
    before = load_file(Path(demo.model) / "model.safetensors")
    after = load_file(next((tmp_path / "run/checkpoints/step_000004/actor").glob("*.safetensors")))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    rows = [row for row in rows_of(tmp_path / "run") if "actor/updates" in row]
    assert [(row["actor/updates"], row["actor/grad_norm"], row["actor/lr"]) for row in rows] == [
        (2, 0, 1e-3)
    ] * 4
