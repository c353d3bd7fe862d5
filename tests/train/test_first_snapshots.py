"""The files of snapshots in a run: both exist from the first step on, and are never replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from train_helpers import ONE_RANK, SPLIT, small_keys

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.trainer.loop import Observer, Trainer

NO_VALIDATION = ["trainer.val_before_train=false", "data.val_files=[]"]
SHARED_MEMORY = Path("/dev/shm")
KEEPERS = f"rolepool-{os.getpid()}-*"

pytestmark = pytest.mark.usefixtures("one_ray")


class FilesOfSteps(Observer):
    """Notes the files in shared memory after each step, with their numbers in the file system."""

    def __init__(self) -> None:
        self.files: dict[int, dict[str, int]] = {}

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        found: dict[str, int] = {}
        for path in SHARED_MEMORY.glob(f"{KEEPERS}/*/*/shard-*"):
            place, role, name = path.parts[-3:]
            found[f"{place}/{role}/{name}"] = path.stat().st_ino
        self.files[step] = found


def files_of(demo: Demo, folder: Path, *words: str) -> dict[int, dict[str, int]]:
    keys = small_keys(demo, folder, "trainer.total_training_steps=4", *NO_VALIDATION, *words)
    trainer = Trainer(load_config([], keys), torch.float64)
    trainer.observer = observer = FilesOfSteps()
    trainer.run()
    return observer.files


@pytest.mark.parametrize("keys", [[*ONE_RANK, "trainer.critic_warmup=2"], SPLIT])
def test_the_files_of_both_snapshots_are_made_once(
    demo: Demo, tmp_path: Path, keys: list[str]
) -> None:
    """Also if the actor has no optimizer states in the first steps."""
    files = files_of(demo, tmp_path, *keys)
    first = files[1]
    names = {name.removesuffix("/shard-00000.safetensors") for name in first}
    assert names == {"a/actor", "b/actor", "a/critic", "b/critic"}
    assert files == dict.fromkeys((1, 2, 3, 4), first)
    assert not list(SHARED_MEMORY.glob(KEEPERS)), "the run has ended"


def test_without_snapshots_nothing_is_allocated(demo: Demo, tmp_path: Path) -> None:
    files = files_of(demo, tmp_path, *ONE_RANK, "trainer.snapshot_freq=-1")
    assert files == {step: {} for step in (1, 2, 3, 4)}
