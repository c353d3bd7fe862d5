"""Pools of real processes on Ray. The only folder that imports ray."""

from rolepool.quick_imports import quick_imports

with quick_imports():
    from rolepool.cluster.cluster import Cluster, Prepared
    from rolepool.cluster.group import WorkerGroup
    from rolepool.cluster.proxy import RoleProxy, next_call_number
    from rolepool.cluster.verl import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

__all__ = [
    "Cluster",
    "Prepared",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "RoleProxy",
]
__all__ += ["WorkerGroup", "create_colocated_worker_cls", "next_call_number"]
