"""One step of GRPO with a pretrained model, compared number by number with plain transformers code
in float32.

    python benchmarks/real_batch.py MODEL_FOLDER [--prompts 8] [--samples 8] [key=value...]

rolepool trains one step in its own processes. Then plain code loads the same model, takes the
tokens and scores of that step, and computes log-probs, advantages, the loss and its gradient from
their definitions. The gradient of rolepool is read from the checkpoint: after the first update,
AdamW's first moment is 0.1 times the gradient. Prints the largest differences, and ends with code 1
if one is larger than rounding in float32 explains.

Needs the extra reasoning-gym, unless `data.train_files` names another file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rolepool.config import load_config
from rolepool.protocol.columns import TOKENS, pad_ragged, rows_of_responses
from rolepool.trainer.loop import Trainer

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=120&seed=1"
MOMENT_SHARE = 0.1
"""1 - beta1 of AdamW."""
LIMITS = {"log-probs": 1e-4, "advantages": 1e-5, "loss": 1e-5, "gradient": 1e-3}
"""The largest difference of each number; that of the gradient is relative to its norm."""


class OneStep(Trainer):
    """A run that keeps the numbers of its step."""

    kept: Any = None

    def _begin_step(self, number: int) -> None:
        super()._begin_step(number)
        self.kept = self._unfinished


def train(options: argparse.Namespace, folder: Path) -> OneStep:
    keys = [
        f"actor_rollout_ref.model.path={options.model}",
        f"data.train_files={SUMS}",
        f"data.train_batch_size={options.prompts}",
        "data.max_prompt_length=80",
        "data.max_response_length=24",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={options.samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.prompts}",
        "actor_rollout_ref.actor.grad_clip=1e9",
        "trainer.device=cpu",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.logger=[]",
        f"trainer.default_local_dir={folder}",
        *options.words,
    ]
    trainer = OneStep(load_config([], keys))
    trainer.run()
    return trainer


def log_probs_of(model: Any, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """The log-probs of the tokens of one response."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


def advantages_of(scores: Tensor, num_samples: int) -> Tensor:
    """GRPO: scores of each prompt's responses, minus their mean, divided by their standard
    deviation."""
    groups = scores.view(-1, num_samples)
    return (
        (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    ).flatten()


def moments(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """AdamW's first moment of each weight in a checkpoint of one rank."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.endswith("/exp_avg"):
                yield name.removesuffix("/exp_avg"), tensor


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("words", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(options, Path(folder) / "run")
        theirs = dict(moments(Path(folder) / "run" / "checkpoints" / "step_000001" / "actor"))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        logged = {name: value for line in lines for name, value in json.loads(line).items()}
    step = trainer.kept
    tokens = step.generation.get(keys=TOKENS).batch
    responses = [row.tolist() for row in rows_of_responses(tokens)]
    rows = [row.tolist() for row in tokens["input_ids"].unbind()]
    prompts = [
        row[: len(row) - len(response)] for row, response in zip(rows, responses, strict=True)
    ]
    mask = step.estimated.mask
    old_log_probs = pad_ragged(
        step.calls["old_log_prob"][0].get(keys=["old_log_probs"]).batch["old_log_probs"]
    )
    temperature = trainer.config.actor_rollout_ref.rollout.temperature

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.train()
    advantages = advantages_of(step.estimated.scored.batch["scores"], options.samples)
    num_tokens = sum(map(len, responses))
    worst_log_prob, loss = 0.0, 0.0
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        log_probs = log_probs_of(model, prompt, response, temperature)
        ours = old_log_probs[number, : len(response)]
        worst_log_prob = max(worst_log_prob, float((log_probs.detach() - ours).abs().max()))
        # Before the first update the ratio is 1, so clipping does nothing, and the loss is the mean
        # over tokens.
        ratio = torch.exp(log_probs - log_probs.detach())
        part = -(advantages[number] * ratio).sum() / num_tokens
        part.backward()
        loss += float(part.detach())
    theirs_advantages = step.estimated.tensors["advantages"][mask]
    expected = torch.cat(
        [advantages[n].repeat(len(response)) for n, response in enumerate(responses)]
    )
    squares, errors = 0.0, 0.0
    for name, weight in model.named_parameters():
        if name in theirs and weight.grad is not None:
            squares += float(weight.grad.double().square().sum())
            errors += float(
                (theirs[name].double() / MOMENT_SHARE - weight.grad.double()).square().sum()
            )
    found = {
        "log-probs": worst_log_prob,
        "advantages": float((theirs_advantages - expected).abs().max()),
        "loss": abs(loss - logged["actor/pg_loss"]),
        "gradient": (errors / squares) ** 0.5,
    }
    mean_score = float(step.estimated.scored.batch["scores"].mean())
    print(f"{len(responses)} responses, {num_tokens} tokens, mean score {mean_score:.3f}")
    print(f"plain code: loss {loss:.6f}, norm of the gradient {squares**0.5:.4f}")
    print(
        f"rolepool:   loss {logged['actor/pg_loss']:.6f}, norm of the gradient {logged['actor/grad_norm']:.4f}"
    )
    for name, difference in found.items():
        print(f"largest difference of {name}: {difference:.2g} (limit {LIMITS[name]:g})")
    return int(any(difference > LIMITS[name] for name, difference in found.items()))


if __name__ == "__main__":
    sys.exit(main())
