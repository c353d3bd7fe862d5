"""Candidates of the search: groups of roles, the sizes that a pool of them may have, and the plans
and config keys that make such pools.

Knows what divides and what a plan needs, and nothing about time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from rolepool.config import Config
from rolepool.errors import RolepoolError
from rolepool.placement import build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.parallel import dims_of
from rolepool.placement.plan import Plan, ResourcePool, ResourcePoolManager, Slot, place
from rolepool.placement.roles import Role, needed_roles
from rolepool.planner.predict import TENSOR_PARALLEL

Group = tuple[Role, ...]
"""Roles that share a pool."""
KeyValue = int | str | list[int]


def partitions(roles: Sequence[Role]) -> Iterator[tuple[Group, ...]]:
    """All ways to divide roles into groups."""
    if not roles:
        yield ()
        return
    first, *others = roles
    for groups in partitions(others):
        # The first role is alone, or joins one of the groups.
        yield ((first,), *groups)
        for number, group in enumerate(groups):
            before = groups[:number]
            after = groups[number + 1 :]
            yield (*before, (first, *group), *after)


def allowed_sizes(config: Config, role: Role, inventory: Sequence[int]) -> set[int]:
    """The numbers of ranks over which a role's batches, mini-batches and groups can be divided."""
    num_gpus = sum(inventory)
    num_rows = config.rows_of_step
    parallel = dims_of(config, role, num_gpus).ranks_per_part
    most_parts = min(num_gpus // parallel, num_rows)

    problems: dict[int, set[str]] = {}
    for num_parts in range(1, most_parts + 1):
        if num_rows % num_parts == 0:
            size = num_parts * parallel
            plan = plan_of_group(config, (role,), size)
            problems[size] = set(find_problems(config, plan))
    if not problems:
        return set()
    # Problems that all sizes have are about keys that are not about sizes.
    general = set.intersection(*problems.values())
    allowed = set()
    for size, problems_of_size in problems.items():
        if problems_of_size <= general:
            allowed.add(size)
    return allowed


def plan_of_group(config: Config, group: Group, size: int) -> Plan:
    """A plan with one group of roles. Its pool has no slots, because those of thousands of GPUs
    would take long."""
    pools = {}
    if group:
        pools["pool"] = ResourcePool((size,), roles=group)
    return Plan(
        gpus_per_node=(size,),
        device=config.trainer.device,
        pools=pools,
        roles=dict.fromkeys(group, "pool"),
    )


def layouts(
    config: Config,
    groups: Sequence[Group],
    sizes: Sequence[int],
    inventory: Sequence[int],
) -> Iterator[Plan]:
    """The plans with pools of these sizes: node after node, and the same number on every node, if
    that is possible."""
    ways = [_node_after_node(sizes, inventory)]
    num_nodes = len(inventory)
    if all(size % num_nodes == 0 for size in sizes):
        same_on_every_node = []
        for size in sizes:
            same_on_every_node.append([size // num_nodes] * num_nodes)
        ways.append(same_on_every_node)

    _, unused_roles = needed_roles(config)
    for counts_of_pools in ways:
        pools: dict[str, Sequence[int]] = {}
        homes: dict[Role, str] = {}
        for group, counts in zip(groups, counts_of_pools, strict=True):
            name = "_".join([*group, "pool"])
            pools[name] = counts
            homes.update(dict.fromkeys(group, name))
        wanted = ResourcePoolManager(pools, homes)
        # The pools may not fit on the nodes in this way.
        with suppress(RolepoolError):
            plan = place(wanted, inventory, device=config.trainer.device)
            yield plan.model_copy(update={"unused_roles": unused_roles})


def _node_after_node(sizes: Sequence[int], inventory: Sequence[int]) -> list[list[int]]:
    """The ranks that each pool has on each node, if pools use up one node after another."""
    node = 0
    num_free = [*inventory]
    counts_of_pools: list[list[int]] = []
    for size in sizes:
        counts = [0] * node
        num_left = size
        while num_left > 0 and node < len(num_free):
            num_taken = min(num_left, num_free[node])
            counts.append(num_taken)
            num_left -= num_taken
            num_free[node] -= num_taken
            if num_free[node] == 0:
                node += 1
        counts_of_pools.append(counts)
    return counts_of_pools


def changes_for(config: Config, plan: Plan, tensor_parallel: int) -> dict[str, KeyValue]:
    """New values of keys with which a config has this plan: those of a built-in strategy, if one
    makes the same pools."""
    counts = [count for count in plan.gpus_per_node if count]
    if len(plan.pools) == 1 and len(counts) == 1:
        (pool,) = plan.pools.values()
        counts = [pool.world_size]
    sizes: dict[str, KeyValue] = {
        "trainer.nnodes": len(counts),
        "trainer.n_gpus_per_node": max(counts),
        TENSOR_PARALLEL: tensor_parallel,
    }
    changes = {}
    for key, value in sizes.items():
        if config.at(key) != value:
            changes[key] = value

    wanted = places(plan)
    for strategy in _built_in_strategies(plan):
        strategy_changes = {**changes, **strategy}
        with suppress(RolepoolError):
            changed = _with_values(config, strategy_changes)
            if places(build_plan(changed)) == wanted:
                return strategy_changes

    changes["placement.strategy"] = "custom"
    for name, pool in plan.pools.items():
        changes[f"placement.pools.{name}"] = list(pool.per_node)
    for role, name in plan.roles.items():
        changes[f"placement.roles.{role}"] = name
    return changes


def _built_in_strategies(plan: Plan) -> list[dict[str, KeyValue]]:
    """The keys of built-in strategies that may make the pools of a plan, the simplest first."""
    if len(plan.pools) >= 3:
        return []
    actor_counts = plan.pool_of(Role.Actor).counts_by_node
    standard: dict[str, KeyValue] = {"placement.strategy": "standard"}
    split: dict[str, KeyValue] = {"placement.strategy": "split"}
    split_nodes_inside: dict[str, KeyValue] = {
        "placement.strategy": "split",
        "placement.split.actor_gpus_per_node": max(actor_counts.values()),
    }
    split_by_nodes: dict[str, KeyValue] = {
        "placement.strategy": "split",
        "placement.split.actor_nodes": len(actor_counts),
    }
    return [standard, split, split_nodes_inside, split_by_nodes]


def _with_values(config: Config, values: Mapping[str, KeyValue]) -> Config:
    for key, value in values.items():
        config = config.with_value(key, value)
    return config


def places(plan: Plan) -> dict[Role, tuple[Slot, ...]]:
    """The slots of each role."""
    return {role: plan.pool_of(role).slots for role in plan.roles}
