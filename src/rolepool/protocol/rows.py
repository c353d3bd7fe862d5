"""Which rows of a batch belong to which part, when ranks share it.

Owns the one rule: parts are contiguous and of one size, the last ones are filled up with padding. Driver and workers
both compute it, so nobody has to be told.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolepool.errors import DataError


@dataclass(frozen=True)
class Share:
    """Part `index` of `parts` of a batch of `total` rows: rows `start` to `end`, and `padding` rows after them."""

    total: int
    parts: int
    index: int

    @property
    def size(self) -> int:
        """Rows of every part, padding included."""
        return -(-self.total // self.parts)

    @property
    def start(self) -> int:
        return min(self.index * self.size, self.total)

    @property
    def end(self) -> int:
        return min(self.start + self.size, self.total)

    @property
    def num_real(self) -> int:
        return self.end - self.start

    @property
    def padding(self) -> int:
        return self.size - self.num_real

    @property
    def fetched(self) -> range:
        """The rows to have at hand: the real ones, or the first of the batch where all are padding."""
        if self.total == 0:
            return range(0)
        return range(self.start, self.end) if self.num_real else range(1)


def pieces(rows: range, lengths: list[int]) -> list[tuple[int, int, int]]:
    """Where contiguous rows lie when the batch is stored in stretches: (stretch, first, last) in the stretch."""
    found = []
    offset = 0
    for stretch, length in enumerate(lengths):
        first, last = max(rows.start, offset), min(rows.stop, offset + length)
        if first < last:
            found.append((stretch, first - offset, last - offset))
        offset += length
    if rows.stop > offset:
        raise DataError(f"rows {rows.start} to {rows.stop} were asked for, and the batch has {offset}")
    return found
