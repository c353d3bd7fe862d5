"""What a run reads before a process starts: the models' config files, the reward function and the
prompts.

Owns whether they fit together, and how many processes a rule reward gets.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transformers import PretrainedConfig

from rolepool.config import Config
from rolepool.config.functions import import_object, policy_losses
from rolepool.config.model_keys import RewardModelModelConfig
from rolepool.data.prompts import PromptSet
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_signatures import UserFunction
from rolepool.data.reward_texts import reward_texts
from rolepool.data.rewards import RewardFunction, WeightedRewards
from rolepool.errors import ConfigError
from rolepool.metrics.spans import RULE_POOL
from rolepool.models.loading import read_model_config
from rolepool.placement import Plan
from rolepool.placement.roles import ROLE_SPECS

CPUS_PER_HELPER = 8
"""Rule rewards use one process for so many CPUs of the driver's node."""
MAX_HELPERS = 8
"""They use at most so many processes."""
Models = dict[str, PretrainedConfig]
"""The config.json of each model of a run, by the key that names the model."""


class Inputs(NamedTuple):
    """What was checked before a process starts."""

    models: Models
    helpers: Mapping[str, int]
    """The pools beside those of the plan, and the number of their processes."""


def check_inputs(config: Config, plan: Plan, reward: UserFunction | None = None) -> Inputs:
    """The models of a run, and the processes that a rule reward needs.

    Raises ConfigError, before a process starts, if a model, function or class cannot be loaded.
    """
    # This raises an error if there is no such loss.
    policy_losses.find(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    models: Models = {}
    for role in plan.roles:
        section = ROLE_SPECS[role].model
        if section not in models:
            models[section] = read_model_config(config, section)
    for role in plan.roles:
        import_object(f"worker of role {role}", ROLE_SPECS[role].worker)
    if uses_rule(plan):
        function = load_reward_function(config, reward)
        num_helpers = num_helpers_for(function, config)
        return Inputs(models, {RULE_POOL: num_helpers})
    if reward is not None:
        raise ConfigError(
            "reward: it is not used, because reward_model.enable=true; remove one of the two"
        )
    return Inputs(models, {})


def uses_rule(plan: Plan) -> bool:
    """Whether a role that the plan does not have is played by a class without a model: the reward,
    if it is a rule."""
    roles_without_pool = ROLE_SPECS.keys() - plan.roles.keys()
    return any(ROLE_SPECS[role].rule_worker for role in roles_without_pool)


def num_helpers_for(function: RewardFunction | WeightedRewards, config: Config) -> int:
    """How many helper processes a reward gets. A function for whole batches must get all rows of a
    batch in one."""
    if function.takes_batches:
        return 1
    num_cpus = os.cpu_count() or 1
    num_helpers = max(1, num_cpus // CPUS_PER_HELPER)
    num_helpers = min(num_helpers, MAX_HELPERS)
    num_calls = config.custom_reward_function.max_concurrency
    if function.is_users and num_calls is not None:
        return min(num_helpers, num_calls)
    return num_helpers


def check_prompts(config: Config, models: Models, prompts: Sequence[PromptSet]) -> None:
    """Raise an error, before a process starts, if a model cannot read the prompts: if policy or
    critic do not have one of their tokens, or if a reward model cannot read what the policy writes.
    The chat template of a reward model is tried with the first prompt of each set."""
    for section, model in models.items():
        keys = config.at(section)
        vocab_size = model.get_text_config().vocab_size
        if not isinstance(keys, RewardModelModelConfig):
            for prompt_set in prompts:
                prompt_set.check_vocabulary(f"{section}.path={keys.path}", vocab_size)
            continue
        texts = reward_texts(config, section, vocab_size)
        if texts is None:  # the reward model reads the tokens of the policy
            continue
        for prompt_set in prompts:
            texts.check(prompt_set)
