"""The reward of a Python function that scores texts, in CPU processes that belong to no pool."""

import math
from collections.abc import Sequence

import torch

from rolepool.config import Config
from rolepool.data import rewards
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_process import ScoringProcesses, calls_at_once
from rolepool.data.rules import RULES
from rolepool.data.tokenizer import load_tokenizer
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.protocol.batches import ScoredRows, ScoredRowsWithPrompts, Scores, objects
from rolepool.roles.setups import RuleRewardSetup


def _columns_to_score(role: type, config: Config, setup: RuleRewardSetup) -> tuple[str, ...]:
    """Only functions of the user may take prompts."""
    if setup.reward is not None or config.custom_reward_function.path is not None:
        return ScoredRowsWithPrompts.names()
    if all(entry.function in RULES for entry in config.reward.functions):
        return ScoredRows.names()
    return ScoredRowsWithPrompts.names()


class RuleReward(Worker):
    """Scores texts with a Python function."""

    setup_type = RuleRewardSetup

    def __init__(self, config: Config, setup: RuleRewardSetup) -> None:
        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        function_keys = config.custom_reward_function

        def start(function: rewards.RewardFunction) -> ScoringProcesses:
            num_at_once = calls_at_once(
                function,
                function_keys,
                self.rank,
                self.world_size,
            )
            return ScoringProcesses(function, function_keys, num_at_once)

        reward = load_reward_function(config, setup.reward)
        self.reward = reward.in_processes(start)
        self.keys = config.reward_model.reward_kwargs

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=_columns_to_score)
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each response, and the other numbers and the answer that the function
        returns. Rows that the environment has scored keep its score."""
        of_environment = ScoredRows.of(data).environment_score
        if of_environment is None:
            scored = self._score(data)
        else:
            scored = self._score_others(of_environment.tolist(), data)
        scores = [row.score for row in scored]
        columns = Scores(
            scores=torch.tensor(scores, dtype=torch.float32),
            # Not a column for each name, because all ranks must return the same columns, and rows
            # may have other names.
            reward_numbers=objects(row.numbers for row in scored),
            pred=objects(row.pred for row in scored),
        )
        return columns.to_proto()

    def _score_others(
        self,
        of_environment: Sequence[float],
        data: DataProto,
    ) -> list[rewards.Scored]:
        """The scores of the environment, and of the function for rows in which that is NaN."""
        scored: list[rewards.Scored] = []
        unscored_rows: list[int] = []
        for row, score in enumerate(of_environment):
            scored.append(rewards.Scored(score, {}))
            if math.isnan(score):
                unscored_rows.append(row)
        if unscored_rows:
            of_function = self._score(data[unscored_rows])
            for row, scored_row in zip(unscored_rows, of_function, strict=True):
                scored[row] = scored_row
        return scored

    def _score(self, data: DataProto) -> list[rewards.Scored]:
        """What the function returns for each response, with the penalty for overlong responses."""
        responses = ScoredRows.of(data).responses()
        texts = []
        for tokens in responses:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            texts.append(str(text))
        scored = rewards.score_batch(self.reward, data.non_tensor_batch, texts)
        if not self.keys.overlong_buffer_cfg.enable:
            return scored
        penalized = []
        for row, tokens in zip(scored, responses, strict=True):
            penalized_row = rewards.with_overlong_penalty(row, len(tokens), self.keys)
            penalized.append(penalized_row)
        return penalized
