"""Triton kernels: what a GPU computes between matrix products.

A captured step is used longer than the cache that it was captured with, so kernels find the cache
through `place`: a tensor with the addresses of keys and values, the number of slots and their
length. A row at position -1 is not in use: it does not read or write the cache. Arithmetic is in
float32. Imported only on machines with a GPU.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Where = tuple[Tensor, Tensor, Tensor, int]
"""Where tokens are in the cache: the position and the slot of each, the cache's `place`, and the
layer's index."""
_SPLITS = (1, 4, 16)
"""Numbers of parts that a row's tokens may be split into; few, because each is a kernel to
compile."""
_NUM_PROGRAMS = 256
"""Number of programs that keep a GPU busy; if there are fewer rows, rows are split."""
_LOG2_E = 1.4426950408889634
"""The logarithm of e to base 2, because kernels use powers of 2."""


class Heads(NamedTuple):
    """The heads of all layers, and the tables of rotary embedding: (positions, head_dim), in which
    the lower half of the sines is negated. `counters` are for `attend` alone."""

    num_queries: int
    num_keys: int
    cos: Tensor
    signed_sin: Tensor
    counters: Tensor


def make_counters(device: torch.device) -> Tensor:
    """How many parts of a row and its key head are finished: 0 between launches."""
    return torch.zeros(_NUM_PROGRAMS, dtype=torch.int32, device=device)


HeadNorms = tuple[Tensor, Tensor, float]
"""RMS norms of queries and keys, over each head: the two weights, and epsilon."""


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_store(
    qkv_ptr,
    cos_ptr,
    signed_sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    positions_ptr,
    slots_ptr,
    place_ptr,
    layer,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """For one token: norm and rotate its queries and keys in place, and write keys and values to
    the cache."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    # Addresses are multiples of 16 bytes.
    keys = tl.load(place_ptr).to(qkv_ptr.dtype)
    keys = tl.multiple_of(keys, 16)
    values = tl.load(place_ptr + 1).to(qkv_ptr.dtype)
    values = tl.multiple_of(values, 16)
    num_slots = tl.load(place_ptr + 2)
    length = tl.load(place_ptr + 3)
    first_line = (layer * num_slots + slot) * NUM_KV_HEADS * length + position
    row = qkv_ptr + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM

    # Queries and keys: the lower half of a head is rotated with its upper half.
    d = tl.arange(0, HALF_PAD)[None, :]
    angle = tl.maximum(position, 0) * HEAD_DIM + HALF + d
    cos = tl.load(cos_ptr + angle, mask=d < HALF).to(tl.float32)
    sin = tl.load(signed_sin_ptr + angle, mask=d < HALF).to(tl.float32)
    h = tl.arange(0, HEADS_PAD)[:, None]
    is_turned = (h < NUM_HEADS + NUM_KV_HEADS) & (d < HALF)
    lower_ptr = row + h * HEAD_DIM + d
    upper_ptr = lower_ptr + HALF
    lower = tl.load(lower_ptr, mask=is_turned, other=0.0).to(tl.float32)
    upper = tl.load(upper_ptr, mask=is_turned, other=0.0).to(tl.float32)
    if HAS_NORMS:
        square = tl.sum(lower * lower + upper * upper, axis=1, keep_dims=True)
        factor = tl.rsqrt(square / HEAD_DIM + eps)
        is_query = is_turned & (h < NUM_HEADS)
        is_key = is_turned & (h >= NUM_HEADS)
        dtype = qkv_ptr.dtype.element_ty
        lower_weight = tl.load(query_norm_ptr + d + 0 * h, mask=is_query, other=0.0)
        lower_weight += tl.load(key_norm_ptr + d + 0 * h, mask=is_key, other=0.0)
        upper_weight = tl.load(query_norm_ptr + HALF + d + 0 * h, mask=is_query, other=0.0)
        upper_weight += tl.load(key_norm_ptr + HALF + d + 0 * h, mask=is_key, other=0.0)
        # Rounded like the output of a norm, before it is rotated.
        lower = (lower * factor * lower_weight.to(tl.float32)).to(dtype).to(tl.float32)
        upper = (upper * factor * upper_weight.to(tl.float32)).to(dtype).to(tl.float32)
    turned_lower = lower * cos - upper * sin
    turned_upper = upper * cos + lower * sin
    tl.store(lower_ptr, turned_lower, mask=is_turned)
    tl.store(upper_ptr, turned_upper, mask=is_turned)

    is_used = position >= 0
    is_stored = is_turned & (h >= NUM_HEADS) & is_used
    key_line = first_line + (h - NUM_HEADS) * length
    key_ptr = keys + key_line * HEAD_DIM + d
    tl.store(key_ptr, turned_lower, mask=is_stored)
    tl.store(key_ptr + HALF, turned_upper, mask=is_stored)

    # Values are stored as they are.
    h = tl.arange(0, KV_HEADS_PAD)[:, None]
    d = tl.arange(0, 2 * HALF_PAD)[None, :]
    is_value = (h < NUM_KV_HEADS) & (d < HEAD_DIM) & is_used
    source = (NUM_HEADS + NUM_KV_HEADS + h) * HEAD_DIM + d
    value = tl.load(row + source, mask=is_value)
    value_line = first_line + h * length
    value_ptr = values + value_line * HEAD_DIM + d
    tl.store(value_ptr, value, mask=is_value)


def rotate_and_store(
    qkv_thd: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    where: Where,
) -> None:
    """Norm queries and keys if there are norms, and rotate them by their positions, in place; store
    keys and values in the cache."""
    num_tokens, num_all, head_dim = qkv_thd.shape
    # Not read without norms, but a kernel needs some tensors.
    query_norm, key_norm, eps = norms or (heads.cos, heads.cos, 0.0)
    _rotate_and_store[(num_tokens,)](
        qkv_thd,
        heads.cos,
        heads.signed_sin,
        query_norm,
        key_norm,
        *where,
        eps,
        NUM_HEADS=heads.num_queries,
        NUM_KV_HEADS=heads.num_keys,
        HEAD_DIM=head_dim,
        HEADS_PAD=triton.next_power_of_2(num_all - heads.num_keys),
        KV_HEADS_PAD=triton.next_power_of_2(heads.num_keys),
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        HAS_NORMS=norms is not None,
    )


@triton.jit
def _rotated_heads(
    heads_ptr,
    d,
    is_number,
    cos,
    signed_sin,
    norm_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The heads at these addresses: normed if there is a norm, and rotated."""
    HALF: tl.constexpr = HEAD_DIM // 2
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    x = tl.load(heads_ptr + d, mask=is_number, other=0.0).to(tl.float32)
    x_partner = tl.load(heads_ptr + partner, mask=is_number, other=0.0).to(tl.float32)
    dtype = heads_ptr.dtype.element_ty
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / HEAD_DIM + eps)
        weight = tl.load(norm_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_ptr + partner, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        # Rounded like the output of a norm, before it is rotated.
        x = (x * factor * weight).to(dtype).to(tl.float32)
        x_partner = (x_partner * factor * partner_weight).to(dtype).to(tl.float32)
    return (x * cos + x_partner * signed_sin).to(dtype)


@triton.jit
def _joined_parts(
    parts_ptr,
    log_sums_ptr,
    head,
    d,
    is_head,
    HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The outputs of heads from those of their parts. They are read past the L1 cache, because
    other programs have just written them."""
    is_number = is_head[:, None] & (d < HEAD_DIM)[None, :]
    largest = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    output = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        place = head * SPLITS + split
        log_sum_ptr = log_sums_ptr + place
        log_sum = tl.load(log_sum_ptr, mask=is_head, other=-float("inf"), cache_modifier=".cg")
        part_ptr = parts_ptr + place[:, None] * HEAD_DIM + d[None, :]
        part = tl.load(part_ptr, mask=is_number, other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, log_sum)
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        weight = tl.exp2(log_sum - base)
        total = total * shrink + weight
        output = output * shrink[:, None] + part * weight[:, None]
        largest = new_largest
    # No part has a token if the row is not in use.
    divisor = tl.where(total > 0, total, 1.0)
    return output / divisor[:, None]


@triton.jit(do_not_specialize=["layer"])
def _attend(
    qkv_ptr,
    outputs_ptr,
    parts_ptr,
    log_sums_ptr,
    counters_ptr,
    cos_ptr,
    signed_sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    positions_ptr,
    slots_ptr,
    place_ptr,
    layer,
    window,
    scale,
    eps,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """One part of one row: all queries of a group with the keys that they share, each read once.
    The first part also stores the row's own key and value, and attends to them."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions_ptr + row)
    # The earlier tokens of this part. All parts but the last have whole blocks.
    end = tl.maximum(position, 0).to(tl.int32)
    start = tl.maximum(end + 1 - window, 0)
    tokens_of_part = tl.cdiv(end - start, SPLITS)
    share = tl.cdiv(tokens_of_part, BLOCK) * BLOCK
    start += split * share
    end = tl.minimum(start + share, end)

    # Where the keys and values of this head begin in the cache.
    num_slots = tl.load(place_ptr + 2)
    length = tl.load(place_ptr + 3)
    slot = tl.load(slots_ptr + row)
    line = ((layer * num_slots + slot) * NUM_KV_HEADS + kv_head) * length
    keys = tl.load(place_ptr).to(qkv_ptr.dtype)
    keys = tl.multiple_of(keys, 16) + line * HEAD_DIM
    values = tl.load(place_ptr + 1).to(qkv_ptr.dtype)
    values = tl.multiple_of(values, 16) + line * HEAD_DIM

    # The row's own queries, key and value.
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    is_number = (d < HEAD_DIM)[None, :]
    is_query = (g < GROUP)[:, None] & is_number
    heads = kv_head * GROUP + g
    row_ptr = qkv_ptr + row * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    own_value_ptr = row_ptr + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + d[None, :]
    own_value = tl.load(own_value_ptr, mask=is_number, other=0.0)
    angle = tl.maximum(position, 0) * HEAD_DIM + d[None, :]
    cos = tl.load(cos_ptr + angle, mask=is_number, other=0.0).to(tl.float32)
    signed_sin = tl.load(signed_sin_ptr + angle, mask=is_number, other=0.0).to(tl.float32)
    query = _rotated_heads(
        row_ptr + heads[:, None] * HEAD_DIM,
        d[None, :],
        is_query,
        cos,
        signed_sin,
        query_norm_ptr,
        eps,
        HEAD_DIM,
        HAS_NORMS,
    )
    own_key = _rotated_heads(
        row_ptr + (NUM_HEADS + kv_head) * HEAD_DIM,
        d[None, :],
        is_number,
        cos,
        signed_sin,
        key_norm_ptr,
        eps,
        HEAD_DIM,
        HAS_NORMS,
    )
    # A row that is not in use has no token at all.
    has_own = (split == 0) & (position >= 0)
    own_place = position * HEAD_DIM + d[None, :]
    tl.store(keys + own_place, own_key, mask=is_number & has_own)
    tl.store(values + own_place, own_value, mask=is_number & has_own)
    own_score = tl.sum(query.to(tl.float32) * own_key.to(tl.float32), axis=1) * scale
    largest = tl.where(has_own, own_score, -float("inf"))
    total = tl.zeros([GROUP_PAD], tl.float32) + tl.where(has_own, 1.0, 0.0)
    output = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    output += tl.where(has_own, own_value.to(tl.float32), 0.0)

    for first in range(start, end, BLOCK):
        t = first + tl.arange(0, BLOCK)
        is_inside = t < end
        is_seen = is_inside[:, None] & is_number
        lines = t[:, None] * HEAD_DIM
        key = tl.load(keys + lines + d[None, :], mask=is_seen, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(is_inside[None, :], score, -float("inf"))
        # What was added up so far is relative to the largest score so far.
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        shrink = tl.exp2(largest - new_largest)
        weight = tl.exp2(score - new_largest[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        value = tl.load(values + lines + d[None, :], mask=is_seen, other=0.0)
        weight = weight.to(value.dtype)
        output = output * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        largest = new_largest
    # No token is seen by a row that is not in use, or if there are more parts than blocks.
    divisor = tl.where(total > 0, total, 1.0)
    output = output / divisor[:, None]
    head = row * NUM_HEADS + heads
    output_ptr = outputs_ptr + head[:, None] * HEAD_DIM + d[None, :]
    if SPLITS == 1:
        tl.store(output_ptr, output, mask=is_query)
    else:
        place = head * SPLITS + split
        part_ptr = parts_ptr + place[:, None] * HEAD_DIM + d[None, :]
        tl.store(part_ptr, output, mask=is_query)
        log_sum = largest + tl.log2(total)
        tl.store(log_sums_ptr + place, log_sum, mask=g < GROUP)
        # Whoever finishes last joins the parts. First all threads of this program have stored, then
        # one of them counts, which publishes what they stored.
        tl.debug_barrier()
        counter_ptr = counters_ptr + row * NUM_KV_HEADS + kv_head
        num_before = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if num_before == SPLITS - 1:
            tl.store(counter_ptr, 0)  # for the next launch
            output = _joined_parts(
                parts_ptr, log_sums_ptr, head, d, g < GROUP, HEAD_DIM, GROUP_PAD, DIM_PAD, SPLITS
            )
            tl.store(output_ptr, output, mask=is_query)


def attend(
    qkv_bhd: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    where: Where,
    window: int,
    scale: float,
) -> Tensor:
    """Store the key and the value of one token of each row in the cache, and attend to the last
    `window` tokens of its slot, up to itself: (rows, heads * head_dim). Queries and keys are normed
    if there are norms, and rotated; `qkv_bhd` is not changed."""
    num_rows, _, head_dim = qkv_bhd.shape
    wanted = _NUM_PROGRAMS / (num_rows * heads.num_keys)
    num_splits = next((splits for splits in _SPLITS if splits >= wanted), _SPLITS[-1])
    device = qkv_bhd.device
    outputs = torch.empty(
        num_rows,
        heads.num_queries * head_dim,
        dtype=qkv_bhd.dtype,
        device=device,
    )
    # Not used with one part, but a kernel needs some tensors.
    parts = outputs
    log_sums = outputs
    if num_splits > 1:
        assert num_rows * heads.num_keys < _NUM_PROGRAMS
        parts_size = (num_rows, heads.num_queries, num_splits)
        parts = torch.empty(*parts_size, head_dim, dtype=torch.float32, device=device)
        log_sums = torch.empty(parts_size, dtype=torch.float32, device=device)
    # Not read without norms, but a kernel needs some tensors.
    query_norm, key_norm, eps = norms or (heads.cos, heads.cos, 0.0)
    group_size = heads.num_queries // heads.num_keys
    dim_pad = _padded_for_product(head_dim)
    _attend[(num_rows, heads.num_keys, num_splits)](
        qkv_bhd,
        outputs,
        parts,
        log_sums,
        heads.counters,
        heads.cos,
        heads.signed_sin,
        query_norm,
        key_norm,
        *where,
        window,
        scale * _LOG2_E,
        eps,
        GROUP=group_size,
        NUM_KV_HEADS=heads.num_keys,
        HEAD_DIM=head_dim,
        GROUP_PAD=_padded_for_product(group_size),
        DIM_PAD=dim_pad,
        BLOCK=64 if qkv_bhd.dtype.itemsize == 2 else 32,
        SPLITS=num_splits,
        HAS_NORMS=norms is not None,
        num_stages=3 if dim_pad <= 64 else 2,
    )
    return outputs


def _padded_for_product(size: int) -> int:
    """A power of 2, at least 16, because matrix products of a GPU need that."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def _add_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    normed_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    e = tl.arange(0, BLOCK)
    inside = e < SIZE
    sum_ptr = x_ptr + row + e
    x = tl.load(sum_ptr, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(delta_ptr + row + e, mask=inside, other=0.0).to(tl.float32)
    # The norm is that of the sum as it is stored, which is rounded.
    x = x.to(x_ptr.dtype.element_ty)
    tl.store(sum_ptr, x, mask=inside)
    x = x.to(tl.float32)
    mean_square = tl.sum(x * x) / SIZE
    normed = x * tl.rsqrt(mean_square + eps)
    weight = tl.load(weight_ptr + e, mask=inside).to(tl.float32)
    tl.store(normed_ptr + row + e, normed * weight, mask=inside)


def add_norm(x_te: Tensor, delta_te: Tensor, weight_e: Tensor, eps: float) -> Tensor:
    """Add `delta_te` to `x_te` in place; the RMS norm of the sum."""
    num_tokens, size = x_te.shape
    normed_te = torch.empty_like(x_te)
    block = triton.next_power_of_2(size)
    num_warps = min(16, max(1, block // 512))
    _add_norm[(num_tokens,)](
        x_te,
        delta_te,
        weight_e,
        normed_te,
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=num_warps,
    )
    return normed_te


@triton.jit
def _silu_gate(
    gate_up_ptr,
    outputs_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < SIZE
    gate_ptr = gate_up_ptr + token * 2 * SIZE + e
    gate = tl.load(gate_ptr, mask=inside).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=inside).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    tl.store(outputs_ptr + token * SIZE + e, output, mask=inside)


def silu_gate(gate_up_te: Tensor) -> Tensor:
    """SiLU of the first half of features, times the second half."""
    num_tokens = gate_up_te.shape[0]
    size = gate_up_te.shape[1] // 2
    block = 1024
    outputs_te = torch.empty(
        num_tokens,
        size,
        dtype=gate_up_te.dtype,
        device=gate_up_te.device,
    )
    grid = (num_tokens, triton.cdiv(size, block))
    _silu_gate[grid](gate_up_te, outputs_te, SIZE=size, BLOCK=block)
    return outputs_te


@triton.jit
def _copy_slots(
    keys_ptr,
    values_ptr,
    copies_ptr,
    num_slots,
    length,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the first tokens of one head of one slot in one layer, which are adjacent."""
    copy = tl.program_id(0)
    num_copies = tl.num_programs(0)
    layer_and_head = tl.program_id(1).to(tl.int64)
    layer = layer_and_head // NUM_KV_HEADS
    head = layer_and_head % NUM_KV_HEADS
    source = tl.load(copies_ptr + copy)
    target = tl.load(copies_ptr + num_copies + copy)
    num_tokens = tl.load(copies_ptr + 2 * num_copies + copy)
    size = num_tokens.to(tl.int32) * HEAD_DIM
    from_line = ((layer * num_slots + source) * NUM_KV_HEADS + head) * length
    to_line = ((layer * num_slots + target) * NUM_KV_HEADS + head) * length
    for first in range(0, size, BLOCK):
        e = first + tl.arange(0, BLOCK)
        inside = e < size
        key = tl.load(keys_ptr + from_line * HEAD_DIM + e, mask=inside)
        value = tl.load(values_ptr + from_line * HEAD_DIM + e, mask=inside)
        tl.store(keys_ptr + to_line * HEAD_DIM + e, key, mask=inside)
        tl.store(values_ptr + to_line * HEAD_DIM + e, value, mask=inside)


def copy_slots(keys: Tensor, values: Tensor, copies: Tensor) -> None:
    """Copy slots of a cache (layers, slots, heads, length, head_dim). The rows of `copies` are
    sources, targets and numbers of tokens."""
    num_layers, num_slots, num_heads, length, head_dim = keys.shape
    _copy_slots[(copies.shape[1], num_layers * num_heads)](
        keys,
        values,
        copies,
        num_slots,
        length,
        NUM_KV_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK=2048,
    )


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_stops"])
def _record(
    tokens_ptr,
    positions_ptr,
    steps_ptr,
    limits_ptr,
    slots_ptr,
    sampled_ptr,
    log_probs_ptr,
    stops_ptr,
    new_tokens_ptr,
    new_log_probs_ptr,
    sampled_stride,
    first_row,
    num_rows,
    num_stops,
    BLOCK: tl.constexpr,
):
    """For a block of rows: append the new token of each, unless the row has ended."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = first_row + number
    is_row = number < num_rows
    steps = tl.load(steps_ptr + row, mask=is_row, other=0)
    limits = tl.load(limits_ptr + row, mask=is_row, other=0)
    slots = tl.load(slots_ptr + row, mask=is_row, other=0)
    positions = tl.load(positions_ptr + row, mask=is_row, other=0)
    tokens = tl.load(new_tokens_ptr + number, mask=is_row, other=0)
    log_probs = tl.load(new_log_probs_ptr + number, mask=is_row, other=0.0)
    is_active = is_row & (steps < limits)
    place = slots * sampled_stride + steps
    tl.store(sampled_ptr + place, tokens, mask=is_active)
    tl.store(log_probs_ptr + place, log_probs, mask=is_active)
    tl.store(tokens_ptr + row, tokens, mask=is_active)
    tl.store(positions_ptr + row, positions + 1, mask=is_active)
    tl.store(steps_ptr + row, steps + 1, mask=is_active)
    is_stop = tl.zeros([BLOCK], tl.int1)
    for index in range(num_stops):
        is_stop = is_stop | (tokens == tl.load(stops_ptr + index))
    tl.store(limits_ptr + row, steps + 1, mask=is_active & is_stop)


class BatchTensors(NamedTuple):
    """The tensors of a `DecodeBatch`: numbers of its rows, and what its slots have sampled."""

    tokens: Tensor
    positions: Tensor
    steps: Tensor
    limits: Tensor
    slots: Tensor
    sampled: Tensor
    log_probs: Tensor
    stops: Tensor


def record(batch: BatchTensors, rows: slice, tokens_b: Tensor, log_probs_b: Tensor) -> None:
    """What `DecodeBatch.record` does, in one kernel."""
    num_rows = len(tokens_b)
    block = 128
    _record[(triton.cdiv(num_rows, block),)](
        *batch,
        tokens_b,
        log_probs_b,
        batch.sampled.stride(0),
        rows.start,
        num_rows,
        len(batch.stops),
        BLOCK=block,
    )
