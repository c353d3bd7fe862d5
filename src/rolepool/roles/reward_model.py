"""The reward model: an HF sequence classifier that scores prompt and response as one text."""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.config import Config
from rolepool.models.loading import load_reward_model
from rolepool.models.sharding import shard
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.roles.actor import INPUTS
from rolepool.roles.passes import cut_into_passes
from rolepool.roles.scores import at_last_token


class RewardModel(Worker):
    def __init__(self, config: Config, pad_token_id: int, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.keys = config.reward_model
        self.pad_token_id = pad_token_id
        model = load_reward_model(
            self.keys.model.path, dtype=dtype, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code
        )
        model.config.pad_token_id = pad_token_id  # type: ignore[union-attr]
        self.model = shard(model.requires_grad_(False), self.device, -1).eval()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=(*INPUTS, "response_mask"))
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each whole response, at its last token."""
        batch = {key: data.batch[key].to(self.device) for key in INPUTS}
        passes = cut_into_passes(
            batch["attention_mask"],
            rows_per_pass=self.keys.micro_batch_size_per_gpu,
            max_tokens=self.config.critic.ppo_max_token_len_per_gpu if self.keys.use_dynamic_bsz else None,
            device=self.device,
        )
        parts: dict[int, Tensor] = {}
        with torch.no_grad():
            for rows in passes:
                parts.update(zip(rows, self._score({key: value[rows] for key, value in batch.items()}), strict=True))
        scores = torch.stack([parts[row] for row in range(len(data))]).float().cpu()
        return DataProto.from_dict({"token_level_scores": at_last_token(scores, data.batch["response_mask"])})

    def _score(self, batch: dict[str, Tensor]) -> Tensor:
        """Rows are moved to the left edge: a classifier takes the last token that is not padding for the end."""
        mask = batch["attention_mask"].bool()
        longest = int(mask.sum(dim=1).max())
        limit = min(longest, self.keys.max_length or longest)
        ids = batch["input_ids"].new_full((len(mask), limit), self.pad_token_id)
        kept = torch.zeros_like(ids)
        for row, (tokens, real) in enumerate(zip(batch["input_ids"], mask, strict=True)):
            text = tokens[real][-limit:]
            ids[row, : len(text)], kept[row, : len(text)] = text, 1
        scores: Tensor = self.model(input_ids=ids, attention_mask=kept, use_cache=False).logits[:, 0]
        return scores
