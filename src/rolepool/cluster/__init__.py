"""Pools of real processes on Ray. The only folder that imports ray."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rolepool.quick_imports import quick_imports

if TYPE_CHECKING:
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

_HOME = {
    **dict.fromkeys(("Cluster", "Prepared"), "rolepool.cluster.cluster"),
    "WorkerGroup": "rolepool.cluster.group",
    **dict.fromkeys(("RoleProxy", "next_call_number"), "rolepool.cluster.proxy"),
    **dict.fromkeys(
        (
            "RayClassWithInitArgs",
            "RayResourcePool",
            "RayWorkerGroup",
            "create_colocated_worker_cls",
        ),
        "rolepool.cluster.verl",
    ),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, because most of them need torch, and
    `rolepool.cluster.begin` does not."""
    if name in _HOME:
        with quick_imports():
            return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
