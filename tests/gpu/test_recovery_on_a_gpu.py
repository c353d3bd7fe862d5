"""A process on a GPU dies, and a run on a GPU moves: training goes on, and the metrics stay the
same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from commands import load_benchmark
from rolepool.data.demo import make_demo
from rolepool.report.run import read_run

pytestmark = pytest.mark.gpu

chaos, moves = load_benchmark("chaos"), load_benchmark("moves")
COMPARED = ("critic/score/mean", "critic/vf_loss", "actor/entropy", "actor/grad_norm")
TOLERANCE = 2e-3
"""Relative difference that sums in another order on the GPU may have grown to after a few
updates."""
ONE_POOL = "placement.strategy=standard"
TWO_POOLS = "placement.strategy=split placement.split.share=0.5"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    demo = make_demo(tmp_path_factory.mktemp("demo") / "data")
    words = """
    data.train_batch_size=16 data.max_prompt_length=8 data.max_response_length=4 data.val_files=null
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.optim.lr=1e-4 critic.optim.lr=1e-4
    actor_rollout_ref.rollout.n=2 trainer.device=cuda trainer.n_gpus_per_node=1 trainer.logger=[] trainer.save_freq=-1
    """
    paths = [f"actor_rollout_ref.model.path={demo.model}", f"data.train_files={demo.train_file}"]
    return [*words.split(), *paths]


@pytest.fixture(autouse=True, scope="module")
def one_ray() -> Any:
    """One Ray for all runs, because starting it takes longer than they do."""
    options: dict[str, Any] = {
        "include_dashboard": False,
        "logging_level": "ERROR",
        "log_to_driver": False,
    }
    ray.init(address="local", num_cpus=8, num_gpus=1, **options)
    yield
    ray.shutdown()


def differences(found: dict[int, Any], expected: dict[int, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    compared = [(step, name) for step, row in expected.items() for name in COMPARED if name in row]
    assert len(compared) == len(COMPARED) * len(expected)
    wrong = [
        (step, name)
        for step, name in compared
        if abs(found[step][name] - expected[step][name])
        > TOLERANCE * max(abs(expected[step][name]), 0.1)
    ]
    return [
        f"step {step} {name}: {found[step][name]} is not {expected[step][name]}"
        for step, name in wrong
    ]


@pytest.mark.parametrize("phase", ["update", "snapshot"])
def test_training_goes_on_from_a_snapshot_of_the_gpu(
    phase: str, keys: list[str], tmp_path: Path
) -> None:
    words = [*keys, *TWO_POOLS.split(), "trainer.total_training_steps=4"]
    chaos.run(tmp_path / "undisturbed", words)
    outcome = chaos.run(tmp_path / "run", words, f"critic:{phase}")
    print(f"{phase}: {outcome.seconds:.1f} s from the kill to the next row")
    (restart,) = outcome.restarts
    assert restart["pools"] == ["critic_pool"]
    assert not differences(
        read_run(tmp_path / "run").metrics, read_run(tmp_path / "undisturbed").metrics
    )


def test_a_run_moves_between_one_pool_and_two_that_share_the_gpu(
    keys: list[str], tmp_path: Path
) -> None:
    words = [*keys, ONE_POOL, "trainer.total_epochs=1000"]
    moving = moves.run(
        tmp_path / "moving", words, [TWO_POOLS, ONE_POOL], 3, waits=True, dtype=torch.float32
    )
    last = f"trainer.total_training_steps={max(moving)}"
    still = moves.run(tmp_path / "still", [*words, last], every=max(moving), dtype=torch.float32)
    rows = [
        json.loads(line)
        for line in (tmp_path / "moving" / "metrics.jsonl").read_text().splitlines()
    ]
    for move in (row["move"] for row in rows if "move" in row):
        print(f"move after step {move['after_step']}: {move['seconds']:.2f} s")
    assert [len(planned.plan.pools) for planned in read_run(tmp_path / "moving").plans] == [1, 2, 1]
    assert not differences(moving, still)
