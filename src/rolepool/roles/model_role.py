"""What roles with a model have in common: rows that go through it in passes, and what to change when memory runs out.

Owns the order of such changes: what the role itself can do, what roles of its process can put away, another division
of the GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.config.model_keys import FsdpConfig, RefFsdpConfig
from rolepool.models.loading import load_policy
from rolepool.models.packing import Batch, rows_on
from rolepool.placement import Role
from rolepool.placement.advice import roomier_divisions
from rolepool.placement.estimate import MicroBatch, default_micro_batches
from rolepool.placement.roles import ROLE_SPECS
from rolepool.protocol import DataProto, Worker
from rolepool.roles.passes import Passes

MicroBatches = Mapping[str, MicroBatch]
"""By the name of an operation."""
INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")


class ModelRole(Worker):
    def __init__(self, config: Config, role: Role, micro_batches: MicroBatches | None, *, packed: bool) -> None:
        """`micro_batches` are the plan's; a role that runs without a plan has those that its keys set."""
        self.config = config
        self.packed = packed
        sizes = default_micro_batches(config, role) if micro_batches is None else micro_batches
        self.passes = {
            operation.method: Passes(sizes[operation.name], self.device, packed)
            for operation in ROLE_SPECS[role].operations
        }

    def in_passes(
        self, method: str, data: DataProto, compute: Callable[[Batch], Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        """What is computed of every row, in the order of rows and in host memory."""
        batch = {key: data.batch[key] for key in INPUTS}
        of_row: dict[int, tuple[Tensor, ...]] = {}
        for rows in self.passes[method].cut(batch["attention_mask"]):
            computed = compute(rows_on(self.device, batch, rows))
            of_row.update(zip(rows, zip(*computed, strict=True), strict=True))
        in_order = [of_row[row] for row in range(len(data))]
        return tuple(torch.stack(column).cpu() for column in zip(*in_order, strict=True))

    def less_memory(self, method: str) -> list[str]:
        own = self.passes[method].smaller() if method in self.passes else []
        return remedies(self, self.config, own)


def load_policy_of(config: Config, dtype: torch.dtype, *, packed: bool) -> nn.Module:
    """The policy that actor, reference and rollout start from."""
    keys = config.actor_rollout_ref.model
    overrides = dict(keys.override_config)
    return load_policy(
        keys.path, dtype=dtype, trust_remote_code=keys.trust_remote_code, overrides=overrides, packed=packed
    )


def remedies(worker: Worker, config: Config, own: Iterable[str]) -> list[str]:
    """All that may help a role, given what it can do itself."""
    others = [other for other in worker.siblings.values() if other is not worker]
    at_rest = [override for other in others for override in other.less_memory_at_rest()]
    return [*own, *at_rest, *roomier_divisions(config, Role(worker.context.role))]


def offloads(section: str, fsdp: FsdpConfig | RefFsdpConfig, device: str) -> list[str]:
    """What of a model could still go to host memory between uses, the larger first; on a CPU everything is there."""
    away = {"param_offload": fsdp.param_offload}
    if isinstance(fsdp, FsdpConfig):
        away = {"optimizer_offload": fsdp.optimizer_offload, **away}
    return [f"{section}.{key}=true" for key, is_away in away.items() if not is_away and device != "cpu"]
