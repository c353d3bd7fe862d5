"""A Triton kernel for digests: it reads each word of many matrices once, where they lie.

The weighted sum is that of `digests`, which loads this file by its path, on a GPU only. Integers are
added modulo 2**64, so the order in which programs add their sums has no effect.

A model has hundreds of weights, and most of them are small. A launch for each of them would take
longer than reading them, so all matrices are in one table, and one launch works through it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = (4, 1024)
"""Rows and columns that a program reads at a time."""
_NARROW = (128, 32)
"""The same for matrices with few columns."""
_MAX_NARROW_COLUMNS = 256
_STEPS = 16
"""How often a program reads so many rows and columns, one below the other."""
_NUM_WARPS = 4
_NUM_FIELDS = 7
"""Numbers of an entry of the table of matrices."""


class Matrix(NamedTuple):
    """A matrix of 8, 16 or 32-bit integers, and its place in the matrix of its weight."""

    units: Tensor
    first_row: int
    first_word: int
    """The word of the row in which the matrix begins."""
    front: int
    """The units of that word that are before the matrix."""


@triton.jit
def _add_weighted_units(
    entries_ptr,
    programs_ptr,
    totals_ptr,
    row_factors_ptr,
    word_factors_ptr,
    UNITS_PER_WORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
):
    """Add to the total of a matrix what some rows of a block of its columns contribute. A unit is a
    word, or a part of one, if words do not begin where a load of four bytes may begin."""
    program_ptr = programs_ptr + tl.program_id(0) * 3
    matrix = tl.load(program_ptr)
    first_row = tl.load(program_ptr + 1)
    first_column = tl.load(program_ptr + 2)

    entry_ptr = entries_ptr + matrix * NUM_FIELDS
    address = tl.load(entry_ptr)
    if UNITS_PER_WORD == 1:
        units_ptr = address.to(tl.pointer_type(tl.int32))
    elif UNITS_PER_WORD == 2:
        units_ptr = address.to(tl.pointer_type(tl.int16))
    else:
        units_ptr = address.to(tl.pointer_type(tl.int8))
    num_rows = tl.load(entry_ptr + 1)
    num_columns = tl.load(entry_ptr + 2)
    row_stride = tl.load(entry_ptr + 3)
    row_factors_ptr += tl.load(entry_ptr + 4)
    word_factors_ptr += tl.load(entry_ptr + 5)
    front = tl.load(entry_ptr + 6)

    BITS: tl.constexpr = 32 // UNITS_PER_WORD
    c = first_column + tl.arange(0, COLUMNS)
    is_column = c < num_columns
    unit_of_row = front + c
    place = unit_of_row % UNITS_PER_WORD

    # Rows first: then a word is multiplied once, and a column's factor is needed only at the end.
    sums = tl.zeros([ROWS, COLUMNS], tl.int64)
    for step in range(STEPS):
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
    tl.atomic_add(totals_ptr + matrix, total, sem="relaxed")


def weighted_sums(matrices: Sequence[Matrix], row_factors: Tensor, word_factors: Tensor) -> Tensor:
    """The weighted sum of each matrix. All of them, and the factors of all rows and words of their
    weights, are on one GPU."""
    device = row_factors.device
    totals = torch.zeros(len(matrices), dtype=torch.int64, device=device)
    numbers_of: dict[tuple[int, bool], list[int]] = {}
    for number, matrix in enumerate(matrices):
        units_per_word = 4 // matrix.units.element_size()
        is_narrow = matrix.units.shape[1] <= _MAX_NARROW_COLUMNS
        numbers_of.setdefault((units_per_word, is_narrow), []).append(number)

    entries = torch.tensor([_entry(matrix) for matrix in matrices], dtype=torch.int64)
    entries_there = entries.to(device)
    for (units_per_word, is_narrow), numbers in numbers_of.items():
        tile = _NARROW if is_narrow else _WIDE
        programs = torch.from_numpy(_programs(entries.numpy(), numbers, tile))
        rows, columns = tile
        with torch.cuda.device(device):
            _add_weighted_units[(len(programs),)](
                entries_there,
                programs.to(device),
                totals,
                row_factors,
                word_factors,
                UNITS_PER_WORD=units_per_word,
                ROWS=rows,
                COLUMNS=columns,
                STEPS=_STEPS,
                NUM_FIELDS=_NUM_FIELDS,
                num_warps=_NUM_WARPS,
            )
    return totals


def _entry(matrix: Matrix) -> list[int]:
    units, first_row, first_word, front = matrix
    num_rows, num_columns = units.shape
    return [
        units.data_ptr(),
        num_rows,
        num_columns,
        units.stride(0),
        first_row,
        first_word,
        front,
    ]


def _programs(entries: np.ndarray, numbers: Sequence[int], tile: tuple[int, int]) -> np.ndarray:
    """A row for each program: the number of its matrix, and its first row and column in it."""
    rows_of_program = tile[0] * _STEPS
    columns_of_program = tile[1]
    programs: list[np.ndarray] = []
    for number in numbers:
        _, num_rows, num_columns, *_ = entries[number]
        first_rows = np.arange(0, num_rows, rows_of_program)
        first_columns = np.arange(0, num_columns, columns_of_program)
        of_matrix = np.empty((len(first_rows), len(first_columns), 3), dtype=np.int64)
        of_matrix[:, :, 0] = number
        of_matrix[:, :, 1] = first_rows[:, None]
        of_matrix[:, :, 2] = first_columns
        programs.append(of_matrix.reshape(-1, 3))
    return np.concatenate(programs)
