"""Decode steps as CUDA graphs: captured once for each batch size and way to sample, then replayed.

Does not know what a step computes.
"""

import time
from collections.abc import Callable, Hashable

import torch

from rolepool.metrics.spans import CAPTURE
from rolepool.protocol.part_times import note


class StepGraphs:
    """Captured steps, one for each key. They share one memory pool, because only one runs at a
    time. The tensors of a step must keep their addresses."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        """None for a step that ran once and is not captured yet."""

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run the step: the first time directly, which compiles its kernels, later from a graph."""
        if key not in self._graphs:
            self._graphs[key] = None
            step()
            return
        graph = self._graphs[key]
        if graph is None:
            start_s = time.perf_counter()
            graph = self._capture(step)
            note(CAPTURE, time.perf_counter() - start_s)
            self._graphs[key] = graph
        graph.replay()

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local", because other threads of the process, such as a memory monitor, may use
        # CUDA at the same time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph


def bucket_of(num_rows: int, most: int) -> int:
    """The batch size to use for `num_rows` rows: at least that many, rounded up to one of few
    sizes, because each size is a graph."""
    if num_rows <= 32:
        next_power_of_2 = 1 << (num_rows - 1).bit_length()
        return min(next_power_of_2, most)
    grain = 32 if num_rows <= 256 else 64
    next_multiple = -(-num_rows // grain) * grain
    return min(next_multiple, most)
