"""What of a model is compiled for a GPU, with `torch.compile`: decoder layers of packed models, and scores of tokens.

Owns whether there is a compiler, and telling how long the first passes take because of it. Nothing is compiled on a
CPU. What was compiled is kept on disk by torch, for the next process.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)

MOST_VERSIONS = 32
"""Of one piece of code, compiled for different uses."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in kernels made for it, for inputs of any number of tokens; as it is where there is no compiler."""
    return torch.compile(function, dynamic=True) if has_compiler() else function


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward of each layer. What surrounds it, gathering weights and checkpointing, stays as it is."""
    for layer in layers:
        layer.forward = _of_known_head_size(compiled(layer.forward))


def _of_known_head_size(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Tables of positions as wide as a head are all that tells its size; were it left open, kernels would divide by it
    for every number they move."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for table in kwargs.get("position_embeddings") or ():
            torch._dynamo.mark_static(table, table.dim() - 1)
        return forward(*args, **kwargs)

    return call if has_compiler() else forward


def compiled_for_weight(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `compiled`, for a function whose second argument is a weight: kernels are made for its very size."""
    fast = compiled(function)

    def call(inputs: Tensor, weight: Tensor, *others: Any) -> Any:
        torch._dynamo.mark_static(weight)
        return fast(inputs, weight, *others)

    return call if has_compiler() else function


@cache
def has_compiler() -> bool:
    if has_triton() and any(map(shutil.which, ("cc", "gcc", "clang"))):
        _set_up()
        return True
    logger.warning("there is no Triton or no C compiler, so models run uncompiled and slower; install gcc and triton")
    return False


def _set_up() -> None:
    """Log how long compiling takes, and let it be done for each use of a layer."""
    import torch._dynamo.config
    from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start

    # Roles of a process share the code of layers; training, scoring and frozen weights are compiled apart.
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
    started_s = 0.0

    @on_compile_start
    def start(_: CallbackArgs) -> None:
        nonlocal started_s
        started_s = time.perf_counter()

    @on_compile_end
    def end(args: CallbackArgs) -> None:
        what = args.callback_trigger.name.lower()
        logger.info("compiled a part of the model (%s) in %.1f s", what, time.perf_counter() - started_s)
