"""Splitting rows into micro-batches and over ranks. Pure functions of the lengths of rows."""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def by_rows(num_rows: int, rows_per_part: int) -> list[list[int]]:
    """Parts of `rows_per_part` rows, in order; the last may be smaller."""
    parts: list[list[int]] = []
    for start in range(0, num_rows, rows_per_part):
        end = min(start + rows_per_part, num_rows)
        parts.append(list(range(start, end)))
    return parts


def num_passes(lengths: Sequence[int], max_tokens: int) -> int:
    """The fewest micro-batches of at most `max_tokens` tokens (or of one longer row) that
    `balanced` can make."""
    longest = max(lengths, default=0)
    limit = max(max_tokens, longest)
    total = sum(lengths)
    fewest = max(1, -(-total // limit))
    for count in range(fewest, len(lengths)):
        parts = balanced(lengths, count)
        nums_tokens = [_num_tokens(lengths, part) for part in parts]
        most_tokens = max(nums_tokens)
        if most_tokens <= limit:
            return count
    return max(1, len(lengths))


def _num_tokens(lengths: Sequence[int], part: Sequence[int]) -> int:
    return sum(lengths[row] for row in part)


def balanced(
    lengths: Sequence[int],
    num_parts: int,
    max_rows: int | None = None,
) -> list[list[int]]:
    """Parts with about the same number of tokens, and at most `max_rows` rows: longest row first,
    each to the part with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # The parts that have room: their tokens, their rows, and their numbers.
    heap = [(0, 0, part) for part in range(num_parts)]
    longest_first = sorted(
        range(len(lengths)),
        key=lambda row: lengths[row],
        reverse=True,
    )
    for row in longest_first:
        num_tokens, num_rows, part = heapq.heappop(heap)
        parts[part].append(row)
        num_tokens += lengths[row]
        num_rows += 1
        if num_rows != max_rows:
            heapq.heappush(heap, (num_tokens, num_rows, part))
    return [sorted(part) for part in parts]


def rank_order(
    lengths: Sequence[int],
    rows_per_mini_batch: int,
    num_ranks: int,
    *,
    balance: bool,
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
            own_lengths = [lengths[row] for row in rows]
            parts = balanced(own_lengths, num_ranks, size)
        else:
            parts = by_rows(len(rows), size)
        first_row = rows[0]
        for of_rank, part in zip(rows_of_rank, parts, strict=True):
            # A part has numbers within the mini-batch.
            of_rank.extend(first_row + row for row in part)
    order: list[int] = []
    for rows in rows_of_rank:
        order += rows
    return np.asarray(order, dtype=np.int64)
