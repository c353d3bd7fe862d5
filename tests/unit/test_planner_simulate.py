"""The simulated step: when calls start and end under a placement, with durations that are known."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from planner_runs import config_of

from rolepool.placement import build_plan
from rolepool.placement.plan import Plan, Schedule
from rolepool.placement.roles import Role
from rolepool.planner.layouts import partitions
from rolepool.planner.simulation import core_rate, shared_rate, simulate, simulate_many
from rolepool.trainer.paper import schedule_of

SECONDS = {
    "gen": 10.0,
    "reward": 1.0,
    "values": 2.0,
    "old_log_prob": 3.0,
    "ref": 3.0,
    "adv": 0.5,
    "update_critic": 5.0,
    "update_actor": 7.0,
    "update_weights": 1.0,
}
SPLIT = "placement.strategy=split trainer.n_gpus_per_node=4"


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return schedule_of(config_of())


def plan_of(words: str) -> Plan:
    return build_plan(config_of(words))


# Placements


def test_in_one_pool_a_step_takes_the_sum_of_all_operations_of_the_pool(schedule: Schedule) -> None:
    """The reward runs on CPUs and the advantages on the driver, while the pool computes
    log-probs."""
    found = simulate(schedule, plan_of("trainer.n_gpus_per_node=4").roles, SECONDS, {})
    of_pool = {name: seconds for name, seconds in SECONDS.items() if name not in ("reward", "adv")}
    assert found.step_s == pytest.approx(sum(of_pool.values())) == pytest.approx(31.0)
    assert found.busy == pytest.approx(
        {"global_pool": 1.0, "driver": 0.5 / 31, "reward_cpu": 1 / 31}
    )
    assert dict(found.path) == pytest.approx(of_pool)


def test_in_two_pools_the_critic_works_beside_the_actor(schedule: Schedule) -> None:
    """Its values beside the log-probs, and its update beside the actor's: 10 + 6 + 7 + 1 s."""
    found = simulate(schedule, plan_of(SPLIT).roles, SECONDS, {})
    assert found.step_s == pytest.approx(24.0)
    assert found.busy["critic_pool"] == pytest.approx(7 / 24.0)
    assert [operation for operation, _ in found.path] == [
        *("gen", "old_log_prob", "ref", "update_actor", "update_weights")
    ]


def test_the_critics_update_may_run_on_during_the_next_generation(schedule: Schedule) -> None:
    """It starts 12.5 s after the generation, and the next values are needed 10 s after the next
    one: 21.5 s are free. If it takes 30 s, a step takes as long as the critic: 2 + 0.5 + 30 s."""
    roles = plan_of(SPLIT).roles
    assert simulate(
        schedule, roles, {**SECONDS, "update_critic": 21.5}, {}
    ).step_s == pytest.approx(24.0)
    slow = simulate(schedule, roles, {**SECONDS, "update_critic": 30.0}, {})
    assert slow.step_s == pytest.approx(32.5)
    assert "update_critic" in dict(slow.path)


def test_hand_overs_add_to_the_chain_that_the_step_waits_for(schedule: Schedule) -> None:
    roles = plan_of("trainer.n_gpus_per_node=4").roles
    gaps = {"gen": 0.25, "update_actor": 0.5}
    without, with_gaps = (simulate(schedule, roles, SECONDS, one).step_s for one in ({}, gaps))
    assert with_gaps - without == pytest.approx(0.75)


def test_pools_that_share_a_gpu_divide_it_while_both_work(schedule: Schedule) -> None:
    """With an efficiency of 1 nothing is lost and nothing gained: a step takes the sum, as in one
    pool."""
    plan = plan_of("placement.strategy=split placement.split.share=0.5 trainer.n_gpus_per_node=1")
    assert [pool.share for pool in plan.pools.values()] == [0.5, 0.5]
    times = {efficiency: simulate(schedule, plan.roles, SECONDS, {}, partial(shared_rate, plan, efficiency)).step_s
             for efficiency in (1.0, 1.5, 2.0)}  # fmt: skip
    assert times[1.0] == pytest.approx(31.0)
    assert times[2.0] == pytest.approx(24.0)  # as with a GPU for each
    assert times[2.0] < times[1.5] < times[1.0]


def test_more_processes_than_cores_slow_each_other_down(schedule: Schedule) -> None:
    plan = plan_of(f"{SPLIT} trainer.device=cpu")
    enough = simulate(schedule, plan.roles, SECONDS, {}, partial(core_rate, plan, 4)).step_s
    assert enough == pytest.approx(24.0)
    few = simulate(schedule, plan.roles, SECONDS, {}, partial(core_rate, plan, 2)).step_s
    assert few == pytest.approx(24.0 + 7)  # the cores are enough for one pool at a time
    one = simulate(schedule, plan.roles, SECONDS, {}, partial(core_rate, plan, 1)).step_s
    assert one == pytest.approx(2 * few)


def test_processes_on_different_nodes_have_cores_of_their_own(schedule: Schedule) -> None:
    nodes = "trainer.n_gpus_per_node=2 trainer.nnodes=2 trainer.device=cpu"
    plan = plan_of(f"placement.strategy=split placement.split.axis=node {nodes}")
    found = simulate(schedule, plan.roles, SECONDS, {}, partial(core_rate, plan, 2)).step_s
    assert found == pytest.approx(24.0)


# Generation that runs ahead

ROLLOUT_ALONE = """
placement.strategy=custom trainer.n_gpus_per_node=4 placement.pools={train:[2],generate:[2]}
placement.roles={actor:train,critic:train,ref:train,rollout:generate}
"""


def step_s_of(k: int, words: str, **seconds: float) -> float:
    config = config_of(f"{words} algorithm.max_staleness={k}")
    plan = build_plan(config)
    return simulate(schedule_of(config), plan.roles, {**SECONDS, **seconds}, {}).step_s


def test_a_rollout_in_its_own_pool_generates_while_the_others_train() -> None:
    """Training takes 2 + 3 + 3 + 5 + 7 s. Both sides wait for each other while weights are sent,
    which takes 1 s."""
    assert step_s_of(0, ROLLOUT_ALONE) == pytest.approx(10 + 20 + 1)
    assert step_s_of(1, ROLLOUT_ALONE) == pytest.approx(20 + 1)
    assert step_s_of(1, ROLLOUT_ALONE, gen=20.0) == pytest.approx(20 + 1)
    assert step_s_of(1, ROLLOUT_ALONE, gen=35.0) == pytest.approx(35 + 1)
    # As both wait for each other after each step, more steps ahead save nothing more.
    for gen_s in (10.0, 35.0):
        assert step_s_of(2, ROLLOUT_ALONE, gen=gen_s) == step_s_of(1, ROLLOUT_ALONE, gen=gen_s)


def test_in_one_pool_nothing_is_saved_by_generating_ahead() -> None:
    words = "trainer.n_gpus_per_node=4"
    assert step_s_of(1, words) == step_s_of(2, words) == step_s_of(0, words)


def test_a_critic_in_its_own_pool_computes_values_beside_a_generation_ahead() -> None:
    """Without staleness 9 s of values and 0.5 s of advantages follow 10 s of generation."""
    assert step_s_of(0, SPLIT, values=9.0) == pytest.approx(10 + 9.5 + 7 + 1)
    assert step_s_of(1, SPLIT, values=9.0) == pytest.approx(10 + 3 + 3 + 7 + 1)


@pytest.mark.parametrize("k", [1, 2, 16])
def test_busy_shares_and_the_path_are_those_of_one_step(k: int) -> None:
    config = config_of(f"{ROLLOUT_ALONE} algorithm.max_staleness={k}")
    found = simulate(schedule_of(config), build_plan(config).roles, SECONDS, {})
    assert found.busy["generate"] == pytest.approx(11 / 21)
    assert found.busy["train"] == pytest.approx(1.0)
    assert sum(seconds for _, seconds in found.path) == pytest.approx(21.0)
    assert dict(found.path)["update_actor"] == pytest.approx(7.0)


# Many placements at once


def random_seconds(chance: random.Random) -> dict[str, float]:
    return {name: seconds * chance.uniform(0.05, 4) for name, seconds in SECONDS.items()}


@pytest.mark.parametrize(
    "words",
    ["", "critic.ppo_epochs=2", "algorithm.use_kl_in_reward=true", "trainer.critic_warmup=3"],
)
def test_arrays_of_times_give_the_same_steps_as_one_simulation_for_each(words: str) -> None:
    chance = random.Random(words)
    schedule = schedule_of(config_of(words))
    gaps = {name: chance.uniform(0, 0.2) for name in SECONDS}
    for groups in partitions((Role.Actor, Role.Rollout, Role.RefPolicy, Role.Critic)):
        homes = {role: "+".join(group) for group in groups for role in group}
        drawn = [random_seconds(chance) for _ in range(8)]
        arrays = {name: np.array([one[name] for one in drawn]) for name in SECONDS}
        together = simulate_many(schedule, homes, arrays, gaps).step_s
        assert together == pytest.approx(
            [simulate(schedule, homes, one, gaps).step_s for one in drawn]
        )


@pytest.mark.parametrize("seed", range(30))
def test_a_rate_of_one_changes_nothing(schedule: Schedule, seed: int) -> None:
    """Two programs compute the same: events in the order of time, and calls in the order in which
    they are made."""
    chance = random.Random(seed)
    groups = chance.choice(
        list(partitions((Role.Actor, Role.Rollout, Role.RefPolicy, Role.Critic)))
    )
    homes = {role: "+".join(group) for group in groups for role in group}
    seconds, gaps = random_seconds(chance), {name: chance.uniform(0, 0.2) for name in SECONDS}
    plain = simulate(schedule, homes, seconds, gaps)
    by_events = simulate(schedule, homes, seconds, gaps, lambda pool, active: 1.0)
    assert by_events.step_s == pytest.approx(plain.step_s)
    assert by_events.busy == pytest.approx(plain.busy)
    assert sum(took for _, took in plain.path) <= plain.step_s * (1 + 1e-9)
