"""The micro-batches of an operation of a role: how rows are split, and with which keys they would be
smaller."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolepool.config.rules import divisor_near
from rolepool.models.micro_batches import balanced, by_rows, num_passes
from rolepool.models.ranks import PartSums
from rolepool.placement.estimate import MicroBatch


@dataclass
class MicroBatches:
    """The micro-batches of one operation, and how rows were last split."""

    size: MicroBatch
    part_sums: PartSums
    packed: bool
    width: int
    """The tokens of the longest row that the config allows."""
    further: Sequence[str] = ()
    """Other overrides with which micro-batches take less memory."""
    _num_rows: int = 0
    _most_rows: int = 0

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """The rows of each micro-batch, for rows of these lengths. Every rank has the same number
        of micro-batches."""
        num_rows = len(lengths)
        if self.size.rows is not None:  # all ranks have as many rows, padding included
            parts = by_rows(num_rows, self.size.rows)
        else:
            counted = lengths
            if not self.packed:
                # Rows are padded to the longest one.
                counted = [max(lengths)] * num_rows
            num_here = num_passes(counted, self.size.tokens)
            num_on_all = self.part_sums.max(num_here)
            parts = balanced(counted, num_on_all)
        self._num_rows = num_rows
        self._most_rows = max(map(len, parts), default=0)
        return parts

    def smaller(self) -> list[str]:
        """The override with which micro-batches are half as large, if they can be smaller, and
        others."""
        return [*self._half(), *self.further]

    def _half(self) -> list[str]:
        keys = self.size.keys
        if self.size.rows is None and not self.size.is_chosen:
            # One micro-batch must hold at least the longest row.
            num_tokens = max(self.size.tokens // 2, self.width)
            if num_tokens >= self.size.tokens:
                return []
            return [f"{keys.tokens}={num_tokens}"]
        most_rows = self._most_rows or self.size.rows or 1
        if most_rows == 1:
            return []
        num_rows = divisor_near(self._num_rows, most_rows // 2)
        return [f"{keys.rows}={num_rows}"]
