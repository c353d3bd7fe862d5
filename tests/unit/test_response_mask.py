"""Only tokens that the policy sampled count: in losses, entropies, advantages, scores and
metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rolepool.config import load_config
from rolepool.protocol import DataProto, pad_ragged, ragged, unpad
from rolepool.protocol.batching import pad_rows
from rolepool.protocol.columns import flat_values
from rolepool.roles.actor_critic import Actor, Critic
from rolepool.roles.setups import ActorSetup, TrainingSetup
from rolepool.trainer.advantages import Estimated, Estimator, describe

PROMPT, LENGTHS = 3, torch.tensor([7, 4, 1, 6])
MASK = torch.tensor(
    [[1, 1, 0, 0, 1, 0, 1], [1, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]],
    dtype=torch.bool,
)
ROWS, WIDTH = MASK.shape
PER_TOKEN = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")


def batch_with(mask: Tensor | None, garbage: float = 0.0) -> DataProto:
    """A batch for updates. `garbage` is added to the numbers of tokens that were not sampled."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 12, (int(LENGTHS.sum()) + ROWS * PROMPT,), generator=generator)
    drawn = {
        key: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for key in PER_TOKEN
    }
    columns = {
        "input_ids": ragged(ids, LENGTHS + PROMPT),
        "num_prompt_tokens": torch.full((ROWS,), PROMPT),
    }
    if mask is not None:
        columns["response_mask"] = unpad(mask, LENGTHS)
        drawn = {
            key: torch.where(mask, numbers, numbers + garbage) for key, numbers in drawn.items()
        }
    return DataProto.from_dict(
        {**columns, **{key: unpad(numbers, LENGTHS) for key, numbers in drawn.items()}}
    )


def updated(
    model: Path, batch: DataProto, mode: str = "token-mean", num_rows: int = ROWS
) -> dict[str, float]:
    """Metrics of an update of actor and critic, and the sum of the weights after it."""
    keys = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={num_rows}",
        "critic.optim.lr=1e-3",
    ]
    keys += [
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    keys += [
        "data.max_prompt_length=4",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ]
    config = load_config([], [*keys, "actor_rollout_ref.actor.optim.lr=1e-3"]).config
    actor = Actor(config, ActorSetup(num_training_steps=10, dtype=torch.float64))
    torch.manual_seed(2)
    critic = Critic(config, TrainingSetup(num_training_steps=10, dtype=torch.float64))
    entropy = float(actor.compute_log_prob(batch).batch["entropy_sums"][:ROWS].sum())
    metrics = {**actor.update_actor(batch), **critic.update_critic(batch), "entropy": entropy}
    metrics.pop("perf/cpu_memory_used_gb")
    for role in (actor, critic):
        parameters = role.trained.model.parameters()
        metrics[f"{role.role}/weights"] = sum(
            float(one.detach().double().abs().sum()) for one in parameters
        )
    return metrics


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_numbers_of_tokens_that_were_not_sampled_change_no_update(model: Path, mode: str) -> None:
    first = updated(model, batch_with(MASK), mode)
    assert updated(model, batch_with(MASK, garbage=5.0), mode) == first
    assert updated(model, batch_with(None), mode)["actor/pg_loss"] != first["actor/pg_loss"]


def test_a_mask_of_ones_is_the_same_as_no_mask_bit_for_bit(model: Path) -> None:
    everything = torch.arange(WIDTH) < LENGTHS[:, None]
    assert updated(model, batch_with(everything)) == updated(model, batch_with(None))


def test_rows_that_pad_a_batch_add_nothing_beside_a_mask(model: Path) -> None:
    padded = updated(model, pad_rows(batch_with(MASK), 2), num_rows=ROWS + 2)
    assert padded == pytest.approx(updated(model, batch_with(MASK)), rel=1e-9)


def test_the_loss_is_the_mean_over_sampled_tokens(model: Path) -> None:
    batch = batch_with(MASK)
    config = load_config(
        [], [f"actor_rollout_ref.model.path={model}", f"data.train_batch_size={ROWS}"]
    ).config
    log_probs = pad_ragged(
        Actor(config, ActorSetup(num_training_steps=10, dtype=torch.float64))
        .compute_log_prob(batch)
        .batch["old_log_probs"]
    )
    batch.batch["old_log_probs"] = unpad(log_probs, LENGTHS)  # so that all ratios are 1
    advantages = pad_ragged(batch.batch["advantages"])
    loss = updated(model, batch)["actor/pg_loss"]
    assert loss == pytest.approx(-float(advantages[MASK].mean()), rel=1e-9)


# Advantages


class Future:
    calls = ()

    def __init__(self, columns: dict[str, Any]) -> None:
        self.batch = DataProto.from_dict(columns)

    def get(self, keys: Any = None) -> DataProto:
        return (
            self.batch
            if keys is None
            else self.batch.select([key for key in keys if key in self.batch.batch])
        )


TURNS = torch.zeros(ROWS, WIDTH)
TURNS[0, 1], TURNS[0, 6], TURNS[1, 3] = 0.25, 0.5, 1.0
SCORES = torch.tensor([0.75, 1.0, 0.5, -1.0])
ENVIRONMENT = torch.tensor([0.75, 1.0, torch.nan, torch.nan])
"""The last two scores come from elsewhere."""


def estimated(*words: str, garbage: float = 0.0) -> tuple[Estimated, DataProto]:
    numbers = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) / 10
    numbers = torch.where(MASK, numbers, garbage)
    sizes = {"num_prompt_tokens": torch.full((ROWS,), PROMPT), "num_response_tokens": LENGTHS}
    counts = {
        name: torch.tensor([3, 2, 1, 1])
        for name in ("num_turns", "num_tool_calls", "num_tool_errors")
    }
    turns = {"turn_scores": unpad(TURNS, LENGTHS), "environment_score": ENVIRONMENT, **counts}
    rollouts: Any = Future({**sizes, **turns, "response_mask": unpad(MASK, LENGTHS)})
    values: Any = Future({"values": unpad(numbers, LENGTHS)})
    log_probs: Any = [
        Future({key: unpad(-numbers * scale, LENGTHS)}) for key, scale in LOG_PROBS.items()
    ]
    config = load_config(
        [], ["data.max_prompt_length=4", "data.max_response_length=7", *words]
    ).config
    prompts = DataProto.from_dict(non_tensors={"uid": np.array(["a", "a", "b", "b"], dtype=object)})
    scores: Any = Future({"scores": SCORES})
    made = Estimator(config).estimate(prompts, rollouts, scores, None, values, *log_probs)
    entropies = numbers.double() * MASK
    probs = {
        "rollout_log_probs": unpad(-numbers, LENGTHS),
        "old_log_probs": unpad(-numbers * 1.01, LENGTHS),
    }
    return made, DataProto.from_dict({"entropy_sums": entropies.sum(dim=1), **probs})


LOG_PROBS = {"old_log_probs": 1.0, "ref_log_prob": 1.5}
ESTIMATORS = ("gae", "grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def test_scores_of_turns_are_at_their_ends_and_other_scores_at_the_last_token() -> None:
    scores = estimated()[0].tensors["token_level_scores"]
    expected = TURNS.clone()
    expected[2, 0], expected[3, 5] = 0.5, -1.0
    assert torch.equal(scores, expected)
    assert torch.equal(scores.sum(dim=1), SCORES)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_ignore_tokens_that_were_not_sampled(estimator: str) -> None:
    keys = (
        f"algorithm.adv_estimator={estimator}",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.rollout.n=2",
    )
    (one, scored), (other, other_scored) = (
        estimated(*keys, garbage=garbage) for garbage in (0.0, 33.0)
    )
    for key in ("advantages", "returns"):
        assert torch.equal(one.tensors[key], other.tensors[key])
        assert not flat_values(one.batch.batch[key])[~flat_values(unpad(MASK, LENGTHS))].any()
    assert one.metrics == other.metrics
    assert describe(one, scored) == describe(replace(other, span=one.span), other_scored)


def test_gae_steps_from_the_last_token_of_a_turn_to_the_first_of_the_next() -> None:
    keys = ("algorithm.gamma=0.9", "algorithm.lam=0.8")
    returns = estimated(*keys)[0].tensors["returns"][0][MASK[0]].tolist()
    values, rewards = [0.0, 0.1, 0.4, 0.6], [0.0, 0.25, 0.0, 0.5]
    advantage, expected = 0.0, []
    for value, reward, following in reversed(
        list(zip(values, rewards, [*values[1:], 0.0], strict=True))
    ):
        advantage = reward + 0.9 * following - value + 0.9 * 0.8 * advantage
        expected.append(advantage + value)
    assert returns == pytest.approx(expected[::-1], rel=1e-5)


def test_metrics_tell_sampled_tokens_from_those_of_the_environment() -> None:
    metrics = describe(*estimated())
    assert metrics["response_length/mean"] == int(MASK.sum()) / ROWS
    assert metrics["environment_length/mean"] == (int(LENGTHS.sum()) - int(MASK.sum())) / ROWS
    assert metrics["response_length/clip_ratio"] == 0.25, "one response has all 7 tokens"
    assert metrics["perf/total_num_tokens"] == int(LENGTHS.sum()) + ROWS * PROMPT
    assert (metrics["num_turns/mean"], metrics["num_turns/max"], metrics["num_tool_calls/min"]) == (
        1.75,
        3,
        1,
    )
    of_token = (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) / 10)[MASK]
    assert metrics["actor/entropy"] == pytest.approx(float(of_token.mean()), rel=1e-5)
    difference = ((-of_token).exp() - (-of_token * 1.01).exp()).abs()
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(
        float(difference.mean()), rel=1e-3
    )
