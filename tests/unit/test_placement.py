"""Placement: which GPUs each pool gets, which roles live where, and what is said when it cannot
be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from pydantic import ValidationError

from rolepool import ResourcePool, ResourcePoolManager, Role
from rolepool.config import load_config
from rolepool.errors import ConfigError, PlacementError
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.hardware import parse_inventory, parse_memory
from rolepool.placement.plan import place
from rolepool.placement.roles import ROLE_SPECS

ACTOR_POOL, CRITIC_POOL = "actor_rollout_ref_pool", "critic_pool"
WITH_REFERENCE = "actor_rollout_ref.actor.use_kl_loss=true"
WITH_REWARD_MODEL = "reward_model.enable=true reward_model.model.path=some/model"
EIGHT = "trainer.n_gpus_per_node=8"
"""Whatever the machine of the tests has."""


def plan_of(overrides: str = "", inventory: str | None = None) -> Plan:
    """The plan of overrides on an inventory that is divided whole, or on what trainer.* asks
    for."""
    config = load_config(overrides=[EIGHT, *overrides.split()]).config
    if inventory is None:
        return build_plan(config)
    return build_plan(config, parse_inventory(inventory), take_all=True)


def custom(
    pools: str, roles: str = "actor_rollout=a critic=b", inventory: str = "8", more: str = ""
) -> Plan:
    written = [f"placement.pools.{pool}" for pool in pools.split()] + [
        f"placement.roles.{role}" for role in roles.split()
    ]
    return plan_of(f"placement.strategy=custom {' '.join(written)} {more}", inventory)


def refusal(overrides: str, inventory: str | None = None) -> str:
    with pytest.raises(PlacementError) as caught:
        plan_of(overrides, inventory)
    return str(caught.value)


def custom_refusal(
    pools: str, roles: str = "actor_rollout=a critic=b", inventory: str = "8", more: str = ""
) -> str:
    with pytest.raises(PlacementError) as caught:
        custom(pools, roles, inventory, more)
    return str(caught.value)


def by_node(slots: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = {}
    for node, gpu in slots:
        nodes.setdefault(node, []).append(gpu)
    return nodes


def slots(plan: Plan, pool: str) -> dict[int, list[int]]:
    """GPUs by node."""
    return by_node(plan.pools[pool].slots)


def problems(overrides: str, inventory: str | None = None) -> list[str]:
    config = load_config(overrides=[EIGHT, *overrides.split()]).config
    plan = (
        build_plan(config)
        if inventory is None
        else build_plan(config, parse_inventory(inventory), take_all=True)
    )
    return find_problems(config, plan)


# Standard and split

FIRST_HALF, SECOND_HALF, WHOLE = [0, 1, 2, 3], [4, 5, 6, 7], list(range(8))


@pytest.mark.parametrize(
    ("nodes", "gpus", "wish", "actor", "critic"),
    [
        (1, 4, "", {0: [0, 1]}, {0: [2, 3]}),
        (1, 3, "", {0: [0, 1]}, {0: [2]}),
        (1, 2, "", {0: [0]}, {0: [1]}),
        (2, 8, "", {0: FIRST_HALF, 1: FIRST_HALF}, {0: SECOND_HALF, 1: SECOND_HALF}),
        (2, 8, "axis=node", {0: WHOLE}, {1: WHOLE}),
        (3, 8, "axis=node", {0: WHOLE, 1: WHOLE}, {2: WHOLE}),
        (2, 1, "", {0: [0]}, {1: [0]}),
        (1, 4, "actor_gpus_per_node=3", {0: [0, 1, 2]}, {0: [3]}),
        (1, 4, "axis=gpu", {0: [0, 1]}, {0: [2, 3]}),
        (3, 8, "actor_nodes=1", {0: WHOLE}, {1: WHOLE, 2: WHOLE}),
        (2, 4, "actor_gpus_per_node=1", {0: [0], 1: [0]}, {0: [1, 2, 3], 1: [1, 2, 3]}),
        (1, 1, "share=0.5", {0: [0]}, {0: [0]}),
        (2, 2, "share=0.25", {0: [0, 1], 1: [0, 1]}, {0: [0, 1], 1: [0, 1]}),
    ],
)
def test_split_divides_the_gpus_as_the_table_says(
    nodes: int, gpus: int, wish: str, actor: dict[int, list[int]], critic: dict[int, list[int]]
) -> None:
    wish = f"placement.split.{wish}" if wish else ""
    plan = plan_of(
        f"trainer.nnodes={nodes} trainer.n_gpus_per_node={gpus} placement.strategy=split {wish}"
    )
    assert slots(plan, ACTOR_POOL) == actor
    assert slots(plan, CRITIC_POOL) == critic


def test_standard_puts_all_roles_in_one_pool_on_all_gpus() -> None:
    plan = plan_of(
        f"trainer.nnodes=2 trainer.n_gpus_per_node=2 {WITH_REFERENCE} {WITH_REWARD_MODEL}"
    )
    assert slots(plan, "global_pool") == {0: [0, 1], 1: [0, 1]}
    assert plan.pools["global_pool"].roles == ("actor", "rollout", "ref", "critic", "reward_model")
    assert set(plan.roles.values()) == {"global_pool"}
    assert plan.unused_roles == {}


def test_split_keeps_actor_rollout_and_reference_apart_from_critic_and_reward_model() -> None:
    plan = plan_of(f"placement.strategy=split {WITH_REFERENCE} {WITH_REWARD_MODEL}")
    assert plan.pools[ACTOR_POOL].roles == (Role.Actor, Role.Rollout, Role.RefPolicy)
    assert plan.pools[CRITIC_POOL].roles == (Role.Critic, Role.RewardModel)


def test_one_gpu_cannot_be_split_and_the_error_offers_what_can_be_done() -> None:
    assert refusal("trainer.n_gpus_per_node=1 placement.strategy=split") == (
        "placement.strategy=split: two pools need at least 2 GPUs, and there is 1; use placement.strategy=standard, "
        "or let both pools share the GPU with placement.split.share=0.5"
    )


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("trainer.n_gpus_per_node=4 placement.split.actor_gpus_per_node=4",
         "placement.split.actor_gpus_per_node=4: the critic would have no GPU (of 4); use at most 3"),
        ("trainer.nnodes=2 placement.split.actor_nodes=2",
         "placement.split.actor_nodes=2: the critic would have no node (of 2); use at most 1"),
        ("trainer.nnodes=1 placement.split.axis=node",
         "placement.split.axis=node: the critic would have no node (of 1); use placement.split.axis=gpu"),
        ("trainer.nnodes=2 trainer.n_gpus_per_node=1 placement.split.axis=gpu", "use placement.split.axis=node"),
        ("trainer.nnodes=2 trainer.n_gpus_per_node=1 placement.split.actor_gpus_per_node=1",
         "use placement.split.axis=node"),
    ],
)  # fmt: skip
def test_a_division_that_leaves_a_pool_empty_is_refused_with_one_that_does_not(
    wish: str, expected: str
) -> None:
    assert expected in refusal(f"placement.strategy=split {wish}")


def test_split_without_critic_and_reward_model_is_refused() -> None:
    message = refusal("placement.strategy=split algorithm.adv_estimator=grpo")
    assert message.startswith(
        "placement.pools.critic_pool=[4]: its roles are not used: critic (algorithm.adv_estimator=grpo has no critic), "
    )
    assert message.endswith("use placement.strategy=standard")


def test_split_without_a_critic_serves_the_reward_model() -> None:
    plan = plan_of(f"placement.strategy=split algorithm.adv_estimator=grpo {WITH_REWARD_MODEL}")
    assert plan.pools[CRITIC_POOL].roles == (Role.RewardModel,)


# Which roles there are


@pytest.mark.parametrize(
    ("overrides", "unused"),
    [
        ("", {"ref": "no KL term", "reward_model": "the reward is a rule"}),
        (WITH_REFERENCE, {"reward_model": "the reward is a rule"}),
        ("algorithm.use_kl_in_reward=true", {"reward_model": "the reward is a rule"}),
        (WITH_REWARD_MODEL, {"ref": "no KL term"}),
        ("algorithm.adv_estimator=grpo",
         {"ref": "no KL term", "critic": "algorithm.adv_estimator=grpo has no critic", "reward_model": "rule"}),
        ("algorithm.adv_estimator=rloo critic.enable=true", {"ref": "no KL term", "reward_model": "rule"}),
    ],
)  # fmt: skip
def test_a_role_that_the_algorithm_does_not_need_is_not_used_and_the_plan_says_why(
    overrides: str, unused: dict[str, str]
) -> None:
    plan = plan_of(overrides)
    assert set(plan.unused_roles) == set(unused)
    assert set(plan.roles) | set(plan.unused_roles) == set(ROLE_SPECS)
    assert set(plan.roles).isdisjoint(plan.unused_roles)
    for role, reason in unused.items():
        assert reason in plan.unused_roles[Role(role)]


def test_a_custom_reference_is_dropped_when_no_kl_is_used() -> None:
    roles = "actor_rollout=a critic=b ref=b"
    assert custom("a=[4] b=[4]", roles).pools["b"].roles == (Role.Critic,)
    assert custom("a=[4] b=[4]", roles, more=WITH_REFERENCE).pools["b"].roles == (
        Role.RefPolicy,
        Role.Critic,
    )


def test_a_pool_whose_roles_are_all_left_out_is_refused_with_the_reason() -> None:
    message = custom_refusal("a=[4] b=[4]", "actor_rollout=a critic=a ref=b")
    assert message.startswith(
        "placement.pools.b=[4]: its roles are not used: ref (no KL term is used"
    )


# Custom pools


@pytest.mark.parametrize(
    ("pools", "inventory", "expected"),
    [
        (
            "a=[4,2] b=[2,2]",
            "8,8",
            {"a": {0: [0, 1, 2, 3], 1: [0, 1]}, "b": {0: [4, 5], 1: [2, 3]}},
        ),
        ("a=[2,0,4] b=[0,8]", "8,8,8", {"a": {0: [0, 1], 2: [0, 1, 2, 3]}, "b": {1: WHOLE}}),
        ("a=[8] b=[8]", "8,8", {"a": {0: WHOLE}, "b": {1: WHOLE}}),
        ("a=[8,8] b=[4]", "8,8,4", {"a": {0: WHOLE, 1: WHOLE}, "b": {2: [0, 1, 2, 3]}}),
        ("a=[4] b=[8]", "8,8,4", {"a": {0: [0, 1, 2, 3]}, "b": {1: WHOLE}}),
        ("a=[8] b=[4]", "4,8", {"a": {1: WHOLE}, "b": {0: [0, 1, 2, 3]}}),
        ("a=[1] b=[1]", "1,1", {"a": {0: [0]}, "b": {1: [0]}}),
        ("a=[0,2] b=[2]", "4,4", {"a": {1: [0, 1]}, "b": {0: [0, 1]}}),
        ("a=[6] b=[2,2]", "8,8", {"a": {0: [0, 1, 2, 3, 4, 5]}, "b": {0: [6, 7], 1: [0, 1]}}),
        ("a=[6] b=[3,0,1]", "8,8,8,8", {"a": {0: [0, 1, 2, 3, 4, 5]}, "b": {1: [0, 1, 2], 3: [0]}}),
        ("a=[2] b=[2]", "0,2,2", {"a": {1: [0, 1]}, "b": {2: [0, 1]}}),
    ],
)
def test_entries_go_in_order_to_the_next_node_with_enough_free_gpus(
    pools: str, inventory: str, expected: dict[str, dict[int, list[int]]]
) -> None:
    plan = custom(pools, inventory=inventory)
    assert {name: slots(plan, name) for name in plan.pools} == expected


def test_ranks_count_along_the_slots() -> None:
    pool = custom("a=[2,0,2] b=[0,1]", inventory="2,2,2").pools["a"]
    assert pool.slots == ((0, 0), (0, 1), (2, 0), (2, 1))
    assert pool.world_size == 4
    assert pool.counts_by_node == {0: 2, 2: 2}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("standard", {"global_pool": {0: WHOLE, 1: WHOLE, 2: [0, 1, 2, 3]}}),
        ("split",
         {ACTOR_POOL: {0: FIRST_HALF, 1: FIRST_HALF, 2: [0, 1]},
          CRITIC_POOL: {0: SECOND_HALF, 1: SECOND_HALF, 2: [2, 3]}}),
        ("split placement.split.axis=node", {ACTOR_POOL: {0: WHOLE, 1: WHOLE}, CRITIC_POOL: {2: [0, 1, 2, 3]}}),
        ("split placement.split.actor_gpus_per_node=3",
         {ACTOR_POOL: {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]},
          CRITIC_POOL: {0: [3, 4, 5, 6, 7], 1: [3, 4, 5, 6, 7], 2: [3]}}),
    ],
)  # fmt: skip
def test_an_inventory_of_unequal_nodes_is_divided_whole(
    strategy: str, expected: dict[str, dict[int, list[int]]]
) -> None:
    plan = plan_of(f"placement.strategy={strategy}", "8,8,4")
    assert {name: slots(plan, name) for name in plan.pools} == expected


def test_an_inventory_larger_than_asked_for_is_used_as_far_as_asked_for() -> None:
    config = load_config(overrides=["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]).config
    assert slots(build_plan(config, [4, 8, 8, 8]), "global_pool") == {1: WHOLE, 2: WHOLE}


def test_nodes_without_gpus_are_passed_over() -> None:
    plan = plan_of("placement.strategy=split", "0,2,0,2")
    assert slots(plan, ACTOR_POOL) == {1: [0], 3: [0]}
    assert slots(plan, CRITIC_POOL) == {1: [1], 3: [1]}


def test_rollout_may_live_alone() -> None:
    plan = custom("train=[2] gen=[2]", "actor=train critic=train rollout=gen", inventory="4")
    assert plan.roles == {Role.Actor: "train", Role.Rollout: "gen", Role.Critic: "train"}
    assert plan.pool_of(Role.Rollout).roles == (Role.Rollout,)
    with pytest.raises(PlacementError, match="role actor_rollout has no pool of its own"):
        plan.pool_of(Role.ActorRollout)


def test_the_plan_says_where_a_role_lives() -> None:
    plan = plan_of("placement.strategy=split")
    assert plan.pool_of(Role.ActorRollout) == plan.pool_of(Role.Actor) == plan.pools[ACTOR_POOL]
    assert plan.pool_of(Role.Critic) == plan.pools[CRITIC_POOL]
    with pytest.raises(
        PlacementError, match="role ref has no pool of its own; the roles with a pool are actor"
    ):
        plan.pool_of(Role.RefPolicy)


# Sharing a GPU


def test_two_pools_of_half_a_gpu_stand_on_the_same_gpu() -> None:
    plan = custom("a={per_node:[1],share:0.5} b={per_node:[1],share:0.5}", inventory="1")
    assert slots(plan, "a") == slots(plan, "b") == {0: [0]}


def test_ten_pools_of_a_tenth_fill_a_gpu_exactly() -> None:
    specs = {f"p{index}": {"per_node": [1], "share": 0.1} for index in range(10)}
    manager = ResourcePoolManager(specs, {Role.ActorRollout: "p0"})
    assert {pool.slots for pool in place(manager, [1]).pools.values()} == {((0, 0),)}


def test_shares_of_one_gpu_may_not_sum_to_more_than_one() -> None:
    message = custom_refusal("a={per_node:[1],share:0.6} b={per_node:[1],share:0.5}", inventory="1")
    assert message.startswith(
        "Not enough GPUs: b needs 1 with 0.5 of each free on node 0 or a later node, and at most 0 "
    )


def test_a_whole_gpu_is_not_shared() -> None:
    plan = custom("a={per_node:[1],share:0.5} b=[1]", inventory="2")
    assert (slots(plan, "a"), slots(plan, "b")) == ({0: [0]}, {0: [1]})


def test_a_pool_never_stands_twice_on_one_gpu() -> None:
    assert slots(
        custom("a={per_node:[2],share:0.5} b={per_node:[2],share:0.5}", inventory="2"), "a"
    ) == {0: [0, 1]}
    assert "Not enough GPUs: a needs 2 with 0.5 of each free" in custom_refusal(
        "a={per_node:[2],share:0.5} b=[1]", inventory="1,1"
    )


# What cannot be placed


def test_too_few_gpus_are_counted_in_the_error() -> None:
    message = custom_refusal("a=[4,6] b=[4,4]", inventory="8,8")
    assert message.startswith(
        "Not enough GPUs: b needs 4 on node 1 or a later node, and at most 2 are free there (2 nodes in all); "
        "make the pool smaller, or "
    )


def test_the_error_says_how_many_gpus_are_free_on_any_later_node() -> None:
    message = custom_refusal("a=[8,4,6] b=[5]", inventory="8,8,8")
    assert "b needs 5 on node 0 or a later node, and at most 4 are free there" in message


def test_a_pool_over_more_nodes_than_there_are_is_refused() -> None:
    message = custom_refusal("a=[1] b=[1,0,1]", inventory="4,4")
    assert (
        "b needs 1 on node 2 or a later node, and at most 0 are free there (2 nodes in all)"
        in message
    )


def test_every_pool_that_does_not_fit_is_reported() -> None:
    lines = custom_refusal("a=[9] b=[10]", inventory="8").splitlines()
    assert [line.split(" on node")[0] for line in lines] == [
        "Not enough GPUs: a needs 9",
        "Not enough GPUs: b needs 10",
    ]


def test_a_smaller_inventory_than_asked_for_is_refused() -> None:
    config = load_config(overrides=["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]).config
    with pytest.raises(
        PlacementError,
        match="Not enough GPUs: global_pool needs 8 on node 1 or a later node, and at most 4 ",
    ):
        build_plan(config, [8, 4])


def test_a_role_may_be_placed_once_only() -> None:
    assert custom_refusal("a=[4] b=[4]", "actor_rollout=a actor=b critic=b") == (
        "placement.roles.actor=b: actor is also placed in a; set only one pool for it"
    )


def test_a_role_in_an_unknown_pool_is_answered_with_the_pools_there_are() -> None:
    assert custom_refusal("a=[4] b=[4]", "actor_rollout=a critic=c") == (
        "placement.roles.critic=c: no such pool; there are a, b"
    )


def test_roles_without_a_pool_and_pools_without_a_role_are_reported_together() -> None:
    assert custom_refusal("a=[2] b=[2] c=[2]", "actor=a").splitlines() == [
        "placement.strategy=custom: no pool for rollout, critic; give each role one of a, b, c "
        "(placement.roles.rollout=POOL)",
        "placement.pools.b=[2]: it has no role; give it a role, remove it, or use placement.strategy=standard",
        "placement.pools.c=[2]: it has no role; give it a role, remove it, or use placement.strategy=standard",
    ]


@pytest.mark.parametrize("name", ["driver", "reward_cpu"])
def test_a_pool_with_a_name_that_timings_use_is_refused(name: str) -> None:
    said = custom_refusal(f"{name}=[1]", f"actor_rollout={name} critic={name}")
    assert said.startswith(f"placement.pools.{name}: timings already use this name")


def test_custom_without_pools_is_refused_with_an_example() -> None:
    assert refusal("placement.strategy=custom").endswith(
        "needs pools, such as placement.pools.big=[4]"
    )


# The names a verl user brings along


def test_a_pool_manager_is_written_as_in_a_verl_script() -> None:
    resource_pool_spec = {"actor_rollout_ref_pool": [2], "critic_pool": [2]}
    mapping = {
        Role.ActorRollout: "actor_rollout_ref_pool",
        Role.RefPolicy: "actor_rollout_ref_pool",
        Role.Critic: "critic_pool",
    }
    mapping[Role.RewardModel] = "critic_pool"
    manager = ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping)
    manager.create_resource_pool()
    assert manager.get_resource_pool(Role.ActorRollout) == ResourcePool((2,))
    assert manager.get_resource_pool(Role.RewardModel).world_size == 2
    assert manager.get_n_gpus() == 4
    plan = place(manager, [4])
    assert (slots(plan, ACTOR_POOL), slots(plan, CRITIC_POOL)) == ({0: [0, 1]}, {0: [2, 3]})
    assert plan.pools[ACTOR_POOL].roles == (Role.Actor, Role.Rollout, Role.RefPolicy)


@pytest.mark.parametrize(
    "spec",
    [
        4,
        [],
        [0],
        [-1],
        [1.5],
        [True],
        {"per_node": [1], "share": 0},
        {"per_node": [1], "share": 1.5},
        {"share": 0.5},
        {"per_node": [1], "gpus": 1},
    ],
)
def test_a_pool_that_is_not_processes_per_node_is_refused(spec: object) -> None:
    with pytest.raises(PlacementError) as caught:
        ResourcePoolManager({"a": spec}, {Role.ActorRollout: "a"})  # type: ignore[dict-item]
    (problem,) = caught.value.problems
    assert problem.startswith(f"pool a: {spec} must be a list of processes per node such as [2, 2]")


def test_pools_may_be_placed_with_some_of_the_roles_only() -> None:
    plan = place(ResourcePoolManager({"a": [1]}, {Role.Critic: "a"}), [1])
    assert plan.roles == {Role.Critic: "a"}
    assert plan.pool_of(Role.Critic).slots == ((0, 0),)


def test_asking_a_manager_for_a_role_it_does_not_have_names_those_it_has() -> None:
    manager = ResourcePoolManager({"a": [1], "b": [1]}, {Role.Actor: "a", Role.Rollout: "b"})
    for role in (Role.Critic, Role.ActorRollout):
        with pytest.raises(
            PlacementError,
            match=f"role {role} has no pool of its own; the roles with a pool are actor",
        ):
            manager.get_resource_pool(role)


# What must divide what


def test_a_plan_without_problems_has_none() -> None:
    assert problems("") == []


def test_batches_are_cut_by_the_roles_own_pool_and_not_by_all_gpus() -> None:
    batches = "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=2"
    assert problems(f"trainer.n_gpus_per_node=3 placement.strategy=split {batches}") == []
    assert len(problems(f"trainer.n_gpus_per_node=3 {batches}")) == 3


def test_a_batch_that_cannot_be_cut_is_answered_with_its_neighbours() -> None:
    assert problems(
        "trainer.n_gpus_per_node=4 data.train_batch_size=10 actor_rollout_ref.actor.ppo_mini_batch_size=10"
    ) == [
        "data.train_batch_size=10: 10 sequences cannot be split into 4 equal parts for actor in global_pool; "
        "use 8 or 12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=10: 10 sequences cannot be split into 4 equal parts for actor in "
        "global_pool; use 8 or 12",
        "critic.ppo_mini_batch_size=10: 10 sequences cannot be split into 4 equal parts for critic in global_pool; "
        "use 8 or 12",
    ]


def test_only_the_pool_that_does_not_divide_is_reported() -> None:
    found = problems(
        "trainer.n_gpus_per_node=5 placement.strategy=split placement.split.actor_gpus_per_node=2 "
        "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=4"
    )
    assert found == [
        "data.train_batch_size=8: 8 sequences cannot be split into 3 equal parts for critic in critic_pool; "
        "use 6 or 12",
        "critic.ppo_mini_batch_size=4: 4 sequences cannot be split into 3 equal parts for critic in critic_pool; "
        "use 3 or 6",
    ]


@pytest.mark.parametrize("prompts", [6, 12])
def test_the_numbers_offered_work_when_they_are_taken(prompts: int) -> None:
    found = problems(
        "trainer.n_gpus_per_node=5 placement.strategy=split placement.split.actor_gpus_per_node=2 "
        f"data.train_batch_size={2 * prompts} actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"
    )
    assert found == []


def test_several_samples_of_a_prompt_count_as_sequences() -> None:
    base = "trainer.n_gpus_per_node=4 data.train_batch_size=6 actor_rollout_ref.actor.ppo_mini_batch_size=6"
    assert problems(f"{base} actor_rollout_ref.rollout.n=2") == []
    assert problems(f"{base} actor_rollout_ref.rollout.n=3")[0] == (
        "data.train_batch_size=6: 18 sequences cannot be split into 4 equal parts for actor in global_pool; use 4 or 8"
    )


def test_a_batch_smaller_than_the_pool_is_answered_with_the_pools_size() -> None:
    found = problems(
        "trainer.n_gpus_per_node=8 data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4"
    )
    assert found[0].endswith("; use 8")


@pytest.mark.parametrize("section", ["actor_rollout_ref.actor", "critic"])
def test_a_micro_batch_must_divide_what_a_gpu_gets_of_a_mini_batch(section: str) -> None:
    base = (
        "trainer.n_gpus_per_node=4 placement.strategy=split data.train_batch_size=16 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    )
    pool = ACTOR_POOL if section != "critic" else CRITIC_POOL
    assert problems(f"{base} {section}.ppo_micro_batch_size_per_gpu=2") == []
    assert problems(f"{base} {section}.ppo_micro_batch_size_per_gpu=3") == [
        f"{section}.ppo_micro_batch_size_per_gpu=3: must divide the 4 sequences of a mini-batch on each of the 2 "
        f"processes of {pool}; use 2"
    ]


@pytest.mark.parametrize(
    ("size", "placement", "expected"),
    [
        (4, "trainer.n_gpus_per_node=8 placement.strategy=split", None),
        (4, "trainer.n_gpus_per_node=4 placement.strategy=split",
         "must divide the number of processes of actor_rollout_ref_pool (2 per node); use 1 or 2"),
        (2, "trainer.nnodes=2 trainer.n_gpus_per_node=1",
         "must divide the number of processes of global_pool (1 per node); use 1"),
        (3, "trainer.n_gpus_per_node=8",
         "must divide the number of processes of global_pool (8 per node); use 1 or 2 or 4 or 8"),
    ],
)  # fmt: skip
def test_tensor_parallelism_stays_within_a_node_of_the_rollouts_pool(
    size: int, placement: str, expected: str | None
) -> None:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    found = [
        problem for problem in problems(f"{placement} {key}={size}") if problem.startswith(key)
    ]
    assert found == ([] if expected is None else [f"{key}={size}: {expected}"])


def test_tensor_parallelism_must_divide_every_node_of_an_uneven_pool() -> None:
    found = problems("actor_rollout_ref.rollout.tensor_model_parallel_size=4", "8,4,2")
    assert (
        "must divide the number of processes of global_pool (2, 4, 8 per node); use 1 or 2"
        in found[0]
    )


def test_the_rollout_is_cut_by_its_tensor_parallel_groups() -> None:
    rollout_alone = (
        "placement.strategy=custom placement.pools.train=[1] placement.pools.gen=[4] placement.roles.actor=train "
        "placement.roles.critic=train placement.roles.rollout=gen data.train_batch_size=2 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    )
    assert len(problems(rollout_alone, "8")) == 1
    assert (
        problems(f"{rollout_alone} actor_rollout_ref.rollout.tensor_model_parallel_size=2", "8")
        == []
    )


@pytest.mark.parametrize(
    ("key", "pool"),
    [
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", ACTOR_POOL),
        ("critic.model.fsdp_config.fsdp_size", CRITIC_POOL),
    ],
)
def test_a_sharding_group_must_divide_the_roles_pool(key: str, pool: str) -> None:
    base = "trainer.n_gpus_per_node=8 placement.strategy=split"
    assert problems(f"{base} {key}=2") == []
    assert problems(f"{base} {key}=-1") == []
    assert problems(f"{base} {key}=8") == [
        f"{key}=8: must divide the number of processes of {pool} (4 in all); use 1 or 2 or 4"
    ]


def test_keys_of_a_role_that_is_not_used_are_not_checked() -> None:
    assert (
        problems(
            "algorithm.adv_estimator=grpo critic.model.fsdp_config.fsdp_size=7 critic.ppo_mini_batch_size=7"
        )
        == []
    )


def test_mps_without_a_shared_gpu_is_refused() -> None:
    assert problems("placement.mps=true")[0].startswith(
        "placement.mps=true: MPS is for pools that share GPUs"
    )
    assert problems("placement.mps=true placement.strategy=split placement.split.share=0.5") == []


def test_mps_without_gpus_is_refused() -> None:
    shared = (
        "placement.mps=true placement.strategy=split placement.split.share=0.5 trainer.device=cpu"
    )
    assert problems(shared)[0].startswith(
        "placement.mps=true: MPS is for pools that share GPUs, and there are none"
    )


# Lengths


@pytest.fixture
def positions(tmp_path: Path) -> Callable[[int], Path]:
    """A model folder that says so many positions."""

    def make(number: int) -> Path:
        folder = tmp_path / f"model_{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": number}))
        return folder

    return make


LENGTHS = "data.max_prompt_length=40 data.max_response_length=25"


def problems_of(overrides: str) -> list[str]:
    config = load_config(overrides=f"{LENGTHS} {overrides}".split()).config
    return find_problems(config, build_plan(config))


def test_sequences_longer_than_a_model_has_positions_are_refused_with_both_numbers(
    positions: Callable[[int], Path],
) -> None:
    small, enough = positions(64), positions(65)
    assert problems_of(f"actor_rollout_ref.model.path={enough}") == []
    longer = "actor_rollout_ref.model.override_config.max_position_embeddings=65"
    assert problems_of(f"actor_rollout_ref.model.path={small} {longer}") == []
    for key in ("actor_rollout_ref.model.path", "critic.model.path"):
        other = f"actor_rollout_ref.model.path={enough} " if key.startswith("critic") else ""
        (line,) = problems_of(f"{other}{key}={small}")
        assert line == (
            "data.max_prompt_length=40: with data.max_response_length=25 a sequence may have 65 tokens, and "
            f"{key}={small} has 64 positions (max_position_embeddings); use at most 64 together"
        )


def test_a_reward_model_needs_positions_for_what_it_scores_only(
    positions: Callable[[int], Path],
) -> None:
    models = f"actor_rollout_ref.model.path={positions(65)} reward_model.model.path={positions(64)}"
    (line,) = problems_of(f"{models} reward_model.enable=true")
    assert line.endswith("or set reward_model.max_length=64")
    assert problems_of(f"{models} reward_model.enable=true reward_model.max_length=64") == []
    assert problems_of(models) == [], "it is not loaded"


@pytest.mark.parametrize(
    ("rope", "enough"),
    [
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 40,
                }
            },
            True,
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, True),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8,
                }
            },
            False,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, False),
        ({"rope_scaling": None}, False),
    ],
)
def test_stretched_rotary_embeddings_have_more_positions(
    tmp_path: Path, rope: dict[str, object], enough: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **rope}))
    assert (problems_of(f"actor_rollout_ref.model.path={tmp_path}") == []) == enough


# The plan as data


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(f"placement.strategy=split {WITH_REFERENCE}", "8,8,4"),
        custom("a={per_node:[2,0,1],share:0.5} b={per_node:[1],share:0.25}", inventory="2,2,2"),
        plan_of("algorithm.adv_estimator=grpo trainer.device=cpu"),
    ],
    ids=["split", "shared", "cpu"],
)
def test_a_plan_survives_the_trip_through_json(plan: Plan) -> None:
    text = plan.model_dump_json()
    arrived = Plan.model_validate_json(text)
    assert arrived == plan
    assert arrived.pool_of(Role.Actor).slots[0].node == plan.pool_of(Role.Actor).slots[0].node
    assert Plan.model_validate(json.loads(text)) == plan


def test_a_plan_is_frozen() -> None:
    plan = plan_of()
    with pytest.raises(ValidationError, match="frozen"):
        plan.device = "cuda"
    with pytest.raises(FrozenInstanceError):
        plan.pools["global_pool"].share = 0.5  # type: ignore[misc]


# The spelling of inventory and memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8", (8,)), ("8,8,4", (8, 8, 4)), ("2x8", (8, 8)), ("2x8, 4 ,0", (8, 8, 4, 0))],
)
def test_an_inventory_is_gpus_per_node(text: str, expected: tuple[int, ...]) -> None:
    assert parse_inventory(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "0", "0,0", "-1", "8,,8", "8x", "x8", "eight", "1.5", "9999999", "65537x1", "1025", "²"],
)
def test_what_is_no_inventory_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--inventory "):
        parse_inventory(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80", 80 * 2**30), ("80GiB", 80 * 2**30), ("141GB", 141 * 10**9), ("0.5 gib", 2**29),
     ("512MiB", 2**29), ("7mb", 7 * 10**6)],
)  # fmt: skip
def test_memory_is_in_gib_unless_it_says_otherwise(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "80TB", "many", "1e3", "nan", "inf", "8 0", "GiB", "²"]
)
def test_what_is_no_memory_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--gpu-memory "):
        parse_memory(text)


def test_a_role_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(
        PlacementError, match="driver=pool: there is no role driver; the roles are actor, "
    ):
        ResourcePoolManager({"pool": [4]}, {"driver": "pool"})  # type: ignore[dict-item]
