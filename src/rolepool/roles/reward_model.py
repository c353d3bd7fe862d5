"""Rewards: from a model, or from a Python function that scores texts.

The reward model is a Hugging Face sequence classifier that scores prompt and response as one text. A second reward
model is a subclass with another `role` (docs/extending.md).
"""

from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rolepool.config import Config
from rolepool.config.model_keys import RewardModelConfig
from rolepool.data.prompts import load_tokenizer
from rolepool.data.reward_process import ScoringProcess
from rolepool.data.reward_texts import READS, reward_texts
from rolepool.data.rewards import NUMBERS, PRED, load_reward_function, score_batch, with_overlong_penalty
from rolepool.models.loading import load_reward_model
from rolepool.models.packing import TokenRows
from rolepool.models.training import FrozenModel
from rolepool.placement import Role
from rolepool.placement.roles import longest_row
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.protocol.ragged import INPUT_IDS, TOKENS, ragged, ragged_parts, rows_of_responses
from rolepool.roles.model_role import ModelRole, Setup


class RewardModel(ModelRole):
    role = Role.RewardModel
    keys: RewardModelConfig

    def __init__(self, config: Config, setup: Setup) -> None:
        super().__init__(config, setup)
        trusted = self.keys.model.trust_remote_code
        model: Any = load_reward_model(self.keys.model.path, dtype=self.frozen_dtype, trust_remote_code=trusted)
        self.texts = reward_texts(config, self.spec.model, model.config.get_text_config().vocab_size)
        self.placed = FrozenModel(model, device=self.device, offload=False)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=READS)
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each whole response."""
        tokens = data.select(list(TOKENS), [], [])
        limit = self.keys.max_length
        if self.texts is not None:
            texts, limit = self.texts.tokenize(data), longest_row(self.config, self.role)
            tokens.batch[INPUT_IDS] = ragged(torch.tensor([*chain(*texts)]), torch.tensor([*map(len, texts)]))
        if limit is not None:
            tokens.batch[INPUT_IDS] = last_tokens(tokens.batch[INPUT_IDS], limit)
        pad_token_id = self._choose_pad_token(tokens.batch[INPUT_IDS])

        def score(rows: TokenRows) -> dict[str, Tensor]:
            # Padded on the right, because a classifier scores at the last token that is not padding.
            inputs, _ = rows.padded_inputs(pad_token_id)
            logits: Tensor = self.placed.model(**inputs, use_cache=False).logits
            return {"scores": logits[:, 0].float()}

        return self.in_micro_batches("compute_scores", tokens, score)

    def _choose_pad_token(self, ids: Tensor) -> int:
        """A token with which no row ends. The pad token of many tokenizers is the token at the end of every text."""
        (values, offsets), config = ragged_parts(ids), cast(Any, self.placed.model).config
        last = set(values[offsets[1:] - 1].tolist())
        free = (token for token in range(config.get_text_config().vocab_size) if token not in last)
        config.pad_token_id = pad_token_id = next(free, 0)
        return pad_token_id


def last_tokens(column: Tensor, limit: int) -> Tensor:
    """A ragged column with only the last `limit` tokens of each row."""
    values, offsets = ragged_parts(column)
    lengths = offsets.diff()
    first_kept = torch.repeat_interleave(offsets[1:] - limit, lengths)
    return ragged(values[torch.arange(len(values)) >= first_kept], lengths.clamp(max=limit))


class RuleReward(Worker):
    """Scores texts with a Python function, in CPU processes that belong to no pool."""

    def __init__(self, config: Config, setup: Setup) -> None:
        model_keys = config.actor_rollout_ref.model
        self.tokenizer = load_tokenizer(model_keys.path, trust_remote_code=model_keys.trust_remote_code)
        custom = config.custom_reward_function
        reward = load_reward_function(custom, config.reward, setup.reward)
        self.reward = ScoringProcess(reward, custom) if reward.is_users else reward
        self.keys = config.reward_model.reward_kwargs

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=(*TOKENS, "data_source", "reward_model", "extra_info", "origin", "uid"),
    )
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each response, and the other numbers and the answer that the function returns."""
        responses = rows_of_responses(data.batch)
        texts = [str(self.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in responses]
        scored = score_batch(self.reward, data, texts)
        if self.keys.overlong_buffer_cfg.enable:
            scored = [with_overlong_penalty(*row, self.keys) for row in zip(scored, map(len, responses), strict=True)]
        scores = torch.tensor([row.score for row in scored], dtype=torch.float32)
        # Not a column for each name, because all ranks must return the same columns, and rows may have other names.
        arrays = {
            NUMBERS: np.fromiter((row.numbers for row in scored), object),
            PRED: np.fromiter((row.pred for row in scored), object),
        }
        return DataProto.from_dict({"scores": scores}, non_tensors=arrays)
