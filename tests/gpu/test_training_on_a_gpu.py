"""Training and scoring on a real GPU: compiled, packed, bounded logits; against the plain way of
doing the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rolepool.algorithm.losses import LossCounts
from rolepool.algorithm.policy_losses import compute_policy_loss_vanilla
from rolepool.config import load_config
from rolepool.models.packing import LinearLogProbs, TokenRows, packed_attention, response_log_probs
from rolepool.models.sharding import compiled_for_weight, has_compiler
from rolepool.protocol import DataProto, ragged, unpad
from rolepool.protocol.columns import flat_values
from rolepool.protocol.worker import WorkerContext, made_in
from rolepool.roles.actor_critic import Actor, Critic
from rolepool.roles.setups import ActorSetup, TrainingSetup

pytestmark = pytest.mark.gpu

ROWS, PROMPT, RESPONSE, VOCABULARY = 16, 96, 160, 32_000
BF16_NOISE = 0.05
"""Relative difference of gradients that two right ways of computing them in 16 bits may have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> DataProto:
    """Rows of many lengths. The old log-probs are the model's own, so that no ratio is near where
    it is clipped."""
    generator = torch.Generator().manual_seed(1)
    prompts, responses = (
        torch.randint(8, size + 1, (ROWS,), generator=generator) for size in (PROMPT, RESPONSE)
    )
    ids = torch.randint(VOCABULARY, (int((prompts + responses).sum()),), generator=generator)
    floats = {
        key: torch.randn(int(responses.sum()), generator=generator)
        for key in ("advantages", "values", "returns")
    }
    rows = DataProto.from_dict(
        {
            "input_ids": ragged(ids, prompts + responses),
            "num_prompt_tokens": prompts,
            **{key: ragged(values, responses) for key, values in floats.items()},
        }
    )
    with torch.no_grad():
        log_probs = naive_log_probs(naive_model(folder), padded(rows))
    rows.batch["old_log_probs"] = unpad(log_probs.cpu(), responses)
    return rows


def padded(rows: DataProto) -> dict[str, Tensor]:
    return dict(rows.to_padded(PROMPT, RESPONSE).to("cuda").batch.items())


def role(kind: type[Any], folder: Path, *words: str) -> Any:
    config = load_config(
        [],
        [
            f"actor_rollout_ref.model.path={folder}",
            f"data.train_batch_size={ROWS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={RESPONSE}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "critic.cliprange_value=100",
            *words,
        ],
    ).config
    torch.manual_seed(3)
    with made_in(WorkerContext(role=kind.__name__.lower(), device="cuda")):
        setup_type = ActorSetup if kind is Actor else TrainingSetup
        return kind(config, setup_type(num_training_steps=2))


def gradients_of_update(
    kind: type[Any], folder: Path, data: DataProto, *words: str
) -> dict[str, Tensor]:
    """The gradients as the optimizer sees them in a first update."""
    made, seen = role(kind, folder, *words), {}

    def look(*_: object) -> None:
        for name, parameter in made.trained.model.named_parameters():
            seen[name] = parameter.grad.clone()

    made.trained.optimizer.register_step_pre_hook(look)
    update = made.update_actor if kind is Actor else made.update_critic
    update(data)
    return seen


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients as one vector."""
    assert found.keys() == expected.keys()
    difference = sum(
        float((found[name] - expected[name]).double().square().sum()) for name in expected
    )
    size = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return float((difference / size) ** 0.5)


def naive_model(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return model.cuda().train()


def naive_log_probs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Padded rows, all logits in fp32."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs, use_cache=False).logits[:, PROMPT - 1 : -1].float()
    return (
        torch.log_softmax(logits, dim=-1).gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)
    )


def naive_gradients(folder: Path, data: DataProto) -> dict[str, Tensor]:
    """By torch's own autograd."""
    model = naive_model(folder)
    batch = padded(data)
    mask = batch["response_mask"]
    loss, _ = compute_policy_loss_vanilla(
        batch["old_log_probs"],
        naive_log_probs(model, batch),
        batch["advantages"],
        mask,
        "token-mean",
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        counts=LossCounts.of(mask),
    )
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_gradients_of_an_update_are_those_of_the_plain_way_within_noise_of_16_bits(
    one_rank: None, folder: Path, data: DataProto
) -> None:
    start_s = time.perf_counter()
    packed = gradients_of_update(Actor, folder, data)
    first_s = time.perf_counter() - start_s
    difference = relative_difference(packed, naive_gradients(folder, data))
    print(f"\nrelative difference {difference:.4f}, first update {first_s:.1f} s")
    assert difference < BF16_NOISE


@pytest.mark.parametrize(
    ("kind", "checkpointing", "compiles"),
    [
        (Actor, "false", True),
        (Actor, "true", False),
        (Critic, "false", False),
        (Critic, "true", True),
    ],
)
def test_packed_updates_are_padded_updates(
    one_rank: None,
    folder: Path,
    data: DataProto,
    kind: type[Any],
    checkpointing: str,
    compiles: bool,
) -> None:
    """Each kind of role is compiled in one case, because compiling takes longer than the rest."""
    words = [f"actor_rollout_ref.model.enable_gradient_checkpointing={checkpointing}"]
    words.append(f"critic.model.enable_gradient_checkpointing={checkpointing}")
    stance = "default" if compiles else "force_eager"
    with torch.compiler.set_stance(stance):
        padded = gradients_of_update(
            kind, folder, data, *words, "actor_rollout_ref.model.use_remove_padding=false"
        )
        packed = gradients_of_update(kind, folder, data, *words)
    difference = relative_difference(packed, padded)
    print(f"\n{kind.__name__}, checkpointing={checkpointing}: relative difference {difference:.4f}")
    assert difference < BF16_NOISE


def test_log_probs_before_an_update_are_those_within_it(
    one_rank: None, folder: Path, data: DataProto
) -> None:
    actor = role(Actor, folder)
    scored = actor.compute_log_prob(data).batch
    actor.trained.model.train()
    part = TokenRows(data.batch, "cuda")
    with actor.trained.on_device(training=True) as model:
        within, _ = response_log_probs(model, part, temperature=1.0, packed=True)
    difference = float((flat_values(scored["old_log_probs"]) - within.detach().cpu()).abs().max())
    print(f"\nlargest difference {difference:.5f}")
    assert difference < 0.05


@pytest.mark.parametrize("window", [None, 24])
def test_attention_on_the_gpu_is_attention_sequence_by_sequence(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [1, 70, 33, 200]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    states = [torch.randn(1, heads, sum(lengths), 64, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    outputs, gradients = [], []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        inputs = [state.to(device, dtype).detach().requires_grad_() for state in states]
        where = {
            "cu_seq_lens_q": starts.to(device),
            "max_length_q": max(lengths),
            "sliding_window": window,
        }
        result, _ = packed_attention(nn.Module(), *inputs, None, scaling=0.125, **where)
        gradients.append(
            torch.cat(
                [grad.flatten() for grad in torch.autograd.grad(result.square().sum(), inputs)]
            )
        )
        outputs.append(result.detach().flatten())
    for expected, found in (outputs, gradients):
        difference = float((found.cpu().double() - expected).norm() / expected.norm())
        print(f"\nwindow {window}: relative difference {difference:.4f}")
        assert difference < BF16_NOISE


def test_compiled_scores_are_the_plain_ones() -> None:
    assert has_compiler()
    torch.manual_seed(0)
    hidden = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (
        torch.randn(VOCABULARY, 128, device="cuda", dtype=torch.bfloat16) / 8
    ).requires_grad_()
    labels = torch.randint(VOCABULARY, (300,), device="cuda")
    found = LinearLogProbs(100 * VOCABULARY, compiled_for_weight)(hidden, weight, labels, 0.8)
    expected = LinearLogProbs(100 * VOCABULARY)(hidden, weight, labels, 0.8)
    plain = (
        torch.log_softmax((hidden @ weight.T / 0.8).float(), dim=-1)
        .gather(-1, labels.unsqueeze(-1))
        .squeeze(-1)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        found[0], plain, rtol=0.02, atol=0.1
    )  # its logits are divided in 16 bits
    grads = [
        torch.autograd.grad(one[0].sum() + 0.1 * one[1].sum(), (hidden, weight))
        for one in (found, expected)
    ]
    for one, other in zip(*grads, strict=True):
        assert float((one - other).float().norm() / other.float().norm()) < 0.01


def test_an_update_takes_at_most_half_the_memory_of_the_plain_way(
    one_rank: None, folder: Path, data: DataProto
) -> None:
    def peak(action: Any) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() - before

    words = ["actor_rollout_ref.model.enable_gradient_checkpointing=false"]
    gradients_of_update(Actor, folder, data, *words)  # compiles
    ours = peak(lambda: gradients_of_update(Actor, folder, data, *words))
    plain = peak(lambda: naive_gradients(folder, data))
    print(f"\n{ours / 2**20:.0f} MiB against {plain / 2**20:.0f} MiB")
    assert ours <= plain / 2
