"""What a user can change when a role has run out of memory, as overrides.

Owns the order: what the role itself can do, what roles of its process can put away, another division of the GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable

from rolepool.config import Config
from rolepool.config.model_keys import Fsdp, RefFsdp
from rolepool.placement.advice import roomier_divisions
from rolepool.placement.roles import Role
from rolepool.protocol import Worker


def remedies(worker: Worker, config: Config, own: Iterable[str]) -> list[str]:
    """All that may help a role, given what it can do itself."""
    others = [other for other in worker.siblings.values() if other is not worker]
    at_rest = [override for other in others for override in other.less_memory_at_rest()]
    return [*own, *at_rest, *roomier_divisions(config, Role(worker.context.role))]


def offloads(section: str, fsdp: Fsdp | RefFsdp, device: str) -> list[str]:
    """What of a model could still go to host memory between uses, the larger first; on a CPU everything is there."""
    away = {"param_offload": fsdp.param_offload}
    if isinstance(fsdp, Fsdp):
        away = {"optimizer_offload": fsdp.optimizer_offload, **away}
    return [f"{section}.{key}=true" for key, is_away in away.items() if not is_away and device != "cpu"]
