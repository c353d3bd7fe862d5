"""TRL's side of learning.py, which starts it: GRPOTrainer with the data, the model and the settings
of a rolepool config.

TRL gets the prompts in the order in which rolepool trains on them, the same reward, the same number
of optimizer steps for each batch, and the same validation: greedy responses to the held-out
prompts. Sampling differs, because the two draw random numbers in different ways.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rolepool.config import load_config
from rolepool.config.schema import Config
from rolepool.data.prompts import PromptLoader, PromptSet
from rolepool.data.rules import reasoning_gym
from rolepool.data.tokenizer import load_tokenizer

VERSION = "1.16.0"
"""The release whose settings are named below."""
VALIDATION_ROWS = 256


def score(text: str, row: dict[str, Any]) -> float:
    found = reasoning_gym(text, row["reward_model"]["ground_truth"], row["extra_info"])
    return float(found["score"])


class Validation(TrainerCallback):
    """Validates after the same batches as rolepool, and keeps the curves."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        training: PromptSet,
        updates_per_batch: int,
        result: Path,
    ) -> None:
        self._result = result
        self._prompts = PromptSet("val", config, tokenizer)
        self._prompts.leave_out(training)
        self._tokenizer, self._updates = tokenizer, updates_per_batch
        self._every = config.trainer.test_freq or 1
        self._limit = config.data.max_response_length
        self._is_bf16 = config.trainer.device == "cuda"
        self.rewards: list[float] = []
        """The mean score of each batch of training responses."""
        self.validations: dict[int, float] = {}
        self.start_s = time.monotonic()
        self.seconds: dict[int, float] = {}

    def reward(self, completions: Any, row: Sequence[str], **_: Any) -> list[float]:
        """The reward function of the trainer, which calls it once for each batch."""
        scores = [
            score(messages[0]["content"], json.loads(text))
            for messages, text in zip(completions, row, strict=True)
        ]
        self.rewards.append(sum(scores) / len(scores))
        return scores

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._validate(0, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        batch, rest = divmod(state.global_step, self._updates)
        if rest == 0 and batch % self._every == 0:
            self._validate(batch, kwargs["model"])

    def _validate(self, batch: int, model: Any) -> None:
        by_source: dict[str, list[float]] = defaultdict(list)
        columns = self._prompts.take(range(len(self._prompts)))
        device = next(model.parameters()).device
        model.eval()
        with (
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=self._is_bf16),
        ):
            for first in range(0, len(self._prompts), VALIDATION_ROWS):
                chosen = slice(first, first + VALIDATION_ROWS)
                prompts = {"input_ids": columns["raw_prompt_ids"][chosen]}
                padded = self._tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
                tokens = model.generate(
                    **padded.to(device), do_sample=False, max_new_tokens=self._limit
                )
                new = tokens[:, padded["input_ids"].shape[1] :]
                texts = self._tokenizer.batch_decode(new, skip_special_tokens=True)
                for number, text in enumerate(texts, first):
                    names = ("data_source", "reward_model", "extra_info")
                    row = {name: columns[name][number] for name in names}
                    by_source[row["data_source"]].append(score(text, row))
        model.train()
        means = [sum(scores) / len(scores) for scores in by_source.values()]
        self.validations[batch] = sum(means) / len(means)
        self.seconds[batch] = time.monotonic() - self.start_s
        print(f"step {batch}: validation {self.validations[batch]:.3f}", flush=True)
        self.write()

    def write(self, **more: Any) -> None:
        """Write the curves so far, so that a run that is stopped leaves them."""
        curves = {
            "rewards": self.rewards,
            "validations": self.validations,
            "seconds": self.seconds,
            "logged": {},
            **more,
        }
        partial = self._result.with_suffix(".tmp")
        partial.write_text(json.dumps(curves), encoding="utf-8")
        partial.replace(self._result)


def training_rows(config: Config, prompts: PromptSet) -> Dataset:
    """The prompts of all batches, one after another."""
    data, seed = config.data, config.trainer.seed
    loader = PromptLoader(prompts, data.train_batch_size, seed=seed, shuffle=data.shuffle)
    chats: list[Any] = []
    rows: list[str] = []
    for _ in range(config.trainer.total_training_steps or 1):
        columns = loader.next_batch().non_tensor_batch
        chats += [list(chat) for chat in columns["raw_prompt"]]
        for reward_model, extra in zip(columns["reward_model"], columns["extra_info"], strict=True):
            rows.append(json.dumps({"reward_model": reward_model, "extra_info": extra}))
    return Dataset.from_dict({"prompt": chats, "row": rows})


def settings_of(config: Config, folder: Path) -> GRPOConfig:
    """TRL's settings that mean what the config says."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size
    is_cuda = config.trainer.device == "cuda"
    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=actor.ppo_mini_batch_size * rollout.n,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_iterations=1,
        num_generations=rollout.n,
        max_steps=(config.trainer.total_training_steps or 1) * updates,
        max_completion_length=config.data.max_response_length,
        temperature=rollout.temperature,
        loss_type="bnpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=actor.clip_ratio,
        learning_rate=actor.optim.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=actor.optim.weight_decay,
        max_grad_norm=actor.grad_clip,
        bf16=is_cuda,
        fp16=False,
        use_cpu=not is_cuda,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=config.trainer.seed,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("words", nargs="+", help="a recipe, and key=value")
    options = parser.parse_args()
    if trl.__version__ != VERSION:
        parser.error(f"trl is {trl.__version__}; install trl=={VERSION}")
    files = [word for word in options.words if "=" not in word]
    config = load_config(files, [word for word in options.words if "=" in word]).config
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    args = settings_of(config, options.result.parent / "trl")
    prompts = PromptSet("train", config, tokenizer)
    updates = args.steps_per_generation or 1
    validation = Validation(config, tokenizer, prompts, updates, options.result)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            config.actor_rollout_ref.model.path, dtype=torch.float32
        ),
        args=args,
        reward_funcs=validation.reward,
        train_dataset=training_rows(config, prompts),
        processing_class=tokenizer,
        callbacks=[validation],
    )
    trainer.train()
    names = ("grad_norm", "entropy", "loss")
    logged = {
        name: [row[name] for row in trainer.state.log_history if name in row] for name in names
    }
    validation.write(logged=logged)


if __name__ == "__main__":
    main()
