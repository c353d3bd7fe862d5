"""Copying a stream of named tensors into a model, with errors for tensors that do not fit.

Does not know where the stream comes from.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rolepool.errors import DataError
from rolepool.rollout.tensor_parallel import Shard

_SHOWN = 5


class WeightStream:
    """Copies whole tensors into `model`, or into the shard of a model that `model` is. Tied weights may come under one
    name or under all of them.

    A wrong name or shape is an error when it arrives, a missing name at the end; the model then contains a mixture of
    old and new weights.
    """

    def __init__(self, model: nn.Module, shard: Shard | None) -> None:
        self._targets = model.state_dict(keep_vars=True)
        self._shard = shard
        self._arrived: set[str] = set()

    @torch.no_grad()
    def take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor in place as it arrives."""
        for name, tensor in named_tensors:
            if name not in self._targets:
                raise DataError(f"weights: {name} is not a weight of this model{_nearest(name, self._targets)}")
            if name in self._arrived:
                raise DataError(f"weights: {name} came twice")
            target = self._targets[name]
            shape = target.shape if self._shard is None else self._shard.whole_shape(name, target.shape)
            if tensor.shape != shape:
                raise DataError(f"weights: {name} has shape {list(tensor.shape)}, the model's {list(shape)}")
            target.copy_(tensor if self._shard is None else self._shard.part(name, tensor))
            self._arrived.add(name)

    def end(self) -> None:
        """Check that all weights have arrived."""
        served = {id(self._targets[name]) for name in self._arrived}
        missing = [name for name, target in self._targets.items() if id(target) not in served]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise DataError(
                f"weights: {len(missing)} of {len(self._targets)} did not come: {', '.join(missing[:_SHOWN])}{more}"
            )


def _nearest(name: str, targets: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(targets), n=1)
    return f"; the nearest is {close[0]}" if close else ""
