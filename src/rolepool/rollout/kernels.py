"""Triton kernels: what a GPU computes between matrix products, and sampling.

A captured step is used longer than the cache that it was captured with, so kernels find the cache
through `place`: a tensor with the addresses of keys and values, the number of slots and their
length. A row at position -1 is not in use: it does not read or write the cache. Arithmetic is in
float32. Imported only on machines with a GPU.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

Where = tuple[Tensor, Tensor, Tensor, int]
"""Where tokens are in the cache: the position and the slot of each, the cache's `place`, and the
layer's index."""
_SPLITS = (1, 4, 16)
"""Numbers of parts that a row's tokens may be split into; few, because each is a kernel to
compile."""
_NUM_PROGRAMS = 256
"""Number of programs that keep a GPU busy; if there are fewer rows, rows are split."""
_VOCAB_BLOCK = 4096
_NUM_HALVINGS = tl.constexpr(30)
"""Bisection steps over the range of a row's scores, until float32 cannot distinguish more of
them."""
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


@triton.jit
def _mass_above(
    row_ptr,
    inverse_temperature,
    largest,
    least,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """For a row's scores above `least`: their number, or the sum of their exponentials."""
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCAB, BLOCK):
        v = first + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + v, mask=v < VOCAB, other=-float("inf"))
        score = logit.to(tl.float32) * inverse_temperature
        mass += tl.where(score > least, 1.0 if COUNT else tl.exp(score - largest), 0.0)
    return tl.sum(mass)


@triton.jit
def _find_floor(
    logits_ptr,
    floors_ptr,
    inverse_temperature,
    row_stride,
    top_k,
    top_p,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the floor by bisection, first for top-k, then for top-p."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        v = first + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + v, mask=v < VOCAB, other=-float("inf"))
        score = logit.to(tl.float32) * inverse_temperature
        highest = tl.maximum(highest, score)
        finite_score = tl.where(score > -float("inf"), score, float("inf"))
        lowest = tl.minimum(lowest, finite_score)
    largest = tl.max(highest)
    floor = tl.min(lowest) - 1.0
    if top_k < VOCAB:
        above = largest
        for _ in range(_NUM_HALVINGS):
            middle = 0.5 * (floor + above)
            num_above = _mass_above(
                row_ptr, inverse_temperature, largest, middle, VOCAB, BLOCK, True
            )
            is_enough = num_above >= top_k
            floor = tl.where(is_enough, middle, floor)
            above = tl.where(is_enough, above, middle)
    if top_p < 1:
        above = largest
        total = _mass_above(row_ptr, inverse_temperature, largest, floor, VOCAB, BLOCK, False)
        wanted = top_p * total
        for _ in range(_NUM_HALVINGS):
            middle = 0.5 * (floor + above)
            mass = _mass_above(row_ptr, inverse_temperature, largest, middle, VOCAB, BLOCK, False)
            is_enough = mass >= wanted
            floor = tl.where(is_enough, middle, floor)
            above = tl.where(is_enough, above, middle)
    tl.store(floors_ptr + row, floor)


def find_floors(
    logits_bv: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Tensor:
    """For each row the number above which top-k and top-p keep scores (logits divided by
    temperature)."""
    num_rows, vocab_size = logits_bv.shape
    floors_b = torch.empty(num_rows, dtype=torch.float32, device=logits_bv.device)
    _find_floor[(num_rows,)](
        logits_bv,
        floors_b,
        1 / temperature,
        logits_bv.stride(0),
        top_k if top_k > 0 else vocab_size,
        float(top_p),
        VOCAB=vocab_size,
        BLOCK=_VOCAB_BLOCK,
        num_warps=16,
    )
    return floors_b


@triton.jit
def _mix32(x):
    """A bijection of 32 bits in which every input bit affects every output bit."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _race(
    logits_ptr,
    streams_ptr,
    steps_ptr,
    floors_ptr,
    sums_ptr,
    tokens_ptr,
    inverse_temperature,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
):
    """The winner among one block of a row's tokens, and the block's part of the softmax
    denominator."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    logit_ptr = logits_ptr + row * row_stride + v
    logit = tl.load(logit_ptr, mask=v < VOCAB, other=-float("inf"))
    score = logit.to(tl.float32) * inverse_temperature
    if HAS_FLOOR:
        floor = tl.load(floors_ptr + row)
        score = tl.where(score > floor, score, -float("inf"))
    largest = tl.max(score)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    share = tl.exp(score - base)
    if GREEDY:
        entry = score
    else:
        # A token's time is exponential with its probability as rate; the earliest token is the
        # sample. Arithmetic dominates this kernel, so it uses fast functions, with relative errors
        # of about 1e-5.
        stream = tl.load(streams_ptr + row).to(tl.uint64, bitcast=True)
        step = tl.load(steps_ptr + row).to(tl.uint64, bitcast=True)
        key = stream + (step + 1) * 0x9E3779B97F4A7C15
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB
        key = key ^ (key >> 31)
        lower_key = key.to(tl.uint32)
        upper_key = (key >> 32).to(tl.uint32)
        bits = _mix32(_mix32(v.to(tl.uint32) ^ lower_key) + upper_key)
        # 2**-32 and half of it.
        uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
        # The earliest times decide, and there 1 - uniform has lost the bits that distinguish them.
        early = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
        time = tl.where(uniform < 0.02, early, -libdevice.fast_logf(1.0 - uniform))
        entry = libdevice.fast_dividef(share, time)
    winner = tl.argmax(entry, axis=0)
    is_winner = tl.arange(0, BLOCK) == winner
    winning_score = tl.sum(tl.where(is_winner, score, 0.0))
    first = tl.max(entry)
    # Four numbers of each block, in four planes of `sums`.
    place = row * num_blocks + block
    plane = tl.num_programs(0).to(tl.int64) * num_blocks
    sum_ptr = sums_ptr + place
    tl.store(sum_ptr, largest)
    tl.store(sum_ptr + plane, tl.sum(share))
    tl.store(sum_ptr + 2 * plane, first if GREEDY else base + tl.log(first))
    tl.store(sum_ptr + 3 * plane, winning_score)
    tl.store(tokens_ptr + place, block * BLOCK + winner)


@triton.jit
def _finish_race(
    sums_ptr,
    block_tokens_ptr,
    tokens_ptr,
    log_probs_ptr,
    num_blocks,
    VOCAB: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS_PAD)
    place = row * num_blocks + b
    plane = tl.num_programs(0).to(tl.int64) * num_blocks
    inside = b < num_blocks
    sum_ptr = sums_ptr + place
    largest = tl.load(sum_ptr, mask=inside, other=-float("inf"))
    shares = tl.load(sum_ptr + plane, mask=inside, other=0.0)
    entries = tl.load(sum_ptr + 2 * plane, mask=inside, other=-float("inf"))
    scores = tl.load(sum_ptr + 3 * plane, mask=inside, other=0.0)
    block_tokens = tl.load(block_tokens_ptr + place, mask=inside, other=0)

    most = tl.max(largest)
    total = tl.sum(shares * tl.exp(largest - most))
    is_winner = b == tl.argmax(entries, axis=0)
    score = tl.sum(tl.where(is_winner, scores, 0.0))
    token = tl.sum(tl.where(is_winner, block_tokens, 0))
    tl.store(tokens_ptr + row, tl.minimum(token, VOCAB - 1).to(tl.int64))
    tl.store(log_probs_ptr + row, score - most - tl.log(total))


def race(
    logits_bv: Tensor,
    streams_b: Tensor,
    steps_b: Tensor,
    temperature: float,
    greedy: bool,
    floors_b: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A token of each row, sampled from its softmax at `temperature` above its floor, or the best
    one; its log-prob."""
    num_rows, vocab_size = logits_bv.shape
    num_blocks = triton.cdiv(vocab_size, _VOCAB_BLOCK)
    device = logits_bv.device
    sums = torch.empty(4, num_rows, num_blocks, dtype=torch.float32, device=device)
    block_tokens = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    tokens_b = torch.empty(num_rows, dtype=torch.int64, device=device)
    log_probs_b = torch.empty(num_rows, dtype=torch.float32, device=device)
    _race[(num_rows, num_blocks)](
        logits_bv,
        streams_b,
        steps_b,
        # Not read without floors, but a kernel needs some tensor.
        log_probs_b if floors_b is None else floors_b,
        sums,
        block_tokens,
        1 / temperature,
        logits_bv.stride(0),
        VOCAB=vocab_size,
        BLOCK=_VOCAB_BLOCK,
        GREEDY=greedy,
        HAS_FLOOR=floors_b is not None,
        num_warps=4,
    )
    _finish_race[(num_rows,)](
        sums,
        block_tokens,
        tokens_b,
        log_probs_b,
        num_blocks,
        VOCAB=vocab_size,
        BLOCKS_PAD=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return tokens_b, log_probs_b
