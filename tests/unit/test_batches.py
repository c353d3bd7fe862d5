"""Typed batches: views of a DataProto, and the columns that each method of a role asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolepool.config import Config, load_config
from rolepool.errors import DataError
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.batches import EnvironmentPrompts, Rollouts, Scores, Tokens, objects
from rolepool.protocol.worker import keys_read_by
from rolepool.roles.actor_critic import Actor
from rolepool.roles.reward_model import RewardModel
from rolepool.roles.rollout import Rollout
from rolepool.roles.rule_reward import RuleReward
from rolepool.roles.setups import (
    ActorSetup,
    RewardModelSetup,
    RolloutSetup,
    RuleRewardSetup,
)

LENGTHS = torch.tensor([3, 2])
PROMPT_TEXTS = {"raw_prompt", "data_source", "reward_model", "extra_info", "origin"}


def tokens() -> Tokens:
    return Tokens(
        input_ids=ragged(torch.arange(5), LENGTHS), num_prompt_tokens=torch.tensor([1, 1])
    )


def config_with(*words: str) -> Config:
    return load_config([], list(words)).config


# Views


def test_a_view_and_its_batch_share_their_columns_and_know_no_others() -> None:
    batch = tokens().to_proto()
    batch.batch["other"] = torch.zeros(2)
    view = Tokens.of(batch)
    assert view.input_ids is batch.batch["input_ids"]
    assert sorted(view.to_proto().columns()) == sorted(Tokens.names())
    assert [row.tolist() for row in view.responses()] == [[1, 2], [4]]


def test_a_column_that_a_batch_may_lack_is_none_and_is_not_sent() -> None:
    rollouts = Rollouts.of(
        DataProto.from_single_dict(
            {**tokens().to_proto().columns(), "num_response_tokens": LENGTHS}
        )
    )
    assert rollouts.response_mask is None
    assert "response_mask" not in rollouts.to_proto().columns()


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(DataError, match=r"Tokens need the columns \['input_ids'\].*'num_prompt"):
        Tokens.of(DataProto.from_dict({"num_prompt_tokens": torch.ones(2)}))


def test_objects_of_equal_lengths_are_one_column_of_objects() -> None:
    column = objects([[1, 2], [3, 4]])
    assert column.shape == (2,)
    batch = Scores(scores=torch.zeros(2), pred=column).to_proto()
    assert list(batch.non_tensor_batch["pred"]) == [[1, 2], [3, 4]]
    assert np.array_equal(Scores.of(batch).scores, torch.zeros(2))


# What is sent


def test_prompts_go_to_a_rollout_only_if_an_environment_reads_them() -> None:
    config = config_with()
    without = keys_read_by(Rollout, (config, RolloutSetup()), {})["generate_sequences"]
    assert without == {"raw_prompt_ids", "uid", "sample_index"}
    config = config_with(
        "environment.name=my_module:rollout", "actor_rollout_ref.rollout.multi_turn.enable=true"
    )
    keys = keys_read_by(Rollout, (config, RolloutSetup()), {})["generate_sequences"]
    assert keys == set(EnvironmentPrompts.names())
    assert keys >= PROMPT_TEXTS


def score(**_: object) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("words", "setup", "takes_prompts"),
    [
        ([], RuleRewardSetup(), False),
        (["reward.functions=[exact_match]"], RuleRewardSetup(), False),
        (["reward.functions=[exact_match,my_rewards.py:score]"], RuleRewardSetup(), True),
        (["custom_reward_function.path=my_rewards.py"], RuleRewardSetup(), True),
        ([], RuleRewardSetup(reward=score), True),
    ],
)
def test_prompts_go_to_a_reward_only_if_a_function_of_the_user_may_take_them(
    words: list[str], setup: RuleRewardSetup, takes_prompts: bool
) -> None:
    keys = keys_read_by(RuleReward, (config_with(*words), setup), {})["compute_scores"]
    assert keys is not None
    assert ("raw_prompt" in keys) == takes_prompts
    assert keys >= PROMPT_TEXTS - {"raw_prompt"}


@pytest.mark.parametrize("tokenizer", ["null", "my_model"])
def test_prompts_go_to_a_reward_model_only_if_it_may_have_other_tokens(tokenizer: str) -> None:
    config = config_with(
        "reward_model.enable=true",
        "reward_model.model.path=my_model",
        f"reward_model.model.input_tokenizer={tokenizer}",
    )
    keys = keys_read_by(RewardModel, (config, RewardModelSetup()), {})["compute_scores"]
    assert keys is not None
    assert ("raw_prompt" in keys) == (tokenizer != "null")


@pytest.mark.parametrize("compares", [False, True])
def test_the_engines_log_probs_go_to_the_actor_only_if_they_are_compared(compares: bool) -> None:
    config = config_with(
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        f"actor_rollout_ref.rollout.parity_check={str(compares).lower()}",
    )
    keys = keys_read_by(Actor, (config, ActorSetup()), {})["compute_log_prob"]
    assert keys is not None
    assert ("rollout_log_probs" in keys) == compares
