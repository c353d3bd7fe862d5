"""Triton kernels that sample: the floors of top-k and top-p, and the draw.

A token is drawn by inverting the cumulative distribution at one uniform number, as on a CPU
(`sampling`), so both draw the same token from the same logits, unless rounding decides. The first
kernel reads all logits once and sums up blocks of them. The second chooses a block of each row by
these sums, and reads only this block again. Imported only on machines with a GPU.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VOCAB_BLOCK = 4096
_NUM_HALVINGS = tl.constexpr(30)
"""Bisection steps over the range of a row's scores, until float32 cannot distinguish more of
them."""


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
def _scores(
    row_ptr,
    v,
    floors_ptr,
    row,
    inverse_temperature,
    VOCAB: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
):
    """Scores of a row's tokens `v`: logits divided by temperature; -inf for those that cannot be
    drawn."""
    logit = tl.load(row_ptr + v, mask=v < VOCAB, other=-float("inf"))
    score = logit.to(tl.float32) * inverse_temperature
    if HAS_FLOOR:
        floor = tl.load(floors_ptr + row)
        score = tl.where(score > floor, score, -float("inf"))
    return score


@triton.jit
def _sum_block(
    logits_ptr,
    floors_ptr,
    sums_ptr,
    inverse_temperature,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
):
    """For one block of a row: the largest score, and the sum of exponentials relative to it."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_blocks = tl.num_programs(0)
    row_ptr = logits_ptr + row * row_stride
    v = block * BLOCK + tl.arange(0, BLOCK)
    score = _scores(row_ptr, v, floors_ptr, row, inverse_temperature, VOCAB, HAS_FLOOR)
    largest = tl.max(score)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp(score - base))
    # Two numbers of each block, in two planes of `sums`.
    sum_ptr = sums_ptr + row * num_blocks + block
    plane = tl.num_programs(1).to(tl.int64) * num_blocks
    tl.store(sum_ptr, largest)
    tl.store(sum_ptr + plane, total)


@triton.jit
def _uniform(stream, step):
    """`sampling.uniforms`, bit for bit: 48 bits and half a step more."""
    key = stream.to(tl.uint64, bitcast=True)
    key += (step.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    # 2**-48.
    return ((key >> 16).to(tl.float64) + 0.5) * 3.552713678800501e-15


@triton.jit
def _invert(mass, reached, target, index, SIZE: tl.constexpr):
    """The first index at which the cumulative mass `reached` exceeds `target`.

    Sums that run in parallel round in another order, so `reached` may decrease in its last bit, and
    may end below the target. So an index without mass never counts, and the last one with mass is
    taken if none exceeds the target. It is 0 if there is no mass, or if it is NaN.
    """
    has_mass = mass > 0
    is_hit = has_mass & (reached > target)
    first = tl.min(tl.where(is_hit, index, SIZE))
    last = tl.max(tl.where(has_mass, index, 0))
    return tl.minimum(first, last)


@triton.jit
def _draw(
    logits_ptr,
    streams_ptr,
    steps_ptr,
    floors_ptr,
    sums_ptr,
    tokens_ptr,
    log_probs_ptr,
    inverse_temperature,
    row_stride,
    num_blocks,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    GREEDY: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
):
    """The token of one row: first its block, then its place in the block."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS_PAD)
    plane = tl.num_programs(0).to(tl.int64) * num_blocks
    sum_ptr = sums_ptr + row * num_blocks + b
    is_block = b < num_blocks
    largest_of_block = tl.load(sum_ptr, mask=is_block, other=-float("inf"))
    sum_of_block = tl.load(sum_ptr + plane, mask=is_block, other=0.0)
    largest = tl.max(largest_of_block)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    # In float64, because the random number has 48 bits.
    mass = (sum_of_block * tl.exp(largest_of_block - base)).to(tl.float64)
    total = tl.sum(mass)
    if GREEDY:
        block = tl.min(tl.where(largest_of_block == largest, b, BLOCKS_PAD))
        block = tl.minimum(block, num_blocks - 1)
    else:
        stream = tl.load(streams_ptr + row)
        step = tl.load(steps_ptr + row)
        reached = tl.cumsum(mass, axis=0)
        target = _uniform(stream, step) * total
        block = _invert(mass, reached, target, b, BLOCKS_PAD)
        # How far the target is inside of the block.
        is_chosen = b == block
        begin = tl.sum(tl.where(is_chosen, reached - mass, 0.0))
        fraction = (target - begin) / tl.sum(tl.where(is_chosen, mass, 0.0))

    e = tl.arange(0, BLOCK)
    v = block * BLOCK + e
    row_ptr = logits_ptr + row * row_stride
    score = _scores(row_ptr, v, floors_ptr, row, inverse_temperature, VOCAB, HAS_FLOOR)
    if GREEDY:
        place = tl.min(tl.where(score == largest, e, BLOCK))
        place = tl.minimum(place, BLOCK - 1)
    else:
        largest_here = tl.max(score)
        weight = tl.exp(score - tl.where(largest_here == -float("inf"), 0.0, largest_here))
        weight = weight.to(tl.float64)
        reached_here = tl.cumsum(weight, axis=0)
        place = _invert(weight, reached_here, fraction * tl.sum(weight), e, BLOCK)
    score_of_token = tl.sum(tl.where(e == place, score, 0.0))
    # A row with NaN chooses any token, and its log-prob is NaN.
    token = tl.minimum(block * BLOCK + place, VOCAB - 1)
    log_total = tl.log(total.to(tl.float32))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(log_probs_ptr + row, score_of_token - base - log_total)


def draw(
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
    sums = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=device)
    tokens_b = torch.empty(num_rows, dtype=torch.int64, device=device)
    log_probs_b = torch.empty(num_rows, dtype=torch.float32, device=device)
    has_floor = floors_b is not None
    # Not read without floors, but a kernel needs some tensor.
    floors_b = log_probs_b if floors_b is None else floors_b
    _sum_block[(num_blocks, num_rows)](
        logits_bv,
        floors_b,
        sums,
        1 / temperature,
        logits_bv.stride(0),
        VOCAB=vocab_size,
        BLOCK=_VOCAB_BLOCK,
        HAS_FLOOR=has_floor,
        num_warps=4,
    )
    _draw[(num_rows,)](
        logits_bv,
        streams_b,
        steps_b,
        floors_b,
        sums,
        tokens_b,
        log_probs_b,
        1 / temperature,
        logits_bv.stride(0),
        num_blocks,
        VOCAB=vocab_size,
        BLOCK=_VOCAB_BLOCK,
        BLOCKS_PAD=triton.next_power_of_2(num_blocks),
        GREEDY=greedy,
        HAS_FLOOR=has_floor,
        num_warps=8,
    )
    return tokens_b, log_probs_b
