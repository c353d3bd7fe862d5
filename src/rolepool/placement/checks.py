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
from rolepool.config.functions import import_object
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.placement.engines import why_not_native, why_not_parallel
from rolepool.placement.models import ShapeUnknown, read_model_file, read_num_positions, read_shape
from rolepool.placement.plan import Plan
from rolepool.placement.roles import ROLE_SPECS, Role


def data_parallel_size(config: Config, plan: Plan, role: Role) -> int:
    """Number of parts that a role's batch is cut into: its pool's processes, or its groups of tensor-parallel ranks."""
    key = ROLE_SPECS[role].tensor_parallel
    return max(1, plan.pool_of(role).world_size // (1 if key is None else config.at(key)))


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
    models = {section: config.at(section) for section in dict.fromkeys(ROLE_SPECS[role].model for role in plan.roles)}
    return {
        f"{section}.path": (model.path, model.override_config if isinstance(model, PolicyModelConfig) else {})
        for section, model in models.items()
    }


def _tensor_parallel(config: Config, plan: Plan) -> Iterator[str]:
    for role, pool in plan.roles.items():
        key = ROLE_SPECS[role].tensor_parallel
        if key is None:
            continue
        size = config.at(key)
        counts = sorted(set(plan.pool_of(role).counts_by_node.values()))
        uneven = [count for count in counts if count % size]
        if uneven:
            fits = [divisor for divisor in range(1, min(counts) + 1) if all(count % divisor == 0 for count in counts)]
            yield (
                f"{key}={size}: must divide the {uneven[0]} process{'es' if uneven[0] > 1 else ''} that {pool} has on "
                f"a node; use {' or '.join(map(str, fits))}"
            )


def _sharding(config: Config, plan: Plan) -> Iterator[str]:
    for role, pool in plan.roles.items():
        section = ROLE_SPECS[role].fsdp
        size = config.at(section).fsdp_size if section and ROLE_SPECS[role].is_trained else -1
        num_processes = plan.pool_of(role).world_size
        if size != -1 and num_processes % size:
            yield (
                f"{section}.fsdp_size={size}: must divide the {num_processes} processes of {pool}; "
                "use -1 for all of them"
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
    for role in (role for role in plan.roles if ROLE_SPECS[role].is_trained):
        section = ROLE_SPECS[role].section
        prompts, micro = config.at(section).ppo_mini_batch_size, config.at(section).ppo_micro_batch_size_per_gpu
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
    limit_keys = {f"{ROLE_SPECS[role].model}.path": ROLE_SPECS[role].max_length for role in plan.roles}
    for key, (path, overrides) in models_of(config, plan).items():
        if path in checked:  # a critic from the policy's folder is judged as the policy, overrides included
            continue
        checked.add(path)
        limit_key = limit_keys[key]
        num_read = config.at(limit_key) if limit_key else None
        longest = min(prompt + response, num_read or prompt + response)
        with suppress(ShapeUnknown):  # models that are not on disk yet, and those without a limit
            limit = read_num_positions(path, overrides)
            if longest > limit:
                remedy = f", or set {limit_key}={limit}" if limit_key else ""
                yield (
                    f"data.max_prompt_length={prompt}: with data.max_response_length={response} a sequence may have "
                    f"{prompt + response} tokens, and {key}={path} has {limit} positions (max_position_embeddings); "
                    f"use at most {limit} together{remedy}"
                )


def _engine(config: Config) -> Iterator[str]:
    """The engine that generates must be able to run the policy, and to divide it over its ranks."""
    model, keys = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if keys.name != "native":
        if ":" in keys.name:
            import_object("actor_rollout_ref.rollout.name", keys.name)
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
