"""Rows of weights on their way through shared memory.

Each rank of the actor exports its own rows, so nobody gathers a model. An engine that knows the
parts that it holds reads those; for an engine that takes whole tensors they are put together here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Size, Tensor

from rolepool.weights.regions import Region, whole_region


class WeightRows(NamedTuple):
    """Some rows of a weight, as a matrix."""

    shape: tuple[int, ...]
    """The shape of the whole weight."""
    first_row: int
    rows: Tensor

    @property
    def region(self) -> Region:
        interval = (self.first_row, self.first_row + len(self.rows))
        return whole_region(self.shape)._replace(rows=interval)


Exported = Mapping[str, WeightRows]
"""What one rank exports, by the name of the weight."""


def assembled(exports: Sequence[Exported]) -> Iterator[tuple[str, Tensor]]:
    """The whole weights of which these ranks have exported all rows, one after another."""
    names = dict.fromkeys(name for exported in exports for name in exported)
    for name in names:
        parts = [exported[name] for exported in exports if name in exported]
        parts.sort(key=lambda part: part.first_row)
        tensors = [part.rows for part in parts]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        yield name, whole.view(Size(parts[0].shape))
