"""The critic: computes a value for every response token, and is updated towards the returns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rolepool.algorithm.losses import LossCounts, compute_value_loss, masked_sum
from rolepool.config import Config
from rolepool.config.model_keys import CriticConfig
from rolepool.models.loading import load_critic
from rolepool.models.packing import TokenRows, response_values
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.ragged import TOKENS
from rolepool.roles.model_role import Setup, TrainedRole


class Critic(TrainedRole):
    role = Role.Critic
    keys: CriticConfig

    def __init__(self, config: Config, setup: Setup) -> None:
        super().__init__(config, setup)
        trusted = config.actor_rollout_ref.model.trust_remote_code
        path = self.keys.model.path
        model = load_critic(path, dtype=setup.dtype, trust_remote_code=trusted, packed=self.packed)
        self.train(model, setup.num_training_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=TOKENS)
    def compute_values(self, data: DataProto) -> DataProto:
        """The value of the state before each response token."""
        return self.in_micro_batches("compute_values", data, lambda rows: {"values": rows.ragged(self._values(rows))})

    def _values(self, rows: TokenRows) -> Tensor:
        return response_values(self.trained.model, rows, packed=self.packed)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=(*TOKENS, "values", "returns"))
    def update_critic(self, data: DataProto, ends_step: bool = True) -> dict[str, float]:
        """One epoch of updates."""
        return self.update(data, ends_step)

    def loss_of(
        self, rows: TokenRows, columns: Mapping[str, Tensor], counts: LossCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        keys, mask = self.keys, columns["response_mask"]
        predicted = rows.pad(self._values(rows))
        returns, values = columns["returns"], columns["values"]
        loss, clip_fraction = compute_value_loss(
            predicted, returns, values, mask, keys.cliprange_value, keys.loss_agg_mode, counts=counts
        )
        mean = masked_sum(predicted.detach(), mask) / max(counts.num_tokens, 1)
        return loss, {"vf_loss": loss.detach(), "vf_clipfrac": clip_fraction, "vpred_mean": mean}
