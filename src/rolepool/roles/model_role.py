"""What roles with a model have in common: rows that go through it in passes, and what to change when memory runs out.

Owns the order of such changes: what the role itself can do, what roles of its process can put away, another division
of the GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.config.model_keys import FsdpConfig, RefFsdpConfig
from rolepool.models.loading import load_policy
from rolepool.models.packing import TokenRows
from rolepool.placement import Role
from rolepool.placement.advice import roomier_divisions
from rolepool.placement.estimate import MicroBatch, default_micro_batches
from rolepool.placement.roles import ROLE_SPECS
from rolepool.protocol import DataProto, Worker
from rolepool.protocol.ragged import INPUT_IDS, TOKENS, lengths_of
from rolepool.roles.passes import Passes

MicroBatches = Mapping[str, MicroBatch]
"""By the name of an operation."""


class ModelRole(Worker):
    def __init__(self, config: Config, role: Role, micro_batches: MicroBatches | None, *, packed: bool) -> None:
        """`micro_batches` are the plan's; a role that runs without a plan has those that its keys set."""
        self.config = config
        self.packed = packed
        sizes = default_micro_batches(config, role) if micro_batches is None else micro_batches
        width = config.data.max_prompt_length + config.data.max_response_length
        self.passes = {
            operation.method: Passes(sizes[operation.name], self.device, packed, width)
            for operation, _ in ROLE_SPECS[role].batched
        }

    def in_passes(
        self, method: str, data: DataProto, compute: Callable[[TokenRows], Mapping[str, Tensor]]
    ) -> DataProto:
        """The columns that are computed from the tokens of micro-batches, in the order of rows and in host memory."""
        tokens = data.select(list(TOKENS), [], [])
        passes = self.passes[method].cut(lengths_of(data.batch[INPUT_IDS]).tolist())
        parts = [DataProto.from_dict(compute(TokenRows(tokens[rows].batch, self.device))) for rows in passes]
        computed = DataProto.concat(parts).to("cpu")  # only now, so that passes do not wait for each other's results
        computed.reorder(np.argsort([row for rows in passes for row in rows]))
        return computed

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
