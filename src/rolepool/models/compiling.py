"""What is compiled for a GPU with `torch.compile`: decoder layers of packed models, and token scores.

Owns whether there is a compiler, and logging how long compiling takes. Nothing is compiled for a CPU. Torch caches
compiled code on disk for later processes.
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
"""Most compiled versions of one piece of code."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function, for any number of tokens; the function itself if there is no compiler."""
    return torch.compile(function, dynamic=True) if has_compiler() else function


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward of each layer, but not weight gathering and activation checkpointing around it."""
    for layer in layers:
        layer.forward = _of_known_head_size(compiled(layer.forward))


def _of_known_head_size(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the width of rotary tables, which is the head size, as constant. Otherwise kernels would divide by it for
    every number that they move."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for table in kwargs.get("position_embeddings") or ():
            torch._dynamo.mark_static(table, table.dim() - 1)
        return forward(*args, **kwargs)

    return call if has_compiler() else forward


def compiled_for_weight(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `compiled`, for a function whose second argument is a weight: kernels are compiled for its exact size."""
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
    """Log how long compiling takes, and allow a compiled version for each use of a layer."""
    import torch._dynamo.config
    from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start

    # Roles of a process share the code of layers; training, scoring and frozen weights need their own versions.
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
