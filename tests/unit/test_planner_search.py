"""The search finds what trying everything finds, and prints overrides that make the same
placement."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import pytest
from planner_runs import COSTS, config_of, random_costs, record

from rolepool.config import Config, load_config
from rolepool.errors import ConfigError, RolepoolError
from rolepool.placement import build_plan
from rolepool.placement.plan import Plan
from rolepool.placement.roles import Role, needed_roles
from rolepool.planner.layouts import layouts, partitions
from rolepool.planner.predict import TENSOR_PARALLEL, Predictor
from rolepool.planner.profile import Profile
from rolepool.planner.search import Objective, score_of, search
from rolepool.report.predicted import without_placement
from rolepool.trainer.paper import schedule_of

REWARD_MODEL = "reward_model.enable=true reward_model.model.path=recipes/shapes/qwen2.5-0.5b"
PROFILES = (
    "trainer.n_gpus_per_node=1",
    "trainer.n_gpus_per_node=3 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "trainer.n_gpus_per_node=6 placement.strategy=split placement.split.actor_gpus_per_node=4",
)
SMALL: list[tuple[int, ...]] = [(1,), (2,), (3,), (4,), (1, 1), (5,)]
LARGE: list[tuple[int, ...]] = [(6,), (7,), (8,), (4, 4), (2, 2, 2), (5, 3), (2, 6), (1,) * 8]
SLOW = [pytest.param(large, marks=pytest.mark.slow) for large in LARGE]


def predictor_of(
    seed: int | None = None, more: str = "", gpu_memory_bytes: int | None = None
) -> Predictor:
    costs = COSTS if seed is None else random_costs(seed)
    recordings = [record(f"{words} {more}", costs=costs, num_steps=3) for words in PROFILES]
    return Predictor(Profile(recordings), schedule_of, gpu_memory_bytes=gpu_memory_bytes)


def best_by_trying_all(
    predictor: Predictor, config: Config, inventory: tuple[int, ...], objective: Objective
) -> float:
    """The best score of all ways to group the roles and all sizes of pools."""
    scores = []
    for parallel in {one.config.at(TENSOR_PARALLEL) for one in predictor.profile.recordings}:
        changed = config.with_value(TENSOR_PARALLEL, parallel)
        for groups in partitions(needed_roles(config)[0]):
            for sizes in product(range(1, sum(inventory) + 1), repeat=len(groups)):
                for plan in (
                    layouts(changed, groups, sizes, inventory)
                    if sum(sizes) <= sum(inventory)
                    else ()
                ):
                    try:
                        scores.append(score_of(predictor.predict("", changed, plan), objective))
                        break
                    except RolepoolError:
                        continue
    return min(scores)


# What is found


@pytest.mark.parametrize("inventory", [*SMALL, *SLOW], ids=str)
@pytest.mark.parametrize("objective", ["time", "throughput_per_gpu"])
def test_it_finds_what_trying_all_placements_finds(
    inventory: tuple[int, ...], objective: Objective
) -> None:
    predictor = predictor_of(seed=sum(inventory) * 31 + len(inventory))
    config = config_of(f"trainer.nnodes={len(inventory)} trainer.n_gpus_per_node={max(inventory)}")
    found = search(predictor, config, inventory, objective)
    best = best_by_trying_all(predictor, config, inventory, objective)
    assert score_of(found[0], objective) == pytest.approx(best, rel=1e-3)
    scores = [score_of(one, objective) for one in found]
    assert scores == pytest.approx(sorted(scores), rel=1e-3)


@pytest.mark.parametrize("seed", range(2))
def test_it_finds_the_best_placement_also_with_a_reward_model(seed: int) -> None:
    predictor, inventory = predictor_of(seed, REWARD_MODEL), (5,)
    config = config_of(f"{REWARD_MODEL} trainer.n_gpus_per_node=5")
    (best, *_) = search(predictor, config, inventory)
    assert best.step_s == pytest.approx(
        best_by_trying_all(predictor, config, inventory, "time"), rel=1e-3
    )


def test_a_tensor_parallel_size_is_tried_if_it_was_measured() -> None:
    two = f"{TENSOR_PARALLEL}=2"
    recordings = [record("trainer.n_gpus_per_node=4"), record(f"trainer.n_gpus_per_node=4 {two}")]
    predictor, config = (
        Predictor(Profile(recordings), schedule_of),
        config_of("trainer.n_gpus_per_node=4"),
    )
    (best, *_) = search(predictor, config, (4,))
    assert best.step_s == pytest.approx(
        best_by_trying_all(predictor, config, (4,), "time"), rel=1e-3
    )
    only_one = Predictor(Profile(recordings[:1]), schedule_of)
    assert not any(TENSOR_PARALLEL in one.name for one in search(only_one, config, (4,)))
    with pytest.raises(ConfigError, match="the profile has measured only 1; record a run with it"):
        only_one.predict("", changed := config.with_value(TENSOR_PARALLEL, 2), build_plan(changed))


def test_what_does_not_fit_in_memory_is_not_found() -> None:
    large, small = (
        predictor_of(gpu_memory_bytes=80 * 2**30),
        predictor_of(gpu_memory_bytes=7 * 2**30),
    )
    config = config_of("trainer.n_gpus_per_node=4")
    whole = search(large, config, (4,))
    found = search(small, config, (4,))
    assert all(max(one.memory_gib.values()) <= 7 for one in found)
    assert any(max(one.memory_gib.values()) > 7 for one in whole)
    with pytest.raises(ConfigError, match="no placement of these GPUs"):
        search(predictor_of(gpu_memory_bytes=2**30), config, (4,))


def test_more_gpus_are_never_worse() -> None:
    predictor = predictor_of(seed=3)
    times = [search(predictor, config_of(), (number,))[0].step_s for number in range(1, 9)]
    assert times == pytest.approx(sorted(times, reverse=True), rel=1e-3)
    assert times[-1] < 0.9 * times[0]


# Overrides


def slots_of(plan: Plan) -> dict[Role, object]:
    return {role: plan.pool_of(role).slots for role in plan.roles}


@pytest.mark.parametrize(
    "words",
    [
        "trainer.n_gpus_per_node=8",
        "trainer.n_gpus_per_node=4 trainer.nnodes=2",
        "trainer.n_gpus_per_node=4 placement.strategy=split placement.split.actor_gpus_per_node=3",
        "trainer.n_gpus_per_node=4 placement.strategy=custom placement.pools={a:[2],b:[2]} "
        "placement.roles={actor_rollout:a,ref:a,critic:b}",
    ],
)
@pytest.mark.parametrize("inventory", [(3,), (2, 2), *SLOW], ids=str)
def test_the_overrides_that_are_printed_make_the_same_placement(
    words: str, inventory: tuple[int, ...]
) -> None:
    config = config_of(words)
    for seed in range(2):
        for one in search(predictor_of(seed), config, inventory):
            overrides = one.name.split()
            loaded = load_config([without_placement(config, overrides)], overrides).config
            assert slots_of(build_plan(loaded, gpus_per_node=inventory)) == slots_of(one.plan), (
                one.name
            )


def test_a_placement_that_a_strategy_makes_is_written_with_its_name() -> None:
    config = config_of("trainer.n_gpus_per_node=4")
    found = [one for seed in range(6) for one in search(predictor_of(seed), config, (4,))]
    names = {word for one in found for word in one.name.split()}
    assert {
        "placement.strategy=standard",
        "placement.strategy=split",
        "placement.strategy=custom",
    } <= names


# Size


def memory_kib(name: str) -> int:
    """A number of this process: VmRSS is the memory that it uses now, VmHWM the most that it has
    used."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1])


def test_ten_thousand_gpus_take_less_than_ten_seconds_and_a_gigabyte() -> None:
    """10,080 has 72 divisors, so there are 27 million combinations of sizes for four pools."""
    work = "data.train_batch_size=10080 actor_rollout_ref.actor.ppo_mini_batch_size=10080"
    free = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null critic.ppo_micro_batch_size_per_gpu=null"
    predictor = predictor_of(gpu_memory_bytes=80 * 2**30)
    before_kib = memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is used now
    start_s = time.process_time()
    found = search(predictor, config_of(f"{work} {free}"), (8,) * 1250)
    assert time.process_time() - start_s < 10
    assert memory_kib("VmHWM") - before_kib < 2**20
    assert len(found) == 5
