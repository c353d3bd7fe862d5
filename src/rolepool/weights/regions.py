"""Rectangular parts of weights: which rows and columns of a weight a rank holds.

Owns the reading of a shape as a matrix. Knows neither tensors nor who holds a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Region(NamedTuple):
    """A rectangular part of a weight, in the weight's matrix form: the rows are the first dimension,
    and the columns are the elements of all other dimensions. Intervals end before their second
    number."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    """In elements of the flattened other dimensions."""

    @property
    def num_elements(self) -> int:
        """Zero if the region is empty."""
        return _length(self.rows) * _length(self.columns)

    def overlap(self, other: Region) -> Region | None:
        """The elements that are in both regions; None if there are none."""
        rows = _common(self.rows, other.rows)
        columns = _common(self.columns, other.columns)
        common = Region(rows, columns)
        return common if common.num_elements else None


def whole_region(shape: Sequence[int]) -> Region:
    """All of a weight. A number is a matrix of one element, and a vector one of one column."""
    if not shape:
        return Region((0, 1), (0, 1))
    return Region((0, shape[0]), (0, math.prod(shape[1:])))


def _length(interval: tuple[int, int]) -> int:
    first, last = interval
    return max(0, last - first)


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    last = min(one[1], other[1])
    return first, max(first, last)
