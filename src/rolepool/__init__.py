"""rolepool: PPO post-training of language models; you choose which models share which GPUs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolepool.algorithm import register_adv_est, register_policy_loss
    from rolepool.cluster import Cluster, WorkerGroup
    from rolepool.placement import ResourcePool, ResourcePoolManager, Role
    from rolepool.protocol import DataProto, DataProtoFuture, Dispatch, Execute, Worker, register

__version__ = "0.1.0"
__all__ = ["Cluster", "DataProto", "DataProtoFuture", "Dispatch", "Execute", "ResourcePool", "ResourcePoolManager"]
__all__ += ["Role", "Worker", "WorkerGroup", "__version__", "register", "register_adv_est", "register_policy_loss"]

_HOME = {
    **dict.fromkeys(("Role", "ResourcePool", "ResourcePoolManager"), "rolepool.placement"),
    **dict.fromkeys(("DataProto", "DataProtoFuture", "Dispatch", "Execute", "Worker", "register"), "rolepool.protocol"),
    **dict.fromkeys(("Cluster", "WorkerGroup"), "rolepool.cluster"),
    **dict.fromkeys(("register_adv_est", "register_policy_loss"), "rolepool.algorithm"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `rolepool --help` stays fast."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
