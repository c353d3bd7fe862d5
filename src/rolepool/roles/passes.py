"""How a role cuts its rows into passes: by a number of rows, by tokens, or by what fits where the user said nothing.

Owns the choice of what fits. The bytes of a pass are the plan's formulas, from `placement.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rolepool.config.consistency import divisor_near
from rolepool.models.micro_batches import balanced, by_rows, num_passes
from rolepool.models.sharding import max_over_ranks
from rolepool.placement.memory import HeldModel
from rolepool.protocol.memory import free_bytes

MOST_TOKENS = 16_384
"""Tokens of a pass where the user left the micro-batch size open: enough to keep a GPU busy, if they fit."""
USABLE = 0.8
"""Of the free memory. The rest is for what the estimate leaves out, and for holes in what the allocator has free."""
MASK_BYTES = 3
"""For each pair of tokens of a padded row: a boolean, and the 16-bit number it is turned into."""

BytesOfPass = Callable[[int, int], int]
"""The memory that a pass over some rows of some width takes beside the model that rests on the device."""


def training_bytes(model: HeldModel, num_rows: int, width: int) -> int:
    """Forward and backward, and gradients, which are not there between updates."""
    taken = model.training(num_rows * width, accumulates=True)
    return taken.working - taken.idle + _mask_bytes(model, num_rows, width)


def scoring_bytes(model: HeldModel, num_rows: int, width: int) -> int:
    """Forward only, with 16-bit copies of weights where those that rest are in fp32."""
    taken = model.scoring(num_rows * width)
    copies = model.gathered_bytes if model.num_shards == 1 else 0
    return taken.working - taken.idle + copies + _mask_bytes(model, num_rows, width)


def _mask_bytes(model: HeldModel, num_rows: int, width: int) -> int:
    return 0 if model.packed else MASK_BYTES * num_rows * width * width


@dataclass
class Passes:
    """How one operation of a role cuts its rows, under which keys, and how it last did."""

    rows_key: str
    rows_per_pass: int | None
    tokens_key: str
    max_tokens: int | None
    """Where passes are filled by tokens."""
    device: str
    bytes_of_pass: BytesOfPass
    further: Sequence[str] = ()
    """Other overrides with which passes take less."""
    _num_rows: int = 0
    _width: int = 0
    _most_rows: int = 0

    def cut(self, attention_mask: Tensor) -> list[list[int]]:
        """Rows of each pass, of which every rank makes the same number."""
        passes = self._cut(attention_mask)
        self._num_rows, self._width = attention_mask.shape
        self._most_rows = max(map(len, passes), default=0)
        return passes

    def _cut(self, attention_mask: Tensor) -> list[list[int]]:
        num_rows, width = attention_mask.shape
        if self.max_tokens is not None:
            lengths: Sequence[int] = attention_mask.sum(dim=1).tolist()
            return balanced(lengths, max_over_ranks(num_passes(lengths, self.max_tokens), self.device))
        # All ranks have as many rows, padding included, and so as many passes of a given number of rows.
        if self.rows_per_pass is not None:
            return by_rows(num_rows, self.rows_per_pass)
        free = None if self.device == "cpu" else free_bytes(self.device)
        fitting = rows_that_fit(num_rows, width, self.bytes_of_pass, free)
        return by_rows(num_rows, -max_over_ranks(-fitting, self.device))

    def smaller(self) -> list[str]:
        """The override with which passes take about half, where they can be smaller, and others."""
        most_rows = self._most_rows or self.rows_per_pass or 1
        if self.max_tokens is not None:
            tokens = max(self.max_tokens // 2, self._width)
            half = [f"{self.tokens_key}={tokens}"] if tokens < self.max_tokens else []
        else:
            half = [f"{self.rows_key}={divisor_near(self._num_rows, most_rows // 2)}"] if most_rows > 1 else []
        return [*half, *self.further]


def rows_that_fit(num_rows: int, width: int, bytes_of_pass: BytesOfPass, free: int | None) -> int:
    """Rows of passes that fit into what is free, where that is known, and are about as large as each other."""
    fitting = max(1, min(num_rows, MOST_TOKENS // width))
    if free is not None:
        while fitting > 1 and bytes_of_pass(fitting, width) > USABLE * free:
            fitting -= 1
    count = max(1, -(-num_rows // fitting))
    return max(1, -(-num_rows // count))
