"""verl's way to make worker groups: a pool, a class with its arguments, and a group of both.

Owns the names of `verl.single_controller.ray` that programs use, so that their lines run unchanged.
A pool starts a `Cluster` with one pool when its first group is made, and every class of a group
becomes a role in it. So all groups of a pool share its processes, like the classes of one
`create_colocated_worker_cls` in verl.
"""

import atexit
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rolepool.cluster.cluster import Cluster, live_inventory
from rolepool.cluster.connection import connect
from rolepool.cluster.group import WorkerGroup
from rolepool.cluster.nodes import live_nodes
from rolepool.cluster.proxy import RoleProxy
from rolepool.errors import DataError
from rolepool.placement.parallel import ParallelDims
from rolepool.placement.plan import ResourcePoolManager, place

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
        atexit.register(connect(None, max(os.cpu_count() or 1, self.world_size + 1), device))
        pools = _started.setdefault((live_nodes()[0].node_id, device), {})
        name = f"{self.name_prefix or 'pool'}_{len(pools) + 1}"
        manager = ResourcePoolManager({**pools, name: self.process_on_nodes}, {})
        plan = place(manager, live_inventory(None, device), device=device)
        cluster = Cluster(plan.model_copy(update={"pools": {name: plan.pools[name]}}))
        pools[name] = self.process_on_nodes
        return cluster.groups[name]


class RayClassWithInitArgs:
    """A worker class, which may be decorated with `ray.remote`, and the arguments of its
    constructor."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = getattr(cls, "__ray_actor_class__", cls)
        self.args, self.kwargs = args, kwargs


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
        made, group = ray_cls_with_init, resource_pool.group
        classes = (
            {name_prefix or made.cls.__name__: made}
            if isinstance(made, RayClassWithInitArgs)
            else made
        )
        self.world_size = resource_pool.world_size
        dims = ParallelDims.over(self.world_size, tp=tensor_parallel)
        self._proxies: dict[str, RoleProxy] = {}
        for name, one in classes.items():
            role = f"{name}_{len(group.roles) + 1}" if name in group.roles else name
            proxy = group.add_role(role, one.cls, *one.args, dims=dims, **one.kwargs)
            self._proxies[name] = proxy

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RoleProxy]:
        """The groups of these classes of `create_colocated_worker_cls`."""
        return {name: self._proxies[name] for name in prefix_set}

    def __getattr__(self, name: str) -> Any:
        proxies = self.__dict__.get("_proxies", {})
        if len(proxies) != 1:
            raise AttributeError(
                f"{name}: the group has the classes {list(proxies)}; call spawn(), and use its result"
            )
        return getattr(next(iter(proxies.values())), name)
