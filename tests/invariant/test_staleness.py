"""With responses that are generated ahead, too, no placement changes a number, and the responses of
step n are those of the weights after step n - 1 - k."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from commands import load_benchmark
from rolepool.data.demo import Demo

TOLERANCE = 1e-9
NUM_STEPS = 6
STILL = ("timing_", "perf/", "pool/", "overlap/", "training/num_steps", "global_seqlen/")
"""Metrics that depend on time, or on the number of ranks."""

moves = load_benchmark("moves")
PLACEMENTS = {
    "one rank": "placement.strategy=standard trainer.n_gpus_per_node=1",
    "rollout alone": """placement.strategy=custom placement.pools={train:[1],generate:[1]}
        trainer.n_gpus_per_node=2
        placement.roles={actor:train,ref:train,critic:train,rollout:generate}""",
    "two ranks, rollout and critic alone": moves.OWN_ROLLOUT,
    "split": "placement.strategy=split",
}
Rows = dict[int, dict[str, float]]


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=6,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


class Runs:
    """Runs that were made, by k and placement."""

    def __init__(self, demo: Demo, folder: Path) -> None:
        self._demo = demo
        self._folder = folder
        self._rows: dict[tuple[int, str], Rows] = {}

    def rows(self, k: int, placement: str) -> Rows:
        if (k, placement) not in self._rows:
            folder = self._folder / f"{k} {placement}"
            self._rows[k, placement] = moves.run(folder, self._keys(k, placement), every=NUM_STEPS)
        return self._rows[k, placement]

    def _keys(self, k: int, placement: str) -> list[str]:
        return [
            *moves.KEYS.split(),
            *PLACEMENTS[placement].split(),
            "ray_kwargs.ray_init.num_cpus=null",
            f"actor_rollout_ref.model.path={self._demo.model}",
            f"data.train_files={self._demo.train_file}",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            f"trainer.total_training_steps={NUM_STEPS}",
            f"algorithm.max_staleness={k}",
        ]


@pytest.fixture(scope="module")
def runs(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(demo, tmp_path_factory.mktemp("staleness"))


def in_every_run(k: int, placement: str) -> bool:
    return k == 1 and placement == "rollout alone"


CASES = [
    pytest.param(k, placement, marks=[] if in_every_run(k, placement) else pytest.mark.slow)
    for k in (0, 1, 2)
    for placement in PLACEMENTS
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("k", "placement"), CASES)
def test_the_responses_of_step_n_are_those_of_the_weights_after_step_n_minus_1_minus_k(
    k: int, placement: str, runs: Runs
) -> None:
    rows = runs.rows(k, placement)
    assert list(rows) == list(range(1, NUM_STEPS + 1))
    for step, row in rows.items():
        staleness = min(k, step - 1)
        assert row["training/staleness/mean"] == row["training/staleness/max"] == staleness
        # The versions are what the engine says. The weights themselves are those of the actor only
        # if nothing is stale.
        distance = row["training/rollout_probs_diff_max"]
        assert distance > 1e-4 if staleness else distance < 1e-12


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("k", "placement"), [case for case in CASES if "one rank" not in case.values]
)
def test_a_run_that_generates_ahead_is_the_same_under_every_placement(
    k: int, placement: str, runs: Runs
) -> None:
    expected = runs.rows(k, "one rank")
    found = runs.rows(k, placement)
    assert found.keys() == expected.keys()
    num_compared = 0
    for step, row in expected.items():
        for name, value in row.items():
            if name.startswith(STILL):
                continue
            num_compared += 1
            assert abs(found[step][name] - value) <= TOLERANCE, (step, name)
    assert num_compared > 30 * NUM_STEPS


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_older_weights_generate_other_responses(runs: Runs) -> None:
    """So the runs that are compared do depend on k."""
    scores = []
    for k in (0, 1, 2):
        rows = runs.rows(k, "one rank")
        scores.append([row["actor/pg_loss"] for row in rows.values()])
    assert scores[0][1] != scores[1][1]
    assert scores[1][1] == pytest.approx(scores[2][1])
    assert scores[1][2] != scores[2][2]
