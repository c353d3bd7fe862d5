"""Rules about several keys: values that are each allowed, but contradict each other.

Owns rules that depend on the config alone. `placement` checks what depends on pools and GPU counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rolepool.config.run_keys import MAX_SLOTS
from rolepool.config.schema import Config

SIZE_OR_TOKENS = {
    ("actor_rollout_ref.actor", "ppo_micro_batch_size_per_gpu"): "use_dynamic_bsz",
    ("critic", "ppo_micro_batch_size_per_gpu"): "use_dynamic_bsz",
    ("actor_rollout_ref.ref", "log_prob_micro_batch_size_per_gpu"): "log_prob_use_dynamic_bsz",
    ("reward_model", "micro_batch_size_per_gpu"): "use_dynamic_bsz",
}
"""Micro-batches have a size in sequences, or this key of the same section limits them by tokens."""


def contradictions(config: Config) -> Iterator[str]:
    """One line for each rule that the config breaks. It names the keys and what to change."""
    yield from _about_models(config)
    yield from _about_batches(config)
    yield from _about_the_run(config)
    yield from _about_placement(config)


def _about_models(config: Config) -> Iterator[str]:
    if config.estimator_needs_critic and not config.uses_critic:
        yield (
            f"critic.enable=false: algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic; set "
            "critic.enable=null, or another estimator such as algorithm.adv_estimator=grpo"
        )
    if config.reward_model.enable and config.reward_model.model.path is None:
        yield "reward_model.model.path=null: reward_model.enable=true needs a model; set its folder or hub id"
    section, rollout = "actor_rollout_ref.rollout", config.actor_rollout_ref.rollout
    if rollout.temperature == 0:
        yield (
            f"{section}.temperature=0: it must be greater than 0 because logits are divided by it; for greedy "
            f"decoding set {section}.do_sample=false and leave the temperature out"
        )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        yield (
            f"{section}.val_kwargs.temperature=0: sampling needs a temperature greater than 0; "
            f"for greedy decoding set {section}.val_kwargs.do_sample=false"
        )


def _about_batches(config: Config) -> Iterator[str]:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    minis = {"actor_rollout_ref.actor": actor.ppo_mini_batch_size}
    if config.uses_critic and critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
        minis["critic"] = critic.ppo_mini_batch_size
    total = config.data.train_batch_size
    for section, mini in minis.items():
        if total % mini:
            yield (
                f"{section}.ppo_mini_batch_size={mini}: must divide data.train_batch_size={total}; "
                f"use {divisor_near(total, mini)}"
            )
    for (section, size_key), switch in SIZE_OR_TOKENS.items():
        size = config.at(f"{section}.{size_key}")
        if size is not None and config.at(f"{section}.{switch}"):
            yield (
                f"{section}.{size_key}={size}: {section}.{switch}=true limits micro-batches by tokens; "
                "set only one of them"
            )
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
    if trainer.nnodes * trainer.n_gpus_per_node > MAX_SLOTS:
        yield (
            f"trainer.nnodes={trainer.nnodes}: times trainer.n_gpus_per_node={trainer.n_gpus_per_node} is more than "
            f"{MAX_SLOTS} GPUs; use fewer"
        )
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield "trainer.resume_from_path=null: trainer.resume_mode=resume_path; set the checkpoint folder"
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path}: it needs trainer.resume_mode=resume_path, "
            f"and trainer.resume_mode={trainer.resume_mode}; set both"
        )
    wanted = {"test_freq": trainer.test_freq if trainer.test_freq > 0 else None, "val_only": trainer.val_only or None}
    for name, value in wanted.items():
        if value is not None and not config.data.val_files:
            key = f"trainer.{name}={value}".lower()
            yield f"{key}: there are no validation prompts; set data.val_files, or leave trainer.{name} out"


def _about_placement(config: Config) -> Iterator[str]:
    """A key of another strategy would be ignored, so it is an error."""
    placement, split = config.placement, config.placement.split
    chosen = f"placement.strategy={placement.strategy}"
    written = {f"placement.split.{name}": value for name, value in split.model_dump(exclude_defaults=True).items()}
    if ":" in placement.strategy:  # a function of the user's own, which may use all keys
        return
    if placement.strategy != "split":
        for key, value in written.items():
            yield f"{key}={value}: is for placement.strategy=split, but {chosen}; set one of them"
    if placement.strategy != "custom":
        roles = placement.roles.model_dump(exclude_none=True)
        for name in [*(f"pools.{name}" for name in placement.pools), *(f"roles.{name}" for name in roles)]:
            yield (
                f"placement.{name}: is for placement.strategy=custom, but {chosen}; "
                "set placement.strategy=custom, or leave it out"
            )
    if placement.strategy == "split":
        # Only one key may say how the GPUs are divided.
        excluded = [
            ("actor_gpus_per_node", "actor_nodes"),
            ("share", "actor_gpus_per_node"),
            ("share", "actor_nodes"),
            ("share", "axis"),
            ("actor_nodes" if split.axis == "gpu" else "actor_gpus_per_node", "axis"),
        ]
        for one, other in ((f"placement.split.{one}", f"placement.split.{other}") for one, other in excluded):
            if one in written and other in written:
                yield f"{one}={written[one]}: contradicts {other}={written[other]}; set only one of them"
