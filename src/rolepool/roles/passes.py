"""How a role splits its rows into micro-batches, as the plan chose their size.

Owns applying that choice to the rows of a call, and saying which key makes micro-batches smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolepool.config.consistency import divisor_near
from rolepool.models.micro_batches import balanced, by_rows, num_passes
from rolepool.models.sharding import max_over_ranks
from rolepool.placement.estimate import MicroBatch


@dataclass
class Passes:
    """The micro-batches of one operation, and how rows were last split."""

    size: MicroBatch
    device: str
    packed: bool
    width: int
    """The tokens of the longest row that the config allows."""
    further: Sequence[str] = ()
    """Other overrides with which micro-batches take less memory."""
    _num_rows: int = 0
    _most_rows: int = 0

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """The rows of each micro-batch, for rows of these lengths. Every rank has the same number of micro-batches."""
        passes = self._cut(lengths)
        self._num_rows = len(lengths)
        self._most_rows = max(map(len, passes), default=0)
        return passes

    def _cut(self, lengths: Sequence[int]) -> list[list[int]]:
        if self.size.rows is not None:  # all ranks have as many rows, padding included
            return by_rows(len(lengths), self.size.rows)
        if not self.packed:
            lengths = [max(lengths)] * len(lengths)
        return balanced(lengths, max_over_ranks(num_passes(lengths, self.size.tokens), self.device))

    def smaller(self) -> list[str]:
        """The override with which micro-batches are half as large, if they can be smaller, and others."""
        keys, most_rows = self.size.keys, self._most_rows or self.size.rows or 1
        if self.size.rows is None and not self.size.is_chosen:
            tokens = max(self.size.tokens // 2, self.width)
            half = [f"{keys.tokens}={tokens}"] if tokens < self.size.tokens else []
        else:
            half = [f"{keys.rows}={divisor_near(self._num_rows, most_rows // 2)}"] if most_rows > 1 else []
        return [*half, *self.further]
