"""How far the log-probs of two correct implementations are apart, and how far those of wrong ones.

    python benchmarks/parity_limit.py MODEL_FOLDER [--dtype bfloat16] [--prompts 12] [--tokens 64]
        [--temperatures 0.5 1 1.5]

`actor_rollout_ref.rollout.parity_limit` must let every correct rollout engine pass, and stop a
wrong one. This samples responses with the model in a more exact dtype, and computes their log-probs
in bfloat16 (as on GPUs) or float32 (as on CPUs) in several correct ways, and with several mistakes
that engines make. Every pair is compared on groups of 64 tokens, as a run does it. Two measures are
printed:

    mean    the mean difference of the log-probs
    logits  the mean error of logits that explains it, which a run compares with the limit (`rolepool.models.parity`)
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolepool.models.parity import NUM_TOKENS, logit_error

QUESTIONS = (
    "What is 7 + 5?",
    "Name three rivers in Europe.",
    "Write a short poem about rain.",
    "Explain why the sky is blue.",
    "What is the capital of Japan?",
    "Translate 'good morning' to French.",
    "Which is heavier, a kilogram of iron or a kilogram of wool?",
    "How do I boil an egg?",
    "Give me a list of five animals that can swim.",
    "What does HTTP stand for?",
    "If I have 12 apples and eat 4, how many are left?",
    "Tell me a story about a fox.",
)
LogProbs = Callable[[Any, Tensor, int, float], Tensor]


def log_probs_of(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The log-probs of tokens, computed in float32."""
    scores = torch.log_softmax(
        logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1
    )
    return scores.gather(-1, tokens[..., None]).squeeze(-1)


def whole_rows(model: Any, row: Tensor, num_prompt: int, temperature: float) -> Tensor:
    """All tokens at once, as the actor computes them."""
    logits = model(input_ids=row[None]).logits[0, num_prompt - 1 : -1]
    return log_probs_of(logits, row[num_prompt:], temperature)


def token_by_token(model: Any, row: Tensor, num_prompt: int, temperature: float) -> Tensor:
    """With a key-value cache, as engines generate."""
    output = model(input_ids=row[None, :num_prompt], use_cache=True)
    found = []
    for index in range(num_prompt, len(row)):
        found.append(log_probs_of(output.logits[0, -1], row[index], temperature))
        token = row[None, index : index + 1]
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return torch.stack(found)


def left_padded(model: Any, row: Tensor, num_prompt: int, temperature: float) -> Tensor:
    """In a batch with a longer row."""
    padding = 37
    ids = torch.cat((row.new_zeros(padding), row))
    mask = (torch.arange(len(ids)) >= padding).long()
    positions = (mask.cumsum(0) - 1).clamp(min=0)
    output = model(input_ids=ids[None], attention_mask=mask[None], position_ids=positions[None])
    return log_probs_of(
        output.logits[0, padding + num_prompt - 1 : -1], row[num_prompt:], temperature
    )


def shifted(model: Any, row: Tensor, num_prompt: int, temperature: float) -> Tensor:
    """The response has positions that begin one too late."""
    positions = torch.arange(len(row))
    positions[num_prompt:] += 1
    logits = model(input_ids=row[None], position_ids=positions[None]).logits[0, num_prompt - 1 : -1]
    return log_probs_of(logits, row[num_prompt:], temperature)


def warmer(model: Any, row: Tensor, num_prompt: int, temperature: float) -> Tensor:
    """The log-probs of a temperature that is a tenth higher."""
    return whole_rows(model, row, num_prompt, temperature * 1.1)


def without_first_token(model: Any, row: Tensor, num_prompt: int, temperature: float) -> Tensor:
    return whole_rows(model, row[1:], num_prompt - 1, temperature)


@contextmanager
def noisy(model: Any, size: float) -> Iterator[None]:
    """Other weights: each matrix has noise of this size, relative to its own size."""
    kept = {name: weight.clone() for name, weight in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * size
        weight.add_(noise.to(weight.dtype))
    yield
    for name, weight in model.named_parameters():
        weight.copy_(kept[name])


@contextmanager
def in_8_bits(model: Any) -> Iterator[None]:
    """The weights of matrices are rounded to 8 bits, with one scale for each row."""
    kept = {name: weight.clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        if weight.dim() == 2:
            scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
            weight.copy_((weight.float() / scale).round() * scale)
    yield
    for name, weight in model.named_parameters():
        weight.copy_(kept[name])


@contextmanager
def without_last_layer(model: Any) -> Iterator[None]:
    layers = model.model.layers
    model.model.layers = layers[:-1]
    yield
    model.model.layers = layers


def sample(model: Any, prompt: Tensor, num_tokens: int, temperature: float, seed: int) -> Tensor:
    torch.manual_seed(seed)
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return model.generate(prompt[None], max_new_tokens=num_tokens, pad_token_id=0, **options)[0]


def groups(values: list[Tensor]) -> Tensor:
    """[groups, NUM_TOKENS] tokens in their order, without the last incomplete group."""
    flat = torch.cat(values)
    return flat[: len(flat) // NUM_TOKENS * NUM_TOKENS].view(-1, NUM_TOKENS)


def show(
    name: str, kind: str, ours: Tensor, theirs: Tensor, temperature: float
) -> tuple[float, float]:
    """Print both measures. Returns the smallest and the largest error of a group."""
    mean = (ours - theirs).abs().mean(1)
    errors = torch.tensor(
        [logit_error(*pair, temperature) for pair in zip(theirs, ours, strict=True)]
    )
    print(
        f"{kind:8} {name:34} mean {mean.min():.2g} to {mean.max():.2g}   "
        f"logits {errors.min():.2g} to {errors.max():.2g} (median {errors.median():.2g})",
        flush=True,
    )
    return float(errors.min()), float(errors.max())


def sampled_rows(
    model: Any, tokenizer: Any, options: argparse.Namespace, temperature: float
) -> list[tuple[Tensor, int]]:
    """Prompts with their responses, and the number of tokens of each prompt."""
    rows = []
    for seed, question in enumerate(QUESTIONS[: options.prompts]):
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        rows.append((sample(model, prompt, options.tokens, temperature, seed), len(prompt)))
    return rows


def mean_entropy(model: Any, rows: list[tuple[Tensor, int]], temperature: float) -> float:
    entropies = []
    for row, num_prompt in rows:
        logits = model(input_ids=row[None]).logits[0, num_prompt - 1 : -1] / temperature
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    return float(torch.cat(entropies).mean())


def compare_at(
    temperature: float, exact: Any, model: Any, eager: Any, rows: list[tuple[Tensor, int]]
) -> tuple[float, dict[str, float]]:
    """The largest error of correct implementations, and the smallest of each wrong one."""

    def compute(used: Any, how: LogProbs) -> Tensor:
        return groups([how(used, row, num_prompt, temperature) for row, num_prompt in rows])

    ours = compute(model, whole_rows)
    print(
        f"\ntemperature {temperature:g}: {len(rows)} responses, {ours.numel()} tokens, mean entropy "
        f"{mean_entropy(exact, rows, temperature):.2f}, mean probability {ours.exp().mean():.2f}"
    )
    largest = 0.0
    right: dict[str, tuple[Any, LogProbs]] = {
        "a more exact dtype": (exact, whole_rows),
        "eager attention": (eager, whole_rows),
        "token by token, with a cache": (model, token_by_token),
        "eager, token by token": (eager, token_by_token),
        "in a padded batch": (model, left_padded),
    }
    for name, (used, how) in right.items():
        largest = max(largest, show(name, "correct", ours, compute(used, how), temperature)[1])
    wrong = {
        "positions one too late": compute(model, shifted),
        "temperature 10% higher": compute(model, warmer),
        "first token of the prompt missing": compute(model, without_first_token),
    }
    for size in (0.01, 0.03, 0.1):
        with noisy(model, size):
            wrong[f"weights with {size:.0%} noise"] = compute(model, whole_rows)
    with in_8_bits(model):
        wrong["weights in 8 bits"] = compute(model, whole_rows)
    with without_last_layer(model):
        wrong["last layer missing"] = compute(model, whole_rows)
    return largest, {
        name: show(name, "wrong", ours, theirs, temperature)[0] for name, theirs in wrong.items()
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = getattr(torch, options.dtype)
    better = torch.float32 if dtype == torch.bfloat16 else torch.float64
    exact = AutoModelForCausalLM.from_pretrained(options.model, dtype=better).eval()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    eager = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=dtype, attn_implementation="eager"
    ).eval()
    largest_right = 0.0
    smallest_wrong: dict[str, float] = {}
    for temperature in options.temperatures:
        rows = sampled_rows(exact, tokenizer, options, temperature)
        largest, smallest = compare_at(temperature, exact, model, eager, rows)
        largest_right = max(largest_right, largest)
        for name, one in smallest.items():
            smallest_wrong[name] = min(one, smallest_wrong.get(name, one))
    print(f"\nlargest error of a correct implementation: {largest_right:.2g}")
    for name, one in smallest_wrong.items():
        print(
            f"  {name}: {one / largest_right:.1f} times that, in the group with the smallest difference"
        )


if __name__ == "__main__":
    main()
