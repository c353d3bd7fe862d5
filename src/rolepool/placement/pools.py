"""Pools, and which roles live in them, before anybody has asked which GPUs there are.

Owns `ResourcePool` and `ResourcePoolManager`, and the names that no pool may have. Does not know nodes or GPUs: `slots`
finds those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolepool.errors import PlacementError
from rolepool.placement.roles import ROLE_SPECS, Role, home_of

DRIVER = "driver"
"""The pool of spans of the driver itself, which estimates advantages and writes checkpoints."""
RULE_POOL = "reward_cpu"
"""The pool of the helper processes that rule rewards run on."""


@dataclass(frozen=True)
class ResourcePool:
    """A named list of processes per node, one GPU (or a `share` of one) each. 0 skips a node."""

    name: str
    per_node: tuple[int, ...]
    share: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_node", tuple(self.per_node))
        if self.name in (DRIVER, RULE_POOL):
            raise PlacementError(
                f"placement.pools.{self.name}={list(self.per_node)}: timings use this name for processes beside the "
                "pools; choose another name"
            )
        if any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for count in self.per_node):
            raise PlacementError(
                f"pool {self.name}: {list(self.per_node)} must be whole numbers from 0 on, one per node"
            )
        if not any(self.per_node):
            raise PlacementError(f"pool {self.name}: {list(self.per_node)} must hold at least one process")
        if not 0 < self.share <= 1:
            raise PlacementError(f"pool {self.name}: share={self.share} must be over 0 and at most 1")

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.per_node)


@dataclass(frozen=True)
class ResourcePoolManager:
    """Pools by name and the pool of every role. A pool is `[processes per node]` or `{per_node: [..], share: 0.5}`."""

    resource_pool_spec: Mapping[str, Sequence[int] | Mapping[str, Any]]
    mapping: Mapping[Role, str]
    resource_pool_dict: dict[str, ResourcePool] = field(init=False)
    roles: dict[Role, str] = field(init=False)

    def __post_init__(self) -> None:
        names = [*ROLE_SPECS, Role.ActorRollout]
        strange = [role for role in self.mapping if role not in names]
        if strange:
            raise PlacementError(f"mapping: {strange[0]!r} is no role; there are {', '.join(names)}")
        pools = {name: _pool_of(name, spec) for name, spec in self.resource_pool_spec.items()}
        problems = [
            f"placement.roles.{Role(role)}={pool}: no such pool; there are {', '.join(pools) or 'none'}"
            for role, pool in self.mapping.items()
            if pool not in pools
        ]
        roles: dict[Role, str] = {}
        for role in ROLE_SPECS:
            written = [name for name in self.mapping if role in Role(name).parts]
            if len(written) > 1:
                places = " and ".join(f"placement.roles.{Role(name)}={self.mapping[name]}" for name in written)
                problems.append(f"role {role} is placed twice: {places}; set one of them only")
            elif written:
                roles[role] = self.mapping[written[0]]
        if problems:
            raise PlacementError(problems)
        object.__setattr__(self, "resource_pool_dict", pools)
        object.__setattr__(self, "roles", roles)

    def create_resource_pool(self) -> None:
        """Nothing to do: pools exist once the manager does. Kept for launch scripts that call it."""

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[home_of(role, self.roles)]

    def get_n_gpus(self) -> int:
        """Number of processes over all pools."""
        return sum(pool.world_size for pool in self.resource_pool_dict.values())


def _pool_of(name: str, spec: Sequence[int] | Mapping[str, Any]) -> ResourcePool:
    if isinstance(spec, Mapping):
        if "per_node" not in spec or not spec.keys() <= {"per_node", "share"}:
            raise PlacementError(f"pool {name}: {dict(spec)} must have per_node and may have share")
        return ResourcePool(name, **spec)
    if not isinstance(spec, Sequence) or isinstance(spec, str):
        raise PlacementError(f"pool {name}: {spec!r} must be a list of processes per node, such as [2, 2]")
    return ResourcePool(name, tuple(spec))
