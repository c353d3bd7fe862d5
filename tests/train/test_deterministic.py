"""With `trainer.deterministic=true` every process of a run computes with deterministic kernels."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from train_helpers import SPLIT, small_keys

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def switches() -> Callable[[str], dict[str, Any]]:
    """What a process tells about itself. A function inside a function, because worker processes
    cannot import this file."""

    def read(device: str) -> dict[str, Any]:
        import torch

        return {
            "algorithms": torch.are_deterministic_algorithms_enabled(),
            "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
            "cudnn": torch.backends.cudnn.deterministic,
            "measures": torch.backends.cudnn.benchmark,
            "fills": torch.utils.deterministic.fill_uninitialized_memory,
            "variables": {name: os.environ.get(name) for name in VARIABLES},
        }

    return read


class Inspector(Observer):
    """Asks all processes after each step, and kills the critic's process after the first one."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.seen: dict[int, dict[str, Any]] = {}
        """The answer of each process, by its pid."""
        self.roles: set[str] = set()

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        assert self.trainer is not None
        groups = self.trainer.deployment.cluster.groups
        for group in groups.values():
            self.roles.update(group.roles)
            for process in group.processes:
                answer = process.actor.measure.remote(switches())
                self.seen[process.pid] = ray.get(answer, timeout=60)
        if step == 1:
            os.kill(groups["critic_pool"].processes[0].pid, signal.SIGKILL)


def train(demo: Demo, folder: Path, *more: str) -> Inspector:
    keys = small_keys(
        demo,
        folder,
        *SPLIT,
        "algorithm.use_kl_in_reward=true",
        "trainer.total_training_steps=3",
        *more,
    )
    inspector = Inspector()
    trainer = Trainer(load_config([], keys))
    trainer.observer = inspector
    inspector.trainer = trainer
    trainer.run()
    return inspector


@pytest.mark.timeout(200)
def test_every_process_of_a_run_computes_deterministically_also_one_that_replaces_another(
    demo: Demo, one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    inspector = train(demo, tmp_path / "run", "trainer.deterministic=true")
    assert inspector.roles == {"actor", "rollout", "ref", "critic", "reward"}
    # Two pools and the process of the rule reward, and one process that replaces the critic's.
    assert len(inspector.seen) == 4
    assert list(inspector.seen.values()) == 4 * [
        {
            "algorithms": True,
            "only warns": False,
            "cudnn": True,
            "measures": False,
            "fills": False,
            "variables": VARIABLES,
        }
    ]


@pytest.mark.timeout(200)
def test_without_the_key_no_process_does(
    demo: Demo, one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    inspector = train(demo, tmp_path / "run")
    assert len(inspector.seen) == 4
    assert not any(seen["algorithms"] or seen["cudnn"] for seen in inspector.seen.values())
    assert all(not any(seen["variables"].values()) for seen in inspector.seen.values())
