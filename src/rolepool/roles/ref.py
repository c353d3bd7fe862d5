"""The reference: the policy as it was, for KL terms."""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.config import Config
from rolepool.models.packing import TokenRows, response_log_probs
from rolepool.models.training import FrozenModel
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.ragged import TOKENS
from rolepool.roles.model_role import MicroBatches, ModelRole, load_policy_of, offloads


class Reference(ModelRole):
    def __init__(
        self, config: Config, dtype: torch.dtype = torch.float32, micro_batches: MicroBatches | None = None
    ) -> None:
        packed = config.actor_rollout_ref.model.use_remove_padding
        super().__init__(config, Role.RefPolicy, micro_batches, packed=packed)
        self.keys = config.actor_rollout_ref.ref
        model = load_policy_of(config, dtype if self.device == "cpu" else torch.bfloat16, packed=self.packed)
        self.frozen = FrozenModel(model, device=self.device, offload=self.keys.fsdp_config.param_offload)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=TOKENS)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the response tokens under the first weights."""
        temperature = self.config.actor_rollout_ref.rollout.temperature

        def score(rows: TokenRows) -> dict[str, Tensor]:
            scores = response_log_probs(self.frozen.model, rows, temperature=temperature, packed=self.packed)
            return {"ref_log_prob": rows.ragged(scores.log_probs)}

        with self.frozen.on_device():
            return self.in_passes("compute_ref_log_prob", data, score)

    def less_memory_at_rest(self) -> list[str]:
        return offloads("actor_rollout_ref.ref.fsdp_config", self.keys.fsdp_config, self.device)
