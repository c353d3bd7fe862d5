"""What every pool takes of a GPU, and how large micro-batches are.

Owns the choice of every micro-batch size that the user left open, and of keeping activations if there is room. It is
made once, here, from the GPU's memory: `plan` shows it and the workers follow it. The estimate advises and never stops
a run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from rolepool.config import Config
from rolepool.config.model_keys import FsdpConfig, PolicyModelConfig
from rolepool.placement.checks import data_parallel_size
from rolepool.placement.memory import (
    PROCESS_OVERHEAD_BYTES,
    HeldModel,
    RoleMemory,
    cache_room,
    rollout_role,
    rollout_weight_bytes,
)
from rolepool.placement.models import ModelShape, ShapeUnknown, read_shape
from rolepool.placement.plan import Plan
from rolepool.placement.roles import ROLE_SPECS, MicroBatchKeys, Operation, Role

MOST_TOKENS = 16_384
"""Tokens of a micro-batch whose size the user left open: enough to keep a GPU busy, if they fit."""
TOKENS_STEP = 1024
"""The choice tries sizes that differ by this many tokens."""
USABLE = 0.8
"""The part of the room that a micro-batch may take. The rest is for what the formulas do not count and for holes
between the blocks of the allocator."""
MASK_BYTES = 3
"""For each pair of tokens of a padded row: a boolean, and the 16-bit number that it becomes."""


@dataclass(frozen=True)
class MicroBatch:
    """How an operation splits its rows: by a number of rows, or else by tokens."""

    keys: MicroBatchKeys
    rows: int | None
    tokens: int
    is_chosen: bool
    """Whether the user left the size open."""
    recomputes: bool | None
    """Whether the backward pass recomputes activations; None if there is no backward pass."""

    def most_rows(self, num_rows: int, length: int) -> int:
        """Rows of the largest micro-batch if all rows have `length` tokens. By tokens, all are about as large."""
        if self.rows is not None:
            return min(self.rows, num_rows)
        count = -(-num_rows // max(1, self.tokens // length))
        return -(-num_rows // count)


@dataclass(frozen=True)
class PoolMemory:
    """What the pool's process takes at its worst moment."""

    roles: dict[Role, RoleMemory]
    peak: int
    peak_role: Role
    least: int
    """The peak with the smallest micro-batches, recomputed activations and a cache for one sequence."""
    limit: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the peak stays within the GPU; None if its memory is not known."""
        return None if self.limit is None else self.peak <= self.limit


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of each pool, the micro-batches of each operation, and why a role's model is not known."""

    pools: dict[str, PoolMemory]
    micro_batches: dict[str, MicroBatch]
    unknown: dict[Role, str]


def estimate_memory(config: Config, plan: Plan, gpu_memory_bytes: int | None) -> MemoryEstimate:
    """The memory of every pool. `gpu_memory_bytes` is that of a whole GPU; a pool has its share of it. If it is not
    known, micro-batches are chosen as for a GPU with enough room."""
    pools: dict[str, PoolMemory] = {}
    micro_batches: dict[str, MicroBatch] = {}
    unknown: dict[Role, str] = {}
    for name, pool in plan.pools.items():
        limit = None if gpu_memory_bytes is None else int(gpu_memory_bytes * pool.share)
        least: dict[Role, RoleMemory] = {}
        for role in pool.roles:
            try:
                least[role], _ = _role_memory(config, plan, role, limit, room=0)
            except ShapeUnknown as reason:
                unknown[role] = str(reason)
                micro_batches.update(default_micro_batches(config, role))
        idle, chosen = sum(memory.idle for memory in least.values()), {}
        for role, memory in least.items():
            room = None if limit is None else limit - PROCESS_OVERHEAD_BYTES - (idle - memory.idle)
            chosen[role], sizes = _role_memory(config, plan, role, limit, room)
            micro_batches.update(sizes)
        if chosen.keys() == set(pool.roles):
            pools[name] = combine(chosen, least, limit)
    return MemoryEstimate(pools, micro_batches, unknown)


def combine(roles: Mapping[Role, RoleMemory], least: Mapping[Role, RoleMemory], limit: int | None) -> PoolMemory:
    """The largest sum counts."""
    peaks = peak_by_role(roles)
    worst = max(peaks, key=lambda role: peaks[role])
    return PoolMemory(dict(roles), peaks[worst], worst, max(peak_by_role(least).values()), limit)


def peak_by_role(roles: Mapping[Role, RoleMemory]) -> dict[Role, int]:
    """Bytes of a pool's process while each role is active: its working bytes, and the idle ones of the others."""
    idle = sum(memory.idle for memory in roles.values())
    return {role: PROCESS_OVERHEAD_BYTES + memory.working + idle - memory.idle for role, memory in roles.items()}


def default_micro_batches(config: Config, role: Role) -> dict[str, MicroBatch]:
    """The micro-batches of a role that runs without a plan."""
    return {operation.name: _as_written(config, role, operation, keys) for operation, keys in ROLE_SPECS[role].batched}


def _role_memory(
    config: Config, plan: Plan, role: Role, limit: int | None, room: int | None
) -> tuple[RoleMemory, dict[str, MicroBatch]]:
    """The memory of a role, and its micro-batches, in a pool that has `limit` bytes of each GPU and leaves it `room`.

    No room gives the least that the role can take. Raises ShapeUnknown.
    """
    spec = ROLE_SPECS[role]
    if not spec.batched:
        return _generation_memory(config, plan, role, limit, room), {}
    held = held_model(config, role, plan.pool_of(role).world_size)
    taken, sizes = [], {}
    for operation, keys in spec.batched:
        prompts = config.at(spec.section).ppo_mini_batch_size if operation.trains else config.data.train_batch_size
        work = _Work(operation, held, _rows(config, plan, role, prompts), _length(config, role))
        size = work.choose(_as_written(config, role, operation, keys), room)
        sizes[operation.name] = size
        taken.append(work.memory(size, work.length * size.most_rows(work.num_rows, work.length)))
    return max(taken, key=lambda memory: memory.working), sizes


@dataclass(frozen=True)
class _Work:
    """An operation on the rows of one GPU: of a mini-batch if it trains, of the whole batch otherwise."""

    operation: Operation
    held: HeldModel
    num_rows: int
    length: int

    def choose(self, size: MicroBatch, room: int | None) -> MicroBatch:
        """The size as it is written, or the largest that fits if it is open; and activations are kept if they fit."""
        if size.is_chosen:
            candidates = [*range(size.tokens, self.length, -TOKENS_STEP), self.length]
            first = bisect_left(candidates, True, key=lambda tokens: self._fits(replace(size, tokens=tokens), room))
            size = replace(size, tokens=candidates[min(first, len(candidates) - 1)])
        if not size.recomputes:
            return size
        kept = replace(size, recomputes=False)
        # The formulas for kept activations were measured with packed rows only.
        return kept if self.held.packed and self._fits(kept, room) else size

    def _fits(self, size: MicroBatch, room: int | None) -> bool:
        """Whether micro-batches of any mix of lengths fit."""
        resting = self.held.resting.working
        if room is None or room <= resting:
            return room is None
        most = self.num_rows * self.length
        num_tokens = min(most, size.tokens if size.rows is None else size.rows * self.length)
        return self.memory(size, num_tokens).working - resting <= USABLE * (room - resting)

    def memory(self, size: MicroBatch, num_tokens: int) -> RoleMemory:
        if self.operation.trains:
            held = replace(self.held, checkpointing=bool(size.recomputes))
            taken = held.training(num_tokens, accumulates=num_tokens < self.num_rows * self.length)
        else:
            taken = self.held.scoring(num_tokens)
        mask = 0 if self.held.packed else MASK_BYTES * num_tokens * self.length
        return replace(taken, activations=taken.activations + mask)


def held_model(config: Config, role: Role, world_size: int) -> HeldModel:
    """The model of a role that works in micro-batches, in a pool of so many processes. Raises ShapeUnknown."""
    spec = ROLE_SPECS[role]
    shape = shape_of(config, role)
    fsdp = config.at(spec.fsdp) if spec.fsdp else FsdpConfig()
    sharding = fsdp if isinstance(fsdp, FsdpConfig) else FsdpConfig(param_offload=fsdp.param_offload)
    length = config.data.max_prompt_length + config.data.max_response_length
    return HeldModel(
        shape,
        shape.num_scalar_head_params if spec.has_scalar_head else shape.num_params,
        num_shards=world_size if sharding.fsdp_size == -1 else sharding.fsdp_size,
        logit_share=Fraction(0 if spec.has_scalar_head else config.data.max_response_length, length),
        packed=spec.can_pack and config.at(spec.model).use_remove_padding,
        checkpointing=spec.is_trained and config.at(spec.model).enable_gradient_checkpointing,
        trained=spec.is_trained,
        offload=sharding,
    )


def _as_written(config: Config, role: Role, operation: Operation, keys: MicroBatchKeys) -> MicroBatch:
    """As the keys have it. A size that they leave open is the largest that would be chosen."""
    by_tokens, rows = config.at(keys.by_tokens), config.at(keys.rows)
    return MicroBatch(
        keys,
        rows=None if by_tokens else rows,
        tokens=config.at(keys.tokens) if by_tokens else max(MOST_TOKENS, _length(config, role)),
        is_chosen=not by_tokens and rows is None,
        recomputes=config.at(ROLE_SPECS[role].model).enable_gradient_checkpointing if operation.trains else None,
    )


def _generation_memory(config: Config, plan: Plan, role: Role, limit: int | None, room: int | None) -> RoleMemory:
    """The engine takes a part of the GPU for weights and cache, and at most the same part of what is free for the
    cache."""
    keys = config.actor_rollout_ref.rollout
    shape = shape_of(config, role)
    num_rows = min(_rows(config, plan, role, config.data.train_batch_size), keys.max_num_seqs)
    weights = rollout_weight_bytes(shape, keys.tensor_model_parallel_size)
    return rollout_role(
        shape,
        tensor_parallel=keys.tensor_model_parallel_size,
        num_sequences=num_rows,
        sequence_tokens=_length(config, role),
        prefill_tokens=min(num_rows * config.data.max_prompt_length, keys.max_num_batched_tokens),
        cache_bytes=None
        if limit is None or room is None
        else cache_room(limit, room - weights, weights, keys.gpu_memory_utilization),
        free_cache=keys.free_cache_engine,
    )


def shape_of(config: Config, role: Role) -> ModelShape:
    """The shape of a role's model. Raises ShapeUnknown."""
    model = config.at(ROLE_SPECS[role].model)
    return read_shape(model.path, model.override_config if isinstance(model, PolicyModelConfig) else None)


def _length(config: Config, role: Role) -> int:
    """Tokens of the longest row that a role reads."""
    whole = config.data.max_prompt_length + config.data.max_response_length
    key = ROLE_SPECS[role].max_length
    return min(whole, config.at(key) or whole) if key is not None else whole


def _rows(config: Config, plan: Plan, role: Role, num_prompts: int) -> int:
    """Sequences on one GPU, or on a group of tensor-parallel ones."""
    return -(-num_prompts * config.actor_rollout_ref.rollout.n // data_parallel_size(config, plan, role))
