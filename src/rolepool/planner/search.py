"""The search for the best placement: which roles share a pool, and how large each pool is.

Owns the candidates. All ways to group the roles and all sizes that divide the batches are tried on the simulator, whole
arrays of sizes at a time; only the best ones become predictions.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rolepool.config import Config
from rolepool.errors import ConfigError, RolepoolError
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import MemoryEstimate, estimate_memory
from rolepool.placement.plan import NEXT_STEP, Plan, ResourcePoolManager, ScheduledCall, place
from rolepool.placement.roles import ROLE_SPECS, Role, needed_roles
from rolepool.placement.strategies import build_plan
from rolepool.planner.predict import Prediction, Predictor
from rolepool.planner.simulate import step_times

Objective = Literal["time", "throughput_per_gpu"]
Group = tuple[Role, ...]
CHUNK = 50_000
"""Combinations of sizes that are simulated at once."""
NUM_BEST, NUM_TRIED = 5, 12
"""How many placements are returned, and how many of the best are looked at in full."""


@dataclass(frozen=True)
class Candidate:
    """Pools and their sizes, with a value of the tensor-parallel key."""

    score: float
    groups: tuple[Group, ...]
    sizes: tuple[int, ...]
    tensor_parallel: int


TENSOR_PARALLEL = next(spec.tensor_parallel for spec in ROLE_SPECS.values() if spec.tensor_parallel is not None)


def search(
    predictor: Predictor, config: Config, inventory: Sequence[int], objective: Objective = "time"
) -> list[Prediction]:
    """The best placements on these nodes, best first, as predictions whose names are the overrides that make them.

    Raises ConfigError if no placement can run.
    """
    found: list[Candidate] = []
    for parallel in sorted({one.config.at(TENSOR_PARALLEL) for one in predictor.profile.recordings}):
        found += _candidates(predictor, config.with_value(TENSOR_PARALLEL, parallel), inventory, objective)
    best: list[tuple[Prediction, int]] = []
    for one in sorted(found, key=lambda one: (one.score, len(one.groups), sum(one.sizes)))[:NUM_TRIED]:
        changed = config.with_value(TENSOR_PARALLEL, one.tensor_parallel)
        for plan in layouts(changed, one.groups, one.sizes, inventory):
            if not find_problems(changed, plan):
                best.append((predictor.predict("", changed, plan), one.tensor_parallel))
                break
    if not best:
        raise ConfigError("predict --search: no placement of these GPUs divides the batches and fits in memory")
    best.sort(key=lambda one: score_of(one[0], objective))
    named = []
    for prediction, parallel in best[:NUM_BEST]:
        changes = changes_for(config, prediction.plan, parallel)
        name = " ".join(f"{key}={value}".replace(" ", "") for key, value in changes.items())
        named.append(replace(prediction, name=name))
    return named


def score_of(one: Prediction, objective: Objective) -> float:
    return one.step_s if objective == "time" else one.step_s * one.num_gpus


def _candidates(
    predictor: Predictor, config: Config, inventory: Sequence[int], objective: Objective
) -> Iterator[Candidate]:
    """The best sizes of each way to group the roles."""
    roles, parallel = needed_roles(config)[0], config.at(TENSOR_PARALLEL)
    times = _Times(predictor, config, inventory)
    sizes = {role: allowed_sizes(config, role, inventory) for role in roles}
    for groups in partitions(roles):
        choices = [
            [size for size in sorted(set.intersection(*(sizes[role] for role in group))) if times.fits(group, size)]
            for group in groups
        ]
        best = sorted(_scores(times, groups, choices, sum(inventory), objective))[:NUM_BEST]
        yield from (Candidate(score, groups, chosen, parallel) for score, chosen in best)


def _scores(
    times: "_Times",
    groups: tuple[Group, ...],
    choices: Sequence[Sequence[int]],
    num_gpus: int,
    objective: Objective,
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The best combinations of sizes for these groups, some of each chunk, with their scores."""
    homes = {role: "+".join(group) for group in groups for role in group}
    shape, by_group = tuple(map(len, choices)), list(map(np.array, choices))
    num_all = int(np.prod(shape))
    for start in range(0, num_all, CHUNK):
        picked = np.unravel_index(np.arange(start, min(start + CHUNK, num_all)), shape)
        used = np.sum([of_group[index] for of_group, index in zip(by_group, picked, strict=True)], axis=0)
        kept = np.flatnonzero(used <= num_gpus)
        if not len(kept):
            continue
        chosen = [index[kept] for index in picked]
        seconds = {
            call.operation.removeprefix(NEXT_STEP): times.of_call(call, groups, choices, chosen)
            for call in times.schedule.calls
        }
        step_s = step_times(times.schedule, homes, seconds, times.predictor.profile.hand_over_s)
        scores = step_s if objective == "time" else step_s * used[kept]
        for position in np.argsort(scores, kind="stable")[:NUM_BEST]:
            sizes = tuple(int(of_group[index[position]]) for of_group, index in zip(by_group, chosen, strict=True))
            yield float(scores[position]), sizes


class _Times:
    """The times of calls, computed once for each group of roles and size of its pool."""

    def __init__(self, predictor: Predictor, config: Config, inventory: Sequence[int]) -> None:
        self.predictor, self.schedule = predictor, predictor.schedule_of(config)
        self._config, self._inventory = config, inventory
        self._seconds: dict[tuple[str, bool, Group, int], float] = {}
        self._plans: dict[tuple[Group, int], tuple[Plan, MemoryEstimate]] = {}

    def _plan(self, group: Group, size: int) -> tuple[Plan, MemoryEstimate]:
        """A plan with the group alone, and its memory."""
        if (group, size) not in self._plans:
            plan = _alone(self._config, group, size, self._inventory)
            memory = self.predictor.gpu_memory_bytes if plan.device != "cpu" else None
            self._plans[group, size] = plan, estimate_memory(self._config, plan, memory)
        return self._plans[group, size]

    def fits(self, group: Group, size: int) -> bool:
        return not self._plan(group, size)[1].excess

    def of_call(
        self, call: ScheduledCall, groups: Sequence[Group], choices: Sequence[Sequence[int]], chosen: Sequence[Any]
    ) -> Any:
        """The seconds of a call for each chosen combination of sizes. The time of a weight sync depends on the actor's
        pool."""
        wanted = {Role.Actor} if Role.Actor in call.roles else call.roles
        for group, sizes, index in zip(groups, choices, chosen, strict=True):
            if wanted.intersection(group):
                return np.array([self._of_group(call, group, size) for size in sizes])[index]
        return self._of_group(call, (), 0)  # of the driver, or of the rule reward

    def _of_group(self, call: ScheduledCall, group: Group, size: int) -> float:
        is_whole = call.roles <= {*group}
        key = call.operation, is_whole, group, size
        if key not in self._seconds:
            plan, memory = self._plan(group, size)
            if not is_whole and group:  # a weight sync between two pools
                plan = plan.model_copy(update={"roles": {**plan.roles, Role.Rollout: "elsewhere"}})
            self._seconds[key] = self.predictor.seconds(self._config, plan, call, memory, self.schedule).mean
        return self._seconds[key]


def allowed_sizes(config: Config, role: Role, inventory: Sequence[int]) -> set[int]:
    """The numbers of ranks over which a role's batches, mini-batches and groups can be divided."""
    num_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    key = ROLE_SPECS[role].tensor_parallel
    parallel = 1 if key is None else config.at(key)
    most = min(sum(inventory) // parallel, num_rows)
    sizes = [parts * parallel for parts in range(1, most + 1) if num_rows % parts == 0]
    problems = {size: {*find_problems(config, _alone(config, (role,), size, inventory))} for size in sizes}
    general = set.intersection(*problems.values()) if problems else set()  # about keys that are not about sizes
    return {size for size in sizes if problems[size] <= general}


def _alone(config: Config, group: Group, size: int, inventory: Sequence[int]) -> Plan:
    """A plan with one group of roles."""
    per_node = _trimmed(_fill(size, list(inventory))) if group else []
    manager = ResourcePoolManager({"pool": per_node} if group else {}, dict.fromkeys(group, "pool"))
    return place(manager, inventory[: len(per_node)], device=config.trainer.device)


def _fill(size: int, free: list[int]) -> list[int]:
    """Processes per node, node after node. Takes them from the free slots of each node."""
    taken: list[int] = []
    for node, room in enumerate(free):
        taken.append(min(room, size))
        free[node] -= taken[-1]
        size -= taken[-1]
    return taken


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


def layouts(config: Config, groups: Sequence[Group], sizes: Sequence[int], inventory: Sequence[int]) -> Iterator[Plan]:
    """The plans with pools of these sizes: node after node, and the same number on every node, if that is possible."""
    free = list(inventory)
    ways = [[_fill(size, free) for size in sizes]]
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
    """New values of keys with which a config has this plan: those of a built-in strategy, if one makes the same
    pools."""
    counts = [count for count in plan.gpus_per_node if count]
    if len(plan.pools) == 1 and len(counts) == 1:
        counts = [next(iter(plan.pools.values())).world_size]
    sizes = {"trainer.nnodes": len(counts), "trainer.n_gpus_per_node": max(counts), TENSOR_PARALLEL: tensor_parallel}
    changes: dict[str, Any] = {key: value for key, value in sizes.items() if config.at(key) != value}
    of_actor, split = plan.pool_of(Role.Actor).counts_by_node, {"placement.strategy": "split"}
    tried: list[dict[str, Any]] = [{"placement.strategy": "standard"}, split]
    tried.append({**split, "placement.split.actor_gpus_per_node": max(of_actor.values())})
    tried.append({**split, "placement.split.actor_nodes": len(of_actor)})
    for words in tried if len(plan.pools) < 3 else ():
        changed = config
        for key, value in {**changes, **words}.items():
            changed = changed.with_value(key, value)
        with suppress(RolepoolError):
            if _places(build_plan(changed)) == _places(plan):
                return {**changes, **words}
    pools = {f"placement.pools.{name}": _trimmed(pool.per_node) for name, pool in plan.pools.items()}
    roles = {f"placement.roles.{role}": name for role, name in plan.roles.items()}
    return {**changes, "placement.strategy": "custom", **pools, **roles}


def _places(plan: Plan) -> dict[Role, tuple[Any, ...]]:
    """The slots of each role."""
    return {role: plan.pool_of(role).slots for role in plan.roles}


def _trimmed(per_node: Sequence[int]) -> list[int]:
    """Without the nodes after the last one that the pool uses."""
    last = max(node for node, count in enumerate(per_node) if count)
    return list(per_node[: last + 1])
