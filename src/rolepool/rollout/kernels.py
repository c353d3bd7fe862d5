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


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_store(
    qkv_ptr,
    cos_ptr,
    signed_sin_ptr,
    positions_ptr,
    slots_ptr,
    place_ptr,
    layer,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """For one token: rotate its queries and keys in place, and write keys and values to the
    cache."""
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
    lower = tl.load(lower_ptr, mask=is_turned).to(tl.float32)
    upper = tl.load(upper_ptr, mask=is_turned).to(tl.float32)
    turned_lower = lower * cos - upper * sin
    turned_upper = upper * cos + lower * sin
    tl.store(lower_ptr, turned_lower, mask=is_turned)
    tl.store(upper_ptr, turned_upper, mask=is_turned)

    is_used = position >= 0
    is_key = is_turned & (h >= NUM_HEADS) & is_used
    key_line = first_line + (h - NUM_HEADS) * length
    key_ptr = keys + key_line * HEAD_DIM + d
    tl.store(key_ptr, turned_lower, mask=is_key)
    tl.store(key_ptr + HALF, turned_upper, mask=is_key)

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
    num_heads: int,
    cos: Tensor,
    signed_sin: Tensor,
    where: Where,
) -> None:
    """Rotate queries and keys by their positions, in place; store keys and values in the cache."""
    num_tokens, num_all, head_dim = qkv_thd.shape
    num_kv_heads = (num_all - num_heads) // 2
    _rotate_and_store[(num_tokens,)](
        qkv_thd,
        cos,
        signed_sin,
        *where,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS_PAD=triton.next_power_of_2(num_heads + num_kv_heads),
        KV_HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
    )


@triton.jit(do_not_specialize=["layer"])
def _attend(
    queries_ptr,
    outputs_ptr,
    log_sums_ptr,
    positions_ptr,
    slots_ptr,
    place_ptr,
    layer,
    window,
    scale,
    query_stride,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One part of one row: all queries of a group with the keys that they share, each read once."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # The tokens of this part. All parts but the last have whole blocks.
    end = tl.load(positions_ptr + row).to(tl.int32) + 1
    start = tl.maximum(end - window, 0)
    tokens_of_part = tl.cdiv(end - start, SPLITS)
    share = tl.cdiv(tokens_of_part, BLOCK) * BLOCK
    start += split * share
    end = tl.minimum(start + share, end)

    # Where the keys and values of this head begin in the cache.
    num_slots = tl.load(place_ptr + 2)
    length = tl.load(place_ptr + 3)
    slot = tl.load(slots_ptr + row)
    line = ((layer * num_slots + slot) * NUM_KV_HEADS + kv_head) * length
    keys = tl.load(place_ptr).to(queries_ptr.dtype)
    keys = tl.multiple_of(keys, 16) + line * HEAD_DIM
    values = tl.load(place_ptr + 1).to(queries_ptr.dtype)
    values = tl.multiple_of(values, 16) + line * HEAD_DIM

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    is_number = (d < HEAD_DIM)[None, :]
    is_query = (g < GROUP)[:, None] & is_number
    heads = kv_head * GROUP + g
    query_ptr = queries_ptr + row * query_stride + heads[:, None] * HEAD_DIM + d[None, :]
    query = tl.load(query_ptr, mask=is_query, other=0.0)
    largest = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    output = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
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
    place = (row * NUM_KV_HEADS * GROUP + heads) * SPLITS + split
    output_ptr = outputs_ptr + place[:, None] * HEAD_DIM + d[None, :]
    tl.store(output_ptr, output, mask=is_query)
    if SPLITS > 1:
        log_sum = largest + tl.log2(total)
        tl.store(log_sums_ptr + place, log_sum, mask=g < GROUP)


@triton.jit
def _join_parts(
    parts_ptr,
    log_sums_ptr,
    outputs_ptr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM_PAD)
    is_number = d < HEAD_DIM
    place = head * SPLITS + s
    log_sum = tl.load(log_sums_ptr + place)
    largest = tl.max(log_sum)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    weight = tl.exp2(log_sum - base)
    part_ptr = parts_ptr + place[:, None] * HEAD_DIM + d[None, :]
    part = tl.load(part_ptr, mask=is_number[None, :], other=0.0)
    total = tl.sum(weight)
    divisor = tl.where(total > 0, total, 1.0)
    output = tl.sum(part * weight[:, None], axis=0) / divisor
    tl.store(outputs_ptr + head * HEAD_DIM + d, output, mask=is_number)


def attend(
    queries_bhd: Tensor,
    num_kv_heads: int,
    where: Where,
    window: int,
    scale: float,
) -> Tensor:
    """Attention of one token per row to the last `window` tokens of its slot, up to its own
    position: (rows, heads * head_dim)."""
    num_rows, num_heads, head_dim = queries_bhd.shape
    wanted = _NUM_PROGRAMS / (num_rows * num_kv_heads)
    num_splits = next((splits for splits in _SPLITS if splits >= wanted), _SPLITS[-1])
    device = queries_bhd.device
    outputs = torch.empty(
        num_rows,
        num_heads * head_dim,
        dtype=queries_bhd.dtype,
        device=device,
    )
    # With one part its outputs are those of the row, and nobody reads the sums.
    parts = outputs
    log_sums = outputs
    if num_splits > 1:
        parts_size = (num_rows, num_heads, num_splits)
        parts = torch.empty(*parts_size, head_dim, dtype=torch.float32, device=device)
        log_sums = torch.empty(parts_size, dtype=torch.float32, device=device)
    group_size = num_heads // num_kv_heads
    dim_pad = _padded_for_product(head_dim)
    _attend[(num_rows, num_kv_heads, num_splits)](
        queries_bhd,
        parts,
        log_sums,
        *where,
        window,
        scale * _LOG2_E,
        queries_bhd.stride(0),
        GROUP=group_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        GROUP_PAD=_padded_for_product(group_size),
        DIM_PAD=dim_pad,
        BLOCK=64 if queries_bhd.dtype.itemsize == 2 else 32,
        SPLITS=num_splits,
        num_stages=3 if dim_pad <= 64 else 2,
    )
    if num_splits > 1:
        _join_parts[(num_rows * num_heads,)](
            parts,
            log_sums,
            outputs,
            HEAD_DIM=head_dim,
            DIM_PAD=dim_pad,
            SPLITS=num_splits,
            num_warps=2,
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
