"""The search for the best placement: which roles share a pool, and how large each pool is.

Owns the candidates. All ways to group the roles and all sizes that divide the batches are tried on
the simulator, whole arrays of sizes at a time; only the best ones become predictions. If there are
very many sizes, some are tried first, and then those next to the best ones.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice, product
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.errors import ConfigError, RolepoolError
from rolepool.placement import build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import MemoryEstimate
from rolepool.placement.parallel import dims_of
from rolepool.placement.plan import (
    Plan,
    ResourcePool,
    ResourcePoolManager,
    ScheduledCall,
    place,
)
from rolepool.placement.roles import ROLE_SPECS, Role, needed_roles
from rolepool.planner.predict import TENSOR_PARALLEL, Prediction, Predictor, simulate

Objective = Literal["time", "throughput_per_gpu"]
Group = tuple[Role, ...]
Sizes = npt.NDArray[np.int64]
MAX_GRID, MAX_TRIED, NUM_KEPT = 50_000, 1_000, 20
"""Combinations of sizes: the most that are listed and simulated at once, and those whose neighbours
are tried."""
NUM_BEST, NUM_TRIED = 5, 12
"""How many placements are returned, and how many of the best are looked at in full."""


def search(
    predictor: Predictor, config: Config, inventory: Sequence[int], objective: Objective = "time"
) -> list[Prediction]:
    """The best placements on these nodes, best first, as predictions whose names are the overrides
    that make them.

    Raises ConfigError if no placement can run.
    """
    found = []  # what candidates are sorted by, their pools and sizes, and the config with their tensor-parallel size
    for parallel in sorted(
        {one.config.at(TENSOR_PARALLEL) for one in predictor.profile.recordings}
    ):
        changed = config.with_value(TENSOR_PARALLEL, parallel)
        roles, step_times = needed_roles(changed)[0], _step_times(predictor, changed)
        sizes = {role: allowed_sizes(changed, role, inventory) for role in roles}
        for groups in partitions(roles):
            choices = [
                np.array(sorted(set.intersection(*(sizes[role] for role in group))))
                for group in groups
            ]
            scored = _best_sizes(partial(step_times, groups), choices, sum(inventory), objective)
            found.extend(
                [
                    ((score, len(groups), sum(chosen)), groups, chosen, changed)
                    for score, chosen in scored
                ]
            )
    best: list[Prediction] = []
    for _, groups, chosen, changed in sorted(found, key=itemgetter(0))[:NUM_TRIED]:
        for plan in layouts(changed, groups, chosen, inventory):
            if not find_problems(changed, plan):
                changes = changes_for(config, plan, changed.at(TENSOR_PARALLEL))
                name = " ".join(f"{key}={value}".replace(" ", "") for key, value in changes.items())
                best.append(predictor.predict(name, changed, plan))
                break
    if not best:
        raise ConfigError(
            "predict --search: no placement of these GPUs divides the batches and fits in memory"
        )
    # Of placements that are as fast, the simplest comes first.
    best.sort(
        key=lambda one: (
            float(f"{score_of(one, objective):.4g}"),
            len(one.plan.pools),
            len(one.name),
        )
    )
    return best[:NUM_BEST]


def score_of(one: Prediction, objective: Objective) -> float:
    return one.step_s if objective == "time" else one.step_s * len(one.plan.slots)


def _best_sizes(
    step_times: Callable[[Sizes], Any],
    choices: Sequence[Sizes],
    num_gpus: int,
    objective: Objective,
) -> list[tuple[float, tuple[int, ...]]]:
    """The best sizes of groups of roles, with their scores. If there are too many combinations,
    every second size is tried, or every fourth, and so on; then the sizes next to those of the best
    combinations."""
    stride = 1
    while (tried := _grid(choices, num_gpus, stride)) is None:
        stride *= 2
    while True:
        step_s, used = step_times(tried), tried.sum(1)
        scores = step_s if objective == "time" else step_s * used
        best = np.argsort(scores, kind="stable")[:NUM_KEPT]
        if stride == 1:
            return [
                (float(scores[at]), tuple(tried[at].tolist()))
                for at in best[:NUM_BEST]
                if np.isfinite(scores[at])
            ]
        stride //= 2
        nearby = [map(partial(_around, stride), choices, tried[at]) for at in best]
        tried = np.unique(
            [sizes for one in nearby for sizes in product(*one) if sum(sizes) <= num_gpus], axis=0
        )


def _grid(choices: Sequence[Sizes], num_gpus: int, stride: int) -> Sizes | None:
    """All combinations of every n-th size of each group, one in each row; None if there are too
    many."""
    some = [of_group[::stride] for of_group in choices]
    if np.prod([len(of_group) for of_group in some]) > MAX_GRID:
        return None
    found = np.stack(np.meshgrid(*some, indexing="ij"), axis=-1).reshape(-1, len(choices))
    found = found[found.sum(1) <= num_gpus]
    return found if len(found) <= MAX_TRIED else None


def _around(stride: int, sizes: Sizes, size: int) -> Sizes:
    """The size itself, and those so many places before and after it."""
    at = int(np.searchsorted(sizes, size))
    return sizes[[place for place in (at - stride, at, at + stride) if 0 <= place < len(sizes)]]


def _step_times(predictor: Predictor, config: Config) -> Callable[[Sequence[Group], Sizes], Any]:
    """A function that simulates many sizes of groups of roles at once. The times of calls are
    computed only once for each group and size of its pool."""
    schedule = predictor.schedule_of(config)

    @cache
    def alone(group: Group, size: int) -> tuple[Plan, MemoryEstimate]:
        plan = _alone(config, group, size)
        return plan, predictor.memory(config, plan)

    @cache
    def seconds(call: ScheduledCall, group: Group, size: int, is_whole: bool) -> float:
        """The time of a call on a group's pool. A weight sync is whole if the pool has both of its
        roles."""
        plan, memory = alone(group, size)
        if not is_whole and group:
            others = dict.fromkeys(call.roles.difference(group), "elsewhere")
            plan = plan.model_copy(update={"roles": {**plan.roles, **others}})
        return (
            np.inf
            if memory.excess
            else predictor.seconds(config, plan, call, memory, schedule).mean
        )

    def step_times(groups: Sequence[Group], sizes: Sizes) -> Any:
        """The step time for each row of sizes, which is infinite if a pool does not fit."""
        homes = {role: "+".join(group) for group in groups for role in group}
        times: dict[str, Any] = {}
        for call in schedule.calls[:-1]:
            # The time of a weight sync depends on the pool of the role that is trained.
            wanted = {role for role in call.roles if ROLE_SPECS[role].is_trained} or call.roles
            group, of_group = next(
                (
                    (group, sizes[:, at])
                    for at, group in enumerate(groups)
                    if wanted.intersection(group)
                ),
                ((), np.zeros(len(sizes), dtype=int)),  # of the driver, or of the rule reward
            )
            different, index = np.unique(of_group, return_inverse=True)
            of_size = np.array(
                [seconds(call, group, int(size), call.roles <= {*group}) for size in different]
            )
            times[call.operation] = of_size[index]
        with np.errstate(invalid="ignore"):  # infinite times
            return simulate(schedule, homes, times, predictor.profile.hand_over_s).step_s

    return step_times


def allowed_sizes(config: Config, role: Role, inventory: Sequence[int]) -> set[int]:
    """The numbers of ranks over which a role's batches, mini-batches and groups can be divided."""
    num_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    parallel = dims_of(config, role, sum(inventory)).ranks_per_part
    most = min(sum(inventory) // parallel, num_rows)
    sizes = [parts * parallel for parts in range(1, most + 1) if num_rows % parts == 0]
    problems = {size: {*find_problems(config, _alone(config, (role,), size))} for size in sizes}
    general = (
        set.intersection(*problems.values()) if problems else set()
    )  # about keys that are not about sizes
    return {size for size in sizes if problems[size] <= general}


def _alone(config: Config, group: Group, size: int) -> Plan:
    """A plan with one group of roles. Its pool has no slots, because those of thousands of GPUs
    would take long."""
    pools = {"pool": ResourcePool((size,), roles=group)} if group else {}
    return Plan(
        gpus_per_node=(size,),
        device=config.trainer.device,
        pools=pools,
        roles=dict.fromkeys(group, "pool"),
    )


def partitions(roles: Sequence[Role]) -> Iterator[tuple[Group, ...]]:
    """All ways to divide roles into groups."""
    if not roles:
        yield ()
        return
    first, *others = roles
    for groups in partitions(others):
        yield ((first,), *groups)
        for number, group in enumerate(groups):
            yield (*groups[:number], (first, *group), *groups[number + 1 :])


def layouts(
    config: Config, groups: Sequence[Group], sizes: Sequence[int], inventory: Sequence[int]
) -> Iterator[Plan]:
    """The plans with pools of these sizes: node after node, and the same number on every node, if
    that is possible."""
    nodes = iter(np.repeat(range(len(inventory)), inventory).tolist())
    ways = [[np.bincount([*islice(nodes, size)]).tolist() for size in sizes]]
    if not any(size % len(inventory) for size in sizes):
        ways.append([[size // len(inventory)] * len(inventory) for size in sizes])
    names = ["_".join([*group, "pool"]) for group in groups]
    homes = {role: name for group, name in zip(groups, names, strict=True) for role in group}
    for per_node in ways:
        with suppress(RolepoolError):
            pools = dict(zip(names, per_node, strict=True))
            plan = place(ResourcePoolManager(pools, homes), inventory, device=config.trainer.device)
            yield plan.model_copy(update={"unused_roles": needed_roles(config)[1]})


def changes_for(config: Config, plan: Plan, tensor_parallel: int) -> dict[str, Any]:
    """New values of keys with which a config has this plan: those of a built-in strategy, if one
    makes the same pools."""
    counts = [count for count in plan.gpus_per_node if count]
    if len(plan.pools) == 1 and len(counts) == 1:
        counts = [next(iter(plan.pools.values())).world_size]
    sizes = {
        "trainer.nnodes": len(counts),
        "trainer.n_gpus_per_node": max(counts),
        TENSOR_PARALLEL: tensor_parallel,
    }
    changes: dict[str, Any] = {
        key: value for key, value in sizes.items() if config.at(key) != value
    }
    of_actor, split = plan.pool_of(Role.Actor).counts_by_node, {"placement.strategy": "split"}
    by_gpus = {**split, "placement.split.actor_gpus_per_node": max(of_actor.values())}
    by_nodes = {**split, "placement.split.actor_nodes": len(of_actor)}
    for words in (
        ({"placement.strategy": "standard"}, split, by_gpus, by_nodes)
        if len(plan.pools) < 3
        else ()
    ):
        changed = config
        for key, value in {**changes, **words}.items():
            changed = changed.with_value(key, value)
        with suppress(RolepoolError):
            if places(build_plan(changed)) == places(plan):
                return {**changes, **words}
    pools = {f"placement.pools.{name}": list(pool.per_node) for name, pool in plan.pools.items()}
    roles = {f"placement.roles.{role}": name for role, name in plan.roles.items()}
    return {**changes, "placement.strategy": "custom", **pools, **roles}


def places(plan: Plan) -> dict[Role, tuple[Any, ...]]:
    """The slots of each role."""
    return {role: plan.pool_of(role).slots for role in plan.roles}
