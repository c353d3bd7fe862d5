"""Mixed precision for a model that is not sharded: weights in fp32, computing in 16 bits.

Owns the 16-bit copies: each decoder layer creates them when it runs, and in training may keep them for its backward
pass. Gradients are in fp32. FSDP2 does the same for sharded models.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

Method = Callable[..., Any]


def compute_in(dtype: torch.dtype, model: nn.Module, layers: Iterable[nn.Module], methods: Iterable[str]) -> None:
    """Let the layers, and these methods of the model around them, compute with copies of the weights in `dtype`."""
    if all(parameter.dtype == dtype for parameter in model.parameters()):
        return
    of_layers: set[nn.Parameter] = set()
    for layer in layers:
        of_layers.update(layer.parameters())
        layer.forward = _with_copies(_Call(layer, layer.forward), {name for name, _ in layer.named_parameters()}, dtype)
    around = {name for name, weight in model.named_parameters() if weight not in of_layers}
    for name in methods:
        setattr(model, name, _with_copies(_Call(model, getattr(model, name)), around, dtype))


class _Call(nn.Module):
    """A method of a module as a `forward`, so that `functional_call` can replace the weights for one call."""

    def __init__(self, module: nn.Module, method: Method) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


def _with_copies(call: _Call, weights: Container[str], dtype: torch.dtype) -> Method:
    def forward(*args: Any, **kwargs: Any) -> Any:
        copies = {
            f"module.{name}": weight.to(dtype) for name, weight in call.module.named_parameters() if name in weights
        }
        return functional_call(call, copies, args, kwargs)

    return forward
