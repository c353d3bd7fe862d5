"""TRL's side of ppo_step.py, which starts it: some steps of its PPOTrainer, and what they took, as
JSON.

What the trainer does is left as it is. Its two entries to the phases of a step, the functions
`batch_generation` and `forward` of its module, are wrapped to read the clock when the GPU has come
to that point: there is no callback there.
https://github.com/huggingface/trl/blob/v1.12.0/trl/experimental/ppo/ppo_trainer.py
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from trl_clock import Clock

VERSION = "1.12.0"
"""The last release that has a PPOTrainer, and the one whose functions are wrapped below."""
GIB = 2**30


class OneToken(nn.Module):
    """A rule in place of a reward network's trunk: whether a token is the one that is asked for."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted = wanted

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(hidden_states=((input_ids == self.wanted).float().unsqueeze(-1),))


class RuleReward(nn.Module):
    """What the trainer asks of a reward model: a trunk by this name, and `score` of its last hidden
    states."""

    base_model_prefix = "trunk"

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.trunk = OneToken(wanted)
        self.score = nn.Identity()


class PhaseClock(Clock):
    """Marks the phases of a step of the PPOTrainer."""

    def __init__(self) -> None:
        super().__init__()
        self.generated: tuple[int, ...] = ()
        """Rows and tokens of the last rollouts, prompts included."""

    def listen(self) -> None:
        generate, forward = ppo_trainer.batch_generation, ppo_trainer.forward

        def marked_generation(*args: Any, **kwargs: Any) -> Any:
            self.mark("generation")
            made = generate(*args, **kwargs)
            self.mark("scoring")
            self.generated = tuple(made[0].shape)
            return made

        def marked_forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and self.marks[-1][0] == "scoring":
                self.mark("training")
            return forward(*args, **kwargs)

        ppo_trainer.batch_generation, ppo_trainer.forward = marked_generation, marked_forward


def make_trainer(options: argparse.Namespace, clock: PhaseClock) -> PPOTrainer:
    model = options.data / "model"
    dtype = "float32" if options.cpu else "auto"  # bf16, as it was saved; not every CPU has that
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (options.data / "train.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    # Accumulation counts over the whole batch here, not within a mini-batch. Without it every
    # mini-batch is one pass and has its optimizer step, as is wanted; with it there is one
    # optimizer step for all of them.
    accumulates = options.rows * options.mini_batches < options.num_prompts
    config = PPOConfig(
        output_dir=str(options.result.parent),
        per_device_train_batch_size=options.rows if accumulates else options.num_prompts,
        gradient_accumulation_steps=options.num_prompts // options.rows if accumulates else 1,
        num_mini_batches=options.mini_batches,
        num_ppo_epochs=1,
        total_episodes=options.steps * options.num_prompts,
        local_rollout_forward_batch_size=options.rollout_rows,
        response_length=options.new_tokens,
        stop_token=None,
        temperature=1.0,
        bf16=not options.cpu,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        use_cpu=options.cpu,
    )
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        reward_model=RuleReward(wanted=tokenizer.convert_tokens_to_ids("a")),
        value_model=AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, dtype=dtype
        ),
        train_dataset=Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]}),
        callbacks=[clock],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder that scripts/make_shape_model.py wrote")
    parser.add_argument("result", type=Path, help="JSON file to write")
    for name in ("steps", "num-prompts", "new-tokens", "mini-batches", "rows", "rollout-rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if trl.__version__ != VERSION:
        parser.error(f"trl is {trl.__version__}; install trl=={VERSION}")
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    clock = PhaseClock()
    trainer = make_trainer(options, clock)
    clock.listen()
    trainer.train()
    dtypes = sorted({str(parameter.dtype) for parameter in trainer.model.parameters()})
    args = trainer.args
    setting = (
        f"trl {trl.__version__}, transformers {transformers.__version__}, weights {', '.join(dtypes)}, passes of "
        f"{min(args.per_device_train_batch_size, args.local_mini_batch_size)} rows, one optimizer step for "
        f"{'the batch' if args.gradient_accumulation_steps > 1 else 'each mini-batch'}, "
        f"rollouts of {args.local_rollout_forward_batch_size}, {' x '.join(map(str, clock.generated))} tokens in all"
    )
    peak = 0 if options.cpu else torch.cuda.max_memory_allocated()
    options.result.parent.mkdir(parents=True, exist_ok=True)
    result = {"setting": setting, "steps": clock.steps(), "torch_gib": peak / GIB}
    options.result.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
