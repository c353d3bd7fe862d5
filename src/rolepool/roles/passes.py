"""How a role splits its rows into micro-batches, as the plan chose their size.

Owns applying that choice to the rows of a call, and saying which key makes micro-batches smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

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
    further: Sequence[str] = ()
    """Other overrides with which micro-batches take less memory."""
    _num_rows: int = 0
    _width: int = 0
    _most_rows: int = 0

    def cut(self, attention_mask: Tensor) -> list[list[int]]:
        """The rows of each micro-batch. Every rank has the same number of micro-batches."""
        passes = self._cut(attention_mask)
        self._num_rows, self._width = attention_mask.shape
        self._most_rows = max(map(len, passes), default=0)
        return passes

    def _cut(self, attention_mask: Tensor) -> list[list[int]]:
        num_rows, width = attention_mask.shape
        if self.size.rows is not None:  # all ranks have as many rows, padding included
            return by_rows(num_rows, self.size.rows)
        lengths: list[int] = attention_mask.sum(dim=1).tolist() if self.packed else [width] * num_rows
        return balanced(lengths, max_over_ranks(num_passes(lengths, self.size.tokens), self.device))

    def smaller(self) -> list[str]:
        """The override with which micro-batches are half as large, if they can be smaller, and others."""
        keys, most_rows = self.size.keys, self._most_rows or self.size.rows or 1
        if self.size.rows is None and not self.size.is_chosen:
            tokens = max(self.size.tokens // 2, self._width)
            half = [f"{keys.tokens}={tokens}"] if tokens < self.size.tokens else []
        else:
            half = [f"{keys.rows}={divisor_near(self._num_rows, most_rows // 2)}"] if most_rows > 1 else []
        return [*half, *self.further]
