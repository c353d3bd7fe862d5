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
from rolepool.data.prompts import RewardTexts, load_tokenizer, reward_texts
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_process import ScoringProcesses, calls_at_once
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
from rolepool.roles.model_role import ModelRole
from rolepool.roles.setups import RewardModelSetup, RuleRewardSetup


class RewardModel(ModelRole):
    role = Role.RewardModel
    setup_type = RewardModelSetup
    keys: RewardModelConfig

    def __init__(self, config: Config, setup: RewardModelSetup) -> None:
        super().__init__(config, setup)
        model: Any = load_reward_model(config, self.spec.model, self.frozen_dtype)
        vocab_size = model.config.get_text_config().vocab_size
        self.texts = reward_texts(config, self.spec.model, vocab_size)
        # Another vocabulary may not have the policy's pad token. The score does not depend on it.
        self.pad_token_id = setup.pad_token_id if self.texts is None else 0
        model.config.pad_token_id = self.pad_token_id
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
            texts = self.texts.tokenize(data)
            token_ids = torch.tensor([*chain(*texts)])
            tokens.batch[INPUT_IDS] = ragged(token_ids, torch.tensor([len(text) for text in texts]))
            limit = longest_row(self.config, self.role)
        if limit is not None:
            tokens.batch[INPUT_IDS] = last_tokens(tokens.batch[INPUT_IDS], limit)

        def score(rows: TokenRows) -> dict[str, Tensor]:
            inputs, _ = rows.padded_inputs(self.pad_token_id)  # on the right
            pooled: Tensor = self.placed.model(**inputs, use_cache=False).logits
            logits = pooled
            if self.of_all_tokens is not None:
                # The model itself would score before the last token if the policy has written a
                # pad token there.
                last = inputs["attention_mask"].sum(dim=1) - 1
                logits = self.of_all_tokens[torch.arange(len(last)), last]
            return {"scores": logits[:, 0].float()}

        scored = self.in_micro_batches("compute_scores", tokens, score)
        if ENVIRONMENT_SCORE in data.batch:
            of_environment = data.batch[ENVIRONMENT_SCORE]
            of_model = scored.batch["scores"]
            scored.batch["scores"] = torch.where(of_environment.isnan(), of_model, of_environment)
        return scored

    def _keep_logits(self, head: nn.Module, inputs: object, logits: Tensor) -> None:
        self.of_all_tokens = logits


def last_tokens(column: Tensor, limit: int) -> Tensor:
    """A ragged column with only the last `limit` tokens of each row."""
    values, offsets = ragged_parts(column)
    lengths = offsets.diff()
    rows = torch.split(values, lengths.tolist())
    ends = [row[-limit:] for row in rows]
    return ragged(torch.cat(ends), lengths.clamp(max=limit))


class RuleReward(Worker):
    """Scores texts with a Python function, in CPU processes that belong to no pool."""

    setup_type = RuleRewardSetup

    def __init__(self, config: Config, setup: RuleRewardSetup) -> None:
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
        of_environment = [math.nan] * len(data)
        if ENVIRONMENT_SCORE in data.batch:
            of_environment = data.batch[ENVIRONMENT_SCORE].tolist()
        scored = [rewards.Scored(score, {}) for score in of_environment]
        left = [row for row, score in enumerate(of_environment) if math.isnan(score)]
        if left:
            for row, of_function in zip(left, self._score(data[left]), strict=True):
                scored[row] = of_function
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
        texts = []
        for tokens in responses:
            texts.append(str(self.tokenizer.decode(tokens, skip_special_tokens=True)))
        scored = rewards.score_batch(self.reward, data.non_tensor_batch, texts)
        if not self.keys.overlong_buffer_cfg.enable:
            return scored
        penalized = []
        for row, tokens in zip(scored, responses, strict=True):
            penalized.append(rewards.with_overlong_penalty(row, len(tokens), self.keys))
        return penalized
