"""rolepool: PPO post-training of language models; you choose which models share which GPUs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolepool.algorithm import register_adv_est, register_policy_loss
    from rolepool.api import PlanSummary, Run, load_config, plan, train
    from rolepool.cluster import Cluster, WorkerGroup
    from rolepool.config import Config, LoadedConfig
    from rolepool.errors import RolepoolError
    from rolepool.placement import ResourcePool, ResourcePoolManager, Role
    from rolepool.protocol import DataProto, DataProtoFuture, Dispatch, Execute, Worker, register

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "Config",
    "DataProto",
    "DataProtoFuture",
    "Dispatch",
    "Execute",
    "LoadedConfig",
    "PlanSummary",
]
__all__ += [
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "RolepoolError",
    "Run",
    "Worker",
    "WorkerGroup",
]
__all__ += [
    "__version__",
    "load_config",
    "plan",
    "register",
    "register_adv_est",
    "register_policy_loss",
    "train",
]

_HOME = {
    **dict.fromkeys(("PlanSummary", "Run", "load_config", "plan", "train"), "rolepool.api"),
    **dict.fromkeys(("Config", "LoadedConfig"), "rolepool.config"),
    "RolepoolError": "rolepool.errors",
    **dict.fromkeys(("Role", "ResourcePool", "ResourcePoolManager"), "rolepool.placement"),
    **dict.fromkeys(
        ("DataProto", "DataProtoFuture", "Dispatch", "Execute", "Worker", "register"),
        "rolepool.protocol",
    ),
    **dict.fromkeys(("Cluster", "WorkerGroup"), "rolepool.cluster"),
    **dict.fromkeys(("register_adv_est", "register_policy_loss"), "rolepool.algorithm"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `rolepool --help` stays fast."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
