"""Keys of other trainers that rolepool does not have: why, and what to write instead."""

from __future__ import annotations

WHY_UNSUPPORTED = {
    "actor_rollout_ref.hybrid_engine": "actor and rollout share processes if they share a pool; set placement.roles",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "counted over all ranks; use ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "counted over all ranks; use log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": (
        "counted over all ranks; use log_prob_micro_batch_size_per_gpu"
    ),
    "critic.ppo_micro_batch_size": "counted over all ranks; use ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "counted over all ranks; use forward_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "counted over all ranks; use micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.megatron": "only FSDP2 is supported; leave it out",
    "critic.megatron": "only FSDP2 is supported; leave it out",
    "critic.strategy": "all roles use FSDP2; leave it out",
    "actor_rollout_ref.ref.strategy": "all roles use FSDP2; leave it out",
    "reward_model.strategy": "all roles use FSDP2; leave it out",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "sequence parallelism is not supported; leave it out",
    "critic.ulysses_sequence_parallel_size": "sequence parallelism is not supported; leave it out",
    "actor_rollout_ref.rollout.mode": "there is one rollout mode; leave it out",
    "reward_model.reward_manager": "rule rewards need no manager; use custom_reward_function.path",
    "reward_model.enable_resource_pool": "placement is set elsewhere; use placement.roles.reward_model",
    "reward_model.n_gpus_per_node": "placement is set elsewhere; use placement.pools and placement.roles.reward_model",
    "reward_model.nnodes": "placement is set elsewhere; use placement.pools and placement.roles.reward_model",
    "data.image_key": "only text is supported; leave it out",
    "data.video_key": "only text is supported; leave it out",
}


def why_unsupported(path: str) -> str | None:
    """Why a key of another trainer, or a key below it, is an error; None for any other key."""
    for foreign, reason in WHY_UNSUPPORTED.items():
        if path == foreign or path.startswith(f"{foreign}."):
            return f"not supported: {reason}"
    return None
