"""The reward model: an HF sequence classifier that scores prompt and response as one text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.models.frozen import FrozenModel
from rolepool.models.loading import load_reward_model
from rolepool.models.packing import Batch
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.roles.model_role import INPUTS, ModelRole
from rolepool.roles.rule_reward import at_last_token


class RewardModel(ModelRole):
    def __init__(self, config: Config, pad_token_id: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, Role.RewardModel)
        self.keys = config.reward_model
        self.pad_token_id = pad_token_id
        max_tokens = config.critic.ppo_max_token_len_per_gpu if self.keys.use_dynamic_bsz else None
        self.add_passes(
            "compute_scores",
            ("reward_model.micro_batch_size_per_gpu", self.keys.micro_batch_size_per_gpu),
            ("critic.ppo_max_token_len_per_gpu", max_tokens),
        )
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
        mask = part["attention_mask"].bool()
        longest = int(mask.sum(dim=1).max())
        limit = min(longest, self.keys.max_length or longest)
        ids = part["input_ids"].new_full((len(mask), limit), self.pad_token_id)
        kept = torch.zeros_like(ids)
        for row, (tokens, real) in enumerate(zip(part["input_ids"], mask, strict=True)):
            text = tokens[real][-limit:]
            ids[row, : len(text)], kept[row, : len(text)] = text, 1
        scores: Tensor = model(input_ids=ids, attention_mask=kept, use_cache=False).logits[:, 0]
        return scores
