"""The memory estimate: how many bytes every role and every pool need on one GPU, and how large
micro-batches are.

Owns the formulas, which docs/memory.md shows. Chooses every micro-batch size that the config does
not set, and whether activations are kept. The choice is made once, here, from the GPU's memory:
`plan` shows it, and the workers use it. A plan that does not fit is a warning and never stops a
run.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from rolepool.config import Config
from rolepool.config.model_files import ModelShape, ShapeUnknown, read_shape
from rolepool.config.model_keys import FsdpConfig
from rolepool.placement.parallel import ParallelDims
from rolepool.placement.plan import Plan, ResourcePool
from rolepool.placement.roles import ROLE_SPECS, MicroBatchKeys, Role, longest_row, model_of
from rolepool.placement.weight_ways import sends_changes, weight_way

GIB = 2**30
BF16 = 2
FP32 = 4
LOGITS_AT_ONCE = 2**28
"""Most logits that exist at the same time: enough to keep a GPU busy, and small compared with
activations."""
PROCESS_OVERHEAD_BYTES = int(1.0 * GIB)
"""Memory of a process in addition to torch's tensors: CUDA context, code, communication buffers,
fragmentation."""
MOST_TOKENS = 16_384
"""Tokens of a micro-batch whose size the config does not set, if they fit: enough to keep a GPU
busy."""
TOKENS_STEP = 1024
"""The sizes that are tried differ by this many tokens."""
USABLE = 0.8
"""The part of the free memory that a micro-batch may use. The rest is for what the formulas do not
count and for fragmentation."""
MASK_BYTES = 3
"""For each pair of tokens of a padded row: a boolean, and the 16-bit number that it becomes."""


# Micro-batches


@dataclass(frozen=True)
class MicroBatch:
    """How an operation splits its rows: by a number of rows, or else by tokens."""

    keys: MicroBatchKeys
    rows: int | None
    tokens: int
    is_chosen: bool
    """Whether the size was chosen here because the config does not set it."""
    recomputes: bool | None
    """Whether the backward pass recomputes activations; None if there is no backward pass."""

    def most_rows(self, num_rows: int, length: int) -> int:
        """Rows of the largest micro-batch if all rows have `length` tokens. Under a token limit all
        are about equal."""
        if self.rows is not None:
            return min(self.rows, num_rows)
        rows_that_fit = max(1, self.tokens // length)
        num_micro_batches = -(-num_rows // rows_that_fit)
        return -(-num_rows // num_micro_batches)


def default_micro_batches(config: Config, role: Role) -> dict[str, MicroBatch]:
    """The micro-batches of each operation of a role as the config sets them; a size that is not set
    is the largest."""
    sizes: dict[str, MicroBatch] = {}
    for operation, keys in ROLE_SPECS[role].batched_in(config):
        rows: int | None = None
        if config.at(keys.by_tokens):
            tokens: int = config.at(keys.tokens)
            is_chosen = False
        else:
            rows = config.at(keys.rows)
            tokens = max(MOST_TOKENS, longest_row(config, role))
            is_chosen = rows is None
        recomputes: bool | None = None
        if operation.trains:
            recomputes = config.at(ROLE_SPECS[role].model).enable_gradient_checkpointing
        sizes[operation.name] = MicroBatch(
            keys=keys,
            rows=rows,
            tokens=tokens,
            is_chosen=is_chosen,
            recomputes=recomputes,
        )
    return sizes


# One role


@dataclass(frozen=True)
class RoleMemory:
    """A role's bytes on one GPU while it computes, and the bytes that stay while another role of
    the pool computes."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    idle: int = 0

    @property
    def working(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.kv_cache
            + self.activations
            + self.logits
        )


class BackwardCopies(NamedTuple):
    """Bytes of 16-bit copies of weights, and of the gradients of one layer, at three moments of a
    backward pass."""

    in_head: int
    in_last: int
    """In the last layer, which is the first one whose backward pass runs."""
    in_other: int
    """In the other layers."""


@dataclass(frozen=True)
class HeldModel:
    """A model as a role holds it on one GPU, and the memory and the choice of its micro-batches."""

    shape: ModelShape
    num_params: int
    num_shards: int
    length: int = 1
    """Tokens of the longest row."""
    logit_share: Fraction = Fraction(0)
    """The part of a micro-batch's tokens that have logits."""
    packed: bool = False
    trained: bool = False
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Says what is moved to host memory while another role computes."""

    @property
    def loaded(self) -> RoleMemory:
        """Memory before a micro-batch starts: sharded weights, in fp32 with two Adam states if the
        model is trained, in 16 bits otherwise."""
        if self.trained:
            weights = FP32 * self.num_params // self.num_shards
            optimizer = 2 * FP32 * self.num_params // self.num_shards
        else:
            weights = BF16 * self.num_params // self.num_shards
            optimizer = 0
        idle = 0
        if not self.fsdp.param_offload:
            idle += weights
        if not self.fsdp.optimizer_offload:
            idle += optimizer
        return RoleMemory(weights=weights, optimizer=optimizer, idle=idle)

    @property
    def outside_params(self) -> int:
        """Parameters that are in no layer: embedding, last norm and head, which are gathered
        together."""
        return self.num_params - self.shape.num_layers * self.shape.layer_params

    @property
    def outside_copy_bytes(self) -> int:
        """16-bit weights of what is in no layer. They exist during the whole pass."""
        return BF16 * self.outside_params

    @property
    def layer_copy_bytes(self) -> int:
        """16-bit weights of one layer."""
        return BF16 * self.shape.layer_params

    @property
    def gathered_bytes(self) -> int:
        """16-bit weights in a forward pass: those outside of the layers, the current layer, and the
        buffer that a layer is gathered into."""
        return self.outside_copy_bytes + 2 * self.layer_copy_bytes

    @property
    def gathering_bytes(self) -> int:
        """The most 16-bit weights of a sharded model that a forward pass starts with.

        The buffer into which the weights outside of the layers were gathered still exists when the
        first layer has its weights.
        """
        return 2 * (self.outside_copy_bytes + self.layer_copy_bytes)

    @property
    def layer_activation_bytes(self) -> int:
        """What one layer keeps of a token for its backward pass, in 16 bits: the inputs of norms,
        projections and MLP.

        Layers of packed rows are compiled and recompute some of it; for other rows, norms also keep
        fp32 inputs.
        """
        shape = self.shape
        if self.packed:
            width = 4 * shape.hidden_size + shape.attention_width + 3 * shape.mlp_width
        else:
            width = 8 * shape.hidden_size + shape.attention_width + 4 * shape.mlp_width
        return BF16 * width

    def training(self, num_tokens: int, *, recomputes: bool, accumulates: bool) -> RoleMemory:
        """The peak of an update. Weights, gradients and Adam states are fp32 and sharded; compute
        is in 16 bits.

        Sharded layers are gathered again for their backward pass; on one GPU each layer keeps its
        16-bit copy for it. With `accumulates` a mini-batch has several micro-batches, and gradients
        of earlier ones exist all the time.
        """
        shape = self.shape
        loaded = self.loaded
        num_logit_tokens = int(num_tokens * self.logit_share)
        all_gradients = loaded.weights
        earlier = all_gradients if accumulates else 0

        # After the forward pass: all layers' activations, or only their inputs; and those of the
        # last norm, which is not compiled: its input in fp32, and 16-bit outputs before and after
        # its weights.
        one_layer = num_tokens * self.layer_activation_bytes
        if recomputes:
            kept_of_layer = num_tokens * BF16 * shape.hidden_size
        else:
            kept_of_layer = one_layer
        kept = shape.num_layers * kept_of_layer
        kept += num_tokens * (FP32 + 2 * BF16) * shape.hidden_size
        in_layer = num_tokens * BF16 * (2 * shape.hidden_size + shape.mlp_width)
        recomputed = one_layer if recomputes else 0

        head = 0
        head_gradient = 0
        if num_logit_tokens:
            head = self._head_bytes(num_logit_tokens)
            head_gradient = BF16 * shape.embedding_params

        def moment(copies: int, gradients: int, activations: int, logits: int = 0) -> RoleMemory:
            return replace(
                loaded,
                weights=loaded.weights + copies,
                gradients=gradients,
                activations=activations,
                logits=logits,
            )

        of_outside = FP32 * self.outside_params // self.num_shards
        all_but_outside = max(earlier, all_gradients - of_outside)
        last_gradients = all_but_outside + self._outside_gradient_bytes(head_gradient)
        in_last = kept + in_layer + recomputed
        in_first = one_layer + in_layer
        copies = self._copies_in_backward(recomputes=recomputes)
        moments = [
            # The backward pass of the head, of the last layer, of the first layer, and then the
            # gradients of what is outside of the layers.
            moment(copies.in_head, earlier, kept, head),
            moment(copies.in_last, earlier, in_last, head_gradient),
            moment(copies.in_other, all_but_outside, in_first, head_gradient),
            moment(0, last_gradients, 0),
        ]
        if self.num_shards > 1:
            # The layer before the last one, and the start of the next forward pass.
            before_last = in_last - kept_of_layer
            moments.append(moment(copies.in_other, earlier, before_last, head_gradient))
            moments.append(moment(self.gathering_bytes, earlier, 0))
        return max(moments, key=lambda memory: memory.working)

    def _head_bytes(self, num_logit_tokens: int) -> int:
        """What the backward pass of the head needs: the head's gradient in fp32; then either logits
        (their gradients replace them) or the head's gradient in 16 bits; hidden states and their
        gradients."""
        head_params = self.shape.embedding_params
        logits = max(self._logit_bytes(num_logit_tokens), BF16 * head_params)
        hidden = 2 * BF16 * num_logit_tokens * self.shape.hidden_size
        return FP32 * head_params + logits + hidden

    def _copies_in_backward(self, *, recomputes: bool) -> BackwardCopies:
        """The copies of weights, and the gradients of a layer, at moments of a backward pass."""
        outside = self.outside_copy_bytes
        layer = self.layer_copy_bytes
        fp32_of_layer = FP32 * self.shape.layer_params
        if self.num_shards > 1:
            # The next layer is gathered during a backward pass; gradients of the layer exist in 16
            # bits, and those of the layer before, while ranks add them up, in fp32.
            in_last = outside + 3 * layer
            return BackwardCopies(
                in_head=outside + layer,
                in_last=in_last,
                in_other=in_last + fp32_of_layer,
            )
        # The copies outside of the layers are freed after the head's backward pass, and those of a
        # layer after its own. Its gradients become fp32.
        if recomputes:
            in_head = self.gathered_bytes
            kept_copies = layer
        else:
            in_head = BF16 * self.num_params
            kept_copies = self.shape.num_layers * layer
        return BackwardCopies(
            in_head=in_head,
            in_last=kept_copies + fp32_of_layer,
            in_other=layer + fp32_of_layer,
        )

    def _outside_gradient_bytes(self, head_gradient: int) -> int:
        """The most that the last gradients need, those of embedding, last norm and head.

        They are computed in 16 bits and then become fp32. If the model is sharded, ranks add them
        up, and each keeps its shard of the sum.
        """
        in_16_bits = BF16 * self.outside_params
        in_fp32 = FP32 * self.outside_params
        most = in_16_bits + in_fp32
        if self.num_shards > 1:
            of_embedding = BF16 * self.shape.embedding_params
            # The 16-bit weights are still there, and so are the fp32 gradients of the first layer.
            before = self.outside_copy_bytes + FP32 * self.shape.layer_params
            most = max(most, before + head_gradient + of_embedding)
            most = max(most, in_fp32 + in_fp32 // self.num_shards)
        return most

    def scoring(self, num_tokens: int) -> RoleMemory:
        """The peak of a forward pass: in the MLP of a layer, or at the logits after the last layer.
        With few tokens it is at the start, when the weights of a sharded model are gathered."""
        shape = self.shape
        loaded = self.loaded
        num_logit_tokens = int(num_tokens * self.logit_share)
        is_sharded = self.num_shards > 1
        if self.fsdp.optimizer_offload:
            loaded = replace(loaded, optimizer=0)
        in_pass = loaded
        if self.trained or is_sharded:
            weights = loaded.weights + self.gathered_bytes
            in_pass = replace(loaded, weights=weights)
        features_in_mlp = 2 * shape.hidden_size + 3 * shape.mlp_width
        num_hidden_states = num_tokens + num_logit_tokens
        moments = [
            replace(
                in_pass,
                activations=BF16 * num_tokens * features_in_mlp,
            ),
            replace(
                in_pass,
                activations=BF16 * num_hidden_states * shape.hidden_size,
                logits=self._logit_bytes(num_logit_tokens),
            ),
        ]
        if is_sharded:
            weights = loaded.weights + self.gathering_bytes
            moments.append(replace(loaded, weights=weights))
        return max(moments, key=lambda memory: memory.working)

    def _logit_bytes(self, num_logit_tokens: int) -> int:
        num_logits = num_logit_tokens * self.shape.vocab_size
        return BF16 * min(num_logits, LOGITS_AT_ONCE)

    def memory(self, size: MicroBatch, num_rows: int, num_tokens: int) -> RoleMemory:
        """The peak of an operation on `num_rows` rows, whose micro-batches have up to `num_tokens`
        tokens."""
        if size.recomputes is None:
            memory = self.scoring(num_tokens)
        else:
            memory = self.training(
                num_tokens,
                recomputes=size.recomputes,
                accumulates=num_tokens < num_rows * self.length,
            )
        if self.packed:
            return memory
        mask = MASK_BYTES * num_tokens * self.length
        return replace(memory, activations=memory.activations + mask)

    def choose(self, size: MicroBatch, num_rows: int, room: int | None) -> MicroBatch:
        """The size in the config, or the largest that fits if it is not set. Activations are kept
        if they fit."""

        def fits(size: MicroBatch) -> bool:
            """Whether micro-batches with any mix of lengths fit."""
            if room is None:
                return True
            loaded = self.loaded.working
            if room <= loaded:
                return False
            if size.rows is None:
                most_tokens = size.tokens
            else:
                most_tokens = size.rows * self.length
            num_tokens = min(num_rows * self.length, most_tokens)
            peak = self.memory(size, num_rows, num_tokens).working
            return peak - loaded <= USABLE * (room - loaded)

        if size.is_chosen:
            # From large to small, so that those that fit come last.
            candidates: list[MicroBatch] = []
            for tokens in range(size.tokens, self.length, -TOKENS_STEP):
                candidates.append(replace(size, tokens=tokens))
            smallest = replace(size, tokens=self.length)
            first_fitting = bisect_left(candidates, True, key=fits)
            # If nothing fits, the smallest is tried.
            if first_fitting < len(candidates):
                size = candidates[first_fitting]
            else:
                size = smallest
        kept = replace(size, recomputes=False)
        # The formulas for kept activations were measured with packed rows only.
        if size.recomputes and self.packed and fits(kept):
            return kept
        return size


def cache_room(share_bytes: int, free_bytes: int, weights_bytes: int, utilization: float) -> int:
    """Most bytes of the KV cache. Weights and cache may use `utilization` of the process's share of
    the GPU, and the cache at most that part of the free memory, because prefill needs memory
    too."""
    beside_weights = share_bytes * utilization - weights_bytes
    of_free = free_bytes * utilization
    return max(0, int(min(beside_weights, of_free)))


def generation_memory(
    config: Config,
    shape: ModelShape,
    dims: ParallelDims,
    num_sequences: int,
    limit: int | None,
    room: int | None,
) -> RoleMemory:
    """16-bit weights and a KV cache for all sequences at once, or for as many as fit, at least one.

    Tensor parallelism splits the layers; embedding and head are whole on every rank. If there are
    fewer key-value heads than tensor-parallel ranks, several ranks hold the same head. The peak is
    in an MLP of the prefill, or at the logits of the first tokens. The logits of later tokens stay
    with the CUDA graph of the decode step, if there is one.
    """
    keys = config.actor_rollout_ref.rollout
    prompt_tokens = config.data.max_prompt_length
    num_ranks = dims.tp
    layers = shape.num_layers * shape.layer_params
    weights = BF16 * (shape.num_params - layers + layers // num_ranks)
    # Keys and values, all layers.
    token_bytes = 2 * BF16 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    sequence_bytes = (prompt_tokens + config.data.max_response_length) * token_bytes
    one_sequence = sequence_bytes // min(num_ranks, shape.num_kv_heads)
    kv_cache = num_sequences * one_sequence
    if limit is not None and room is not None:
        most = cache_room(limit, room - weights, weights, keys.gpu_memory_utilization)
        kv_cache = min(kv_cache, max(one_sequence, most))
    logits = BF16 * num_sequences * shape.vocab_size
    # The native engine does not capture the decode steps of tensor-parallel ranks.
    has_graphs = num_ranks == 1 and not keys.enforce_eager
    # A layer's gated features still exist when the next layer computes its own.
    inner = (shape.attention_width + 4 * shape.mlp_width) // num_ranks
    prefill_tokens = min(num_sequences * prompt_tokens, keys.max_num_batched_tokens)
    in_mlp = BF16 * prefill_tokens * (2 * shape.hidden_size + inner)
    idle = weights
    if has_graphs:
        idle += logits
    if not keys.free_cache_engine:
        idle += kv_cache
    return RoleMemory(
        weights=weights,
        kv_cache=kv_cache,
        activations=max(in_mlp, logits),
        logits=logits,
        idle=idle,
    )


def shape_of(config: Config, role: Role) -> ModelShape:
    """The shape of a role's model. Raises ShapeUnknown."""
    return read_shape(*model_of(config, role))


def held_model(config: Config, role: Role, dims: ParallelDims) -> HeldModel:
    """The model of a role that computes in micro-batches. Raises ShapeUnknown."""
    spec = ROLE_SPECS[role]
    shape = shape_of(config, role)
    if spec.fsdp:
        fsdp = FsdpConfig(**config.at(spec.fsdp).model_dump())
    else:
        fsdp = FsdpConfig()
    if spec.has_scalar_head:
        num_params = shape.num_scalar_head_params
        num_logit_tokens = 0
    else:
        num_params = shape.num_params
        num_logit_tokens = config.data.max_response_length
    num_row_tokens = config.tokens_of_longest_row
    return HeldModel(
        shape,
        num_params,
        num_shards=dims.shard,
        length=longest_row(config, role),
        logit_share=Fraction(num_logit_tokens, num_row_tokens),
        packed=spec.can_pack and config.at(spec.model).use_remove_padding,
        trained=spec.is_trained,
        fsdp=fsdp,
    )


def _role_memory(
    config: Config,
    plan: Plan,
    role: Role,
    limit: int | None,
    room: int | None,
) -> tuple[RoleMemory, dict[str, MicroBatch]]:
    """The memory of a role and its micro-batches, in a pool that has `limit` bytes of each GPU,
    `room` of them free.

    Without room it is the least memory that the role needs. Raises ShapeUnknown.
    """
    spec = ROLE_SPECS[role]
    rollout = config.actor_rollout_ref.rollout
    dims = plan.dims_of(config, role)
    batch_rows = -(-config.rows_of_step // dims.dp)
    if not spec.batched:
        generation_rows = -(-config.rows_of_generation // dims.dp)
        memory = generation_memory(
            config,
            shape_of(config, role),
            dims,
            num_sequences=min(generation_rows, rollout.max_num_seqs),
            limit=limit,
            room=room,
        )
        return memory, {}
    held = held_model(config, role, dims)
    kept_bytes = _kept_bytes(config, plan, role, held) if spec.sends_weights else 0
    if room is not None:
        room -= kept_bytes
    memories: list[RoleMemory] = []
    sizes = default_micro_batches(config, role)
    for operation, size in sizes.items():
        num_rows = batch_rows
        if size.recomputes is not None:
            rows_of_mini_batch = config.rows_of_mini_batch(config.at(spec.section))
            num_rows = -(-rows_of_mini_batch // dims.dp)
        chosen = held.choose(size, num_rows, room)
        num_tokens = held.length * chosen.most_rows(num_rows, held.length)
        memories.append(held.memory(chosen, num_rows, num_tokens))
        sizes[operation] = chosen
    largest = max(memories, key=lambda memory: memory.working)
    with_kept = replace(
        largest,
        weights=largest.weights + kept_bytes,
        idle=largest.idle + kept_bytes,
    )
    return with_kept, sizes


def _kept_bytes(config: Config, plan: Plan, role: Role, held: HeldModel) -> int:
    """The copy of what a rank of the actor sent last, if it sends only changes. The ranks keep one
    copy of the model together."""
    on_gpus = plan.device != "cpu"
    way = weight_way(config, plan, on_gpus=on_gpus)
    if not sends_changes(config, way):
        return 0
    return BF16 * held.num_params // plan.pool_of(role).world_size


SHARED_MEMORY = Path("/dev/shm")
SNAPSHOT_BYTES_PER_PARAM = 12
"""A weight and AdamW's two moments, in float32."""


def snapshot_bytes(config: Config, plan: Plan) -> int:
    """The most shared memory that a node needs for the snapshots of all roles that are trained. 0
    if none are taken; a role whose shape is not known counts as 0, too.

    A node keeps the last two snapshots of its own ranks and of those of the node before it. Before
    a snapshot is loaded, a node of the role gets the rest of it.
    """
    if config.trainer.snapshot_freq <= 0:
        return 0
    # The nodes in the order in which they have snapshots of the one before; the first one has those
    # of the last one.
    nodes: dict[int, None] = {}
    for pool in plan.pools.values():
        for slot in pool.slots:
            nodes[slot.node] = None
    needed: Counter[int] = Counter()
    for role in plan.roles:
        if not ROLE_SPECS[role].is_trained:
            continue
        with suppress(ShapeUnknown):
            dims = plan.dims_of(config, role)
            held = held_model(config, role, dims)
            shards_of_nodes = _snapshot_shards(plan.pool_of(role), held.num_shards, list(nodes))
            for node, num_shards in shards_of_nodes.items():
                bytes_of_all = SNAPSHOT_BYTES_PER_PARAM * held.num_params * num_shards
                needed[node] += bytes_of_all // held.num_shards
    return max(needed.values(), default=0)


def _snapshot_shards(
    pool: ResourcePool,
    num_shards: int,
    nodes: Sequence[int],
) -> dict[int, int]:
    """The most shards of snapshots that each node has at a time, for a role in this pool."""
    # Replicas write nothing.
    num_written = Counter(slot.node for slot in pool.slots[:num_shards])
    most: dict[int, int] = {}
    for index, node in enumerate(nodes):
        before = nodes[index - 1]
        num_kept = num_written[node]
        if before != node:
            num_kept += num_written[before]
        most[node] = 2 * num_kept
        if node in pool.counts_by_node:
            most[node] += num_shards - num_kept
    return most


# All pools


@dataclass(frozen=True)
class PoolMemory:
    """The peak memory of a pool's process."""

    roles: dict[Role, RoleMemory]
    peak: int
    peak_role: Role
    least: int
    """The peak with the smallest micro-batches, recomputed activations and a cache for one
    sequence."""
    limit: int | None
    """The pool's share of the GPU; None if the GPU's memory is not known."""

    @property
    def excess(self) -> int:
        """Bytes by which the peak is over the limit."""
        if self.limit is None:
            return 0
        return max(0, self.peak - self.limit)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of each pool, the micro-batches of each operation, and why a role's memory is not
    known."""

    pools: dict[str, PoolMemory]
    micro_batches: dict[str, MicroBatch]
    unknown: dict[Role, str]

    @property
    def excess(self) -> int:
        """The most bytes by which a pool is over its limit."""
        return max((pool.excess for pool in self.pools.values()), default=0)


def estimate_memory(config: Config, plan: Plan, gpu_memory_bytes: int | None) -> MemoryEstimate:
    """The memory of every pool. `gpu_memory_bytes` is that of a whole GPU; a pool has its share of
    it. If it is None, micro-batches are chosen for a GPU with enough memory."""
    estimate = MemoryEstimate({}, {}, {})
    for name, pool in plan.pools.items():
        limit: int | None = None
        if gpu_memory_bytes is not None:
            limit = int(gpu_memory_bytes * pool.share)
        # First what each role needs at least, because the room of a role is what the others leave.
        least: dict[Role, RoleMemory] = {}
        for role in pool.roles:
            estimate.micro_batches.update(default_micro_batches(config, role))
            try:
                least[role], _ = _role_memory(config, plan, role, limit, room=0)
            except ShapeUnknown as reason:
                estimate.unknown[role] = str(reason)
        idle = sum(memory.idle for memory in least.values())
        chosen: dict[Role, RoleMemory] = {}
        for role, memory in least.items():
            room: int | None = None
            if limit is not None:
                idle_of_others = idle - memory.idle
                room = limit - PROCESS_OVERHEAD_BYTES - idle_of_others
            chosen[role], sizes = _role_memory(config, plan, role, limit, room)
            estimate.micro_batches.update(sizes)
        # If the memory of a role is not known, that of the pool is not, either.
        if chosen.keys() == set(pool.roles):
            peaks = peak_by_role(chosen)
            peak_role = max(peaks, key=lambda role: peaks[role])
            estimate.pools[name] = PoolMemory(
                chosen,
                peak=peaks[peak_role],
                peak_role=peak_role,
                least=max(peak_by_role(least).values()),
                limit=limit,
            )
    return estimate


def peak_by_role(roles: Mapping[Role, RoleMemory]) -> dict[Role, int]:
    """Bytes of a pool's process while each role computes: its working bytes and the idle bytes of
    the others."""
    idle = sum(memory.idle for memory in roles.values())
    peaks: dict[Role, int] = {}
    for role, memory in roles.items():
        idle_of_others = idle - memory.idle
        peaks[role] = PROCESS_OVERHEAD_BYTES + memory.working + idle_of_others
    return peaks
