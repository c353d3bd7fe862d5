"""Rules between keys: values that are each fine and contradict each other.

Owns what can be said from the config alone. What depends on pools and GPU counts is checked by `placement`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rolepool.config.run_keys import MAX_SLOTS
from rolepool.config.schema import Config


@dataclass(frozen=True)
class Contradiction:
    """A broken rule: the keys it is about and the line that says what to change."""

    keys: tuple[str, ...]
    message: str


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Every rule the config breaks."""
    yield from _about_models(config)
    yield from _about_batches(config)
    yield from _about_the_run(config)
    yield from _about_placement(config)


def _about_models(config: Config) -> Iterator[Contradiction]:
    rollout = config.actor_rollout_ref.rollout
    if config.algorithm.adv_estimator == "gae" and config.critic.enable is False:
        yield Contradiction(
            ("algorithm.adv_estimator", "critic.enable"),
            "critic.enable=false: algorithm.adv_estimator=gae needs a critic; set critic.enable=null, "
            "or another estimator such as algorithm.adv_estimator=grpo",
        )
    if config.reward_model.enable and config.reward_model.model.path is None:
        yield Contradiction(
            ("reward_model.enable", "reward_model.model.path"),
            "reward_model.model.path=null: reward_model.enable=true needs a model; set its folder or hub id",
        )
    if rollout.do_sample and rollout.temperature == 0:
        yield Contradiction(
            ("actor_rollout_ref.rollout.temperature", "actor_rollout_ref.rollout.do_sample"),
            "actor_rollout_ref.rollout.temperature=0: sampling needs a temperature over 0; "
            "for greedy decoding set actor_rollout_ref.rollout.do_sample=false",
        )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        yield Contradiction(
            ("actor_rollout_ref.rollout.val_kwargs.temperature", "actor_rollout_ref.rollout.val_kwargs.do_sample"),
            "actor_rollout_ref.rollout.val_kwargs.temperature=0: sampling needs a temperature over 0; "
            "for greedy decoding set actor_rollout_ref.rollout.val_kwargs.do_sample=false",
        )


def _about_batches(config: Config) -> Iterator[Contradiction]:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    minis = [("actor_rollout_ref.actor", actor.ppo_mini_batch_size)]
    if config.uses_critic and critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
        minis.append(("critic", critic.ppo_mini_batch_size))
    for section, mini in minis:
        if config.data.train_batch_size % mini:
            key = f"{section}.ppo_mini_batch_size"
            yield Contradiction(
                ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", key),
                f"{key}={mini}: must divide data.train_batch_size={config.data.train_batch_size}; "
                f"use {divisor_near(config.data.train_batch_size, mini)}",
            )
    fixed_and_dynamic = [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu,
         "actor_rollout_ref.actor.use_dynamic_bsz", actor.use_dynamic_bsz),
        ("critic.ppo_micro_batch_size_per_gpu", critic.ppo_micro_batch_size_per_gpu,
         "critic.use_dynamic_bsz", critic.use_dynamic_bsz),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
         config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
         "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz),
        ("reward_model.micro_batch_size_per_gpu", config.reward_model.micro_batch_size_per_gpu,
         "reward_model.use_dynamic_bsz", config.reward_model.use_dynamic_bsz),
    ]  # fmt: skip
    for size_key, size, dynamic_key, dynamic in fixed_and_dynamic:
        if dynamic and size is not None:
            yield Contradiction(
                (size_key, dynamic_key),
                f"{size_key}={size}: passes are filled by tokens with {dynamic_key}=true; set one of them only",
            )
    longest = config.data.max_prompt_length + config.data.max_response_length
    token_limits = [
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu, actor.use_dynamic_bsz),
        ("critic.ppo_max_token_len_per_gpu", critic.ppo_max_token_len_per_gpu, critic.use_dynamic_bsz),
    ]
    for key, limit, in_force in token_limits:
        if in_force and limit < longest:
            yield Contradiction(
                (key, "data.max_prompt_length", "data.max_response_length", "actor_rollout_ref.actor.use_dynamic_bsz",
                 "critic.use_dynamic_bsz"),
                f"{key}={limit}: one sequence may have {longest} tokens "
                f"(data.max_prompt_length + data.max_response_length); use at least {longest}",
            )  # fmt: skip


def divisor_near(number: int, at_most: int) -> int:
    """A divisor of `number` no larger than `at_most`: the largest, where that is found within 10,000 tries."""
    tries = range(at_most, max(0, at_most - 10_000), -1)
    return next((candidate for candidate in tries if number % candidate == 0), math.gcd(number, at_most))


def _about_the_run(config: Config) -> Iterator[Contradiction]:
    trainer = config.trainer
    if trainer.nnodes * trainer.n_gpus_per_node > MAX_SLOTS:
        yield Contradiction(
            ("trainer.nnodes", "trainer.n_gpus_per_node"),
            f"trainer.nnodes={trainer.nnodes}: times trainer.n_gpus_per_node={trainer.n_gpus_per_node} is over "
            f"{MAX_SLOTS} GPUs; use fewer",
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        fix = (
            "set the checkpoint folder"
            if trainer.resume_from_path is None
            else "it is read with trainer.resume_mode=resume_path only; set that too"
        )
        shown = trainer.resume_from_path or "null"
        yield Contradiction(
            ("trainer.resume_mode", "trainer.resume_from_path"),
            f"trainer.resume_from_path={shown}: trainer.resume_mode={trainer.resume_mode}; {fix}",
        )
    for key, wanted in (("trainer.test_freq", trainer.test_freq > 0), ("trainer.val_only", trainer.val_only)):
        if wanted and not config.data.val_files:
            shown = "true" if key.endswith("val_only") else str(trainer.test_freq)
            yield Contradiction(
                (key, "data.val_files"),
                f"{key}={shown}: there are no validation prompts; set data.val_files, or leave {key} out",
            )


def _about_placement(config: Config) -> Iterator[Contradiction]:
    """Keys of a strategy that is not chosen would be read and ignored; so they are refused."""
    placement, split = config.placement, config.placement.split
    chosen = placement.strategy
    split_keys = {
        "placement.split.axis": None if split.axis == "auto" else split.axis,
        "placement.split.actor_gpus_per_node": split.actor_gpus_per_node,
        "placement.split.actor_nodes": split.actor_nodes,
        "placement.split.share": split.share,
    }
    written = {key: value for key, value in split_keys.items() if value is not None}
    if chosen != "split":
        for key, value in written.items():
            yield Contradiction(
                ("placement.strategy", key),
                f"{key}={value}: is for placement.strategy=split, and placement.strategy={chosen}; set one of them",
            )
    roles = {name: pool for name, pool in placement.roles.model_dump().items() if pool is not None}
    if chosen != "custom":
        names = [f"placement.pools.{name}" for name in placement.pools] + [f"placement.roles.{name}" for name in roles]
        for name in names:
            yield Contradiction(
                ("placement.strategy", "placement.pools", name),
                f"{name}: is for placement.strategy=custom, and placement.strategy={chosen}; "
                "set placement.strategy=custom, or leave it out",
            )
    if chosen == "split" and len(written) > 1:
        yield from _about_the_division(written, tuple(split_keys))


def _about_the_division(written: Mapping[str, object], keys: tuple[str, ...]) -> Iterator[Contradiction]:
    """How the two pools of a split are divided is said once."""
    axis = written.get("placement.split.axis")
    excluded = [
        ("placement.split.actor_gpus_per_node", "placement.split.actor_nodes"),
        ("placement.split.share", "placement.split.actor_gpus_per_node"),
        ("placement.split.share", "placement.split.actor_nodes"),
        ("placement.split.share", "placement.split.axis"),
    ]
    if axis == "node":
        excluded.append(("placement.split.actor_gpus_per_node", "placement.split.axis"))
    if axis == "gpu":
        excluded.append(("placement.split.actor_nodes", "placement.split.axis"))
    for one, other in excluded:
        if one in written and other in written:
            yield Contradiction(
                keys, f"{one}={written[one]}: contradicts {other}={written[other]}; set one of them only"
            )
