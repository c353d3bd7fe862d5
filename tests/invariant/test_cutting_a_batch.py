"""However an update is cut into passes, it is the same update: in one process, without Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.protocol import DataProto
from rolepool.roles.actor import Actor
from rolepool.roles.critic import Critic

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo(tmp_path_factory.mktemp("demo") / "data").model


def ragged_batch() -> DataProto:
    """Rows of many lengths, with what both updates read."""
    generator = torch.Generator().manual_seed(3)
    lengths = [(1 + row % PROMPT, 1 + (row * 5) % RESPONSE) for row in range(ROWS)]
    mask = torch.zeros(ROWS, PROMPT + RESPONSE, dtype=torch.int64)
    for row, (prompt, response) in enumerate(lengths):
        mask[row, PROMPT - prompt : PROMPT + response] = 1
    ids = torch.randint(4, 12, mask.shape, generator=generator) * mask
    shape = (ROWS, RESPONSE)
    response_mask = mask[:, PROMPT:]
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
            "responses": ids[:, PROMPT:],
            "response_mask": response_mask,
            "old_log_probs": -2 + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) * response_mask,
            "ref_log_prob": -2 + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) * response_mask,
            "advantages": torch.randn(shape, generator=generator, dtype=torch.float64) * response_mask,
            "values": torch.randn(shape, generator=generator, dtype=torch.float64) * response_mask,
            "returns": torch.randn(shape, generator=generator, dtype=torch.float64) * response_mask,
        }
    )


def updated(model: Path, overrides: list[str], mode: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
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
    actor = Actor(config, 10, torch.float64)
    torch.manual_seed(2)
    critic = Critic(config, 10, torch.float64)
    rows, batch = [], ragged_batch()
    for _ in range(3):
        scored = actor.compute_log_prob(batch).batch
        values = critic.compute_values(batch).batch["values"]
        seen = {"log_prob": float(scored["old_log_probs"].sum()), "value": float(values.sum())}
        rows.append({**actor.update_actor(batch), **critic.update_critic(batch), **seen})
    weights = {
        **actor.trained.model.state_dict(),
        **{f"critic.{k}": v for k, v in critic.trained.model.state_dict().items()},
    }
    return rows, {name: tensor.detach().clone() for name, tensor in weights.items()}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_losses_gradient_norms_and_weights_do_not_depend_on_how_passes_are_cut(model: Path, mode: str) -> None:
    first_rows, first_weights = updated(model, CUTS["one pass"], mode)
    assert first_rows[0]["actor/grad_norm"] > 0 and first_rows[0] != first_rows[1]
    for name, overrides in CUTS.items():
        rows, weights = updated(model, overrides, mode)
        for row, first in zip(rows, first_rows, strict=True):
            assert row.keys() == first.keys()
            for key in first:
                assert np.isclose(row[key], first[key], rtol=1e-9, atol=1e-9), (name, key)
        for key, tensor in first_weights.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-9, atol=1e-9, msg=f"{name}: {key}")
