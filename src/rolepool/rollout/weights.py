"""Copying a stream of named tensors into a model, and refusing a stream that does not fit.

Does not know where the stream comes from.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rolepool.errors import DataError

_SHOWN = 5


def load_named_tensors(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each tensor in place as it arrives. Of tied weights, one name or all may come.

    A name or shape that does not fit is refused when it arrives, a name that is missing at the end; by then the
    model holds a mixture of old and new weights.
    """
    targets = model.state_dict(keep_vars=True)
    arrived: set[str] = set()
    with torch.no_grad():
        for name, tensor in named_tensors:
            if name not in targets:
                raise DataError(f"weights: {name} is not a weight of this model{_nearest(name, targets)}")
            if name in arrived:
                raise DataError(f"weights: {name} came twice")
            target = targets[name]
            if tensor.shape != target.shape:
                raise DataError(f"weights: {name} has shape {list(tensor.shape)}, the model's {list(target.shape)}")
            target.copy_(tensor)
            arrived.add(name)
    served = {id(targets[name]) for name in arrived}
    missing = [name for name, target in targets.items() if id(target) not in served]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise DataError(f"weights: {len(missing)} of {len(targets)} did not come: {', '.join(missing[:_SHOWN])}{more}")


def _nearest(name: str, targets: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(targets), n=1)
    return f"; the nearest is {close[0]}" if close else ""
