"""The plan: which pool every role is in, which GPUs every pool has, and which operations can run at
the same time.

Owns `ResourcePool` and `ResourcePoolManager`, the names that a pool must not have, the schedule of a
step, and the rule by which GPUs are assigned: pools in order, and in each pool the entries of
`per_node` in order. An entry goes to the next node that has enough free GPUs, and takes the lowest
free GPU numbers. A plan is plain data that can be written to JSON and read back. All other code
asks the plan where a role is. The pools of a config come from `strategies`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError, field_validator

from rolepool.config import Config
from rolepool.config.run_keys import MAX_GPUS_PER_NODE, MAX_NODES, MAX_STALENESS, PoolConfig
from rolepool.errors import PlacementError, collected
from rolepool.placement.parallel import ParallelDims, dims_of
from rolepool.placement.roles import COMBINED_ROLES, ROLE_SPECS, Role, home_of

DRIVER = "driver"
"""The pool name in spans of the driver itself, which computes advantages and writes checkpoints."""
RULE_POOL = "reward_cpu"
"""The pool name of the helper processes that compute rule rewards."""
SHARE_TOLERANCE = 1e-9
NEXT_STEP = "next_"
"""Begins the names of operations that belong to the next step."""


# Pools


class Slot(NamedTuple):
    """One GPU of one node; on a cluster without GPUs, one CPU slot."""

    node: int
    gpu: int


@dataclass(frozen=True)
class ResourcePool:
    """A list of processes per node. Each process has one GPU, or a `share` of one. 0 skips a
    node."""

    per_node: tuple[int, ...]
    share: float = 1.0
    slots: tuple[Slot, ...] = ()
    """The GPU of the process of each rank; empty before the pool is placed."""
    roles: tuple[Role, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.per_node)

    @cached_property
    def counts_by_node(self) -> dict[int, int]:
        """Number of the pool's processes on each node that has one."""
        return Counter(slot.node for slot in self.slots)


@dataclass(frozen=True)
class ResourcePoolManager:
    """Pools by name and the pool of every role. A pool is `[processes per node]` or `{per_node:
    [..], share: 0.5}`."""

    resource_pool_spec: Mapping[str, Sequence[int] | Mapping[str, Any]]
    mapping: Mapping[Role, str]
    resource_pool_dict: dict[str, ResourcePool] = field(init=False, default_factory=dict)
    roles: dict[Role, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        problems: list[str] = []
        self._read_pools(problems)
        homes = self._read_homes(problems)
        PlacementError.raise_if_any(problems)
        # In the order of the role table, whatever the order of the mapping is.
        for role in ROLE_SPECS:
            if role in homes:
                self.roles[role] = homes[role]

    def _read_pools(self, problems: list[str]) -> None:
        """Fill `resource_pool_dict`. Adds a line to `problems` for each pool that cannot be."""
        form = "a list of processes per node such as [2, 2], or {per_node: [2, 2], share: 0.5}"
        for name, spec in self.resource_pool_spec.items():
            if name in (DRIVER, RULE_POOL):
                problems.append(
                    f"placement.pools.{name}: timings already use this name; choose another name"
                )
            try:
                pool = PoolConfig.model_validate(spec)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                problems.append(f"pool {name}: {spec} must be {form} ({reason})")
            else:
                self.resource_pool_dict[name] = ResourcePool(pool.per_node, pool.share)

    def _read_homes(self, problems: list[str]) -> dict[Role, str]:
        """The pool of each single role. Adds a line to `problems` for each entry that cannot be."""
        names = [*ROLE_SPECS, *COMBINED_ROLES]
        homes: dict[Role, str] = {}
        for name, home in self.mapping.items():
            key = f"placement.roles.{name}={home}"
            if name not in names:
                problems.append(f"{key}: there is no role {name}; the roles are {', '.join(names)}")
                continue
            if home not in self.resource_pool_spec:
                pools = ", ".join(self.resource_pool_spec) or "none"
                problems.append(f"{key}: no such pool; there are {pools}")
            for role in Role(name).parts:
                if role in homes:
                    problems.append(
                        f"{key}: {role} is also placed in {homes[role]}; set only one pool for it"
                    )
                homes[role] = home
        return homes

    def create_resource_pool(self) -> None:
        """Do nothing: the pools exist as soon as the manager does. For launch scripts that call
        it."""

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[home_of(role, self.roles)]

    def get_n_gpus(self) -> int:
        """Number of processes in all pools."""
        return sum(pool.world_size for pool in self.resource_pool_dict.values())


# The schedule


@dataclass(frozen=True)
class ScheduledCall:
    """A call that the driver makes in a step."""

    operation: str
    roles: frozenset[Role]
    """The roles that compute it; none for work of the driver itself."""
    after: frozenset[int]
    """Positions of the calls that end before this one starts, under every placement: those whose
    results it is given, those that the driver waited for before it made this call, and earlier
    calls of the same role. A negative position counts back from the first call of the step: -1 is
    the last call of the step before. Only `algorithm.max_staleness` needs such positions."""


@dataclass(frozen=True)
class Schedule:
    """The calls of a step in the order in which they are made, and the generation that begins the
    next step. With `algorithm.max_staleness` a step begins with the generation of a later step.

    It comes from running the step on paper (`rolepool.trainer.paper`), so there is no second
    description of the step.
    """

    calls: tuple[ScheduledCall, ...]

    @cached_property
    def independent(self) -> list[tuple[ScheduledCall, ScheduledCall]]:
        """The pairs of calls of which the second does not wait for the first."""
        before = self._calls_before
        pairs: list[tuple[ScheduledCall, ScheduledCall]] = []
        for first, second in combinations(range(len(self.calls)), 2):
            if first not in before[second]:
                pairs.append((self.calls[first], self.calls[second]))
        return pairs

    @property
    def _calls_before(self) -> list[set[int]]:
        """For each call the positions of all calls that end before it starts: those it waits for,
        and those that they wait for."""
        before: list[set[int]] = []
        for call in self.calls:
            waits_for = {earlier for earlier in call.after if earlier >= 0}
            for earlier in tuple(waits_for):
                waits_for |= before[earlier]
            before.append(waits_for)
        return before

    def overlaps(self, roles: Mapping[Role, str]) -> list[tuple[str, str]]:
        """The pairs of operations that run at the same time with these roles in these pools:
        neither waits for the other, and they use different pools."""

        def pools(call: ScheduledCall) -> set[str]:
            """The pools of a call. A role without a pool is a rule that runs on CPUs, outside of
            the plan's pools."""
            return {roles.get(role, RULE_POOL) for role in call.roles}

        # The second call of a pair may be of an operation whose first call was earlier, so a pair
        # of names is found in any order.
        overlapping: set[frozenset[str]] = set()
        for first, second in self.independent:
            if pools(first).isdisjoint(pools(second)):
                names = frozenset([first.operation, second.operation])
                overlapping.add(names)

        # The driver's own work has no role, and is not shown.
        shown = [call.operation for call in self.calls if call.roles]
        # Each operation once, in the order of the step.
        operations = dict.fromkeys(shown)
        in_order = combinations(operations, 2)
        return [pair for pair in in_order if frozenset(pair) in overlapping]


# The plan


class Plan(BaseModel, frozen=True):
    """The pool of every role, and the GPUs of every pool."""

    gpus_per_node: tuple[int, ...]
    device: str
    pools: dict[str, ResourcePool]
    roles: dict[Role, str]
    unused_roles: dict[Role, str] = Field(default_factory=dict)
    """The roles that the run does not need, and why."""
    mps: bool = False
    """Whether pools that share GPUs use CUDA MPS."""

    @property
    def in_words(self) -> str:
        """The pools and their sizes, such as `actor_pool [1] and critic_pool [1]`."""
        phrases: list[str] = []
        for name, pool in self.pools.items():
            phrase = f"{name} {[*pool.per_node]}"
            if pool.share < 1:
                phrase += f" with share {pool.share:g}"
            phrases.append(phrase)
        return " and ".join(phrases)

    @property
    def sizes_in_words(self) -> str:
        """The pools and the number of their processes, which stays short on many nodes."""
        return ", ".join(f"{name} [{pool.world_size}]" for name, pool in self.pools.items())

    @property
    def slots(self) -> set[Slot]:
        """The GPUs of all pools. Pools may share some of them."""
        slots: set[Slot] = set()
        for pool in self.pools.values():
            slots.update(pool.slots)
        return slots

    @property
    def sharing_pools(self) -> list[str]:
        """Names of the pools whose processes have only a share of a GPU."""
        return [name for name, pool in self.pools.items() if pool.share < 1]

    def pool_of(self, role: Role) -> ResourcePool:
        """The pool of a role. `actor_rollout` has one if actor and rollout are in the same pool."""
        return self.pools[home_of(role, self.roles)]

    def dims_of(self, config: Config, role: Role) -> ParallelDims:
        """How the ranks of a role's pool work together on it."""
        return dims_of(config, role, self.pool_of(role).world_size)


@dataclass(frozen=True)
class PlannedSteps:
    """A plan, and the first step that was made with it."""

    first_step: int
    plan: Plan
    schedule: Schedule | None = None
    """None if the step that the user wrote cannot be run on paper."""


class PlanHistory(BaseModel):
    """`plan.json`: the plans of a run, in the order of steps. There are several if the run moved
    while it trained, or if it was resumed with another placement."""

    plans: list[PlannedSteps] = Field(min_length=1)

    @field_validator("plans")
    @classmethod
    def _can_be(cls, plans: list[PlannedSteps]) -> list[PlannedSteps]:
        """A damaged file is refused here, because what computes with plans trusts them."""
        for planned in plans:
            reason = _why_impossible(planned)
            if reason is not None:
                raise ValueError(reason)
        return plans


def _why_impossible(planned: PlannedSteps) -> str | None:
    """Why no run can have such a plan; None if one can."""
    plan = planned.plan
    num_nodes = len(plan.gpus_per_node)
    counts_are_possible = all(0 <= count <= MAX_GPUS_PER_NODE for count in plan.gpus_per_node)
    if not 1 <= num_nodes <= MAX_NODES or not counts_are_possible:
        return "has an impossible number of nodes or GPUs"
    homes = set(plan.roles.values())
    if not plan.pools or not plan.pools.keys() >= homes:
        return "has no pools, or lacks the pool of a role"
    for name, pool in plan.pools.items():
        num_slots = len(pool.slots)
        is_complete = num_slots > 0 and num_slots == pool.world_size
        is_on_nodes = all(0 <= slot.node < num_nodes for slot in pool.slots)
        has_share = 0 < pool.share <= 1
        if not (is_complete and is_on_nodes and has_share):
            return f"has an impossible pool {name!r}"
    if planned.schedule is None:
        return None
    num_calls = len(planned.schedule.calls)
    for position, call in enumerate(planned.schedule.calls):
        earlier_calls = range(-MAX_STALENESS * num_calls, position)
        if any(number not in earlier_calls for number in call.after):
            return "has a call that waits for a later one"
    return None


def place(
    manager: ResourcePoolManager,
    gpus_per_node: Sequence[int],
    *,
    device: str = "auto",
    mps: bool = False,
) -> Plan:
    """The plan of pools and roles that are written in Python. Raises PlacementError with every pool
    that does not fit."""
    left = [[1.0] * num_gpus for num_gpus in gpus_per_node]
    pools: dict[str, ResourcePool] = {}
    problems: list[str] = []
    for name, pool in manager.resource_pool_dict.items():
        roles = tuple(role for role, home in manager.roles.items() if home == name)
        with collected(problems):
            slots = _take_slots(name, pool, left)
            pools[name] = replace(pool, slots=slots, roles=roles)
    PlacementError.raise_if_any(problems)
    return Plan(
        gpus_per_node=tuple(gpus_per_node),
        device=device,
        pools=pools,
        roles=manager.roles,
        mps=mps,
    )


def _take_slots(name: str, pool: ResourcePool, left: list[list[float]]) -> tuple[Slot, ...]:
    """The slots of a pool, in rank order. Subtracts its shares from `left`, the free part of every
    GPU of every node.

    Raises PlacementError, and changes nothing, if the pool does not fit.
    """
    needed_part = pool.share - SHARE_TOLERANCE
    # The slots of each node that have enough room.
    free: list[list[Slot]] = []
    for node, parts in enumerate(left):
        free_of_node: list[Slot] = []
        for gpu, part in enumerate(parts):
            if part >= needed_part:
                free_of_node.append(Slot(node, gpu))
        free.append(free_of_node)
    slots: list[Slot] = []
    first_node = 0
    for count in pool.per_node:
        node = first_node
        while node < len(free) and len(free[node]) < count:
            node += 1
        if node < len(free):
            slots += free[node][:count]
        elif count > 0:
            raise _not_enough(name, pool, count, free, first_node)
        # An entry of 0 may stand for a node after the last one, because it needs nothing.
        first_node = min(node, len(free)) + 1
    for slot in slots:
        left[slot.node][slot.gpu] -= pool.share
    return tuple(slots)


def _not_enough(
    name: str,
    pool: ResourcePool,
    count: int,
    free: list[list[Slot]],
    first_node: int,
) -> PlacementError:
    """The error if no node from `first_node` on has `count` free GPUs for a pool."""
    part = "" if pool.share == 1 else f" with {pool.share:g} of each free"
    most = max(map(len, free[first_node:]), default=0)
    plural = "s" if len(free) > 1 else ""
    place = f"on node {first_node} or a later node"
    wanted = f"{name} needs {count}{part} {place}, and at most {most} are free there"
    fix = "make the pool smaller, or use more GPUs (trainer.nnodes, trainer.n_gpus_per_node, --inventory)"
    return PlacementError(f"Not enough GPUs: {wanted} ({len(free)} node{plural} in all); {fix}")
