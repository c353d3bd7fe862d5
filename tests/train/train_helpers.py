"""Runs of the demo task, small and real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.trainer.loop import Trainer

SPLIT = ["trainer.n_gpus_per_node=2", "placement.strategy=split"]
MEASURED = ("timing_", "perf/", "pool/", "overlap/")
ONE_RANK = ["trainer.n_gpus_per_node=1"]


def small_keys(demo: Demo, folder: Path, *more: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={demo.model}",
        f"data.train_files={demo.train_file}",
        f"data.val_files={demo.val_file}",
        "data.train_batch_size=16",
        "data.val_max_samples=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=2",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={folder}",
        *more,
    ]


def train(demo: Demo, folder: Path, *more: str) -> None:
    """In float64, so that no two tokens are so close that rounding, which depends on the placement,
    decides."""
    Trainer(load_config([], small_keys(demo, folder, *more)), torch.float64).run()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what is measured: times, and what is computed from them."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)}
        for line in lines
    ]
