"""Pools: which roles they hold, and which GPUs their processes use.

Owns `ResourcePool` and `ResourcePoolManager`, the names that a pool must not have, and the rule by which GPUs are
assigned: pools in order, and in each pool the entries of `per_node` in order. An entry goes to the next node that has
enough free GPUs, and takes the lowest free GPU numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import ValidationError

from rolepool.config.run_keys import PoolConfig
from rolepool.errors import PlacementError
from rolepool.placement.roles import ROLE_SPECS, Role, home_of

DRIVER = "driver"
"""The pool name in spans of the driver itself, which computes advantages and writes checkpoints."""
RULE_POOL = "reward_cpu"
"""The pool name of the helper processes that compute rule rewards."""
SHARE_TOLERANCE = 1e-9


class Slot(NamedTuple):
    """One GPU of one node; on a cluster without GPUs, one CPU slot."""

    node: int
    gpu: int


@dataclass(frozen=True)
class ResourcePool:
    """A list of processes per node. Each process has one GPU, or a `share` of one. 0 skips a node."""

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
    """Pools by name and the pool of every role. A pool is `[processes per node]` or `{per_node: [..], share: 0.5}`."""

    resource_pool_spec: Mapping[str, Sequence[int] | Mapping[str, Any]]
    mapping: Mapping[Role, str]
    resource_pool_dict: dict[str, ResourcePool] = field(init=False, default_factory=dict)
    roles: dict[Role, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, spec in self.resource_pool_spec.items():
            if name in (DRIVER, RULE_POOL):
                problems.append(f"placement.pools.{name}: timings already use this name; choose another name")
            try:
                pool = PoolConfig.model_validate(spec)
                self.resource_pool_dict[name] = ResourcePool(pool.per_node, pool.share)
            except ValidationError:
                problems.append(
                    f"pool {name}: {spec} must be a list of processes per node such as [2, 2] (integers, at least one "
                    "of them over 0), or {per_node: [2, 2], share: 0.5} with a share over 0 and at most 1"
                )
        names = [*ROLE_SPECS, Role.ActorRollout]
        homes: dict[Role, str] = {}
        for name, home in self.mapping.items():
            key = f"placement.roles.{name}={home}"
            if name not in names:
                problems.append(f"{key}: there is no role {name}; the roles are {', '.join(names)}")
                continue
            if home not in self.resource_pool_spec:
                problems.append(f"{key}: no such pool; there are {', '.join(self.resource_pool_spec) or 'none'}")
            for role in Role(name).parts:
                if role in homes:
                    problems.append(f"{key}: {role} is also placed in {homes[role]}; set only one pool for it")
                homes[role] = home
        if problems:
            raise PlacementError(problems)
        self.roles.update({role: homes[role] for role in ROLE_SPECS if role in homes})

    def create_resource_pool(self) -> None:
        """Do nothing: the pools exist as soon as the manager does. For launch scripts that call it."""

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[home_of(role, self.roles)]

    def get_n_gpus(self) -> int:
        """Number of processes in all pools."""
        return sum(pool.world_size for pool in self.resource_pool_dict.values())


def take_slots(name: str, pool: ResourcePool, left: list[list[float]]) -> tuple[Slot, ...]:
    """The slots of a pool, in rank order. Subtracts its shares from `left`, the free part of every GPU of every node.

    Raises PlacementError, and changes nothing, if the pool does not fit.
    """
    free = [[gpu for gpu, room in enumerate(gpus) if room >= pool.share - SHARE_TOLERANCE] for gpus in left]
    slots: list[Slot] = []
    node = 0
    for count in pool.per_node:
        if count:
            first = node
            node = next((later for later in range(first, len(free)) if len(free[later]) >= count), len(free))
            if node == len(free):
                part = "" if pool.share == 1 else f" with {pool.share:g} of each free"
                most = max(map(len, free[first:]), default=0)
                raise PlacementError(
                    f"Not enough GPUs: {name} needs {count}{part} on node {first} or a later node, and at most {most} "
                    f"are free there ({len(free)} nodes in all); make the pool smaller, or use more GPUs "
                    "(trainer.nnodes, trainer.n_gpus_per_node, --inventory)"
                )
            slots.extend(Slot(node, gpu) for gpu in free[node][:count])
        node += 1
    for slot in slots:
        left[slot.node][slot.gpu] -= pool.share
    return tuple(slots)
