"""What a run reads before a process starts: the models' config files, the reward function and the
prompts.

Owns whether they fit together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transformers import PretrainedConfig

from rolepool.config import Config
from rolepool.config.functions import import_object, policy_losses
from rolepool.config.model_keys import RewardModelModelConfig
from rolepool.data.prompts import PromptSet
from rolepool.data.reward_signatures import UserFunction
from rolepool.data.reward_texts import reward_texts
from rolepool.errors import ConfigError
from rolepool.models.loading import read_model_config
from rolepool.placement import Plan
from rolepool.placement.roles import ROLE_SPECS
from rolepool.trainer.helpers import helpers_of, uses_rule

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
    if reward is not None and not uses_rule(plan):
        raise ConfigError(
            "reward: it is not used, because reward_model.enable=true; remove one of the two"
        )
    return Inputs(models, helpers_of(config, plan, reward))


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
