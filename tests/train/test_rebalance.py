"""A run chooses its placement: its first steps are the calibration, then it moves to the placement
that it chose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_helpers import rows_of, small_keys

from rolepool.config import Config, load_config
from rolepool.data.demo import Demo
from rolepool.planner.predict import Prediction, Predictor
from rolepool.planner.search import search
from rolepool.trainer import rebalancer
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer
from rolepool.trainer.moves import moved

STEPS = 14
KEYS = [
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_cpus=8",
    "trainer.val_before_train=false",
]
KEYS += [f"trainer.total_training_steps={STEPS}", "data.val_files=null"]


def two_pools_first(
    predictor: Predictor, config: Config, inventory: Sequence[int]
) -> list[Prediction]:
    """A search that prefers two pools by far, however fast they are on this machine."""
    assert search(predictor, config, inventory), "the real search works with what was recorded"
    words = ["placement.strategy=split"]
    plan, loaded = moved(config, words)
    split = predictor.predict(words[0], loaded.config, plan)
    return [replace(split, step_s=split.step_s / 1000, low_s=split.low_s / 1000)]


class Notices(Observer):
    """Keeps what the run says. Each row waits for the search or the processes that are starting."""

    def __init__(self, trainer: Trainer) -> None:
        self.lines: list[str] = []
        self._trainer = trainer

    def on_notice(self, line: str) -> None:
        self.lines.append(line)

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        # Before the first search, which comes after the calibration.
        self._trainer.mover.rebalancer.search = two_pools_first
        self._trainer.mover.rebalancer.move_s = 0.0
        if (looking := self._trainer.mover.rebalancer._looking) is not None:
            wait([looking])
        if (move := self._trainer.mover._move) is not None:
            wait([move.starting])


def run(demo: Demo, folder: Path, *more: str) -> Notices:
    trainer = Trainer(load_config([], small_keys(demo, folder, *KEYS, *more)), torch.float64)
    trainer.observer = observer = Notices(trainer)
    trainer.run()
    return observer


def calibrate_and_move(demo: Demo, folder: Path) -> None:
    """A run that measures its first steps, chooses two pools, and moves there."""
    said = run(demo, folder, "placement.strategy=auto", "placement.rebalance=true").lines
    assert any(
        line.startswith("placement: chose placement.strategy=split, predicted to take")
        for line in said
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (move,) = [row["move"] for row in rows if "move" in row]
    assert move["after_step"] >= rebalancer.NUM_CALIBRATION_STEPS
    assert "global_pool [2] -> " in move["what"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_without_a_profile_calibrates_and_moves(
    demo: Demo, one_ray: None, tmp_path: Path
) -> None:
    calibrate_and_move(demo, tmp_path / "auto" / "run")


@pytest.mark.slow
def test_the_losses_of_a_run_that_moves_are_those_of_one_that_stays(
    demo: Demo, one_ray: None, tmp_path: Path
) -> None:
    calibrate_and_move(demo, tmp_path / "auto" / "run")
    still = run(demo, tmp_path / "still", "placement.strategy=standard").lines
    assert not any("placement" in line for line in still)
    compared = [row for row in rows_of(tmp_path / "auto" / "run") if "move" not in row]
    expected = rows_of(tmp_path / "still")
    assert len(compared) == len(expected) == STEPS
    for row, other in zip(compared, expected, strict=True):
        assert row["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-9)
        assert row["critic/vf_loss"] == pytest.approx(other["critic/vf_loss"], abs=1e-9)


@pytest.mark.slow
def test_a_run_with_a_profile_starts_in_the_placement_that_is_chosen_from_it(
    demo: Demo, one_ray: None, tmp_path: Path
) -> None:
    run(demo, tmp_path / "first", "placement.strategy=standard")
    keys = small_keys(demo, tmp_path / "second", *KEYS, "placement.strategy=auto")
    loaded, notices = rebalancer.resolve(load_config([], keys), two_pools_first)
    assert loaded.config.placement.strategy == "split"
    (notice,) = notices
    assert "chose placement.strategy=split" in notice
    assert str(tmp_path / "first") in notice
