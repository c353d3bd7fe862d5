"""Checks of the counts in a plan: batch sizes, tensor parallelism and sharding must divide evenly over each role's
pool, and sequences must not be longer than the models allow.

What is found here is certain and stops a run. Memory is only estimated, in `estimate`.
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
from rolepool.placement.models import num_positions, read_model_file, read_shape, why_not_native, why_not_parallel
from rolepool.placement.plan import Plan
from rolepool.placement.roles import ROLE_SPECS, Role


def find_problems(config: Config, plan: Plan) -> list[str]:
    """One line for each check that fails. An empty list means that the plan can run."""
    problems = [*_groups(config, plan), *_batches(config, plan), *_lengths(config, plan), *_engine(config)]
    if config.placement.mps and (config.trainer.device == "cpu" or not plan.sharing_pools):
        problems.append(
            "placement.mps=true: MPS is for pools that share GPUs, and there are none; remove this key, or use GPUs "
            "and set a share (placement.split.share=0.5)"
        )
    return problems


def data_parallel_size(config: Config, plan: Plan, role: Role) -> int:
    """Number of parts that a role's batch is split into: one for each process of its pool, or for each group of
    tensor-parallel ranks."""
    key = ROLE_SPECS[role].tensor_parallel
    return max(1, plan.pool_of(role).world_size // (1 if key is None else config.at(key)))


def longest_row(config: Config, role: Role) -> int:
    """Tokens of the longest row that a role reads."""
    whole = config.data.max_prompt_length + config.data.max_response_length
    key = ROLE_SPECS[role].max_length
    return min(whole, config.at(key) or whole) if key is not None else whole


def model_of(config: Config, role: Role) -> tuple[str | None, Mapping[str, Any]]:
    """The path of a role's model, and the entries of its config.json that are replaced."""
    model = config.at(ROLE_SPECS[role].model)
    return model.path, model.override_config if isinstance(model, PolicyModelConfig) else {}


def models_of(config: Config, plan: Plan) -> dict[str, tuple[str | None, Mapping[str, Any]]]:
    """The models that a run loads, as `model_of` returns them, by the key that names each."""
    return {f"{ROLE_SPECS[role].model}.path": model_of(config, role) for role in plan.roles}


def _groups(config: Config, plan: Plan) -> Iterator[str]:
    """A tensor-parallel group stays inside a node; a sharding group may span the nodes of its pool."""
    for role, name in plan.roles.items():
        spec, pool = ROLE_SPECS[role], plan.pool_of(role)
        groups = []
        if spec.tensor_parallel is not None:
            groups.append((spec.tensor_parallel, sorted(set(pool.counts_by_node.values())), "per node"))
        if spec.fsdp is not None and spec.is_trained:
            groups.append((f"{spec.fsdp}.fsdp_size", [pool.world_size], "in all"))
        for key, counts, where in groups:
            size, largest = config.at(key), math.gcd(*counts)
            if size != -1 and largest % size:
                fits = [str(divisor) for divisor in range(1, largest + 1) if largest % divisor == 0]
                yield (
                    f"{key}={size}: must divide the number of processes of {name} ({', '.join(map(str, counts))} "
                    f"{where}); use {' or '.join(fits)}"
                )


def _batches(config: Config, plan: Plan) -> Iterator[str]:
    """Every role splits the batch over its ranks, and a role that is trained splits every mini-batch."""
    num_samples = config.actor_rollout_ref.rollout.n
    num_mini_batches = max(1, config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size)
    reported: set[tuple[str, int]] = set()
    for role, pool in plan.roles.items():
        section, parts = ROLE_SPECS[role].section, data_parallel_size(config, plan, role)
        mini_batch, micro_batch = f"{section}.ppo_mini_batch_size", f"{section}.ppo_micro_batch_size_per_gpu"
        # The batch sizes that are offered can also be split into the same number of mini-batches.
        multiples = {"data.train_batch_size": num_mini_batches}
        if ROLE_SPECS[role].is_trained:
            multiples[mini_batch] = 1
            per_gpu, rest = divmod(config.at(mini_batch) * num_samples, parts)
            size = config.at(micro_batch)
            if size is not None and not rest and per_gpu % size:
                yield (
                    f"{micro_batch}={size}: must divide the {per_gpu} sequences of a mini-batch on each of the {parts} "
                    f"processes of {pool}; use {divisor_near(per_gpu, size)}"
                )
        for key, multiple in multiples.items():
            prompts = config.at(key)
            if (prompts * num_samples) % parts and (key, parts) not in reported:
                reported.add((key, parts))
                step = parts // math.gcd(parts, num_samples) * multiple
                below = prompts // step * step
                yield (
                    f"{key}={prompts}: {prompts * num_samples} sequences cannot be split into {parts} equal parts for "
                    f"{role} in {pool}; use {f'{below} or ' if below else ''}{below + step}"
                )


def _lengths(config: Config, plan: Plan) -> Iterator[str]:
    """Every model must have a position for each token of the longest row that it reads."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    by_path: dict[str | None, Role] = {}
    for role in plan.roles:  # the policy first: a critic that starts from its folder has the policy's overrides, too
        by_path.setdefault(model_of(config, role)[0], role)
    for path, role in by_path.items():
        spec = ROLE_SPECS[role]
        with suppress(ValueError, TypeError):  # models that are not on disk yet, or that have no limit
            limit = num_positions(read_model_file(*model_of(config, role)))
            if longest_row(config, role) > limit:
                fix = f", or set {spec.max_length}={limit}" if spec.max_length is not None else ""
                yield (
                    f"data.max_prompt_length={prompt}: with data.max_response_length={response} a sequence may have "
                    f"{prompt + response} tokens, and {spec.model}.path={path} has {limit} positions "
                    f"(max_position_embeddings); use at most {limit} together{fix}"
                )


def _engine(config: Config) -> Iterator[str]:
    """The rollout engine must be able to run the policy, and to split it over its tensor-parallel ranks."""
    model, keys = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if keys.name != "native":
        if ":" in keys.name:
            import_object("actor_rollout_ref.rollout.name", keys.name)
        return
    with suppress(ValueError):  # models that are not on disk yet
        content = read_model_file(model.path, model.override_config)
        if (reason := why_not_native(content)) is not None:
            yield f"actor_rollout_ref.model.path={model.path}: {reason}; choose such a model"
            return
        shape = read_shape(model.path, model.override_config)
        counts = (shape.num_heads, shape.num_kv_heads, shape.intermediate_size)
        if (problem := why_not_parallel(*counts, keys.tensor_model_parallel_size)) is not None:
            yield problem
