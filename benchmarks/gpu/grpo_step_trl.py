"""TRL's side of grpo_step.py, which starts it: some steps of its GRPOTrainer, and what they took, as
JSON.

What the trainer does is left as it is. A subclass reads the clock before and after generation and
scoring, because there is no callback there.
https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_trainer.py
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from step_reward import score_by_letters
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_clock import Clock

VERSION = "1.16.0"
"""The release whose methods are named below."""
NO_TOKEN = -1
"""In place of an end token: no sampled token equals it, so no response ends early."""
KL_COEF = 0.001
GIB = 2**30


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """Marks the phases of a step."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        self.clock = clock
        # The trainer would cut responses at the tokenizer's end token.
        self.eos_token_ids = [NO_TOKEN]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.mark("generation")
        generated = super()._generate_single_turn(*args, **kwargs)
        self.clock.mark("scoring")
        return generated

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        scored = super()._generate_and_score_completions(*args, **kwargs)
        self.clock.mark("training")
        return scored


def settings_of(options: argparse.Namespace) -> GRPOConfig:
    num_rows = options.num_prompts * options.num_samples
    num_passes = num_rows // options.rows
    return GRPOConfig(
        output_dir=str(options.result.parent),
        per_device_train_batch_size=options.rows,
        # One update for all that was generated.
        gradient_accumulation_steps=num_passes,
        steps_per_generation=num_passes,
        num_iterations=1,
        num_generations=options.num_samples,
        max_steps=options.steps,
        max_completion_length=options.new_tokens,
        generation_kwargs={"eos_token_id": NO_TOKEN},
        temperature=1.0,
        beta=KL_COEF,
        learning_rate=1e-6,
        bf16=not options.cpu,
        use_cpu=options.cpu,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def make_trainer(options: argparse.Namespace, clock: Clock) -> TimedTrainer:
    model = options.data / "model"
    dtype = "float32" if options.cpu else "auto"  # bf16, as it was saved; not every CPU has that
    lines = (options.data / "train.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    return TimedTrainer(
        clock,
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        args=settings_of(options),
        reward_funcs=score_by_letters,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
    )


def dtypes_of(model: Any) -> str:
    return ", ".join(sorted({str(parameter.dtype) for parameter in model.parameters()}))


def check_lengths(trainer: TimedTrainer, new_tokens: int) -> None:
    """All responses must have the full length, or the comparison means nothing."""
    name = "completions/min_length"
    lengths = {row[name] for row in trainer.state.log_history if name in row}
    if lengths != {new_tokens}:
        raise SystemExit(f"error: the shortest responses have {sorted(lengths)} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder that scripts/make_shape_model.py wrote")
    parser.add_argument("result", type=Path, help="JSON file to write")
    for name in ("steps", "num-prompts", "num-samples", "new-tokens", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if trl.__version__ != VERSION:
        parser.error(f"trl is {trl.__version__}; install trl=={VERSION}")
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    options.result.parent.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    trainer = make_trainer(options, clock)
    trainer.train()
    check_lengths(trainer, options.new_tokens)
    setting = (
        f"trl {trl.__version__}, transformers {transformers.__version__}, weights "
        f"{dtypes_of(trainer.model)}, reference {dtypes_of(trainer.ref_model)}, "
        f"{trainer.args.gradient_accumulation_steps} passes of {options.rows} rows for one "
        "optimizer step"
    )
    peak = 0 if options.cpu else torch.cuda.max_memory_allocated()
    result = {"setting": setting, "steps": clock.steps(), "torch_gib": peak / GIB}
    options.result.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
