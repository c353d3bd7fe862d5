"""The reward model: a Hugging Face sequence classifier that scores prompt and response as one text.

A second reward model is a subclass with another `role` (docs/extending.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.config import Config
from rolepool.config.model_keys import RewardModelConfig
from rolepool.models.loading import load_reward_model
from rolepool.models.packing import TokenRows
from rolepool.models.training import FrozenModel
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.ragged import INPUT_IDS, TOKENS, ragged, ragged_parts
from rolepool.roles.model_role import ModelRole, Setup


class RewardModel(ModelRole):
    role = Role.RewardModel
    keys: RewardModelConfig

    def __init__(self, config: Config, setup: Setup) -> None:
        super().__init__(config, setup)
        self.pad_token_id = setup.pad_token_id
        trusted = config.actor_rollout_ref.model.trust_remote_code
        model = load_reward_model(self.keys.model.path, dtype=self.frozen_dtype, trust_remote_code=trusted)
        model.config.pad_token_id = setup.pad_token_id  # type: ignore[union-attr]
        self.frozen = FrozenModel(model, device=self.device, offload=False)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=TOKENS)
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each whole response."""
        tokens = data.select(list(TOKENS), [], [])
        if self.keys.max_length is not None:
            tokens.batch[INPUT_IDS] = last_tokens(data.batch[INPUT_IDS], self.keys.max_length)
        with self.frozen.on_device():
            return self.in_micro_batches("compute_scores", tokens, self._score)

    def _score(self, rows: TokenRows) -> dict[str, Tensor]:
        """Rows are padded on the right, because a classifier scores at the last token that is not padding."""
        inputs, _ = rows.padded_inputs(self.pad_token_id)
        logits: Tensor = self.frozen.model(**inputs, use_cache=False).logits
        return {"scores": logits[:, 0].float()}


def last_tokens(column: Tensor, limit: int) -> Tensor:
    """A ragged column with only the last `limit` tokens of each row."""
    values, offsets = ragged_parts(column)
    lengths = offsets.diff()
    first_kept = torch.repeat_interleave(offsets[1:] - limit, lengths)
    return ragged(values[torch.arange(len(values)) >= first_kept], lengths.clamp(max=limit))
