"""Decode steps as CUDA graphs, one for each batch size, captured once and replayed; and lists as tensors.

Owns when a step is captured. Does not know what a step does, only that its tensors keep their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def has_kernels(device: torch.device) -> bool:
    """Whether `device` uses the kernels of `rollout.kernels`."""
    return device.type == "cuda"


def tensor_of(lists: Iterable[Iterable[int]]) -> Tensor:
    """The numbers of all lists, concatenated. `torch.tensor` takes ten times as long."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), np.int64))


def bucket_of(num_rows: int, most: int) -> int:
    """The batch size to use for `num_rows` rows: at least that many, rounded up to one of few sizes."""
    bucket = 1
    while bucket < min(num_rows, 32):
        bucket *= 2
    if num_rows > 32:
        grain = 32 if num_rows <= 256 else 64
        bucket = -(-num_rows // grain) * grain
    return min(bucket, most)


class StepGraphs:
    """Captured steps by key. They share one memory pool, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run the step: the first time directly, which compiles its kernels, later from a graph."""
        if key not in self._graphs:
            self._graphs[key] = None
            step()
            return
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = torch.cuda.CUDAGraph()
            # Other threads of the process, such as a memory monitor, may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        graph.replay()
