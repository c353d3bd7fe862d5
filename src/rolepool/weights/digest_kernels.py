"""A Triton kernel for digests: it reads each word of a matrix once, where it lies.

The weighted sum is that of `digests`, which loads this file by its path, on a GPU only. Integers are
added modulo 2**64, so the order in which programs add their sums has no effect.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = (4, 1024)
"""Rows and columns that a program reads at a time."""
_NARROW = (128, 32)
"""The same for matrices with few columns."""
_MAX_NARROW_COLUMNS = 256
_NUM_PROGRAMS = 2048
"""Number of programs that keep a GPU busy. Larger matrices get programs with more steps."""
_MAX_STEPS = 64
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "first_unit", "num_steps"])
def _add_weighted_units(
    units_ptr,
    row_factors_ptr,
    word_factors_ptr,
    total_ptr,
    num_rows,
    num_columns,
    row_stride,
    first_unit,
    num_steps,
    UNITS_PER_WORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add to the total what some rows of a block of columns contribute. A unit is a word, or a part
    of one, if words do not begin where a load of four bytes may begin."""
    BITS: tl.constexpr = 32 // UNITS_PER_WORD
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = c < num_columns
    unit_of_row = first_unit + c
    place = unit_of_row % UNITS_PER_WORD

    # Rows first: then a word is multiplied once, and a column's factor is needed only at the end.
    first_row = tl.program_id(0).to(tl.int64) * num_steps * ROWS
    sums = tl.zeros([ROWS, COLUMNS], tl.int64)
    for step in range(num_steps):
        r = first_row + step * ROWS + tl.arange(0, ROWS)
        is_row = r < num_rows
        row_factor = tl.load(row_factors_ptr + r, mask=is_row, other=0)
        unit_ptr = units_ptr + r[:, None] * row_stride + c[None, :]
        is_inside = is_row[:, None] & is_column[None, :]
        unit = tl.load(unit_ptr, mask=is_inside, other=0).to(tl.int64)
        if UNITS_PER_WORD > 1:
            # Only the highest part of a word carries its sign.
            is_highest = place == UNITS_PER_WORD - 1
            unit = tl.where(is_highest[None, :], unit, unit & ((1 << BITS) - 1))
        sums += unit * row_factor[:, None]

    word_factor = tl.load(word_factors_ptr + unit_of_row // UNITS_PER_WORD, mask=is_column, other=0)
    factor = word_factor << (place * BITS).to(tl.int64)
    total = tl.sum(tl.sum(sums * factor[None, :], axis=1), axis=0)
    tl.atomic_add(total_ptr, total, sem="relaxed")


def add_weighted_sum(
    total: Tensor, units: Tensor, row_factors: Tensor, word_factors: Tensor, first_unit: int
) -> None:
    """Add the weighted sum of a matrix of 8, 16 or 32-bit integers to `total`. `word_factors` begin
    with that of the word in which the matrix begins, `first_unit` units after the word's first
    byte."""
    num_rows, num_columns = units.shape
    rows, columns = _NARROW if num_columns <= _MAX_NARROW_COLUMNS else _WIDE
    num_column_blocks = triton.cdiv(num_columns, columns)
    num_row_blocks = triton.cdiv(num_rows, rows)
    num_steps = num_row_blocks * num_column_blocks // _NUM_PROGRAMS
    num_steps = min(max(num_steps, 1), _MAX_STEPS)
    launch = _add_weighted_units[(triton.cdiv(num_row_blocks, num_steps), num_column_blocks)]
    with torch.cuda.device_of(units):
        launch(
            units,
            row_factors,
            word_factors,
            total,
            num_rows,
            num_columns,
            units.stride(0),
            first_unit,
            num_steps,
            UNITS_PER_WORD=4 // units.element_size(),
            ROWS=rows,
            COLUMNS=columns,
            num_warps=_NUM_WARPS,
        )
