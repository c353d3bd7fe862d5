"""Decode steps as CUDA graphs: one for each number of rows that steps are run on, captured once and replayed. And
numbers of the host as tensors.

Owns when a step is captured. Does not know what a step does, only that it works on tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def has_kernels(device: torch.device) -> bool:
    """Whether passes on `device` use the kernels of `rollout.kernels`."""
    return device.type == "cuda"


def tensor_of(lists: Iterable[Iterable[int]]) -> Tensor:
    """The numbers of all lists, one after another. Torch would take ten times as long to read them."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), np.int64))


def bucket_of(num_rows: int, most: int) -> int:
    """Rows that a step is run on to serve `num_rows`: a number of which there are few, and not much more."""
    bucket = 1
    while bucket < min(num_rows, 32):
        bucket *= 2
    if num_rows > 32:
        grain = 32 if num_rows <= 256 else 64
        bucket = -(-num_rows // grain) * grain
    return min(bucket, most)


class StepGraphs:
    """Steps by what distinguishes them. Their memory is one pool, as no two run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Take the step: the first time as it is, which compiles and warms up what it uses, later from a graph."""
        if key not in self._graphs:
            self._graphs[key] = None
            step()
            return
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = torch.cuda.CUDAGraph()
            # Other threads of the process, such as one that watches memory, may go on.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        graph.replay()
