"""The plan: which pool every role is in, and which GPUs every pool has.

Plain data that can be written to JSON and read back. All other code asks the plan where a role is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from rolepool.config import Config
from rolepool.errors import PlacementError
from rolepool.placement.pools import ResourcePool, ResourcePoolManager, take_slots
from rolepool.placement.roles import Role, home_of, needed_roles
from rolepool.placement.strategies import divide


class Plan(BaseModel):
    """The pool of every role, and the GPUs of every pool."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # plan.json of an older run may have other fields

    gpus_per_node: tuple[int, ...]
    device: str
    pools: dict[str, ResourcePool]
    roles: dict[Role, str]
    unused_roles: dict[Role, str] = Field(default_factory=dict)
    """The roles that the run does not need, and why."""
    mps: bool = False
    """Whether pools that share GPUs use CUDA MPS."""

    @property
    def sharing_pools(self) -> list[str]:
        """Names of the pools whose processes have only a share of a GPU."""
        return [name for name, pool in self.pools.items() if pool.share < 1]

    def pool_of(self, role: Role) -> ResourcePool:
        """The pool of a role. `actor_rollout` has one if actor and rollout are in the same pool."""
        return self.pools[home_of(role, self.roles)]


def build_plan(config: Config, gpus_per_node: Sequence[int] | None = None, *, take_all: bool = False) -> Plan:
    """The plan of a config. Raises PlacementError if its pools and roles cannot be placed.

    `gpus_per_node` is the inventory; None means exactly what trainer.nnodes and trainer.n_gpus_per_node ask for.
    `take_all` divides the whole inventory, not only what those two keys ask for.
    """
    wanted = (config.trainer.n_gpus_per_node,) * config.trainer.nnodes
    inventory = wanted if gpus_per_node is None else tuple(gpus_per_node)
    manager = divide(config, inventory if take_all else wanted)
    plan = place(manager, inventory, device=config.trainer.device, mps=config.placement.mps)
    return plan.model_copy(update={"unused_roles": needed_roles(config)[1]})


def place(
    manager: ResourcePoolManager, gpus_per_node: Sequence[int], *, device: str = "auto", mps: bool = False
) -> Plan:
    """The plan of pools and roles that are written in Python. Raises PlacementError with every pool that does not
    fit."""
    left = [[1.0] * num_gpus for num_gpus in gpus_per_node]
    pools: dict[str, ResourcePool] = {}
    problems: list[str] = []
    for name, pool in manager.resource_pool_dict.items():
        roles = tuple(role for role, home in manager.roles.items() if home == name)
        try:
            pools[name] = replace(pool, slots=take_slots(name, pool, left), roles=roles)
        except PlacementError as error:
            problems.extend(error.problems)
    if problems:
        raise PlacementError(problems)
    return Plan(gpus_per_node=tuple(gpus_per_node), device=device, pools=pools, roles=manager.roles, mps=mps)
