"""Rule rewards: a Python function that scores texts, in CPU processes that belong to no pool."""

from __future__ import annotations

import numpy as np
import torch

from rolepool.config import Config
from rolepool.data.prompts import load_tokenizer
from rolepool.data.rewards import load_reward_function, score_batch
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.protocol.ragged import TOKENS, rows_of_responses
from rolepool.roles.model_role import Setup


class RuleReward(Worker):
    def __init__(self, config: Config, setup: Setup) -> None:
        model_keys = config.actor_rollout_ref.model
        self.tokenizer = load_tokenizer(model_keys.path, trust_remote_code=model_keys.trust_remote_code)
        self.function = load_reward_function(config.custom_reward_function)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=(*TOKENS, "data_source", "reward_model", "extra_info", "origin", "uid"),
    )
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each response, and the other numbers that the function returns as arrays."""
        texts = [
            str(self.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in rows_of_responses(data.batch)
        ]
        scored = score_batch(self.function, data, texts)
        scores = torch.tensor([row.score for row in scored], dtype=torch.float32)
        names = sorted({name for row in scored for name in row.numbers})
        arrays = {f"reward/{name}": np.array([row.numbers.get(name, np.nan) for row in scored]) for name in names}
        return DataProto.from_dict({"scores": scores}, non_tensors=arrays)
