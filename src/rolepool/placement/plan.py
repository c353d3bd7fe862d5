"""The plan: which pool every role is in, which GPUs every pool has, and which operations can run at
the same time.

Owns the form of `--inventory` and `--gpu-memory`, `ResourcePool` and `ResourcePoolManager`, the
names that a pool must not have, the schedule of a step, the built-in strategies (one small function
each), and the rule by which GPUs are assigned: pools in order, and in each pool the entries of
`per_node` in order. An entry goes to the next node that has enough free GPUs, and takes the lowest
free GPU numbers. A plan is plain data that can be written to JSON and read back. All other code
asks the plan where a role is.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError, field_validator

from rolepool.config import Config, show
from rolepool.config.fitting import gpu_memories
from rolepool.config.functions import import_object
from rolepool.config.run_keys import MAX_GPUS_PER_NODE, MAX_NODES, MAX_SLOTS, PoolConfig
from rolepool.errors import (
    ConfigError,
    PlacementError,
    RolepoolError,
    collected,
    one_line,
    place_of,
)
from rolepool.placement.parallel import ParallelDims, dims_of
from rolepool.placement.roles import COMBINED_ROLES, ROLE_SPECS, Role, home_of, needed_roles

DRIVER = "driver"
"""The pool name in spans of the driver itself, which computes advantages and writes checkpoints."""
RULE_POOL = "reward_cpu"
"""The pool name of the helper processes that compute rule rewards."""
GLOBAL_POOL = "global_pool"
ACTOR_POOL = "actor_rollout_ref_pool"
CRITIC_POOL = "critic_pool"
SHARE_TOLERANCE = 1e-9
UNITS = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
NEXT_STEP = "next_"
"""Begins the names of operations that belong to the next step."""


# The GPUs


def parse_inventory(text: str) -> tuple[int, ...]:
    """`8,8,4` GPUs per node; `1024x8` is 1024 nodes of 8."""
    matches = [re.fullmatch(r"\s*(?:(\d{1,6})x)?(\d{1,6})\s*", part) for part in text.split(",")]
    groups = [(int(match[1] or 1), int(match[2])) for match in matches if match is not None]
    num_nodes, num_gpus = (
        sum(times for times, _ in groups),
        sum(times * gpus for times, gpus in groups),
    )
    too_large = (
        num_nodes > MAX_NODES
        or num_gpus > MAX_SLOTS
        or any(gpus > MAX_GPUS_PER_NODE for _, gpus in groups)
    )
    if None in matches or num_gpus == 0 or too_large:
        form = "write GPUs per node, such as 8,8,4, or 1024x8 for 1024 nodes of 8; at least 1 GPU"
        limits = (
            f"at most {MAX_SLOTS}, on at most {MAX_NODES} nodes of at most {MAX_GPUS_PER_NODE} GPUs"
        )
        raise ConfigError(f"--inventory {text!r}: {form} and {limits}")
    return tuple(gpus for times, gpus in groups for _ in range(times))


def parse_memory(text: str) -> int:
    """Bytes from `80`, `80GiB` or `141GB`. A number without a unit is in GiB."""
    match = re.fullmatch(r"\s*(\d{1,7}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS or float(match[1]) == 0:
        raise ConfigError(
            f"--gpu-memory {text!r}: write the memory of one GPU, such as 80 (GiB), 80GiB or 141GB"
        )
    return int(float(match[1]) * UNITS[match[2].lower()])


def detect_gpu_memory() -> int | None:
    """Memory of the smallest GPU of this machine; None if it has no GPU."""
    return min(gpu_memories(), default=None)


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
        for name, spec in self.resource_pool_spec.items():
            if name in (DRIVER, RULE_POOL):
                problems.append(
                    f"placement.pools.{name}: timings already use this name; choose another name"
                )
            try:
                pool = PoolConfig.model_validate(spec)
                self.resource_pool_dict[name] = ResourcePool(pool.per_node, pool.share)
            except ValidationError as error:
                form = (
                    "a list of processes per node such as [2, 2], or {per_node: [2, 2], share: 0.5}"
                )
                problems.append(f"pool {name}: {spec} must be {form} ({error.errors()[0]['msg']})")
        names = [*ROLE_SPECS, *COMBINED_ROLES]
        homes: dict[Role, str] = {}
        for name, home in self.mapping.items():
            key = f"placement.roles.{name}={home}"
            if name not in names:
                problems.append(f"{key}: there is no role {name}; the roles are {', '.join(names)}")
                continue
            if home not in self.resource_pool_spec:
                problems.append(
                    f"{key}: no such pool; there are {', '.join(self.resource_pool_spec) or 'none'}"
                )
            for role in Role(name).parts:
                if role in homes:
                    problems.append(
                        f"{key}: {role} is also placed in {homes[role]}; set only one pool for it"
                    )
                homes[role] = home
        PlacementError.raise_if_any(problems)
        self.roles.update({role: homes[role] for role in ROLE_SPECS if role in homes})

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
    calls of the same role."""


@dataclass(frozen=True)
class Schedule:
    """The calls of a step in the order in which they are made, and the generation that begins the
    next step.

    It comes from running the step on paper (`rolepool.trainer.paper`), so there is no second
    description of the step.
    """

    calls: tuple[ScheduledCall, ...]

    @cached_property
    def independent(self) -> list[tuple[ScheduledCall, ScheduledCall]]:
        """The pairs of calls of which the second does not wait for the first."""
        before: list[
            frozenset[int]
        ] = []  # for each call, the positions of all calls that end before it starts
        for call in self.calls:
            before.append(call.after.union(*(before[earlier] for earlier in call.after)))
        pairs = combinations(range(len(self.calls)), 2)
        return [
            (self.calls[first], self.calls[second])
            for first, second in pairs
            if first not in before[second]
        ]

    def overlaps(self, roles: Mapping[Role, str]) -> list[tuple[str, str]]:
        """The pairs of operations that run at the same time with these roles in these pools:
        neither waits for the other, and they use different pools."""

        def pools(call: ScheduledCall) -> set[str]:
            """The pools of a call. A role without a pool is a rule that runs on CPUs, outside of
            the plan's pools."""
            return {roles.get(role, RULE_POOL) for role in call.roles}

        apart = [pair for pair in self.independent if pools(pair[0]).isdisjoint(pools(pair[1]))]
        together = {frozenset((first.operation, second.operation)) for first, second in apart}
        names = dict.fromkeys(call.operation for call in self.calls if call.roles)
        return [pair for pair in combinations(names, 2) if frozenset(pair) in together]


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
        shares = {name: f" with share {self.pools[name].share:g}" for name in self.sharing_pools}
        return " and ".join(
            f"{name} {[*pool.per_node]}{shares.get(name, '')}" for name, pool in self.pools.items()
        )

    @property
    def sizes_in_words(self) -> str:
        """The pools and the number of their processes, which stays short on many nodes."""
        return ", ".join(f"{name} [{pool.world_size}]" for name, pool in self.pools.items())

    @property
    def slots(self) -> set[Slot]:
        """The GPUs of all pools. Pools may share some of them."""
        return {slot for pool in self.pools.values() for slot in pool.slots}

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
            if reason := _why_impossible(planned):
                raise ValueError(reason)
        return plans


def _why_impossible(planned: PlannedSteps) -> str | None:
    """Why no run can have such a plan; None if one can."""
    plan, calls = planned.plan, planned.schedule.calls if planned.schedule is not None else ()
    nodes = plan.gpus_per_node
    if not 1 <= len(nodes) <= MAX_NODES or not all(
        0 <= count <= MAX_GPUS_PER_NODE for count in nodes
    ):
        return "has an impossible number of nodes or GPUs"
    if not plan.pools or not plan.pools.keys() >= set(plan.roles.values()):
        return "has no pools, or lacks the pool of a role"
    for name, pool in plan.pools.items():
        on_nodes = all(0 <= slot.node < len(nodes) for slot in pool.slots)
        if (
            not on_nodes
            or not pool.slots
            or len(pool.slots) != pool.world_size
            or not 0 < pool.share <= 1
        ):
            return f"has an impossible pool {name!r}"
    if any(
        not 0 <= earlier < position for position, call in enumerate(calls) for earlier in call.after
    ):
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
            pools[name] = replace(pool, slots=_take_slots(name, pool, left), roles=roles)
    PlacementError.raise_if_any(problems)
    return Plan(
        gpus_per_node=tuple(gpus_per_node), device=device, pools=pools, roles=manager.roles, mps=mps
    )


def _take_slots(name: str, pool: ResourcePool, left: list[list[float]]) -> tuple[Slot, ...]:
    """The slots of a pool, in rank order. Subtracts its shares from `left`, the free part of every
    GPU of every node.

    Raises PlacementError, and changes nothing, if the pool does not fit.
    """
    free = [
        [gpu for gpu, room in enumerate(gpus) if room >= pool.share - SHARE_TOLERANCE]
        for gpus in left
    ]
    slots: list[Slot] = []
    node, nodes = -1, enumerate(free)
    for count in pool.per_node:
        first = node + 1
        node, gpus = next((one for one in nodes if len(one[1]) >= count), (len(free), []))
        if len(gpus) < count:
            part = "" if pool.share == 1 else f" with {pool.share:g} of each free"
            most, plural = max(map(len, free[first:]), default=0), "s" if len(free) > 1 else ""
            wanted = f"{name} needs {count}{part} on node {first} or a later node, and at most {most} are free there"
            fix = "make the pool smaller, or use more GPUs (trainer.nnodes, trainer.n_gpus_per_node, --inventory)"
            raise PlacementError(
                f"Not enough GPUs: {wanted} ({len(free)} node{plural} in all); {fix}"
            )
        slots.extend(Slot(node, gpu) for gpu in gpus[:count])
    for slot in slots:
        left[slot.node][slot.gpu] -= pool.share
    return tuple(slots)


# The strategies: functions from the config and the GPUs of each node to pools, and to the pool of
# each role. Nothing outside of this file asks which one was chosen.


def build_plan(
    config: Config, gpus_per_node: Sequence[int] | None = None, *, take_all: bool = False
) -> Plan:
    """The plan of a config. Raises PlacementError if its pools and roles cannot be placed.

    `gpus_per_node` is the inventory; None means exactly what trainer.nnodes and
    trainer.n_gpus_per_node ask for. `take_all` divides the whole inventory, not only what those two
    keys ask for. A strategy may place roles that the run does not need; they are skipped.
    """
    wanted = (config.trainer.n_gpus_per_node,) * config.trainer.nnodes
    inventory = wanted if gpus_per_node is None else tuple(gpus_per_node)
    name, (needed, unused) = config.placement.strategy, needed_roles(config)
    manager = _pools_of(name, config, inventory if take_all else wanted)
    problems: list[str] = []
    if missing := [role for role in needed if role not in manager.roles]:
        fix = f"give each role one of {', '.join(manager.resource_pool_dict)} (placement.roles.{missing[0]}=POOL)"
        problems.append(f"placement.strategy={name}: no pool for {', '.join(missing)}; {fix}")
    for pool, size in manager.resource_pool_dict.items():
        roles = [role for role, home in manager.roles.items() if home == pool]
        if all(role in unused for role in roles):
            skipped = ", ".join(f"{role} ({unused[role]})" for role in roles)
            why = f"its roles are not used: {skipped}" if roles else "it has no role"
            fix = "give it a role, remove it, or use placement.strategy=standard"
            problems.append(f"placement.pools.{pool}={show(size.per_node)}: {why}; {fix}")
    PlacementError.raise_if_any(problems)
    manager = replace(manager, mapping={role: manager.roles[role] for role in needed})
    plan = place(manager, inventory, device=config.trainer.device, mps=config.placement.mps)
    return plan.model_copy(update={"unused_roles": unused})


def _pools_of(strategy: str, config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """What a strategy returns. A strategy of the user may raise anything, which is an error in the
    placement."""
    function = STRATEGIES.get(strategy) or import_object("placement.strategy", strategy)
    try:
        manager = function(config, gpus_per_node)
    except RolepoolError:
        raise
    except Exception as error:
        fix = "correct the function, or use placement.strategy=standard"
        what = f"{type(error).__name__} at {place_of(error)}: {one_line(error)}"
        raise PlacementError(
            f"placement.strategy={strategy}: the function failed ({what}); {fix}"
        ) from error
    if not isinstance(manager, ResourcePoolManager):
        fix = "return a ResourcePoolManager"
        kind = type(manager).__name__
        raise PlacementError(
            f"placement.strategy={strategy}: the function returned a {kind}; {fix}"
        )
    return manager


def standard(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """One pool on all GPUs, all roles in it."""
    return ResourcePoolManager({GLOBAL_POOL: gpus_per_node}, dict.fromkeys(ROLE_SPECS, GLOBAL_POOL))


def split(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """Critic, reward model and added roles like them in one pool, all other roles in another."""
    share = config.placement.split.share
    actor, critic = (
        (gpus_per_node, gpus_per_node) if share is not None else _divide(config, gpus_per_node)
    )
    per_node = {ACTOR_POOL: actor, CRITIC_POOL: critic}
    pools = {name: {"per_node": counts, "share": share or 1.0} for name, counts in per_node.items()}
    roles = {
        role: CRITIC_POOL if spec.has_scalar_head else ACTOR_POOL
        for role, spec in ROLE_SPECS.items()
    }
    return ResourcePoolManager(pools, roles)


def custom(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """Pools and roles as the user wrote them."""
    placement = config.placement
    if not placement.pools:
        reason = "placement.strategy=custom needs pools, such as placement.pools.big=[4]"
        raise PlacementError(f"placement.pools={{}}: {reason}")
    pools = {name: pool.model_dump() for name, pool in placement.pools.items()}
    roles = placement.roles.model_dump(exclude_none=True)
    return ResourcePoolManager(pools, {Role(name): pool for name, pool in roles.items()})


STRATEGIES = {"standard": standard, "split": split, "custom": custom, "auto": standard}
"""`auto` begins like `standard`, if there is no profile from which a placement can be chosen before
the start."""


def _divide(config: Config, gpus_per_node: Sequence[int]) -> tuple[list[int], list[int]]:
    """The GPUs per node of the actor's pool, and those of the critic's: whole nodes, or some GPUs
    of every node."""
    wish, counts = config.placement.split, [num_gpus for num_gpus in gpus_per_node if num_gpus]
    if sum(counts) < 2:
        reason = f"two pools need at least 2 GPUs, and there is {sum(counts)}"
        fix = "use placement.strategy=standard, or let both pools share the GPU with placement.split.share=0.5"
        raise PlacementError(f"placement.strategy=split: {reason}; {fix}")
    nodes_by_default = wish.actor_gpus_per_node is None and (
        wish.actor_nodes is not None or min(counts) < 2
    )
    whole_nodes = nodes_by_default if wish.axis == "auto" else wish.axis == "node"
    name, unit, other = (
        ("actor_nodes", "node", "gpu") if whole_nodes else ("actor_gpus_per_node", "GPU", "node")
    )
    wanted = wish.at(name)
    most = len(counts) if whole_nodes else max(counts) if wanted is None else min(counts)
    if (wanted or 1) >= most:
        key = f"axis={wish.axis}" if wanted is None else f"{name}={wanted}"
        fix = f"at most {most - 1}" if most > 1 else f"placement.split.axis={other}"
        raise PlacementError(
            f"placement.split.{key}: the critic would have no {unit} (of {most}); use {fix}"
        )
    if whole_nodes:
        nodes = [node for node, num_gpus in enumerate(gpus_per_node) if num_gpus]
        actor_nodes = set(nodes[: wanted or (most + 1) // 2])
        actor = [
            num_gpus if node in actor_nodes else 0 for node, num_gpus in enumerate(gpus_per_node)
        ]
    else:
        actor = [min(wanted or (num_gpus + 1) // 2, num_gpus) for num_gpus in gpus_per_node]
    return actor, [num_gpus - taken for num_gpus, taken in zip(gpus_per_node, actor, strict=True)]
