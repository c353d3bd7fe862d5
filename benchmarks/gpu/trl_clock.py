"""When the phases of TRL's training steps began, for the benchmarks that measure them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from transformers import TrainerCallback

FIRST_PHASE = "generation"
"""A step goes from generation to generation."""


class Clock(TrainerCallback):  # type: ignore[misc]
    """When the steps' phases began, by the time the GPU had done all before."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((name, time.perf_counter()))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.mark("rest")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.mark("end")

    def steps(self) -> list[dict[str, float]]:
        """Seconds by phase."""
        steps: list[dict[str, float]] = []
        for (name, start_s), (_, end_s) in pairwise(self.marks):
            if name == FIRST_PHASE:
                steps.append({"step": 0.0})
            taken_s = end_s - start_s
            steps[-1][name] = steps[-1].get(name, 0.0) + taken_s
            steps[-1]["step"] += taken_s
        return steps
