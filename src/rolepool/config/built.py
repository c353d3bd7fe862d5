"""What `rolepool train` does not act on yet: the keys, and which of their values are in force all the same.

A key that is set to a value that is not in force is refused, and never ignored. Everything not named here is built.
"""

from __future__ import annotations

from typing import Any

from rolepool.config.loading import LoadedConfig
from rolepool.config.schema import all_keys

VALUES_IN_FORCE: dict[str, tuple[Any, ...]] = {
    "actor_rollout_ref.model.lora_rank": (0,),
    "actor_rollout_ref.model.lora_alpha": (16,),
    "actor_rollout_ref.rollout.name": ("native",),
}


def is_built(path: str) -> bool:
    """Whether training acts on every value of a key."""
    return path not in VALUES_IN_FORCE


def refused_keys(loaded: LoadedConfig) -> list[str]:
    """The keys the user set to values that are not in force, in the order of the schema."""
    return [path for path in all_keys() if path in loaded.set_keys and not _in_force(path, loaded)]


def _in_force(path: str, loaded: LoadedConfig) -> bool:
    return path not in VALUES_IN_FORCE or loaded.value_of(path) in VALUES_IN_FORCE[path]
