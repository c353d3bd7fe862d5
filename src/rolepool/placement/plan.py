"""The plan: config and inventory resolved into every role's pool and every pool's exact slots.

Pure data, JSON in and out. Everybody who needs to know where something lives asks the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from pydantic import BaseModel, ConfigDict

from rolepool.config import Config
from rolepool.placement.pools import ResourcePoolManager
from rolepool.placement.roles import Role, home_of, needed_roles
from rolepool.placement.slots import Slot, place_pools
from rolepool.placement.strategies import divide


class PlannedPool(BaseModel):
    """A pool on its GPUs. The process of rank r holds `slots[r]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_node: tuple[int, ...]
    share: float
    slots: tuple[Slot, ...]
    roles: tuple[Role, ...]

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @cached_property
    def counts_by_node(self) -> dict[int, int]:
        """Number of the pool's processes on each node that has one."""
        return Counter(slot.node for slot in self.slots)


class Plan(BaseModel):
    """Where every role lives."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # plan.json of an older run may hold more

    gpus_per_node: tuple[int, ...]
    device: str
    pools: dict[str, PlannedPool]
    roles: dict[Role, str]
    left_out: dict[Role, str]
    mps: bool = False
    """Whether pools that share GPUs use CUDA MPS."""

    @property
    def sharing_pools(self) -> list[str]:
        """The pools with less than whole GPUs."""
        return [name for name, pool in self.pools.items() if pool.share < 1]

    def pool_of(self, role: Role) -> PlannedPool:
        """The pool a role lives in; `actor_rollout` where both parts live together."""
        return self.pools[home_of(role, self.roles)]


def build_plan(config: Config, gpus_per_node: Sequence[int] | None = None, *, take_all: bool = False) -> Plan:
    """Resolve the config's placement on the nodes there are.

    `gpus_per_node` is the inventory; None stands for exactly what trainer.nnodes and trainer.n_gpus_per_node ask for.
    `take_all` divides the whole inventory instead of what those two keys ask for.
    """
    wanted = (config.trainer.n_gpus_per_node,) * config.trainer.nnodes
    inventory = wanted if gpus_per_node is None else tuple(gpus_per_node)
    manager = divide(config, inventory if take_all else wanted)
    _, left_out = needed_roles(config)
    return place(manager, inventory, device=config.trainer.device, left_out=left_out, mps=config.placement.mps)


def place(
    manager: ResourcePoolManager,
    gpus_per_node: Sequence[int],
    *,
    device: str = "auto",
    left_out: dict[Role, str] | None = None,
    mps: bool = False,
) -> Plan:
    """Put pools and roles that are written out on the nodes there are."""
    slots = place_pools(manager.resource_pool_dict.values(), gpus_per_node)
    pools = {
        name: PlannedPool(
            per_node=pool.per_node,
            share=pool.share,
            slots=slots[name],
            roles=tuple(role for role, home in manager.roles.items() if home == name),
        )
        for name, pool in manager.resource_pool_dict.items()
    }
    return Plan(
        gpus_per_node=tuple(gpus_per_node),
        device=device,
        pools=pools,
        roles=manager.roles,
        left_out=left_out or {},
        mps=mps,
    )
