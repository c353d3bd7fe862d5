"""Updates from an engine that keeps old weights, compared with plain loops over tokens: in one
process, with the real roles, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from test_response_mask import LENGTHS, MASK, PER_TOKEN, ROWS, batch_with
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from exact_norms import exact_norm
from rolepool.algorithm.policy_losses import compute_policy_loss_reinforce
from rolepool.config import Config, load_config
from rolepool.protocol import DataProto, pad_ragged, unpad
from rolepool.protocol.columns import rows_of_responses
from rolepool.protocol.worker import WorkerContext, made_in
from rolepool.roles.actor_critic import Actor, Critic
from rolepool.roles.rollout import Rollout
from rolepool.roles.setups import ActorSetup, RolloutSetup, TrainingSetup
from rolepool.trainer.advantages import Estimator, repeated

KEY = "algorithm.rollout_correction"
NUM_PROMPTS, SAMPLES, NUM_STEPS = 8, 2, 3
CLIP, BOUND = 0.2, 3.0


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that do not round to float32."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact_norm())


def config_of(model: Path, *words: str) -> Config:
    keys = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        f"actor_rollout_ref.actor.clip_ratio={CLIP}",
        f"actor_rollout_ref.actor.clip_ratio_c={BOUND}",
        "actor_rollout_ref.actor.grad_clip=1e9",
        "algorithm.adv_estimator=grpo",
    ]
    return load_config([], [*keys, *(f"{KEY}.{word}" for word in words)]).config


def actor_of(config: Config) -> Actor:
    is_reinforce = config.algorithm.rollout_correction.loss_type == "reinforce"
    loss = {"policy_loss": compute_policy_loss_reinforce} if is_reinforce else {}
    return Actor(config, ActorSetup(num_training_steps=10, dtype=torch.float64, **loss))


class Future:
    calls = ()

    def __init__(self, data: DataProto) -> None:
        self.data = data

    def get(self, keys: Any = None) -> DataProto:
        columns = self.data.columns()
        return self.data if keys is None else self.data.select([k for k in keys if k in columns])


class Update(NamedTuple):
    """An optimizer step: the weights before it, and their gradients."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


class Step(NamedTuple):
    batch: DataProto
    updates: list[Update]
    metrics: dict[str, float]


def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Update]:
    """A list to which each optimizer step is added."""
    updates: list[Update] = []

    def note(*_: object) -> None:
        weights: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            weights[name] = parameter.detach().clone()
            gradients[name] = parameter.grad.detach().clone()
        updates.append(Update(weights, gradients))

    optimizer.register_step_pre_hook(note)
    return updates


def prompts() -> DataProto:
    columns = {
        "raw_prompt_ids": [[4 + row, 5 + row % 3, 3] for row in range(NUM_PROMPTS)],
        "uid": [f"row{row}" for row in range(NUM_PROMPTS)],
    }
    arrays = {name: np.fromiter(values, object) for name, values in columns.items()}
    return repeated(DataProto.from_dict(non_tensors=arrays), SAMPLES)


def train(config: Config) -> list[Step]:
    """A few steps whose responses all come from an engine with the weights of the beginning."""
    with made_in(WorkerContext()):
        rollout = Rollout(config, RolloutSetup(stop_token_ids=(1,), dtype=torch.float64))
    actor = actor_of(config)
    updates = watch(actor.trained.model, actor.trained.optimizer)
    estimator: Any = Estimator(config)
    steps: list[Step] = []
    for _ in range(NUM_STEPS):
        rollouts = rollout.generate_sequences(prompts())
        responses = rows_of_responses(rollouts.batch)
        scores = torch.tensor([float(tokens.sum() % 5) for tokens in responses])
        futures = [Future(rollouts), Future(DataProto.from_dict({"scores": scores})), None]
        batch = rollouts
        if not config.bypasses_old_log_prob:
            old = actor.compute_log_prob(rollouts)
            batch = rollouts.union(old)
            futures.append(Future(old))
        estimated = estimator.estimate(prompts(), *futures)
        batch = batch.union(estimated.batch)
        metrics = actor.update_actor(batch)
        steps.append(Step(batch, updates[:], {**estimated.metrics, **metrics}))
        updates.clear()
    return steps


# The reference: one row after the other, one token after the other


class Token(NamedTuple):
    new: Tensor
    """The log-prob under the weights in training; gradients flow through it."""
    old: float
    engine: float
    advantage: float


def tokens_of(model: nn.Module, batch: DataProto, rows: Sequence[int]) -> list[list[Token]]:
    columns = batch.batch
    result: list[list[Token]] = []
    for row in rows:
        ids = columns["input_ids"].unbind()[row]
        num_prompt = int(columns["num_prompt_tokens"][row])
        logits = model(ids[None]).logits[0]
        log_probs = logits.log_softmax(dim=-1)

        def numbers(name: str, row: int = row) -> list[float]:
            values: list[float] = columns[name].unbind()[row].tolist()
            return values

        engine = numbers("rollout_log_probs")
        old = numbers("old_log_probs")
        advantages = numbers("advantages")
        tokens: list[Token] = []
        for place in range(num_prompt, len(ids)):
            new = log_probs[place - 1, ids[place]]
            number = place - num_prompt
            tokens.append(Token(new, old[number], engine[number], advantages[number]))
        result.append(tokens)
    return result


LossOfTokens = Callable[[list[list[Token]]], Tensor]


def gradients_of(
    model: Path, weights: Mapping[str, Tensor], batch: DataProto, rows: range, loss_of: LossOfTokens
) -> dict[str, Tensor]:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    plain.load_state_dict(dict(weights), strict=False)
    loss_of(tokens_of(plain, batch, rows)).backward()
    return {name: weight.grad for name, weight in plain.named_parameters()}


def clipped(token: Token, old: float) -> Tensor:
    """The loss of a token in PPO."""
    ratio = (token.new - old).exp()
    held = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = torch.maximum(-token.advantage * ratio, -token.advantage * held)
    if token.advantage < 0:
        loss = loss.clamp(max=-token.advantage * BOUND)
    return loss


def truncated(rows: list[list[Token]]) -> Tensor:
    """Weights of tokens, at most 1.1."""
    tokens = [token for row in rows for token in row]
    losses: list[Tensor] = []
    for token in tokens:
        weight = min(math.exp(token.old - token.engine), 1.1)
        losses.append(weight * clipped(token, token.old))
    return torch.stack(losses).sum() / len(tokens)


def rejected(rows: list[list[Token]]) -> Tensor:
    """Sequences whose mean ratio is between 1/1.6 and 1.6, with the weight of the sequence."""
    losses: list[Tensor] = []
    for row in rows:
        logs = [token.old - token.engine for token in row]
        if abs(-sum(logs) / len(row)) <= math.log(1.6):
            weight = min(math.exp(sum(logs)), 2.0)
            losses += [weight * clipped(token, token.old) for token in row]
    return torch.stack(losses).sum() / len(losses)


def reinforced(rows: list[list[Token]]) -> Tensor:
    """REINFORCE with weights of the weights in training, whose mean is 1, and without tokens that
    are too far from the engine, which still count in what the loss is divided by."""
    tokens = [token for row in rows for token in row]
    weights: list[float] = []
    for token in tokens:
        weight = math.exp(token.new.item() - token.engine)
        weights.append(weight if 0.8 <= weight <= 1.3 else 0.0)
    mean = sum(weights) / len(weights)
    losses: list[Tensor] = []
    for token, weight in zip(tokens, weights, strict=True):
        if (token.new.item() - token.engine) ** 2 / 2 <= 0.02:
            losses.append(-token.advantage * token.new * weight / mean)
    return torch.stack(losses).sum() / len(tokens)


CASES: dict[str, tuple[LossOfTokens, list[str]]] = {
    "truncated tokens": (truncated, ["rollout_is=token", "rollout_is_threshold=1.1"]),
    "rejected sequences": (
        rejected,
        ["rollout_is=sequence", "rollout_rs=seq_mean_k1", "rollout_rs_threshold=1.6"],
    ),
    "reinforce": (
        reinforced,
        [
            "preset=bypass_pg_token_icepop",
            "rollout_is_threshold=0.8_1.3",
            "rollout_is_batch_normalize=true",
            "rollout_rs=token_k2",
            "rollout_rs_threshold=0.02",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_with_an_engine_of_old_weights_are_those_of_plain_loops(
    model: Path, case: str
) -> None:
    loss_of, words = CASES[case]
    steps = train(config_of(model, *words))
    rows_of_mini_batch = NUM_PROMPTS * SAMPLES // 2
    for number, step in enumerate(steps):
        assert len(step.updates) == 2
        for place, update in enumerate(step.updates):
            first = place * rows_of_mini_batch
            rows = range(first, first + rows_of_mini_batch)
            expected = gradients_of(model, update.weights, step.batch, rows, loss_of)
            for name, gradient in update.gradients.items():
                torch.testing.assert_close(
                    gradient, expected[name], rtol=1e-8, atol=1e-12, msg=f"{number} {place} {name}"
                )
    sizes = [step.metrics["rollout_corr/rollout_is_eff_sample_size"] for step in steps]
    if case != "reinforce":  # whose first step has a second update, with other weights
        assert sizes[0] == pytest.approx(1, abs=1e-9), "the engine has the weights of the actor"
    assert sizes[-1] < 0.999, "it has older ones"
    masked = [step.metrics.get("rollout_corr/rollout_rs_masked_fraction", 0) for step in steps]
    assert (masked[-1] > 0) == ("rollout_rs" in " ".join(words))


def test_micro_batches_change_no_update(model: Path) -> None:
    _, words = CASES["reinforce"]
    config = config_of(model, *words)
    mine = train(config)
    actor = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    theirs = train(config.with_value(actor, 8))
    for one, other in zip(mine, theirs, strict=True):
        for update, same in zip(one.updates, other.updates, strict=True):
            for name, gradient in update.gradients.items():
                torch.testing.assert_close(same.gradients[name], gradient, rtol=1e-8, atol=1e-12)
        for name, value in one.metrics.items():
            if name.startswith(("rollout_corr/", "actor/")):
                assert other.metrics[name] == pytest.approx(value, rel=1e-8, abs=1e-12), name


# Tokens that are left out


def updated(model: Path, garbage: float, kept: Tensor | None) -> dict[str, float]:
    """Metrics of an update of actor and critic, in which rejected tokens have other numbers."""
    batch = batch_with(MASK)
    if kept is not None:
        batch.batch["loss_mask"] = unpad(kept, LENGTHS)
        for name in PER_TOKEN:
            column = batch.batch[name]
            numbers = pad_ragged(column)
            batch.batch[name] = unpad(torch.where(kept, numbers, numbers + garbage), LENGTHS)
    words = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={ROWS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "data.max_response_length=8",
    ]
    config = load_config([], words).config
    metrics: dict[str, float] = {}
    torch.manual_seed(2)
    actor = Actor(config, ActorSetup(num_training_steps=10, dtype=torch.float64))
    critic = Critic(config, TrainingSetup(num_training_steps=10, dtype=torch.float64))
    metrics = {**actor.update_actor(batch), **critic.update_critic(batch)}
    metrics.pop("perf/cpu_memory_used_gb")
    return metrics


def test_numbers_of_rejected_tokens_change_no_update(model: Path) -> None:
    kept = torch.ones_like(MASK)
    kept[0, 1] = kept[3, 5] = False
    kept[1] = False
    first = updated(model, 0.0, kept)
    assert updated(model, 5.0, kept) == pytest.approx(first, rel=1e-12)
    everything = updated(model, 0.0, None)
    assert everything["critic/vf_loss"] != first["critic/vf_loss"]
    assert updated(model, 0.0, torch.ones_like(MASK)) == pytest.approx(everything, rel=1e-12)


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_loss_of_the_user_gets_weights_only_if_there_are_some(
    model: Path, has_weights: bool
) -> None:
    received: list[dict[str, Any]] = []

    def own_loss(log_prob: Tensor, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        received.append(arguments)
        return log_prob.sum(), {}

    batch = batch_with(MASK)
    weights = torch.rand(MASK.shape, dtype=torch.float64)
    if has_weights:
        batch.batch["rollout_is_weights"] = unpad(weights, LENGTHS)
    words = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={ROWS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={ROWS}",
        "data.max_response_length=8",
    ]
    setup = ActorSetup(num_training_steps=10, dtype=torch.float64, policy_loss=own_loss)
    Actor(load_config([], words).config, setup).update_actor(batch)
    (arguments,) = received
    assert ("rollout_is_weights" in arguments) == has_weights
    if has_weights:
        given = arguments["rollout_is_weights"]
        mask = arguments["response_mask"]
        rows = [set(row[kept].tolist()) for row, kept in zip(given, mask, strict=True)]
        expected = [set(row[kept].tolist()) for row, kept in zip(weights, MASK, strict=True)]
        assert sorted(map(sorted, rows)) == sorted(map(sorted, expected))
