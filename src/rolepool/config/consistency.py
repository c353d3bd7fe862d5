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
    yield from _about_placement(config)


def _about_models(config: Config) -> Iterator[str]:
    """What is loaded and generated, and where the run resumes and validates."""
    trainer, rollout = config.trainer, "actor_rollout_ref.rollout"
    if config.estimator_needs_critic and not config.uses_critic:
        name = config.algorithm.adv_estimator
        yield f"critic.enable=false: algorithm.adv_estimator={name} needs a critic; set critic.enable=null"
    if config.reward_model.enable and config.reward_model.model.path is None:
        yield "reward_model.model.path=null: reward_model.enable=true needs a model; set its folder or hub id"
    # Training divides logits by the temperature, even if decoding is greedy.
    validation_samples = config.at(f"{rollout}.val_kwargs.do_sample")
    for section, is_used in ((rollout, True), (f"{rollout}.val_kwargs", validation_samples)):
        if is_used and config.at(section).temperature == 0:
            yield (
                f"{section}.temperature=0: must be greater than 0; for greedy decoding set {section}.do_sample=false "
                "and do not set the temperature"
            )
    mode, path = trainer.resume_mode, trainer.resume_from_path
    if (mode == "resume_path") != (path is not None):
        key = f"trainer.resume_from_path={'null' if path is None else path}"
        yield f"{key}: trainer.resume_mode={mode}; set resume_mode=resume_path and the checkpoint folder, or neither"
    for key in ("trainer.test_freq", "trainer.val_only"):
        value = config.at(key)
        if value > 0 and not config.data.val_files:
            written = f"{key}={value}".lower()
            yield f"{written}: there are no validation prompts; set data.val_files, or remove {key}"


def _about_batches(config: Config) -> Iterator[str]:
    total, longest = config.data.train_batch_size, config.data.max_prompt_length + config.data.max_response_length
    reported: set[int] = set()
    for section, is_used in (("actor_rollout_ref.actor", True), ("critic", config.uses_critic)):
        keys = config.at(section)
        mini, tokens = keys.ppo_mini_batch_size, keys.ppo_max_token_len_per_gpu
        if is_used and total % mini and mini not in reported:
            reported.add(mini)  # the critic's size follows the actor's
            fix = divisor_near(total, mini)
            yield f"{section}.ppo_mini_batch_size={mini}: must divide data.train_batch_size={total}; use {fix}"
        if keys.use_dynamic_bsz and tokens < longest:
            yield (
                f"{section}.ppo_max_token_len_per_gpu={tokens}: one sequence may have {longest} tokens "
                f"(data.max_prompt_length + data.max_response_length); use at least {longest}"
            )
    for key, switch in SIZE_OR_TOKENS.items():
        if config.at(key) is not None and config.at(switch):
            yield f"{key}={config.at(key)}: {switch}=true limits micro-batches by tokens; set only one of them"


def divisor_near(number: int, at_most: int) -> int:
    """A divisor of `number` that is at most `at_most`: the largest, if it is found within 10,000 tries."""
    tries = range(at_most, max(0, at_most - 10_000), -1)
    return next((candidate for candidate in tries if number % candidate == 0), math.gcd(number, at_most))


def _about_placement(config: Config) -> Iterator[str]:
    """A key of another strategy would be ignored, so it is an error."""
    trainer, placement, split = config.trainer, config.placement, config.placement.split
    if trainer.nnodes * trainer.n_gpus_per_node > MAX_SLOTS:
        product = f"times trainer.n_gpus_per_node={trainer.n_gpus_per_node} is more than {MAX_SLOTS} GPUs"
        yield f"trainer.nnodes={trainer.nnodes}: {product}; use fewer"
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
