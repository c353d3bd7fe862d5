"""How many bytes each role takes on one GPU, and whether a pool's roles fit together.

Owns the formulas, as pure functions of shapes and counts; docs/placement.md derives them. An estimate: it advises and
never stops a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolepool.config import Config
from rolepool.placement.checks import data_parallel_size
from rolepool.placement.models import ModelShape, ShapeUnknown, read_shape
from rolepool.placement.plan import Plan
from rolepool.placement.roles import Role

GIB = 2**30
BF16, FP32 = 2, 4
LOGITS_AT_ONCE = 2**28
"""Log-probs are computed from so many logits at a time: long enough rows for a GPU, small beside activations."""
PROCESS_OVERHEAD_BYTES = int(1.0 * GIB)
"""CUDA context, library workspaces, communication buffers and the allocator's unused remainders, per process."""


@dataclass(frozen=True)
class RoleMemory:
    """A role's bytes on one GPU while it works, and what of them stays while another role of the pool works."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    idle: int = 0

    @property
    def working(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.kv_cache + self.activations + self.logits


@dataclass(frozen=True)
class PoolMemory:
    """What the pool's process takes at its worst moment."""

    roles: dict[Role, RoleMemory]
    overhead: int
    peak: int
    peak_role: Role
    limit: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the peak stays within the GPU; None where its memory is not known."""
        return None if self.limit is None else self.peak <= self.limit


@dataclass(frozen=True)
class MemoryEstimate:
    """Per pool, and for each role whose model is not known, why not."""

    pools: dict[str, PoolMemory]
    unknown: dict[Role, str]


def estimate_memory(config: Config, plan: Plan, gpu_memory_bytes: int | None) -> MemoryEstimate:
    """The memory of every pool. `gpu_memory_bytes` is the whole GPU's; a pool has its share of it."""
    shapes, unknown = _shapes(config, plan)
    pools: dict[str, PoolMemory] = {}
    for name, pool in plan.pools.items():
        if any(role in unknown for role in pool.roles):
            continue
        limit = None if gpu_memory_bytes is None else int(gpu_memory_bytes * pool.share)
        roles = {role: MEMORY_OF[role](shapes[role], config, plan, limit) for role in pool.roles}
        pools[name] = combine(roles, limit)
    return MemoryEstimate(pools, unknown)


def combine(roles: Mapping[Role, RoleMemory], limit: int | None) -> PoolMemory:
    """One role of a pool works at a time: its working bytes and the others' idle ones. The largest such sum counts."""
    idle = sum(memory.idle for memory in roles.values())
    peaks = {role: memory.working + idle - memory.idle for role, memory in roles.items()}
    worst = max(peaks, key=lambda role: peaks[role])
    return PoolMemory(dict(roles), PROCESS_OVERHEAD_BYTES, peaks[worst] + PROCESS_OVERHEAD_BYTES, worst, limit)


def trained_role(
    num_params: int,
    shape: ModelShape,
    *,
    num_shards: int,
    num_tokens: int,
    num_logit_tokens: int,
    packed: bool,
    checkpointing: bool,
    param_offload: bool,
    optimizer_offload: bool,
) -> RoleMemory:
    """fp32 weights, gradients and two Adam states, sharded; 16-bit compute, one layer gathered ahead.

    Of the logits that there are at a time also the gradients, and the gradient of the head, which is added up in fp32.
    """
    weights = FP32 * num_params // num_shards
    optimizer = 2 * FP32 * num_params // num_shards
    return RoleMemory(
        weights=weights + gathered_bytes(shape),
        gradients=FP32 * num_params // num_shards,
        optimizer=optimizer,
        activations=training_activation_bytes(shape, num_tokens, packed=packed, checkpointing=checkpointing),
        logits=2 * logit_bytes(shape, num_logit_tokens)
        + ((FP32 + BF16) * shape.embedding_params if num_logit_tokens else 0),
        idle=(0 if param_offload else weights) + (0 if optimizer_offload else optimizer),
    )


def scoring_role(
    num_params: int,
    shape: ModelShape,
    *,
    num_shards: int,
    num_tokens: int,
    num_logit_tokens: int,
    packed: bool,
    param_offload: bool,
) -> RoleMemory:
    """16-bit weights, sharded; a forward pass only."""
    weights = BF16 * num_params // num_shards
    return RoleMemory(
        weights=weights + gathered_bytes(shape),
        activations=num_tokens * layer_activation_bytes(shape, packed=packed),
        logits=logit_bytes(shape, num_logit_tokens),
        idle=0 if param_offload else weights,
    )


def rollout_role(
    shape: ModelShape,
    *,
    tensor_parallel: int,
    num_sequences: int,
    sequence_tokens: int,
    budget: int | None,
    free_cache: bool,
) -> RoleMemory:
    """16-bit weights and a KV cache for all sequences at once, or what the budget leaves. Tensor parallelism cuts the
    layers and leaves embedding and head whole; of fewer key-value heads than ranks, several ranks hold one."""
    layers = shape.num_layers * shape.layer_params
    weights = BF16 * (shape.num_params - layers + layers // tensor_parallel)
    one_sequence = sequence_tokens * shape.kv_bytes_per_token // min(tensor_parallel, shape.num_kv_heads)
    kv_cache = num_sequences * one_sequence
    if budget is not None:
        kv_cache = min(kv_cache, max(one_sequence, budget - weights))
    logits = num_sequences * shape.vocab_size * FP32
    return RoleMemory(weights=weights, kv_cache=kv_cache, logits=logits, idle=weights + (0 if free_cache else kv_cache))


def gathered_bytes(shape: ModelShape) -> int:
    """Two layers gathered in 16 bits (the one at work and the next), or the embedding where that is larger."""
    return BF16 * max(2 * shape.layer_params, shape.embedding_params)


def logit_bytes(shape: ModelShape, num_logit_tokens: int) -> int:
    """The logits that there are at a time, in 16 bits."""
    return BF16 * min(num_logit_tokens * shape.vocab_size, LOGITS_AT_ONCE)


def layer_activation_bytes(shape: ModelShape, *, packed: bool) -> int:
    """What one layer keeps of one token for its backward pass, in 16 bits: the inputs of norms, projections and MLP.

    Layers of packed passes are compiled, and make some of it again; in others norms keep their inputs in fp32, too.
    """
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mlp = shape.intermediate_size * shape.num_active_experts
    num_hidden, num_mlp = (4, 3) if packed else (8, 4)
    return BF16 * (num_hidden * shape.hidden_size + 2 * q + 2 * kv + num_mlp * mlp)


def training_activation_bytes(shape: ModelShape, num_tokens: int, *, packed: bool, checkpointing: bool) -> int:
    """Every layer's activations; with checkpointing every layer's input and one layer's activations."""
    one_layer = layer_activation_bytes(shape, packed=packed)
    if not checkpointing:
        return num_tokens * shape.num_layers * one_layer
    return num_tokens * (shape.num_layers * BF16 * shape.hidden_size + one_layer)


# From the config to the numbers that the formulas take


def _shapes(config: Config, plan: Plan) -> tuple[dict[Role, ModelShape], dict[Role, str]]:
    policy = (config.actor_rollout_ref.model.path, config.actor_rollout_ref.model.override_config)
    sources = {
        Role.Actor: policy,
        Role.Rollout: policy,
        Role.RefPolicy: policy,
        Role.Critic: (config.critic.model.path, None),
        Role.RewardModel: (config.reward_model.model.path, None),
    }
    shapes: dict[Role, ModelShape] = {}
    unknown: dict[Role, str] = {}
    for role in plan.roles:
        try:
            shapes[role] = read_shape(*sources[role])
        except ShapeUnknown as reason:
            unknown[role] = str(reason)
    return shapes, unknown


def _actor(shape: ModelShape, config: Config, plan: Plan, limit: int | None) -> RoleMemory:
    keys, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    tokens = _tokens(config, keys.use_dynamic_bsz, keys.ppo_max_token_len_per_gpu, keys.ppo_micro_batch_size_per_gpu)
    return trained_role(
        shape.num_params,
        shape,
        num_shards=_num_shards(keys.fsdp_config.fsdp_size, plan.pool_of(Role.Actor).world_size),
        num_tokens=tokens,
        num_logit_tokens=_response_tokens(config, tokens),
        packed=model.use_remove_padding,
        checkpointing=model.enable_gradient_checkpointing,
        param_offload=keys.fsdp_config.param_offload,
        optimizer_offload=keys.fsdp_config.optimizer_offload,
    )


def _critic(shape: ModelShape, config: Config, plan: Plan, limit: int | None) -> RoleMemory:
    keys, fsdp = config.critic, config.critic.model.fsdp_config
    return trained_role(
        shape.num_scalar_head_params,
        shape,
        num_shards=_num_shards(fsdp.fsdp_size, plan.pool_of(Role.Critic).world_size),
        num_tokens=_tokens(
            config, keys.use_dynamic_bsz, keys.ppo_max_token_len_per_gpu, keys.ppo_micro_batch_size_per_gpu
        ),
        num_logit_tokens=0,
        packed=keys.model.use_remove_padding,
        checkpointing=keys.model.enable_gradient_checkpointing,
        param_offload=fsdp.param_offload,
        optimizer_offload=fsdp.optimizer_offload,
    )


def _reference(shape: ModelShape, config: Config, plan: Plan, limit: int | None) -> RoleMemory:
    keys = config.actor_rollout_ref.ref
    tokens = _tokens(
        config,
        keys.log_prob_use_dynamic_bsz,
        keys.log_prob_max_token_len_per_gpu,
        keys.log_prob_micro_batch_size_per_gpu,
    )
    return scoring_role(
        shape.num_params,
        shape,
        num_shards=plan.pool_of(Role.RefPolicy).world_size,
        num_tokens=tokens,
        num_logit_tokens=_response_tokens(config, tokens),
        packed=config.actor_rollout_ref.model.use_remove_padding,
        param_offload=keys.fsdp_config.param_offload,
    )


def _reward_model(shape: ModelShape, config: Config, plan: Plan, limit: int | None) -> RoleMemory:
    keys = config.reward_model
    sequence = keys.max_length or _sequence_tokens(config)
    tokens = config.critic.ppo_max_token_len_per_gpu if keys.use_dynamic_bsz else None
    return scoring_role(
        shape.num_scalar_head_params,
        shape,
        num_shards=plan.pool_of(Role.RewardModel).world_size,
        num_tokens=tokens or (keys.micro_batch_size_per_gpu or 1) * sequence,
        num_logit_tokens=0,
        packed=False,
        param_offload=False,
    )


def _rollout(shape: ModelShape, config: Config, plan: Plan, limit: int | None) -> RoleMemory:
    keys = config.actor_rollout_ref.rollout
    rows = -(-config.data.train_batch_size * keys.n // data_parallel_size(config, plan, Role.Rollout))
    return rollout_role(
        shape,
        tensor_parallel=keys.tensor_model_parallel_size,
        num_sequences=min(rows, keys.max_num_seqs),
        sequence_tokens=_sequence_tokens(config),
        budget=None if limit is None else int(limit * keys.gpu_memory_utilization),
        free_cache=keys.free_cache_engine,
    )


MEMORY_OF = {
    Role.Actor: _actor,
    Role.Rollout: _rollout,
    Role.RefPolicy: _reference,
    Role.Critic: _critic,
    Role.RewardModel: _reward_model,
}


def _sequence_tokens(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _response_tokens(config: Config, num_tokens: int) -> int:
    """Logits are needed where a response token is predicted, and not over the prompt."""
    return num_tokens * config.data.max_response_length // _sequence_tokens(config)


def _num_shards(fsdp_size: int, world_size: int) -> int:
    return world_size if fsdp_size == -1 else fsdp_size


def _tokens(config: Config, dynamic: bool, token_limit: int, micro_batch_size: int | None) -> int:
    """Tokens of one pass. A null micro-batch size is chosen to fit; one sequence is the least it can be."""
    return token_limit if dynamic else (micro_batch_size or 1) * _sequence_tokens(config)
