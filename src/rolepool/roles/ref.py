"""The reference: the policy before training, for KL terms."""

from __future__ import annotations

from torch import Tensor

from rolepool.config import Config
from rolepool.config.model_keys import RefConfig
from rolepool.models.packing import TokenRows, response_log_probs
from rolepool.models.training import FrozenModel
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.ragged import TOKENS
from rolepool.roles.model_role import ModelRole, Setup


class Reference(ModelRole):
    role = Role.RefPolicy
    keys: RefConfig

    def __init__(self, config: Config, setup: Setup) -> None:
        super().__init__(config, setup)
        model = self.load_policy(self.frozen_dtype, packed=self.packed)
        self.frozen = FrozenModel(model, device=self.device, offload=self.keys.fsdp_config.param_offload)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=TOKENS)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the response tokens under the weights before training."""
        temperature = self.config.actor_rollout_ref.rollout.temperature

        def score(rows: TokenRows) -> dict[str, Tensor]:
            scores = response_log_probs(self.frozen.model, rows, temperature=temperature, packed=self.packed)
            return {"ref_log_prob": rows.ragged(scores.log_probs)}

        with self.frozen.on_device():
            return self.in_micro_batches("compute_ref_log_prob", data, score)
