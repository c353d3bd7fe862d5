"""Dynamic sampling in real runs: the groups that are learned from, under placements, after a death
and after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from train_helpers import ONE_RANK, rows_of, train

from commands import load_benchmark
from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.errors import DataError
from rolepool.trainer.loop import Trainer

chaos = load_benchmark("chaos")
# The choice of groups, its limit and the order of calls have unit tests (test_groups.py).
pytestmark = [pytest.mark.usefixtures("one_ray"), pytest.mark.slow]
NUM_STEPS = 4
SHORT = ["data.val_files=null", "trainer.val_before_train=false", *ONE_RANK]
FILTERED = ["algorithm.filter_groups.enable=true", "data.gen_batch_size=12"]


def responses(folder: Path) -> list[dict[str, Any]]:
    """All rows of the first step."""
    return [json.loads(line) for line in (folder / "1.jsonl").read_text().splitlines()]


def test_the_groups_are_the_first_mixed_ones_in_the_order_of_prompts(
    demo: Demo, tmp_path: Path
) -> None:
    folder = tmp_path / "filtered"
    words = [*SHORT, "trainer.total_training_steps=1"]
    kept = f"trainer.rollout_data_dir={folder}"
    train(demo, tmp_path / "run", *words, *FILTERED, kept)
    (row,) = rows_of(tmp_path / "run")
    num_batches = int(row["train/num_gen_batches"])
    assert num_batches >= 2, "nothing was replaced"

    # All of its prompts in one batch that is not filtered.
    all_folder = tmp_path / "all"
    num_prompts = 12 * num_batches
    sizes = [f"data.train_batch_size={num_prompts}", f"trainer.rollout_data_dir={all_folder}"]
    train(
        demo,
        tmp_path / "run_of_all",
        *words,
        *sizes,
        "actor_rollout_ref.actor.ppo_mini_batch_size=12",
    )
    mixed = []
    rows = responses(all_folder)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        if first["score"] != second["score"]:
            mixed.append([first, second])
    expected = [(row["input"], row["output"], row["score"]) for pair in mixed[:16] for row in pair]
    found = [(row["input"], row["output"], row["score"]) for row in responses(folder)]
    assert found == expected
    assert row["train/filtered_groups"] == num_prompts - len(mixed)
    assert row["train/surplus_groups"] == len(mixed) - 16


def test_a_step_with_too_few_groups_is_one_line(demo: Demo, tmp_path: Path) -> None:
    words = ["trainer.total_training_steps=1", "algorithm.filter_groups.max_num_gen_batches=1"]
    with pytest.raises(DataError, match=r"after 1 batch of data\.gen_batch_size=12 prompts"):
        train(demo, tmp_path / "run", *SHORT, *FILTERED, *words)


# Deaths and resuming


def keys_with(folder: Path, k: int) -> list[str]:
    keys: list[str] = chaos.demo_keys(folder)
    steps = [f"trainer.total_training_steps={NUM_STEPS}", f"algorithm.max_staleness={k}"]
    return [*keys, *FILTERED, *steps, "trainer.test_freq=-1", "data.val_files=null"]


def training_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder) if "training/global_step" in row]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("k", [0, 1])
def test_after_a_death_or_a_resume_the_groups_are_the_same(k: int, tmp_path: Path) -> None:
    keys = keys_with(tmp_path / "data", k)
    undisturbed = tmp_path / "undisturbed"
    chaos.run(undisturbed, keys)
    expected = training_rows(undisturbed)
    nums_batches = [int(row["train/num_gen_batches"]) for row in expected]
    assert min(nums_batches) >= 2

    # In the second batch of the generation for the step 2 + k, which step 2 makes.
    call = sum(nums_batches[: 1 + k]) + 2
    folder = tmp_path / "killed"
    with chaos.kill_at("rollout", "generation", call) as killed_s:
        outcome = chaos.run(folder, keys)
    assert killed_s, "the victim was not killed"
    (restart,) = outcome.restarts
    assert restart["repeated_from_step"] == 2
    assert training_rows(folder) == expected

    resumed = tmp_path / "resumed"
    shutil.copytree(undisturbed, resumed)
    shutil.rmtree(resumed / "checkpoints" / f"step_{NUM_STEPS:06d}")
    state = json.loads((resumed / "checkpoints" / "step_000002" / "trainer.json").read_text())
    assert len(state.get("queue", ())) == k
    Trainer(load_config([], [*keys, f"trainer.default_local_dir={resumed}"])).run()
    assert training_rows(resumed) == expected
