"""Any inventory and any strategy give a plan that holds, or a RolepoolError; nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rolepool.config import Config, load_config
from rolepool.errors import RolepoolError
from rolepool.placement import Plan, ResourcePoolManager, Role, build_plan
from rolepool.placement.checks import Advice, find_problems
from rolepool.placement.estimate import MemoryEstimate, PoolMemory, RoleMemory, estimate_memory
from rolepool.placement.plan import ResourcePool, Slot, place
from rolepool.placement.render import PlanSummary
from rolepool.placement.roles import ROLE_SPECS, needed_roles

MAX_NODES, MAX_GPUS = 64, 16
NAMES = [*ROLE_SPECS, Role.ActorRollout]
ESTIMATORS = ("gae", "grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
BASE = load_config().config.model_dump()

thorough = settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))


def leaves_of(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and prefix + name != "placement.pools":
            leaves |= leaves_of(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return base | {
        name: merged(base[name], value) if isinstance(value, dict) and name != "pools" else value
        for name, value in changes.items()
    }


# What may be asked for

uniform = st.builds(
    lambda nodes, gpus: [gpus] * nodes, st.integers(1, MAX_NODES), st.integers(0, MAX_GPUS)
)
uneven = st.lists(st.integers(0, MAX_GPUS), min_size=1, max_size=MAX_NODES)
few_nodes = st.lists(st.integers(1, MAX_GPUS), min_size=1, max_size=4)
inventories = uniform | uneven | few_nodes
shares = st.sampled_from([1.0, 1.0, 0.5, 0.5, 0.25, 1 / 3, 0.1, 0.7]) | st.floats(0.01, 1)
some_nodes = st.lists(st.integers(0, 3), max_size=2)
many_nodes = st.lists(st.integers(0, MAX_GPUS), max_size=MAX_NODES)
per_node = st.builds(
    lambda first, last: [*first, last], some_nodes | some_nodes | many_nodes, st.integers(1, 4)
)
pools = st.fixed_dictionaries({"per_node": per_node.map(tuple), "share": shares})
pool_names = st.sampled_from(["a", "b", "c", "d", "e"])


@st.composite
def custom_placements(draw: st.DrawFn, *, sensible: bool) -> dict[str, Any]:
    """Sensible: every role in a pool that exists, every pool with a role. Otherwise anything,
    mostly nonsense."""
    if not sensible:
        written = draw(st.dictionaries(pool_names, pools, max_size=5))
        homes = st.none() | st.sampled_from([*written, "nowhere"])
        return {
            "strategy": "custom",
            "pools": written,
            "roles": {role: draw(homes) for role in NAMES},
        }
    roles: dict[str, str | None] = {role: draw(pool_names) for role in NAMES}
    for role in ("actor", "rollout") if draw(st.booleans()) else ("actor_rollout",):
        roles[role] = None
    written = {name: draw(pools) for name in sorted({name for name in roles.values() if name})}
    return {"strategy": "custom", "pools": written, "roles": roles}


@st.composite
def placements(draw: st.DrawFn, *, sensible: bool) -> dict[str, Any]:
    strategy = draw(st.sampled_from(["standard", "split", "custom"]))
    if strategy == "custom":
        return draw(custom_placements(sensible=sensible))
    if strategy == "standard":
        return {"strategy": strategy}
    wishes = {
        "axis": st.sampled_from(["auto", "gpu", "node"]),
        "actor_gpus_per_node": st.integers(1, MAX_GPUS),
        "actor_nodes": st.integers(1, MAX_NODES),
        "share": st.floats(0.01, 0.5),
    }
    written = draw(st.sets(st.sampled_from(list(wishes)), max_size=1 if sensible else None))
    return {"strategy": strategy, "split": {name: draw(wishes[name]) for name in sorted(written)}}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Valid one by one. Half of them are sensible and need all roles; in the others anything may
    contradict."""
    sensible = draw(st.booleans())
    algorithm = {
        "adv_estimator": draw(st.sampled_from(ESTIMATORS)),
        "use_kl_in_reward": draw(st.booleans()),
    }
    changes: dict[str, Any] = {
        "trainer": {
            "nnodes": draw(st.integers(1, MAX_NODES)),
            "n_gpus_per_node": draw(st.integers(1, MAX_GPUS)),
        },
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True} if sensible else algorithm,
        "critic": {"enable": None if sensible else draw(st.none() | st.booleans())},
        "reward_model": {"enable": sensible or draw(st.booleans()), "model": {"path": "no/model"}},
        "actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": draw(st.integers(1, 9))}},
        "data": {"train_batch_size": 256 * draw(st.integers(1, 20))},
        "placement": draw(placements(sensible=sensible)),
    }
    return Config.model_validate(merged(BASE, changes))


# What must hold


def assert_holds(plan: Plan, inventory: list[int]) -> None:
    """Pools disjoint or sharing at most a whole GPU, within the inventory, every role in exactly
    one pool."""
    taken: Counter[tuple[int, int]] = Counter()
    for pool in plan.pools.values():
        assert len(set(pool.slots)) == len(pool.slots) == sum(pool.per_node) > 0
        assert list(pool.slots) == sorted(pool.slots)
        assert list(pool.counts_by_node.values()) == [entry for entry in pool.per_node if entry]
        for slot in pool.slots:
            assert 0 <= slot.node < len(inventory)
            assert 0 <= slot.gpu < inventory[slot.node]
            taken[slot] += pool.share  # type: ignore[assignment]
    assert all(share <= 1 + 1e-6 for share in taken.values())
    homes = [(role, name) for name, pool in plan.pools.items() for role in pool.roles]
    assert sorted(homes) == sorted(plan.roles.items())
    assert Role.ActorRollout not in plan.roles


@thorough
@given(config=configs(), inventory=st.none() | inventories, take_all=st.booleans())
def test_any_config_on_any_inventory_gives_a_plan_that_holds_or_a_rolepool_error(
    config: Config, inventory: list[int] | None, take_all: bool
) -> None:
    strategy = config.placement.strategy
    try:
        plan = build_plan(config, inventory, take_all=take_all)
    except RolepoolError as error:
        event(f"{strategy}: refused")
        assert error.problems
        assert all(problem and "\n" not in problem for problem in error.problems)
        return
    event(f"{strategy}: placed")
    asked_for = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
    assert_holds(plan, asked_for if inventory is None else inventory)
    needed, unused = needed_roles(config)
    assert set(plan.roles) == set(needed)
    assert plan.unused_roles == unused
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert all("\n" not in problem for problem in find_problems(config, plan))
    assert set(estimate_memory(config, plan, 2**34).unknown) == set(plan.roles)


@settings(thorough, max_examples=150)
@given(inventory=inventories)
def test_standard_takes_every_gpu_there_is(inventory: list[int]) -> None:
    try:
        plan = build_plan(Config.model_validate(BASE), inventory, take_all=True)
    except RolepoolError:
        assert not any(inventory)
        return
    assert_holds(plan, inventory)
    assert plan.pools["global_pool"].world_size == sum(inventory)


@settings(thorough, max_examples=150)
@given(inventory=inventories, axis=st.sampled_from(["auto", "gpu", "node"]))
def test_split_takes_every_gpu_there_is_and_leaves_neither_pool_empty(
    inventory: list[int], axis: str
) -> None:
    changes = {"placement": {"strategy": "split", "split": {"axis": axis}}}
    try:
        plan = build_plan(Config.model_validate(merged(BASE, changes)), inventory, take_all=True)
    except RolepoolError:
        one_node, single_gpus = sum(map(bool, inventory)) < 2, max(inventory) < 2
        assert (
            sum(inventory) < 2 or (axis == "node" and one_node) or (axis == "gpu" and single_gpus)
        )
        return
    assert_holds(plan, inventory)
    actor, critic = plan.pools.values()
    assert actor.world_size + critic.world_size == sum(inventory)
    assert critic.world_size > 0


@thorough
@given(
    spec=st.dictionaries(pool_names, pools | per_node, min_size=1),
    mapping=st.dictionaries(st.sampled_from(NAMES), pool_names, max_size=3),
    inventory=inventories,
)
def test_pools_and_roles_written_out_in_python_hold_too(
    spec: dict[str, Any], mapping: dict[Role, str], inventory: list[int]
) -> None:
    try:
        plan = place(ResourcePoolManager(resource_pool_spec=spec, mapping=mapping), inventory)
    except RolepoolError:
        event("refused")
        return
    event("placed")
    assert_holds(plan, inventory)
    assert set(plan.pools) == set(spec)


@settings(thorough, max_examples=50)
@given(config=configs())
def test_what_is_written_as_overrides_is_judged_the_same_way(config: Config) -> None:
    """The same through the loader, which refuses contradictions; what it lets through, the planner
    must stand."""
    leaves, defaults = (
        leaves_of(config.model_dump(mode="json")),
        leaves_of(load_config().config.model_dump(mode="json")),
    )
    overrides = [f"{key}={value}" for key, value in leaves.items() if value != defaults[key]]
    texts = [
        override.replace("True", "true").replace("False", "false").replace("None", "null")
        for override in overrides
    ]
    try:
        loaded = load_config(overrides=texts)
        plan = build_plan(loaded.config)
    except RolepoolError:
        event("refused")
        return
    event("placed")
    assert plan == build_plan(config)


def test_the_largest_inventory_is_taken_slot_by_slot() -> None:
    plan = build_plan(Config.model_validate(BASE), [MAX_GPUS] * MAX_NODES, take_all=True)
    every_slot = [(node, gpu) for node in range(MAX_NODES) for gpu in range(MAX_GPUS)]
    assert list(plan.pools["global_pool"].slots) == every_slot


# The plan as text

GIB = 2**30
names = st.text("abcdefgh_", min_size=1, max_size=60) | st.sampled_from(
    ["critic_pool", "actor_rollout_ref_pool"]
)
amounts = st.floats(0, 9_000).map(lambda gib: int(gib * GIB))
memories = st.builds(RoleMemory, *([amounts] * 7))


@st.composite
def shown_plans(draw: st.DrawFn) -> tuple[Plan, MemoryEstimate]:
    """Pools and roles with names of any length on nodes of up to 40 GPUs, which may have up to
    eight pools each."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6) | st.just([8] * 1024))
    every = [Slot(node, gpu) for node, size in enumerate(sizes) for gpu in range(size)]
    homes: dict[Role, str] = {}
    placed, known = {}, {}
    for name in draw(st.lists(names, min_size=1, max_size=8, unique=True)):
        slots = tuple(every[: draw(st.integers(1, len(every)))])
        mine = tuple(
            Role(role) for role in draw(st.lists(names, min_size=1, max_size=4, unique=True))
        )
        per_node = tuple(Counter(slot.node for slot in slots).values())
        placed[name] = ResourcePool(per_node, draw(st.sampled_from([1.0, 0.5, 0.125])), slots, mine)
        homes |= dict.fromkeys(mine, name)
        limit = draw(st.none() | amounts)
        known[name] = PoolMemory(
            {role: draw(memories) for role in mine}, draw(amounts), mine[0], draw(amounts), limit
        )
    unused = {
        Role(role): "of a reason that takes several words to tell"
        for role in draw(st.lists(names, max_size=2))
    }
    plan = Plan(
        gpus_per_node=tuple(sizes),
        device=draw(st.sampled_from(["cuda", "cpu"])),
        pools=placed,
        roles=homes,
    )
    return plan.model_copy(update={"unused_roles": unused}), MemoryEstimate(known, {}, {})


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(shown_plans(), st.lists(st.tuples(names, names), max_size=4))
def test_no_line_of_a_plan_is_longer_than_80_and_nothing_is_cut_off(
    shown: tuple[Plan, MemoryEstimate], overlaps: list[tuple[str, str]]
) -> None:
    plan, estimate = shown
    advice = [Advice({"some.key": "x" * 50, "another.key": "y" * 50}, 5 * GIB)]
    engines = {"one": None, "another": "of a reason that takes several words to tell"}
    text = PlanSummary(plan, overlaps, estimate, [], [], advice, engines, 0).to_terminal()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    letters = Counter(text.replace("\n", ""))
    for name, pool in plan.pools.items():
        assert not Counter(name + "".join(pool.roles)) - letters
    if plan.device != "cpu":
        numbers = [memory.peak for memory in estimate.pools.values()]
        numbers += [
            role.working for memory in estimate.pools.values() for role in memory.roles.values()
        ]
        assert all(f"{number / GIB:.1f}" in text for number in numbers if number)
