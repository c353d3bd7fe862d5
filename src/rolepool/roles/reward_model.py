"""The reward model: an HF sequence classifier that scores prompt and response as one text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.models.frozen import FrozenModel
from rolepool.models.loading import load_reward_model
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.roles.actor import INPUTS
from rolepool.roles.less_memory import remedies
from rolepool.roles.passes import Passes, PassMemory, shape_of
from rolepool.roles.scores import at_last_token


class RewardModel(Worker):
    def __init__(self, config: Config, pad_token_id: int, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.keys = config.reward_model
        self.pad_token_id = pad_token_id
        memory = PassMemory(
            shape_of(self.keys.model.path),
            num_shards=self.world_size,
            checkpointing=False,
            logit_share=0.0,
            packed=False,
        )
        self.passes = Passes(
            rows_key="reward_model.micro_batch_size_per_gpu",
            rows_per_pass=self.keys.micro_batch_size_per_gpu,
            tokens_key="critic.ppo_max_token_len_per_gpu",
            max_tokens=config.critic.ppo_max_token_len_per_gpu if self.keys.use_dynamic_bsz else None,
            device=self.device,
            bytes_of_pass=memory.scoring,
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
        batch = {key: data.batch[key].to(self.device) for key in INPUTS}
        parts: dict[int, Tensor] = {}
        with self.frozen.on_device() as model:
            for rows in self.passes.cut(batch["attention_mask"]):
                scores = self._score(model, {key: value[rows] for key, value in batch.items()})
                parts.update(zip(rows, scores, strict=True))
        all_scores = torch.stack([parts[row] for row in range(len(data))]).float().cpu()
        return DataProto.from_dict({"token_level_scores": at_last_token(all_scores, data.batch["response_mask"])})

    def less_memory(self, method: str) -> list[str]:
        return remedies(self, self.config, self.passes.smaller())

    def _score(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Rows are moved to the left edge: a classifier takes the last token that is not padding for the end."""
        mask = batch["attention_mask"].bool()
        longest = int(mask.sum(dim=1).max())
        limit = min(longest, self.keys.max_length or longest)
        ids = batch["input_ids"].new_full((len(mask), limit), self.pad_token_id)
        kept = torch.zeros_like(ids)
        for row, (tokens, real) in enumerate(zip(batch["input_ids"], mask, strict=True)):
            text = tokens[real][-limit:]
            ids[row, : len(text)], kept[row, : len(text)] = text, 1
        scores: Tensor = model(input_ids=ids, attention_mask=kept, use_cache=False).logits[:, 0]
        return scores
