"""How many of a pretrained model's 16-bit weights change in a step of training.

    python benchmarks/changed_weights.py MODEL_FOLDER [--rates 1e-6 1e-5 1e-4] [--steps 4]

For each learning rate, rolepool trains some steps of GRPO on single-digit sums, with a checkpoint
after each of them. The weights of two checkpoints in a row are rounded to bf16, as a rollout in
another pool gets them, and compared bit for bit. Prints the share of values that differ after each
step, and the bytes of the changes (a position of four bytes and a value of two) relative to those
of all values.

The shares say when `actor_rollout_ref.rollout.weights=delta` sends less than `full`. Needs the extra
reasoning-gym.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from real_batch import SUMS
from safetensors.torch import load_file, safe_open
from torch import Tensor

from rolepool.config import load_config
from rolepool.trainer.loop import Trainer

VALUE_BYTES = 2
POSITION_BYTES = 4


def words_of(options: argparse.Namespace, rate: float, folder: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={options.model}",
        f"data.train_files={SUMS}",
        f"data.train_batch_size={options.prompts}",
        "data.max_prompt_length=80",
        "data.max_response_length=24",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.prompts}",
        f"actor_rollout_ref.actor.optim.lr={rate}",
        f"trainer.device={options.device}",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={options.steps}",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        "trainer.logger=[]",
        f"trainer.default_local_dir={folder}",
        *options.words,
    ]


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """The actor's weights in bf16. The states of its optimizer have a slash in their names."""
    weights: dict[str, Tensor] = {}
    for file in sorted((checkpoint / "actor").glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                if "/" not in name:
                    weights[name] = content.get_tensor(name).to(torch.bfloat16)
    return weights


def first_weights(model: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            weights[name] = tensor.to(torch.bfloat16)
    return weights


def shares_of(run: Path, model: Path, num_steps: int) -> Iterator[float]:
    """The share of values that differ after each step."""
    before = first_weights(model)
    for step in range(1, num_steps + 1):
        after = weights_of(run / "checkpoints" / f"step_{step:06}")
        names = before.keys() & after.keys()
        assert names == after.keys(), f"not in both: {before.keys() ^ after.keys()}"
        num_changed = sum(int((before[name] != after[name]).sum()) for name in names)
        num_values = sum(after[name].numel() for name in names)
        yield num_changed / num_values
        before = after


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    results: dict[str, list[float]] = {}
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            Trainer(load_config([], words_of(options, rate, run))).run()
            shares = list(shares_of(run, options.model, options.steps))
        results[f"{rate:g}"] = shares
        line = "  ".join(f"{share:7.3%}" for share in shares)
        relative = shares[-1] * (POSITION_BYTES + VALUE_BYTES) / VALUE_BYTES
        print(f"learning rate {rate:g}: {line}; the last changes take {relative:.1%} of the bytes")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
