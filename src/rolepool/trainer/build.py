"""From a plan to roles that can be called: the one place that knows which class plays which role.

Owns which process gets which role, and how the rollout comes by the actor's weights: that follows from the plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rolepool.algorithm.registry import policy_losses
from rolepool.cluster import Cluster, RoleProxy
from rolepool.config import Config
from rolepool.data.prompts import load_tokenizer
from rolepool.data.rewards import load_reward_function
from rolepool.metrics.spans import RULE_POOL
from rolepool.models.loading import read_model_config
from rolepool.placement import Plan, Role
from rolepool.placement.checks import models_of
from rolepool.placement.estimate import estimate_memory
from rolepool.placement.roles import ROLE_SPECS
from rolepool.protocol import CallFuture
from rolepool.roles.actor import Actor
from rolepool.roles.critic import Critic
from rolepool.roles.ref import Reference
from rolepool.roles.reward_model import RewardModel
from rolepool.roles.rollout import Rollout
from rolepool.roles.rule_reward import RuleReward
from rolepool.trainer.calls import Roles

CPUS_PER_HELPER, MOST_HELPERS = 8, 8
"""Processes for rule rewards: one for so many CPUs of the driver's node, within a limit."""
MODEL_KEYS = {Role.Critic: "critic.model.path", Role.RewardModel: "reward_model.model.path"}
"""The key of a role's model, if it is not the policy's."""
WEIGHTS_PER_CALL = 16
"""Tensors of one leg of a weight sync: about two layers are on their way at a time."""


def build_roles(
    cluster: Cluster, config: Config, plan: Plan, num_training_steps: int, dtype: torch.dtype = torch.float32
) -> Roles:
    """Make every role on its pool, all pools side by side, and wait until they are there.

    The learning rate of a role follows the steps in which it updates: the actor does not in the critic's warm-up.
    """
    model_keys = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model_keys.path, trust_remote_code=model_keys.trust_remote_code)
    ranks_per_copy = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    _check_models_on_nodes(cluster, config, plan)
    proxies: dict[Role, RoleProxy] = {}
    micro_batches = estimate_memory(config, plan, cluster.gpu_memory_bytes).micro_batches

    def add(role: Role, worker_class: type[Any], *args: Any, **options: Any) -> None:
        if role in plan.roles:
            if ROLE_SPECS[role].batched:
                options["micro_batches"] = micro_batches
            group = cluster.groups[plan.roles[role]]
            proxies[role] = group.add_role(role.value, worker_class, config, *args, dtype, blocking=False, **options)

    # The actor comes before the rollout, which shares its weights where they share a process.
    policy_loss = policy_losses.find(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    add(Role.Actor, Actor, max(0, num_training_steps - config.trainer.critic_warmup), policy_loss=policy_loss)
    add(Role.Rollout, Rollout, (tokenizer.eos_token_id,), tensor_parallel=ranks_per_copy)
    add(Role.RefPolicy, Reference)
    add(Role.Critic, Critic, num_training_steps)
    add(Role.RewardModel, RewardModel, tokenizer.pad_token_id)
    if Role.RewardModel not in plan.roles:
        helpers = cluster.add_helpers(RULE_POOL, min(max(1, (os.cpu_count() or 1) // CPUS_PER_HELPER), MOST_HELPERS))
        proxies[Role.RewardModel] = helpers.add_role("reward", RuleReward, config, blocking=False)
    for proxy in proxies.values():
        proxy.ready.get()
    # A proxy has the methods of its worker class, which mypy cannot see.
    ready: dict[Role, Any] = {role: proxy.with_blocking(False) for role, proxy in proxies.items()}
    together = plan.roles[Role.Actor] == plan.roles[Role.Rollout]
    sync = sync_here if together else sync_across
    return Roles(
        actor=ready[Role.Actor],
        rollout=ready[Role.Rollout],
        reward=ready[Role.RewardModel],
        critic=ready.get(Role.Critic),
        ref=ready.get(Role.RefPolicy),
        sync_weights=sync(ready[Role.Actor], ready[Role.Rollout]),
    )


def check_inputs(config: Config, plan: Plan) -> None:
    """Refuse, before a process is started, models and functions that none could load."""
    policy_losses.find(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    trust_remote_code = config.actor_rollout_ref.model.trust_remote_code
    for key, (path, overrides) in models_of(config, plan).items():
        read_model_config(key, path, trust_remote_code=trust_remote_code, overrides=dict(overrides))
    if Role.RewardModel not in plan.roles:
        load_reward_function(config.custom_reward_function)


def _check_models_on_nodes(cluster: Cluster, config: Config, plan: Plan) -> None:
    """Refuse a model folder that a node lacks: its processes would take the path for a hub id."""
    models = models_of(config, plan)
    for role, pool in plan.roles.items():
        key = MODEL_KEYS.get(role, "actor_rollout_ref.model.path")
        path = str(models[key][0])
        if Path(path).expanduser().is_dir():
            fix = "copy the model there, or to a folder that all nodes share"
            cluster.groups[pool].check_exists(f"{key}={path}", path, fix)


def sync_here(actor: RoleProxy, rollout: RoleProxy) -> Callable[[int], list[CallFuture]]:
    """Actor and rollout share processes: each process hands its weights over inside."""
    return lambda version: [rollout.take_weights_here(version)]


def sync_across(actor: RoleProxy, rollout: RoleProxy) -> Callable[[int], list[CallFuture]]:
    """Weights go from the actor's rank 0 through shared memory to every rollout process, a few layers at a time.

    Both pools get their calls in the same order, and neither waits for the other inside a call: it cannot deadlock.
    """
    names: list[str] = actor.weight_names().get()
    legs = [names[start : start + WEIGHTS_PER_CALL] for start in range(0, len(names), WEIGHTS_PER_CALL)]

    def sync(version: int) -> list[CallFuture]:
        taken = [rollout.take_weights(actor.export_weights(leg)) for leg in legs]
        return [*taken, rollout.end_of_weights(version)]

    return sync
