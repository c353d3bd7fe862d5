"""Cutting rows into passes and over ranks.

Owns three decisions, all pure: the passes of a fixed number of rows, the passes of bounded tokens, and the order that
gives every rank its part of every mini-batch with about the same number of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def by_rows(num_rows: int, rows_per_pass: int) -> list[list[int]]:
    """Passes of `rows_per_pass` rows, in order; the last may be smaller."""
    return [list(range(start, min(start + rows_per_pass, num_rows))) for start in range(0, num_rows, rows_per_pass)]


def num_passes(lengths: Sequence[int], max_tokens: int) -> int:
    """The fewest passes into which `by_tokens` cuts the rows with none over the limit (but for single longer rows)."""
    limit = max(max_tokens, max(lengths, default=0))
    count = max(1, -(-sum(lengths) // limit))
    while count < len(lengths) and max(_loads(balanced(lengths, count), lengths)) > limit:
        count += 1
    return min(count, max(1, len(lengths)))


def balanced(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """As many parts with about the same number of tokens: longest row first, each to the part with the fewest."""
    heap = [(0, 0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens, size, part = heapq.heappop(heap)
        parts[part].append(row)
        heapq.heappush(heap, (tokens + lengths[row], size + 1, part))
    return [sorted(part) for part in parts]


def balanced_equal(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """As `balanced`, and every part has the same number of rows, which `num_parts` must divide."""
    assert len(lengths) % num_parts == 0
    capacity = len(lengths) // num_parts
    heap = [(0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens, part = heapq.heappop(heap)
        parts[part].append(row)
        if len(parts[part]) < capacity:
            heapq.heappush(heap, (tokens + lengths[row], part))
    return [sorted(part) for part in parts]


def rank_order(
    lengths: Sequence[int], rows_per_mini_batch: int, num_ranks: int, *, balance: bool
) -> npt.NDArray[np.int64]:
    """The order of rows that gives each rank, one after another, its rows of every mini-batch.

    Mini-batches are the given rows in order, so which rows are in one does not depend on the number of ranks.
    """
    of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(lengths), rows_per_mini_batch):
        rows = range(start, min(start + rows_per_mini_batch, len(lengths)))
        inside = [lengths[row] for row in rows]
        size = len(rows) // num_ranks
        cut = (
            balanced_equal(inside, num_ranks)
            if balance
            else [list(range(r * size, (r + 1) * size)) for r in range(num_ranks)]
        )
        for rank, part in enumerate(cut):
            of_rank[rank].extend(start + row for row in part)
    return np.asarray([row for rows in of_rank for row in rows], dtype=np.int64)


def _loads(parts: list[list[int]], lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[row] for row in part) for part in parts]
