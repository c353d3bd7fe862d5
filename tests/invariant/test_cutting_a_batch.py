"""However an update is cut into passes, it is the same update: in one process, without Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rolepool.config import load_config
from rolepool.config.functions import policy_losses
from rolepool.protocol import DataProto, ragged, unpad
from rolepool.protocol.columns import flat_values
from rolepool.roles.actor_critic import Actor, Critic
from rolepool.roles.setups import ActorSetup, TrainingSetup

PROMPT, RESPONSE, ROWS = 8, 6, 12

CUTS = {
    "one pass": [],
    "passes of one row": [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
    ],
    "passes of three rows": [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "critic.ppo_micro_batch_size_per_gpu=3",
    ],
    "passes by tokens": [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20",
        "critic.ppo_max_token_len_per_gpu=20",
    ],
    "padded": ["actor_rollout_ref.model.use_remove_padding=false"],
    "padded, passes of two rows": [
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "critic.ppo_micro_batch_size_per_gpu=2",
    ],
    "checkpointed": [
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "critic.model.enable_gradient_checkpointing=true",
    ],
}


def ragged_batch() -> DataProto:
    """Rows of many lengths, with what both updates read."""
    generator = torch.Generator().manual_seed(3)
    num_prompt, num_response = (
        1 + torch.arange(ROWS) % PROMPT,
        1 + torch.arange(ROWS) * 5 % RESPONSE,
    )
    num_tokens = int((num_prompt + num_response).sum())
    numbers = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    drawn = {
        key: torch.randn(ROWS, RESPONSE, generator=generator, dtype=torch.float64)
        for key in numbers
    }
    for key in ("old_log_probs", "ref_log_prob"):
        drawn[key] = -2 + 0.3 * drawn[key]
    return DataProto.from_dict(
        {
            "input_ids": ragged(
                torch.randint(4, 12, (num_tokens,), generator=generator), num_prompt + num_response
            ),
            "num_prompt_tokens": num_prompt,
            **{key: unpad(column, num_response) for key, column in drawn.items()},
        }
    )


def updated(
    model: Path, overrides: list[str], mode: str
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of three updates of actor and critic, and the weights after."""
    config = load_config(
        [],
        [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_batch_size={ROWS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS // 2}",
            f"actor_rollout_ref.actor.loss_agg_mode={mode}",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "critic.model.enable_gradient_checkpointing=false",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={RESPONSE}",
            *overrides,
        ],
    ).config
    torch.manual_seed(1)
    loss = policy_losses.find(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    actor = Actor(config, ActorSetup(num_training_steps=10, dtype=torch.float64, policy_loss=loss))
    torch.manual_seed(2)
    critic = Critic(config, TrainingSetup(num_training_steps=10, dtype=torch.float64))
    rows, batch = [], ragged_batch()
    for _ in range(3):
        scored = actor.compute_log_prob(batch).batch
        values = critic.compute_values(batch).batch["values"]
        seen = {
            "log_prob": float(flat_values(scored["old_log_probs"]).sum()),
            "value": float(flat_values(values).sum()),
        }
        seen["entropy"] = float(scored["entropy_sums"].sum())
        made = {**actor.update_actor(batch), **critic.update_critic(batch)}
        assert made.pop("perf/cpu_memory_used_gb") > 0  # differs from run to run
        rows.append({**made, **seen})
    weights = {
        **actor.trained.model.state_dict(),
        **{f"critic.{k}": v for k, v in critic.trained.model.state_dict().items()},
    }
    return rows, {name: tensor.detach().clone() for name, tensor in weights.items()}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_losses_gradient_norms_and_weights_do_not_depend_on_how_passes_are_cut(
    model: Path, mode: str
) -> None:
    assert_same_in_all(model, list(CUTS), mode)


@pytest.mark.parametrize("loss", ["gspo", "gpg", "geo_mean", "cispo"])
def test_other_policy_losses_do_not_depend_on_how_passes_are_cut(model: Path, loss: str) -> None:
    cuts = ["one pass", "padded, passes of two rows"]
    assert_same_in_all(
        model, cuts, "token-sum", [f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    )


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_losses_that_compare_the_tokens_of_a_micro_batch_make_the_same_choice_again(
    model: Path, loss: str
) -> None:
    keys = [
        f"actor_rollout_ref.actor.policy_loss.{key}"
        for key in (f"loss_mode={loss}", "clip_cov_lb=0.01")
    ]
    packed, padded = (
        updated(model, [*keys, *CUTS[cut]], "token-mean")[0] for cut in ("one pass", "padded")
    )
    for row, other in zip(packed, padded, strict=True):
        assert row == pytest.approx(other, rel=1e-9, abs=1e-9)
    if loss == "clip_cov":
        assert packed[0]["actor/pg_clipfrac"] > 0


def test_the_loss_scale_factor_divides_the_loss(model: Path) -> None:
    keys = [
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
        "actor_rollout_ref.actor.loss_scale_factor=3",
    ]
    default, third = (
        updated(model, keys[:count], "seq-mean-token-sum-norm")[0][0] for count in (1, 2)
    )
    for key in ("actor/pg_loss", "actor/kl_loss", "actor/entropy"):
        assert third[key] == pytest.approx(default[key] * RESPONSE / 3, rel=1e-12)
    assert third["critic/vf_loss"] == default["critic/vf_loss"]


def assert_same_in_all(
    model: Path, cuts: list[str], mode: str, keys: list[str] | None = None
) -> None:
    first_rows, first_weights = updated(model, [*(keys or []), *CUTS[cuts[0]]], mode)
    assert first_rows[0]["actor/grad_norm"] > 0 and first_rows[0] != first_rows[1]
    for name in cuts[1:]:
        rows, weights = updated(model, [*(keys or []), *CUTS[name]], mode)
        for row, first in zip(rows, first_rows, strict=True):
            assert row.keys() == first.keys()
            for key in first:
                assert np.isclose(row[key], first[key], rtol=1e-9, atol=1e-9), (name, key)
        for key, tensor in first_weights.items():
            torch.testing.assert_close(
                weights[key], tensor, rtol=1e-9, atol=1e-9, msg=f"{name}: {key}"
            )
