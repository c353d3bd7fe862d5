"""What must divide what: batch sizes, tensor parallelism and sharding against each role's own pool; and whether
sequences are within the positions of the models.

Owns the counts. Memory is `memory`'s, and an estimate; what is found here is certain and stops a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from rolepool.config import Config
from rolepool.config.consistency import divisor_near
from rolepool.config.model_keys import ActorConfig, CriticConfig
from rolepool.placement.engines import why_not_native, why_not_parallel
from rolepool.placement.models import ShapeUnknown, read_model_file, read_num_positions, read_shape
from rolepool.placement.plan import Plan
from rolepool.placement.roles import Role


def data_parallel_size(config: Config, plan: Plan, role: Role) -> int:
    """Number of parts that a role's batch is cut into: its pool's processes, or its groups of tensor-parallel ranks."""
    world_size = plan.pool_of(role).world_size
    if role is not Role.Rollout:
        return world_size
    return max(1, world_size // config.actor_rollout_ref.rollout.tensor_model_parallel_size)


def find_problems(config: Config, plan: Plan) -> list[str]:
    """One line for each count that does not work out. Empty: the plan is fine."""
    return [
        *_tensor_parallel(config, plan),
        *_sharding(config, plan),
        *_batches(config, plan),
        *_mini_batches(config, plan),
        *_multi_process(config, plan),
        *_lengths(config, plan),
        *_engine(config),
    ]


def models_of(config: Config, plan: Plan) -> dict[str, tuple[str | None, Mapping[str, Any]]]:
    """The models that a run loads, by the keys that name them: where each is, and what is overridden in it."""
    policy = config.actor_rollout_ref.model
    models: dict[str, tuple[str | None, Mapping[str, Any]]] = {
        "actor_rollout_ref.model.path": (policy.path, policy.override_config)
    }
    if Role.Critic in plan.roles:
        models["critic.model.path"] = config.critic.model.path, {}
    if Role.RewardModel in plan.roles:
        models["reward_model.model.path"] = config.reward_model.model.path, {}
    return models


def _tensor_parallel(config: Config, plan: Plan) -> Iterator[str]:
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    counts = sorted(set(plan.pool_of(Role.Rollout).counts_by_node.values()))
    uneven = [count for count in counts if count % size]
    if uneven:
        fits = [divisor for divisor in range(1, min(counts) + 1) if all(count % divisor == 0 for count in counts)]
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: must divide the {uneven[0]} process"
            f"{'es' if uneven[0] > 1 else ''} that {plan.roles[Role.Rollout]} has on a node; "
            f"use {' or '.join(map(str, fits))}"
        )


def _sharding(config: Config, plan: Plan) -> Iterator[str]:
    sizes = {
        Role.Actor: ("actor_rollout_ref.actor", config.actor_rollout_ref.actor.fsdp_config.fsdp_size),
        Role.Critic: ("critic.model", config.critic.model.fsdp_config.fsdp_size),
    }
    for role, (section, size) in sizes.items():
        if role in plan.roles and size != -1 and plan.pool_of(role).world_size % size:
            yield (
                f"{section}.fsdp_config.fsdp_size={size}: must divide the {plan.pool_of(role).world_size} processes of "
                f"{plan.roles[role]}; use -1 for all of them"
            )


def _batches(config: Config, plan: Plan) -> Iterator[str]:
    """Every role cuts the batch of train_batch_size x n sequences over its own ranks."""
    prompts = config.data.train_batch_size
    num_mini_batches = max(1, prompts // config.actor_rollout_ref.actor.ppo_mini_batch_size)
    reported: set[int] = set()
    for role in plan.roles:
        parts = data_parallel_size(config, plan, role)
        if parts not in reported:
            reported.add(parts)
            yield from _uneven(config, plan, role, "data.train_batch_size", prompts, num_mini_batches)


def _mini_batches(config: Config, plan: Plan) -> Iterator[str]:
    samples = config.actor_rollout_ref.rollout.n
    sections: list[tuple[Role, str, ActorConfig | CriticConfig]] = [
        (Role.Actor, "actor_rollout_ref.actor", config.actor_rollout_ref.actor),
        (Role.Critic, "critic", config.critic),
    ]
    for role, section, keys in sections:
        if role not in plan.roles:
            continue
        prompts, micro = keys.ppo_mini_batch_size, keys.ppo_micro_batch_size_per_gpu
        uneven = list(_uneven(config, plan, role, f"{section}.ppo_mini_batch_size", prompts))
        yield from uneven
        parts = plan.pool_of(role).world_size
        per_gpu = prompts * samples // parts
        if not uneven and micro is not None and per_gpu % micro:
            yield (
                f"{section}.ppo_micro_batch_size_per_gpu={micro}: must divide the {per_gpu} sequences per GPU of a "
                f"mini-batch ({_sequences(prompts, samples)} over {parts} processes of {plan.roles[role]}); "
                f"use {divisor_near(per_gpu, micro)}"
            )


def _uneven(config: Config, plan: Plan, role: Role, key: str, prompts: int, num_mini_batches: int = 1) -> Iterator[str]:
    """Where a number of prompts cannot be cut: those next to it that can, also when cut into mini-batches before."""
    samples, parts = config.actor_rollout_ref.rollout.n, data_parallel_size(config, plan, role)
    if (prompts * samples) % parts:
        step = parts // math.gcd(parts, samples) * num_mini_batches
        below = prompts // step * step
        neighbours = f"{below} or {below + step}" if below else str(below + step)
        yield (
            f"{key}={prompts}: {_sequences(prompts, samples)} cannot be cut into {parts} equal parts for {role} in "
            f"{plan.roles[role]}; use {neighbours}"
        )


def _multi_process(config: Config, plan: Plan) -> Iterator[str]:
    if config.placement.mps and config.trainer.device == "cpu":
        yield "placement.mps=true: is for GPUs, and trainer.device=cpu uses none; leave it out"
    elif config.placement.mps and not plan.sharing_pools:
        yield (
            "placement.mps=true: is for pools that share a GPU, and none does; leave it out, "
            "or set a share (placement.split.share=0.5)"
        )


def _lengths(config: Config, plan: Plan) -> Iterator[str]:
    """A sequence of a prompt and a response must have a place in every model that reads it."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    checked: set[str | None] = set()
    for key, (path, overrides) in models_of(config, plan).items():
        if path in checked:  # a critic from the policy's folder is judged as the policy, overrides included
            continue
        checked.add(path)
        scored = config.reward_model.max_length if key.startswith("reward_model") else None
        longest = min(prompt + response, scored or prompt + response)
        with suppress(ShapeUnknown):  # models that are not on disk yet, and those without a limit
            limit = read_num_positions(path, overrides)
            if longest > limit:
                remedy = f", or set reward_model.max_length={limit}" if key.startswith("reward_model") else ""
                yield (
                    f"data.max_prompt_length={prompt}: with data.max_response_length={response} a sequence may have "
                    f"{prompt + response} tokens, and {key}={path} has {limit} positions (max_position_embeddings); "
                    f"use at most {limit} together{remedy}"
                )


def _engine(config: Config) -> Iterator[str]:
    """The engine that generates must be able to run the policy, and to divide it over its ranks."""
    model, keys = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if keys.name != "native":
        return
    with suppress(ShapeUnknown):  # models that are not on disk yet
        _, content = read_model_file(model.path, model.override_config)
        if (reason := why_not_native(content)) is not None:
            yield f"actor_rollout_ref.model.path={model.path}: {reason}; choose such a model"
            return
        shape = read_shape(model.path, model.override_config)
        counts = (shape.num_heads, shape.num_kv_heads, shape.intermediate_size)
        if (problem := why_not_parallel(*counts, keys.tensor_model_parallel_size)) is not None:
            yield problem


def _sequences(prompts: int, samples: int) -> str:
    return f"{prompts} sequences" if samples == 1 else f"{prompts} prompts x {samples} samples"
