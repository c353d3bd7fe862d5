"""verl's way to make worker groups: a pool, a class with its arguments, and a group of both.

Owns the names of `verl.single_controller.ray` that programs use, so that their lines run unchanged.
A pool starts a `Cluster` with one pool when its first group is made, and every class of a group
becomes a role in it. So all groups of a pool share its processes, like the classes of one
`create_colocated_worker_cls` in verl.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rolepool.cluster.calls import Argument, Value
from rolepool.cluster.cluster import Cluster, live_inventory
from rolepool.cluster.connection import connect
from rolepool.cluster.group import WorkerGroup
from rolepool.cluster.nodes import live_nodes
from rolepool.cluster.proxy import RoleProxy
from rolepool.errors import DataError
from rolepool.placement.parallel import ParallelDims
from rolepool.placement.plan import ResourcePoolManager, place
from rolepool.protocol import Worker

_started: dict[tuple[str, str], dict[str, Sequence[int]]] = {}
"""The pools of this program, by the id of the node that it runs on and the device."""


@dataclass(eq=False)
class RayResourcePool:
    """Processes on nodes, one for each GPU, or on CPUs if `use_gpu` is false or the cluster has no
    GPU."""

    process_on_nodes: Sequence[int]
    use_gpu: bool = True
    name_prefix: str | None = None
    max_colocate_count: int = 1
    """It has no effect, because all groups of a pool share its processes."""

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @cached_property
    def group(self) -> WorkerGroup:
        """The processes. They start when this is first read, on slots that no earlier pool of the
        program has."""
        device = "auto" if self.use_gpu else "cpu"
        # One CPU more than processes, as for every cluster of the driver's own.
        num_cpus = max(os.cpu_count() or 1, self.world_size + 1)
        atexit.register(connect(None, num_cpus, device))
        driver_node_id = live_nodes()[0].node_id
        earlier_pools = _started.setdefault((driver_node_id, device), {})
        prefix = self.name_prefix or "pool"
        name = f"{prefix}_{len(earlier_pools) + 1}"
        # The plan has the earlier pools, too, so that this one gets other slots.
        pools = {**earlier_pools, name: self.process_on_nodes}
        manager = ResourcePoolManager(pools, {})
        inventory = live_inventory(None, device)
        plan = place(manager, inventory, device=device)
        own_pool = {name: plan.pools[name]}
        own_plan = plan.model_copy(update={"pools": own_pool})
        cluster = Cluster(own_plan)
        earlier_pools[name] = self.process_on_nodes
        return cluster.groups[name]


class RayClassWithInitArgs:
    """A worker class, which may be decorated with `ray.remote`, and the arguments of its
    constructor."""

    def __init__(self, cls: type[Worker], *args: Argument, **kwargs: Argument) -> None:
        self.cls: type[Worker] = getattr(cls, "__ray_actor_class__", cls)
        self.args = args
        self.kwargs: dict[str, Any] = kwargs


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> Mapping[str, RayClassWithInitArgs]:
    """The classes that one `RayWorkerGroup` constructs in the same processes. Its `spawn` returns a
    group for each."""
    return class_dict


class RayWorkerGroup:
    """A class in the processes of a pool. The registered methods of the class are methods of the
    group.

    `bin_pack` and `device_name` have no effect.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | Mapping[str, RayClassWithInitArgs],
        bin_pack: bool = True,
        name_prefix: str | None = None,
        *,
        device_name: str | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        if not isinstance(resource_pool, RayResourcePool):
            raise DataError(
                f"resource_pool is a {type(resource_pool).__name__}; write RayResourcePool([2])"
            )
        group = resource_pool.group
        classes: Mapping[str, RayClassWithInitArgs]
        if isinstance(ray_cls_with_init, RayClassWithInitArgs):
            name = name_prefix or ray_cls_with_init.cls.__name__
            classes = {name: ray_cls_with_init}
        else:
            classes = ray_cls_with_init
        self.world_size = resource_pool.world_size
        dims = ParallelDims.over(self.world_size, tp=tensor_parallel)
        self._proxies: dict[str, RoleProxy] = {}
        for name, of_class in classes.items():
            role = name
            if role in group.roles:  # an earlier group of this pool has such a class, too
                role = f"{name}_{len(group.roles) + 1}"
            self._proxies[name] = group.add_role(
                role,
                of_class.cls,
                *of_class.args,
                dims=dims,
                **of_class.kwargs,
            )

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RoleProxy]:
        """The groups of these classes of `create_colocated_worker_cls`."""
        return {name: self._proxies[name] for name in prefix_set}

    def __getattr__(self, name: str) -> Callable[..., Value]:
        # Not `self._proxies`, which would call this method again as long as there are none.
        proxies: Mapping[str, RoleProxy] = self.__dict__.get("_proxies", {})
        if len(proxies) != 1:
            raise AttributeError(
                f"{name}: the group has the classes {list(proxies)}; call spawn(), and use its result"
            )
        (proxy,) = proxies.values()
        method: Callable[..., Value] = getattr(proxy, name)
        return method
