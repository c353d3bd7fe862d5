"""The reward model: an HF sequence classifier that scores prompt and response as one text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.models.frozen import FrozenModel
from rolepool.models.loading import load_reward_model
from rolepool.models.packing import Batch, on_device
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.roles.model_role import INPUTS, MicroBatches, ModelRole
from rolepool.roles.rule_reward import at_last_token


class RewardModel(ModelRole):
    def __init__(
        self,
        config: Config,
        pad_token_id: int,
        dtype: torch.dtype = torch.float32,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        super().__init__(config, Role.RewardModel, micro_batches, packed=False)
        self.keys = config.reward_model
        self.pad_token_id = pad_token_id
        model = load_reward_model(
            self.keys.model.path,
            dtype=dtype if self.device == "cpu" else torch.bfloat16,
            trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        )
        model.config.pad_token_id = pad_token_id  # type: ignore[union-attr]
        self.frozen = FrozenModel(model, device=self.device, offload=False)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=(*INPUTS, "response_mask"))
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each whole response, at its last token."""
        with self.frozen.on_device() as model:
            (scores,) = self.in_passes("compute_scores", data, lambda part: (self._score(model, part),))
        return DataProto.from_dict({"token_level_scores": at_last_token(scores.float(), data.batch["response_mask"])})

    def _score(self, model: nn.Module, part: Batch) -> Tensor:
        """Rows are moved to the left edge: a classifier takes the last token that is not padding for the end."""
        mask, device = part["attention_mask"].bool(), part["input_ids"].device
        lengths = mask.sum(dim=1)
        longest = int(lengths.max())
        limit = min(longest, self.keys.max_length or longest)
        place_from_end = mask.flip(1).cumsum(dim=1).flip(1)
        is_kept = mask & (place_from_end <= limit)
        is_there = torch.arange(limit) < lengths[:, None]
        # The same tokens in the same order: of the rows as they are, and at their left edge.
        sources, targets = (on_device(where.flatten().nonzero().flatten(), device) for where in (is_kept, is_there))
        ids = part["input_ids"].new_full((is_there.numel(),), self.pad_token_id)
        ids = ids.index_copy(0, targets, part["input_ids"].flatten()[sources]).view(is_there.shape)
        attention_mask = on_device(is_there.long(), device)
        scores: Tensor = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[:, 0]
        return scores
