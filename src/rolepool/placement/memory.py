"""How many bytes a role takes on one GPU.

Owns the formulas, as pure functions of shapes and counts; docs/placement.md derives them. `estimate` applies them to a
config and a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from rolepool.config.model_keys import FsdpConfig
from rolepool.placement.models import ModelShape

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
class HeldModel:
    """A model as a role holds it on one GPU, and what micro-batches of some tokens take."""

    shape: ModelShape
    num_params: int
    num_shards: int
    logit_share: Fraction = Fraction(0)
    """The part of a micro-batch's tokens that have logits."""
    packed: bool = False
    checkpointing: bool = False
    """Whether the backward pass recomputes activations."""
    trained: bool = False
    offload: FsdpConfig = field(default_factory=FsdpConfig)
    """What is in host memory while another role is active."""

    @property
    def resting(self) -> RoleMemory:
        """What is on the GPU before a micro-batch starts: sharded weights, in fp32 with two Adam states if the model is
        trained, in 16 bits otherwise."""
        weights = (FP32 if self.trained else BF16) * self.num_params // self.num_shards
        optimizer = 2 * FP32 * self.num_params // self.num_shards if self.trained else 0
        idle = (0 if self.offload.param_offload else weights) + (0 if self.offload.optimizer_offload else optimizer)
        return RoleMemory(weights=weights, optimizer=optimizer, idle=idle)

    def training(self, num_tokens: int, *, accumulates: bool) -> RoleMemory:
        """What the worst moment of an update takes. Weights, gradients and Adam states are fp32 and sharded; compute is
        in 16 bits.

        Sharded layers are gathered again for their backward pass; on one GPU each layer keeps its 16-bit copy for it.
        With `accumulates` a mini-batch has several micro-batches, and gradients of earlier ones are there all the time.
        """
        shape, num_logit_tokens = self.shape, int(num_tokens * self.logit_share)
        at_rest = self.resting
        gradients = weights = at_rest.weights
        before = weights if accumulates else 0
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
            # The embedding's gradient: whole and in fp32, before it is reduced over ranks and added to earlier ones.
            replace(at_rest, gradients=gradients + outside + (outside_shard if accumulates else 0)),
        )
        return max(moments, key=lambda moment: moment.working)

    def scoring(self, num_tokens: int) -> RoleMemory:
        """A forward pass, whose worst moment is in the MLP of a layer, or at the logits after the last layer."""
        shape, num_logit_tokens = self.shape, int(num_tokens * self.logit_share)
        at_rest = self.resting
        gathered = self.gathered_bytes if self.trained or self.num_shards > 1 else 0
        in_pass = replace(
            at_rest,
            weights=at_rest.weights + gathered,
            optimizer=0 if self.offload.optimizer_offload else at_rest.optimizer,
        )
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


def rollout_weight_bytes(shape: ModelShape, tensor_parallel: int) -> int:
    """16-bit weights. Tensor parallelism splits the layers and leaves embedding and head whole."""
    layers = shape.num_layers * shape.layer_params
    return BF16 * (shape.num_params - layers + layers // tensor_parallel)


def cache_room(share_bytes: int, free_bytes: int, weights_bytes: int, utilization: float) -> int:
    """Bytes that the cache may take: weights and cache have a part of the process's share of the GPU, and the cache at
    most the same part of what is free, because prefill needs room too."""
    return max(0, int(min(share_bytes * utilization - weights_bytes, free_bytes * utilization)))


def rollout_role(
    shape: ModelShape,
    *,
    tensor_parallel: int,
    num_sequences: int,
    sequence_tokens: int,
    prefill_tokens: int,
    cache_bytes: int | None,
    free_cache: bool,
) -> RoleMemory:
    """16-bit weights and a KV cache for all sequences at once, or for as many as `cache_bytes` holds, at least one. If
    there are fewer key-value heads than tensor-parallel ranks, several ranks hold the same one.

    The worst moment is in an MLP of the prefill, or at the logits of the first tokens. The logits of later tokens stay
    with the CUDA graph of the decode step.
    """
    weights = rollout_weight_bytes(shape, tensor_parallel)
    one_sequence = sequence_tokens * shape.kv_bytes_per_token // min(tensor_parallel, shape.num_kv_heads)
    kv_cache = num_sequences * one_sequence
    if cache_bytes is not None:
        kv_cache = min(kv_cache, max(one_sequence, cache_bytes))
    logits = BF16 * num_sequences * shape.vocab_size
    # The gated features of the previous layer are still there when a layer makes its own.
    inner = attention_width(shape) + 4 * mlp_width(shape)
    prefill = BF16 * prefill_tokens * (2 * shape.hidden_size + inner // tensor_parallel)
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
