"""rolepool: PPO post-training of language models in which placement is a value you write."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolepool.placement import ResourcePool, ResourcePoolManager, Role

__version__ = "0.1.0"
__all__ = ["ResourcePool", "ResourcePoolManager", "Role", "__version__"]

_HOME = {
    "Role": "rolepool.placement",
    "ResourcePool": "rolepool.placement",
    "ResourcePoolManager": "rolepool.placement",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `rolepool --help` stays fast."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
