"""One step of GRPO with a pretrained model, compared number by number with plain transformers code
in float32, and with TRL's loss.

    python benchmarks/real_batch.py MODEL_FOLDER [--device cpu] [--prompts 8] [--samples 8] [--trl] [key=value...]

rolepool trains one step in its own processes. Then plain code loads the same model, takes the
tokens and scores of that step, and computes log-probs, advantages, the loss and its gradient from
their definitions. With `--trl`, TRL's GRPOTrainer computes the loss and the gradient of the same
tokens, too. The gradient of rolepool is read from the checkpoint: after the first update, AdamW's
first moment is 0.1 times the gradient.

Prints the differences, and ends with code 1 if one is too large. On a CPU all compute in float32,
and rounding in float32 is the limit. On a GPU rolepool computes in bf16 as it does in training, so
the plain code does it a second time under autocast to bf16: rolepool's errors may be at most
1.5 times those.

Needs the extra reasoning-gym, unless `data.train_files` names another file; `--trl` needs trl.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolepool.config import load_config
from rolepool.protocol.columns import TOKENS, pad_ragged, rows_of_responses
from rolepool.trainer.loop import Trainer
from rolepool.trainer.pipeline import RunningStep

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=120&seed=1"
MOMENT_SHARE = 0.1
"""1 - beta1 of AdamW."""
LIMITS = {"log-probs": 1e-4, "advantages": 1e-5, "loss": 1e-5, "gradient": 1e-3}
"""The accepted difference of each number on a CPU. That of the gradient is relative to its
norm."""
MORE_THAN_AUTOCAST = 1.5
"""How many times the error of plain code under autocast is accepted on a GPU."""


class OneStep(Trainer):
    """A run that keeps the numbers of its step."""

    kept: Any = None

    def begin_step(self, number: int) -> RunningStep:
        step = super().begin_step(number)
        self.kept = step.calls
        return step


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
        f"trainer.device={options.device}",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.logger=[]",
        f"trainer.default_local_dir={folder}",
        *options.words,
    ]
    trainer = OneStep(load_config([], keys))
    trainer.run()
    return trainer


@dataclass
class Batch:
    """The tokens and scores of a step."""

    prompts: list[list[int]]
    responses: list[list[int]]
    advantages: Tensor
    """One of each response."""
    temperature: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.responses))


@dataclass
class Computed:
    """What one kind of code computes from a batch."""

    log_probs: Tensor
    """The log-probs of all response tokens, one response after another."""
    loss: float
    gradient: dict[str, Tensor]


def plain(options: argparse.Namespace, batch: Batch, *, autocast: bool = False) -> Computed:
    """The numbers from their definitions. Before the first update the ratio is 1, so clipping does
    nothing, and the loss is the mean over tokens."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.train().to(options.device)
    found: list[Tensor] = []
    loss = 0.0
    for prompt, response, advantage in zip(
        batch.prompts, batch.responses, batch.advantages.tolist(), strict=True
    ):
        ids = torch.tensor([[*prompt, *response]], device=options.device)
        with torch.autocast(options.device, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids).logits
        logits = logits[0, len(prompt) - 1 : -1].float() / batch.temperature
        tokens = ids[0, len(prompt) :, None]
        log_probs = torch.log_softmax(logits, -1).gather(-1, tokens).squeeze(-1)
        ratio = torch.exp(log_probs - log_probs.detach())
        part = -(advantage * ratio).sum() / batch.num_tokens
        part.backward()
        loss += float(part.detach())
        found.append(log_probs.detach().cpu())
    return Computed(torch.cat(found), loss, _gradient_of(model))


def _gradient_of(model: Any) -> dict[str, Tensor]:
    return {
        name: weight.grad.double()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def trl_computes(options: argparse.Namespace, batch: Batch, folder: Path) -> Computed:
    """The loss of TRL's GRPOTrainer for the same tokens and advantages, and its gradient."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(batch.prompts),
        num_generations=options.samples,
        loss_type="bnpo",
        beta=0.0,
        temperature=batch.temperature,
        bf16=False,
        use_cpu=options.device == "cpu",
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        args=args,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["?"]}),
        processing_class=AutoTokenizer.from_pretrained(options.model),
    )
    trainer.model.train()

    def padded(rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            place = slice(longest - len(row), longest) if left else slice(0, len(row))
            ids[number, place], mask[number, place] = torch.tensor(row), 1
        return ids.to(options.device), mask.to(options.device)

    prompt_ids, prompt_mask = padded(batch.prompts, left=True)
    completion_ids, completion_mask = padded(batch.responses, left=False)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": batch.advantages.to(options.device),
    }
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return Computed(torch.empty(0), float(loss.detach()), _gradient_of(trainer.model))


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
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--trl", action="store_true", help="compare with TRL's loss, too")
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
    temperature = trainer.parts.config.actor_rollout_ref.rollout.temperature

    scores = step.estimated.scored.batch["scores"]
    batch = Batch(prompts, responses, advantages_of(scores, options.samples), temperature)
    expected = plain(options, batch)
    ours = {
        "log-probs": torch.cat(
            [old_log_probs[number, : len(row)] for number, row in enumerate(responses)]
        ),
        "gradient": {
            name: moment.double().to(options.device) / MOMENT_SHARE
            for name, moment in theirs.items()
        },
    }
    repeated = [
        advantage.repeat(len(row))
        for advantage, row in zip(batch.advantages, responses, strict=True)
    ]
    our_advantages = step.estimated.tensors["advantages"][mask]
    found = {
        "log-probs": _deviation(ours["log-probs"], expected.log_probs),
        "advantages": _largest(our_advantages, torch.cat(repeated)),
        "loss": abs(logged["actor/pg_loss"] - expected.loss),
        "gradient": _distance(ours["gradient"], expected.gradient),
    }
    limits = dict(LIMITS)
    if options.device != "cpu":
        rounded = plain(options, batch, autocast=True)
        errors = {
            "log-probs": _deviation(rounded.log_probs, expected.log_probs),
            "loss": abs(rounded.loss - expected.loss),
            "gradient": _distance(rounded.gradient, expected.gradient),
        }
        for name, error in errors.items():
            limits[name] = max(LIMITS[name], MORE_THAN_AUTOCAST * error)
    print(
        f"{len(responses)} responses, {batch.num_tokens} tokens, mean score {float(scores.mean()):.3f}"
    )
    print(
        f"plain code: loss {expected.loss:.6f}, norm of the gradient {_norm(expected.gradient):.4f}"
    )
    print(
        f"rolepool:   loss {logged['actor/pg_loss']:.6f}, norm of the gradient {logged['actor/grad_norm']:.4f}"
    )
    for name, difference in found.items():
        print(f"difference of {name}: {difference:.2g} (limit {limits[name]:.2g})")
    is_wrong = any(difference > limits[name] for name, difference in found.items())
    if options.trl:
        with tempfile.TemporaryDirectory() as folder:
            other = trl_computes(options, batch, Path(folder))
        distance = _distance(other.gradient, expected.gradient)
        print(
            f"TRL:        loss {other.loss:.6f}, norm of the gradient {_norm(other.gradient):.4f}"
        )
        print(f"TRL's gradient against plain code: {distance:.2g}")
        to_trl = _distance(ours["gradient"], other.gradient)
        print(f"rolepool's gradient against TRL's: {to_trl:.2g}")
        is_wrong |= to_trl > limits["gradient"] + distance
    return int(is_wrong)


def _largest(ours: Tensor, others: Tensor) -> float:
    return float((ours.double() - others.double()).abs().max())


def _deviation(ours: Tensor, others: Tensor) -> float:
    """The root of the mean of the squared differences. The largest one of a thousand tokens would
    say more about the tokens than about the code."""
    return float((ours.double() - others.double()).square().mean().sqrt())


def _norm(gradient: Mapping[str, Tensor]) -> float:
    return sum(float(part.square().sum()) for part in gradient.values()) ** 0.5


def _distance(ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The norm of the difference, relative to the norm of the second."""
    missing = others.keys() - ours.keys()
    assert not missing, f"no gradient of {sorted(missing)}"
    return _norm({name: ours[name] - other for name, other in others.items()}) / _norm(others)


if __name__ == "__main__":
    sys.exit(main())
