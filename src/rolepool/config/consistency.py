"""Rules about several keys: values that are each allowed, but contradict each other.

Owns rules that depend on the config alone. `placement` checks what depends on pools and GPU counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rolepool.config.run_keys import MAX_SLOTS
from rolepool.config.schema import Config

SIZE_OR_TOKENS = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "actor_rollout_ref.actor.use_dynamic_bsz",
    "critic.ppo_micro_batch_size_per_gpu": "critic.use_dynamic_bsz",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    "reward_model.micro_batch_size_per_gpu": "reward_model.use_dynamic_bsz",
}
"""The size of micro-batches in sequences, and the key that limits them by tokens instead."""


def contradictions(config: Config) -> Iterator[str]:
    """One line for each rule that the config breaks. It names the keys and what to change."""
    yield from _about_models(config)
    yield from _about_batches(config)
    yield from _about_the_run(config)
    yield from _about_placement(config)


def _about_models(config: Config) -> Iterator[str]:
    name, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    if config.estimator_needs_critic and not config.uses_critic:
        yield f"critic.enable=false: algorithm.adv_estimator={name} needs a critic; set critic.enable=null"
    if config.reward_model.enable and config.reward_model.model.path is None:
        yield "reward_model.model.path=null: reward_model.enable=true needs a model; set its folder or hub id"
    # Training divides logits by the temperature, even if decoding is greedy.
    training, validation = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"
    wrong = [training] if rollout.temperature == 0 else []
    wrong += [validation] if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0 else []
    for section in wrong:
        yield (
            f"{section}.temperature=0: must be greater than 0; for greedy decoding set {section}.do_sample=false "
            "and do not set the temperature"
        )


def _about_batches(config: Config) -> Iterator[str]:
    actor, critic, total = config.actor_rollout_ref.actor, config.critic, config.data.train_batch_size
    minis = {critic.ppo_mini_batch_size: "critic"} if config.uses_critic else {}
    minis[actor.ppo_mini_batch_size] = "actor_rollout_ref.actor"  # of two equal sizes only the actor's is reported
    for mini, section in minis.items():
        if total % mini:
            key, fix = f"{section}.ppo_mini_batch_size={mini}", divisor_near(total, mini)
            yield f"{key}: must divide data.train_batch_size={total}; use {fix}"
    for key, switch in SIZE_OR_TOKENS.items():
        if config.at(key) is not None and config.at(switch):
            yield f"{key}={config.at(key)}: {switch}=true limits micro-batches by tokens; set only one of them"
    longest = config.data.max_prompt_length + config.data.max_response_length
    for section, role in (("actor_rollout_ref.actor", actor), ("critic", critic)):
        if role.use_dynamic_bsz and role.ppo_max_token_len_per_gpu < longest:
            yield (
                f"{section}.ppo_max_token_len_per_gpu={role.ppo_max_token_len_per_gpu}: one sequence may have "
                f"{longest} tokens (data.max_prompt_length + data.max_response_length); use at least {longest}"
            )


def divisor_near(number: int, at_most: int) -> int:
    """A divisor of `number` that is at most `at_most`: the largest, if it is found within 10,000 tries."""
    tries = range(at_most, max(0, at_most - 10_000), -1)
    return next((candidate for candidate in tries if number % candidate == 0), math.gcd(number, at_most))


def _about_the_run(config: Config) -> Iterator[str]:
    trainer = config.trainer
    mode, path = trainer.resume_mode, trainer.resume_from_path
    if trainer.nnodes * trainer.n_gpus_per_node > MAX_SLOTS:
        product = f"times trainer.n_gpus_per_node={trainer.n_gpus_per_node} is more than {MAX_SLOTS} GPUs"
        yield f"trainer.nnodes={trainer.nnodes}: {product}; use fewer"
    if (mode == "resume_path") != (path is not None):
        key = f"trainer.resume_from_path={'null' if path is None else path}"
        yield f"{key}: trainer.resume_mode={mode}; set resume_mode=resume_path and the checkpoint folder, or neither"
    for key in ("trainer.test_freq", "trainer.val_only"):
        value = config.at(key)
        if value > 0 and not config.data.val_files:
            written = f"{key}={value}".lower()
            yield f"{written}: there are no validation prompts; set data.val_files, or remove {key}"


def _about_placement(config: Config) -> Iterator[str]:
    """A key of another strategy would be ignored, so it is an error."""
    placement, split = config.placement, config.placement.split
    if ":" in placement.strategy:  # a function of the user's own, which may use all keys
        return
    written = split.model_dump(exclude_defaults=True)
    of_split = [f"placement.split.{name}={value}" for name, value in written.items()]
    of_pools = [f"placement.pools.{name}" for name in placement.pools]
    of_roles = [f"placement.roles.{name}" for name in placement.roles.model_dump(exclude_none=True)]
    for strategy, keys in {"split": of_split, "custom": of_pools + of_roles}.items():
        if placement.strategy != strategy:
            needed, chosen = f"placement.strategy={strategy}", f"placement.strategy={placement.strategy}"
            yield from (f"{key}: is for {needed}, but {chosen}; set {needed}, or remove it" for key in keys)
    # Only one key may say how the GPUs are divided; an axis may stand together with its own number.
    number = {"gpu": "actor_gpus_per_node", "node": "actor_nodes"}.get(split.axis)
    if placement.strategy == "split" and len(written) > 1 and set(written) != {"axis", number}:
        yield f"{of_split[0]}: contradicts {' and '.join(of_split[1:])}; set only one of them"
