"""What a training run tells while it runs. Imports nothing that is slow to import."""

from typing import Any


class Observer:
    """Is told what happens in a run. This one does nothing; `TrainingConsole` prints it."""

    def on_phase(self, what: str) -> None:
        """A part of the start begins, such as loading models; the part before it has ended."""

    def on_notice(self, line: str) -> None:
        """Where the run starts, where an earlier run was moved, or why a checkpoint is not saved."""

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        """A row of metrics was written."""

    def on_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """A validation generated these responses and scored them."""
