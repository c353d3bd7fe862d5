"""Rule rewards: a Python function over texts, on CPU processes beside all pools."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rolepool.config import Config
from rolepool.data.rewards import load_reward_function, score_batch
from rolepool.data.tokenizer import load_tokenizer
from rolepool.protocol import DataProto, Dispatch, Worker, register


class RuleReward(Worker):
    def __init__(self, config: Config) -> None:
        model_keys = config.actor_rollout_ref.model
        self.tokenizer = load_tokenizer(model_keys.path, trust_remote_code=model_keys.trust_remote_code)
        self.function = load_reward_function(config.custom_reward_function)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("responses", "response_mask", "data_source", "reward_model", "extra_info", "origin", "uid"),
    )
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each response, at its last token; further numbers of the function as arrays."""
        responses, mask = data.batch["responses"], data.batch["response_mask"]
        texts = [
            str(self.tokenizer.decode(tokens[kept.bool()], skip_special_tokens=True))
            for tokens, kept in zip(responses, mask, strict=True)
        ]
        scored = score_batch(self.function, data, texts)
        scores = torch.tensor([row.score for row in scored], dtype=torch.float32)
        names = sorted({name for row in scored for name in row.numbers})
        arrays = {f"reward/{name}": np.array([row.numbers.get(name, np.nan) for row in scored]) for name in names}
        return DataProto.from_dict({"token_level_scores": at_last_token(scores, mask)}, non_tensors=arrays)


def at_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """[rows, response]: each row's score at the last token of its response, zero elsewhere."""
    places = torch.arange(response_mask.shape[1])
    last = torch.where(response_mask.bool(), places, -1).amax(dim=1, keepdim=True)
    return torch.where((places == last) & (last >= 0), scores.unsqueeze(1), 0.0).to(scores.dtype)
