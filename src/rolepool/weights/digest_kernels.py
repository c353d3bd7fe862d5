"""A Triton kernel for digests: it reads each word of many matrices once, where they lie.

The weighted sum is that of `digests`, which loads this file by its path, on a GPU only. Integers are
added modulo 2**64, so the order in which programs add their sums has no effect.

A model has hundreds of weights, and most of them are small. A launch for each of them would take
longer than reading them, so all matrices are in one table, and one launch works through it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
from __future__ import annotations

import functools
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
"""Numbers of an entry of the table of matrices: those of a `Layout`."""


class Layout(NamedTuple):
    """How a matrix of 8, 16 or 32-bit integers lies in memory, and its place in the matrix of its
    weight. Transfer after transfer has the same layouts, so what follows from them is kept."""

    num_rows: int
    num_columns: int
    row_stride: int
    first_row: int
    first_word: int
    """The word of the row in which the matrix begins."""
    front: int
    """The units of that word that are before the matrix."""
    units_per_word: int

    @property
    def num_words(self) -> int:
        """The words of a row in which the matrix has units."""
        return triton.cdiv(self.front + self.num_columns, self.units_per_word)


class Matrix(NamedTuple):
    """A matrix on a GPU. Whoever makes it keeps the tensor."""

    address: int
    layout: Layout


class _Launch(NamedTuple):
    """Matrices that the same program can read."""

    units_per_word: int
    tile: tuple[int, int]
    programs: Tensor
    """A row for each program: the number of its matrix, and its first row and column in it."""


@triton.jit
def _add_weighted_units(
    addresses_ptr,
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
    address = tl.load(addresses_ptr + matrix)
    if UNITS_PER_WORD == 1:
        units_ptr = address.to(tl.pointer_type(tl.int32))
    elif UNITS_PER_WORD == 2:
        units_ptr = address.to(tl.pointer_type(tl.int16))
    else:
        units_ptr = address.to(tl.pointer_type(tl.int8))
    num_rows = tl.load(entry_ptr)
    num_columns = tl.load(entry_ptr + 1)
    row_stride = tl.load(entry_ptr + 2)
    row_factors_ptr += tl.load(entry_ptr + 3)
    word_factors_ptr += tl.load(entry_ptr + 4)
    front = tl.load(entry_ptr + 5)

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


def weighted_sums(
    matrices: Sequence[Matrix],
    row_factors: Tensor,
    word_factors: Tensor,
) -> Tensor:
    """The weighted sum of each matrix. All of them, and the factors of all rows and words of their
    weights, are on one GPU."""
    device = row_factors.device
    totals = torch.zeros(len(matrices), dtype=torch.int64, device=device)
    addresses = torch.tensor([matrix.address for matrix in matrices], dtype=torch.int64)
    addresses_there = addresses.to(device)
    layouts = tuple(matrix.layout for matrix in matrices)
    entries, launches = _work_of(layouts, device)
    for launch in launches:
        rows, columns = launch.tile
        with torch.cuda.device(device):
            _add_weighted_units[(len(launch.programs),)](
                addresses_there,
                entries,
                launch.programs,
                totals,
                row_factors,
                word_factors,
                UNITS_PER_WORD=launch.units_per_word,
                ROWS=rows,
                COLUMNS=columns,
                STEPS=_STEPS,
                NUM_FIELDS=_NUM_FIELDS,
                num_warps=_NUM_WARPS,
            )
    return totals


@functools.lru_cache(maxsize=64)
def _work_of(
    layouts: tuple[Layout, ...], device: torch.device
) -> tuple[Tensor, tuple[_Launch, ...]]:
    """The table of these matrices without their addresses, and the launches that read them."""
    numbers_of: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for number, layout in enumerate(layouts):
        is_narrow = layout.num_columns <= _MAX_NARROW_COLUMNS
        tile = _NARROW if is_narrow else _WIDE
        numbers_of.setdefault((layout.units_per_word, tile), []).append(number)
    launches: list[_Launch] = []
    for (units_per_word, tile), numbers in numbers_of.items():
        programs = [_programs_of(layouts[number], number, tile) for number in numbers]
        together = torch.from_numpy(np.concatenate(programs)).to(device)
        launches.append(_Launch(units_per_word, tile, together))
    entries = torch.tensor(layouts, dtype=torch.int64).to(device)
    return entries, tuple(launches)


def _programs_of(layout: Layout, number: int, tile: tuple[int, int]) -> np.ndarray:
    """The programs that read a matrix."""
    rows, columns = tile
    first_rows = np.arange(0, layout.num_rows, rows * _STEPS)
    first_columns = np.arange(0, layout.num_columns, columns)
    programs = np.empty((len(first_rows), len(first_columns), 3), dtype=np.int64)
    programs[:, :, 0] = number
    programs[:, :, 1] = first_rows[:, None]
    programs[:, :, 2] = first_columns
    return programs.reshape(-1, 3)
