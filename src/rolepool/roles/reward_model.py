"""Rewards: from a model, or from a Python function that scores texts.

The reward model is a Hugging Face sequence classifier that scores prompt and response as one text.
A second reward model is a subclass with another `role` (docs/extending.md).
"""

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.config.model_keys import RewardModelConfig
from rolepool.data import rewards
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_process import ScoringProcesses, calls_at_once
from rolepool.data.reward_texts import RewardTexts, reward_texts
from rolepool.data.tokenizer import load_tokenizer
from rolepool.models.loading import load_reward_model
from rolepool.models.packing import TokenRows
from rolepool.models.training import FrozenModel
from rolepool.placement import Role
from rolepool.placement.roles import longest_row
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.protocol.columns import (
    ENVIRONMENT_SCORE,
    INPUT_IDS,
    TOKENS,
    ragged,
    ragged_parts,
    rows_of_responses,
)
from rolepool.roles.model_role import ModelRole, Setup


class RewardModel(ModelRole):
    role = Role.RewardModel
    keys: RewardModelConfig

    def __init__(self, config: Config, setup: Setup) -> None:
        super().__init__(config, setup)
        model: Any = load_reward_model(config, self.spec.model, self.frozen_dtype)
        self.texts = reward_texts(
            config, self.spec.model, model.config.get_text_config().vocab_size
        )
        # Another vocabulary may not have the policy's pad token. The score does not depend on it.
        self.pad_token_id = model.config.pad_token_id = (
            setup.pad_token_id if self.texts is None else 0
        )
        self.of_all_tokens: Tensor | None = None
        """The scores at all tokens of the last micro-batch; None if the model's head gets only one
        of them."""
        if hasattr(model, "score"):  # the head of all decoders
            model.score.register_forward_hook(self._keep_logits)
        self.placed = FrozenModel(model, device=self.device, dims=self.context.dims, offload=False)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=(*RewardTexts.READS, ENVIRONMENT_SCORE),
    )
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each whole response: that of the environment, if it gave one, or else the
        model's."""
        tokens = data.select(list(TOKENS), [], [])
        limit = self.keys.max_length
        if self.texts is not None:
            texts, limit = self.texts.tokenize(data), longest_row(self.config, self.role)
            tokens.batch[INPUT_IDS] = ragged(
                torch.tensor([*chain(*texts)]), torch.tensor([*map(len, texts)])
            )
        if limit is not None:
            tokens.batch[INPUT_IDS] = last_tokens(tokens.batch[INPUT_IDS], limit)

        def score(rows: TokenRows) -> dict[str, Tensor]:
            inputs, _ = rows.padded_inputs(self.pad_token_id)  # on the right
            pooled: Tensor = self.placed.model(**inputs, use_cache=False).logits
            # The model itself would score before the last token if the policy has written a pad
            # token there.
            last = inputs["attention_mask"].sum(dim=1) - 1
            logits = (
                pooled
                if self.of_all_tokens is None
                else self.of_all_tokens[torch.arange(len(last)), last]
            )
            return {"scores": logits[:, 0].float()}

        scored = self.in_micro_batches("compute_scores", tokens, score)
        if ENVIRONMENT_SCORE in data.batch:
            given = data.batch[ENVIRONMENT_SCORE]
            scored.batch["scores"] = torch.where(given.isnan(), scored.batch["scores"], given)
        return scored

    def _keep_logits(self, head: nn.Module, inputs: object, logits: Tensor) -> None:
        self.of_all_tokens = logits


def last_tokens(column: Tensor, limit: int) -> Tensor:
    """A ragged column with only the last `limit` tokens of each row."""
    values, offsets = ragged_parts(column)
    rows = torch.split(values, offsets.diff().tolist())
    return ragged(torch.cat([row[-limit:] for row in rows]), offsets.diff().clamp(max=limit))


class RuleReward(Worker):
    """Scores texts with a Python function, in CPU processes that belong to no pool."""

    def __init__(self, config: Config, setup: Setup) -> None:
        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        function_keys = config.custom_reward_function

        def start(function: rewards.RewardFunction) -> ScoringProcesses:
            num_at_once = calls_at_once(function, function_keys, self.rank, self.world_size)
            return ScoringProcesses(function, function_keys, num_at_once)

        self.reward = load_reward_function(config, setup.reward).in_processes(start)
        self.keys = config.reward_model.reward_kwargs

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=(*TOKENS, *rewards.SCORED_COLUMNS, ENVIRONMENT_SCORE),
    )
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each response, and the other numbers and the answer that the function
        returns. Rows that the environment has scored keep its score."""
        given = (
            data.batch[ENVIRONMENT_SCORE].tolist()
            if ENVIRONMENT_SCORE in data.batch
            else [math.nan] * len(data)
        )
        left = [row for row, score in enumerate(given) if math.isnan(score)]
        others = iter(self._score(data[left]) if left else ())
        scored = [
            next(others) if math.isnan(score) else rewards.Scored(score, {}) for score in given
        ]
        scores = torch.tensor([row.score for row in scored], dtype=torch.float32)
        # Not a column for each name, because all ranks must return the same columns, and rows may
        # have other names.
        columns = {
            rewards.NUMBERS: [row.numbers for row in scored],
            rewards.PRED: [row.pred for row in scored],
        }
        return DataProto.from_dict({"scores": scores}, non_tensors=columns)

    def _score(self, data: DataProto) -> list[rewards.Scored]:
        """What the function returns for each response, with the penalty for overlong responses."""
        responses = rows_of_responses(data.batch)
        texts = [
            str(self.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in responses
        ]
        scored = rewards.score_batch(self.reward, data.non_tensor_batch, texts)
        if self.keys.overlong_buffer_cfg.enable:
            num_tokens = map(len, responses)
            scored = [
                rewards.with_overlong_penalty(*row, self.keys)
                for row in zip(scored, num_tokens, strict=True)
            ]
        return scored
