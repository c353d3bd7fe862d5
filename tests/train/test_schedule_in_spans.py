"""What the schedule calls dependent never runs at the same time, whatever the placement."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest
from train_helpers import small_keys

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.metrics.spans import Span
from rolepool.report.run import read_run
from rolepool.trainer.loop import Trainer
from rolepool.trainer.paper import schedule_of

pytestmark = pytest.mark.usefixtures("one_ray")
ROLES = ("actor", "rollout", "ref", "critic")
STEPS = 3


def random_words(seed: int) -> list[str]:
    """Two or three pools of one process, roles in them by chance, and an algorithm."""
    numbers = random.Random(seed)
    pools = [f"pool{number}" for number in range(numbers.choice([2, 3]))]
    homes = [*pools, *numbers.choices(pools, k=len(ROLES) - len(pools))]
    numbers.shuffle(homes)
    placed = [f"placement.roles.{role}={home}" for role, home in zip(ROLES, homes, strict=True)]
    algorithm = numbers.choice(
        ["algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=true"]
    )
    return [
        algorithm,
        "placement.strategy=custom",
        *(f"placement.pools.{pool}=[1]" for pool in pools),
        *placed,
        f"trainer.n_gpus_per_node={len(pools)}",
        f"critic.ppo_epochs={numbers.choice([1, 2])}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
    ]


def run_side_by_side(one: list[Span], other: list[Span]) -> bool:
    return any(
        first.start_s < second.end_s and second.start_s < first.end_s
        for first in one
        for second in other
    )


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))]
)
def test_dependent_operations_never_overlap_under_a_random_placement(
    demo: Demo, tmp_path: Path, seed: int
) -> None:
    words = small_keys(demo, tmp_path, *random_words(seed))
    loaded = load_config([], words)
    Trainer(loaded).run()
    schedule = schedule_of(loaded.config)
    spans: dict[tuple[int, str], list[Span]] = {}
    for step, operation, span in read_run(tmp_path).spans:
        spans.setdefault((step, operation), []).append(span)
    names = list(dict.fromkeys(call.operation for call in schedule.calls))
    independent = {
        frozenset((first.operation, second.operation)) for first, second in schedule.independent
    }
    num_dependent = 0
    for step in range(1, STEPS):
        of_step = {name: spans[step, name] for name in names if name != "next_gen"} | {
            "next_gen": spans[step + 1, "gen"]
        }
        for one, other in combinations(names, 2):
            if frozenset((one, other)) not in independent:
                num_dependent += 1
                assert not run_side_by_side(of_step[one], of_step[other]), (words, step, one, other)
    assert num_dependent > 10, "a schedule that calls everything independent shows nothing"
