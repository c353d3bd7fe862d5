"""Calling functions of a Python program during training."""

from collections.abc import Callable
from typing import Any

from rolepool.trainer.console import TrainingConsole

OnStep = Callable[[int, dict[str, float]], object]
"""Called with the number of a step and its metrics."""
OnValidation = Callable[[int, dict[str, float], list[dict[str, Any]]], object]
"""Called with the number of the last step, the metrics of the validation, and all responses with their scores."""


class CallbackConsole(TrainingConsole):
    """Prints what happens in a run, then calls `on_step` after each step and `on_validation` after each validation."""

    on_step: OnStep | None = None
    on_validation: OnValidation | None = None
    _metrics: dict[str, float]

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        super().on_row(step, metrics)
        self._metrics = metrics
        if self.on_step is not None and "timing_s/step" in metrics:  # not the row of a validation or of a checkpoint
            self.on_step(step, metrics)

    def on_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        super().on_samples(step, samples)
        if self.on_validation is not None:
            self.on_validation(step, self._metrics, samples)
