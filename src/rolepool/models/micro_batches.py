"""Splitting rows into micro-batches and over ranks. Pure functions of the lengths of rows."""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def by_rows(num_rows: int, rows_per_part: int) -> list[list[int]]:
    """Parts of `rows_per_part` rows, in order; the last may be smaller."""
    return [
        list(range(start, min(start + rows_per_part, num_rows)))
        for start in range(0, num_rows, rows_per_part)
    ]


def num_passes(lengths: Sequence[int], max_tokens: int) -> int:
    """The fewest micro-batches of at most `max_tokens` tokens (or of one longer row) that
    `balanced` can make."""
    limit = max(max_tokens, max(lengths, default=0))
    for count in range(max(1, -(-sum(lengths) // limit)), len(lengths)):
        if all(sum(lengths[row] for row in part) <= limit for part in balanced(lengths, count)):
            return count
    return max(1, len(lengths))


def balanced(
    lengths: Sequence[int], num_parts: int, max_rows: int | None = None
) -> list[list[int]]:
    """Parts with about the same number of tokens, and at most `max_rows` rows: longest row first,
    each to the part with the fewest tokens."""
    heap = [(0, 0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens, size, part = heapq.heappop(heap)
        parts[part].append(row)
        if size + 1 != max_rows:
            heapq.heappush(heap, (tokens + lengths[row], size + 1, part))
    return [sorted(part) for part in parts]


def rank_order(
    lengths: Sequence[int], rows_per_mini_batch: int, num_ranks: int, *, balance: bool
) -> npt.NDArray[np.int64]:
    """The order of rows that gives each rank, one after another, its rows of every mini-batch.

    Mini-batches are the given rows in order, so which rows are in one does not depend on the number
    of ranks, which must divide its size. With `balance` ranks get about the same number of tokens.
    """
    rows_of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for rows in by_rows(len(lengths), rows_per_mini_batch):
        assert len(rows) % num_ranks == 0
        size = len(rows) // num_ranks
        if balance:
            parts = balanced([lengths[row] for row in rows], num_ranks, size)
        else:
            parts = by_rows(len(rows), size)
        for of_rank, part in zip(rows_of_rank, parts, strict=True):
            of_rank.extend(rows[0] + row for row in part)
    return np.concatenate([np.asarray(rows, dtype=np.int64) for rows in rows_of_rank])
