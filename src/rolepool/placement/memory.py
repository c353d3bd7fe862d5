"""How many bytes each role takes on one GPU, and whether a pool's roles fit together.

Owns the formulas, as pure functions of shapes and counts; docs/placement.md derives them. An estimate: it advises and
never stops a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from rolepool.config import Config
from rolepool.config.model_keys import Fsdp
from rolepool.placement.checks import data_parallel_size
from rolepool.placement.models import ModelShape, ShapeUnknown, read_shape
from rolepool.placement.plan import Plan
from rolepool.placement.roles import Role

GIB = 2**30
BF16, FP32 = 2, 4
LOGITS_AT_ONCE = 2**28
"""Log-probs are computed from so many logits at a time: long enough rows for a GPU, small beside activations."""
PROCESS_OVERHEAD_BYTES = int(1.0 * GIB)
"""Of a process, beside what torch has allocated: CUDA context, code, communication buffers, and what the allocator
cannot use."""


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
    memory: dict[Role, RoleMemory] = {}
    unknown: dict[Role, str] = {}
    limits = {
        name: None if gpu_memory_bytes is None else int(gpu_memory_bytes * pool.share)
        for name, pool in plan.pools.items()
    }
    for role, name in plan.roles.items():
        try:
            memory[role] = _memory_of(role, config, plan, limits[name])
        except ShapeUnknown as reason:
            unknown[role] = str(reason)
    pools = {
        name: combine({role: memory[role] for role in pool.roles}, limits[name])
        for name, pool in plan.pools.items()
        if unknown.keys().isdisjoint(pool.roles)
    }
    return MemoryEstimate(pools, unknown)


def combine(roles: Mapping[Role, RoleMemory], limit: int | None) -> PoolMemory:
    """One role of a pool works at a time: its working bytes and the others' idle ones. The largest such sum counts."""
    idle = sum(memory.idle for memory in roles.values())
    peaks = {role: memory.working + idle - memory.idle for role, memory in roles.items()}
    worst = max(peaks, key=lambda role: peaks[role])
    return PoolMemory(dict(roles), peaks[worst] + PROCESS_OVERHEAD_BYTES, worst, limit)


@dataclass(frozen=True)
class HeldModel:
    """A model as a role holds it on one GPU, and what passes of some tokens through it take."""

    shape: ModelShape
    num_params: int
    num_shards: int
    logit_share: Fraction = Fraction(0)
    """Of the tokens of a pass, for how many there are logits."""
    packed: bool = False
    checkpointing: bool = False
    offload: Fsdp = field(default_factory=Fsdp)
    """What of it is in host memory while another role works."""

    def training(self, num_tokens: int, *, accumulates: bool) -> RoleMemory:
        """fp32 weights, gradients and two Adam states, sharded; 16-bit compute. What the worst moment of an update
        takes.

        Layers that are sharded are gathered anew for their backward pass; on one GPU each keeps its 16-bit copy for it.
        With `accumulates` a mini-batch has several passes, and gradients of earlier ones are there all the time.
        """
        shape, num_logit_tokens = self.shape, int(num_tokens * self.logit_share)
        gradients = weights = FP32 * self.num_params // self.num_shards
        optimizer, before = 2 * FP32 * self.num_params // self.num_shards, weights if accumulates else 0
        at_rest = RoleMemory(
            weights=weights,
            optimizer=optimizer,
            idle=(0 if self.offload.param_offload else weights) + (0 if self.offload.optimizer_offload else optimizer),
        )
        keeps_copies = self.num_shards == 1 and not self.checkpointing
        copies = BF16 * self.num_params if keeps_copies else self.gathered_bytes
        in_pass = replace(at_rest, weights=weights + copies)
        kept = kept_activation_bytes(shape, num_tokens, packed=self.packed, checkpointing=self.checkpointing)
        one_layer = num_tokens * layer_activation_bytes(shape, packed=self.packed)
        layer_gradients = num_tokens * BF16 * (2 * shape.hidden_size + mlp_width(shape))
        head_gradient = BF16 * shape.embedding_params if num_logit_tokens else 0
        outside, outside_shard = FP32 * self.outside_params, FP32 * self.outside_params // self.num_shards
        moments = (
            replace(in_pass, gradients=before, activations=kept, logits=head_training_bytes(shape, num_logit_tokens)),
            replace(  # the last layer's backward pass, the first to come
                in_pass,
                gradients=before,
                activations=kept + layer_gradients + (one_layer if self.checkpointing else 0),
                logits=head_gradient,
            ),
            replace(  # the first layer's
                in_pass,
                gradients=max(before, gradients - outside_shard),
                activations=one_layer + layer_gradients,
                logits=head_gradient,
            ),
            # The embedding's gradient: whole and in fp32, on its way to the sum over ranks and to that of passes.
            replace(at_rest, gradients=gradients + outside + (outside_shard if accumulates else 0)),
        )
        return max(moments, key=lambda moment: moment.working)

    def scoring(self, num_tokens: int) -> RoleMemory:
        """16-bit weights, sharded; a forward pass, which takes most in the MLP of a layer, or at the logits after."""
        shape, num_logit_tokens = self.shape, int(num_tokens * self.logit_share)
        weights = BF16 * self.num_params // self.num_shards
        gathered = 0 if self.num_shards == 1 else self.gathered_bytes
        in_pass = RoleMemory(weights=weights + gathered, idle=0 if self.offload.param_offload else weights)
        in_mlp = BF16 * num_tokens * (2 * shape.hidden_size + 3 * mlp_width(shape))
        after = BF16 * (num_tokens + num_logit_tokens) * shape.hidden_size
        moments = (
            replace(in_pass, activations=in_mlp),
            replace(in_pass, activations=after, logits=logit_bytes(shape, num_logit_tokens)),
        )
        return max(moments, key=lambda moment: moment.working)

    @property
    def outside_params(self) -> int:
        """Parameters that are in no layer: embedding, last norm and head, which are gathered together."""
        return self.num_params - self.shape.num_layers * self.shape.layer_params

    @property
    def gathered_bytes(self) -> int:
        """In 16 bits: what is in no layer, for the whole pass, and two layers, the one at work and the next."""
        return BF16 * (self.outside_params + 2 * self.shape.layer_params)


def rollout_role(
    shape: ModelShape,
    *,
    tensor_parallel: int,
    num_sequences: int,
    sequence_tokens: int,
    prefill_tokens: int,
    budget: int | None,
    free_cache: bool,
) -> RoleMemory:
    """16-bit weights and a KV cache for all sequences at once, or what the budget leaves. Tensor parallelism cuts the
    layers and leaves embedding and head whole; of fewer key-value heads than ranks, several ranks hold one.

    Prefill takes most, in an MLP, or else the logits of the first tokens. Those of later ones stay with the CUDA graph
    of the step.
    """
    layers = shape.num_layers * shape.layer_params
    weights = BF16 * (shape.num_params - layers + layers // tensor_parallel)
    one_sequence = sequence_tokens * shape.kv_bytes_per_token // min(tensor_parallel, shape.num_kv_heads)
    kv_cache = num_sequences * one_sequence
    if budget is not None:
        kv_cache = min(kv_cache, max(one_sequence, budget - weights))
    logits = BF16 * num_sequences * shape.vocab_size
    # The gated features of the layer before are still there when those of a layer are made.
    cut = attention_width(shape) + 4 * mlp_width(shape)
    prefill = BF16 * prefill_tokens * (2 * shape.hidden_size + cut // tensor_parallel)
    return RoleMemory(
        weights=weights,
        kv_cache=kv_cache,
        activations=max(prefill, logits),
        logits=logits,
        idle=weights + logits + (0 if free_cache else kv_cache),
    )


def logit_bytes(shape: ModelShape, num_logit_tokens: int) -> int:
    """The logits that there are at a time, in 16 bits."""
    return BF16 * min(num_logit_tokens * shape.vocab_size, LOGITS_AT_ONCE)


def head_training_bytes(shape: ModelShape, num_logit_tokens: int) -> int:
    """At the head's backward pass: its gradient, added up in fp32; logits, which their gradients replace; and hidden
    states before logits, and their gradients."""
    if not num_logit_tokens:
        return 0
    logits = logit_bytes(shape, num_logit_tokens)
    hidden = 2 * BF16 * num_logit_tokens * shape.hidden_size
    return FP32 * shape.embedding_params + logits + hidden


def attention_width(shape: ModelShape) -> int:
    """Numbers of one token that attention reads and gives: queries, keys, values and outputs."""
    return 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim


def mlp_width(shape: ModelShape) -> int:
    return shape.intermediate_size * shape.num_active_experts


def layer_activation_bytes(shape: ModelShape, *, packed: bool) -> int:
    """What one layer keeps of one token for its backward pass, in 16 bits: the inputs of norms, projections and MLP.

    Layers of packed passes are compiled, and make some of it again; in others norms keep their inputs in fp32, too.
    """
    num_hidden, num_mlp = (4, 3) if packed else (8, 4)
    return BF16 * (num_hidden * shape.hidden_size + attention_width(shape) + num_mlp * mlp_width(shape))


def kept_activation_bytes(shape: ModelShape, num_tokens: int, *, packed: bool, checkpointing: bool) -> int:
    """When the forward pass ends: every layer's activations, or with checkpointing its input; and the last norm's.

    That one is not compiled: its input in fp32, and in 16 bits what it gives before and after its weights.
    """
    layer = BF16 * shape.hidden_size if checkpointing else layer_activation_bytes(shape, packed=packed)
    return num_tokens * (shape.num_layers * layer + (FP32 + 2 * BF16) * shape.hidden_size)


# From the config to the numbers that the formulas take


def _memory_of(role: Role, config: Config, plan: Plan, limit: int | None) -> RoleMemory:
    """Of a role in a pool that has `limit` bytes of each GPU. Raises ShapeUnknown."""
    if role is Role.Rollout:
        return _rollout(config, plan, limit)
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    critic, reward = config.critic, config.reward_model
    by_tokens, max_tokens, micro_batch_size = {
        Role.Actor: (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu),
        Role.RefPolicy: (
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
            ref.log_prob_micro_batch_size_per_gpu,
        ),
        Role.Critic: (critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu),
        Role.RewardModel: (reward.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, reward.micro_batch_size_per_gpu),
    }[role]
    mini_batch_size = {Role.Actor: actor.ppo_mini_batch_size, Role.Critic: critic.ppo_mini_batch_size}.get(role)
    length = (reward.max_length if role is Role.RewardModel else None) or _sequence_tokens(config)
    # A null micro-batch size is chosen to fit; one sequence is the least it can be.
    in_pass = max_tokens if by_tokens else (micro_batch_size or 1) * length
    in_all = length * _rows(config, plan, role, mini_batch_size or config.data.train_batch_size)
    held = held_model(config, role, plan.pool_of(role).world_size)
    if mini_batch_size is None:
        return held.scoring(min(in_all, in_pass))
    return held.training(min(in_all, in_pass), accumulates=in_pass < in_all)


def held_model(config: Config, role: Role, world_size: int) -> HeldModel:
    """The model of a role that makes passes, in a pool of so many processes. Raises ShapeUnknown."""
    models, critic = config.actor_rollout_ref, config.critic.model
    if role in (Role.Critic, Role.RewardModel):
        shape = read_shape(critic.path if role is Role.Critic else config.reward_model.model.path)
        held = HeldModel(shape, shape.num_scalar_head_params, world_size)
    else:
        shape = read_shape(models.model.path, models.model.override_config)
        share = Fraction(config.data.max_response_length, _sequence_tokens(config))
        held = HeldModel(shape, shape.num_params, world_size, share, models.model.use_remove_padding)
    if role is Role.RefPolicy:
        return replace(held, offload=Fsdp(param_offload=models.ref.fsdp_config.param_offload))
    if role is Role.RewardModel:
        return held
    keys, fsdp = (critic, critic.fsdp_config) if role is Role.Critic else (models.model, models.actor.fsdp_config)
    return replace(
        held,
        num_shards=world_size if fsdp.fsdp_size == -1 else fsdp.fsdp_size,
        packed=keys.use_remove_padding,
        checkpointing=keys.enable_gradient_checkpointing,
        offload=fsdp,
    )


def _rollout(config: Config, plan: Plan, limit: int | None) -> RoleMemory:
    keys, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    rows = min(_rows(config, plan, Role.Rollout, config.data.train_batch_size), keys.max_num_seqs)
    return rollout_role(
        read_shape(model.path, model.override_config),
        tensor_parallel=keys.tensor_model_parallel_size,
        num_sequences=rows,
        sequence_tokens=_sequence_tokens(config),
        prefill_tokens=min(rows * config.data.max_prompt_length, keys.max_num_batched_tokens),
        budget=None if limit is None else int(limit * keys.gpu_memory_utilization),
        free_cache=keys.free_cache_engine,
    )


def _sequence_tokens(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _rows(config: Config, plan: Plan, role: Role, num_prompts: int) -> int:
    """Sequences on one GPU, or on a group of tensor-parallel ones."""
    return -(-num_prompts * config.actor_rollout_ref.rollout.n // data_parallel_size(config, plan, role))
