"""However an update is cut into passes, it is the same update: in one process, without Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.protocol import DataProto, ragged, unpad
from rolepool.protocol.ragged import flat_values
from rolepool.roles.actor_critic import Actor, Critic
from rolepool.roles.model_role import Setup

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
    num_prompt, num_response = 1 + torch.arange(ROWS) % PROMPT, 1 + torch.arange(ROWS) * 5 % RESPONSE
    num_tokens = int((num_prompt + num_response).sum())
    numbers = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    drawn = {key: torch.randn(ROWS, RESPONSE, generator=generator, dtype=torch.float64) for key in numbers}
    for key in ("old_log_probs", "ref_log_prob"):
        drawn[key] = -2 + 0.3 * drawn[key]
    return DataProto.from_dict(
        {
            "input_ids": ragged(torch.randint(4, 12, (num_tokens,), generator=generator), num_prompt + num_response),
            "num_prompt_tokens": num_prompt,
            **{key: unpad(column, num_response) for key, column in drawn.items()},
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
    actor = Actor(config, Setup(10, torch.float64))
    torch.manual_seed(2)
    critic = Critic(config, Setup(10, torch.float64))
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
