"""A training run in the terminal: a progress bar, a line of metrics for each step, and a summary at the end.

Owns the text. Every number comes from the metrics of a step.
"""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rolepool.command_line import silence_stdout
from rolepool.metrics.run_folder import console_line, sparkline
from rolepool.trainer.loop import Observer

NUM_SHOWN_SAMPLES = 4


class _Terminal(Console):
    """Goes silent if the output pipe closes (`| head`). rich would end the program."""

    def on_broken_pipe(self) -> None:
        silence_stdout()


class TrainingConsole(Observer):
    """Shows metrics as they arrive. Use it as the `observer` of a Trainer, inside `with console.progress`."""

    def __init__(self, num_steps: int, *, lines: bool) -> None:
        self._console = _Terminal(highlight=False, soft_wrap=True)
        self._lines = lines
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self.progress.add_task("starting", total=num_steps)
        self.rewards: list[float] = []
        self._samples: list[dict[str, Any]] = []
        self.validations: list[tuple[int, float]] = []

    def on_notice(self, line: str) -> None:
        self._console.print(line, markup=False)

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        scores = [value for name, value in metrics.items() if name.startswith("val-core/")]
        if scores:
            self.validations.append((step, sum(scores) / len(scores)))
        if "critic/score/mean" in metrics:
            self.rewards.append(metrics["critic/score/mean"])
            words = f"reward {self.rewards[-1]:.3f}  {metrics['timing_s/step']:.2f} s per step"
            self.progress.update(self._task, completed=step, description=words)
        if self._lines:
            self._console.print(console_line(step, metrics), markup=False)
        elif scores:
            self._console.print(f"validation after step {step}: mean reward {self.validations[-1][1]:.3f}")

    def on_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self._samples = samples[:NUM_SHOWN_SAMPLES]

    def print_summary(self, run_folder: str) -> None:
        """Print some responses of the last validation, the reward curve, and the run folder."""
        if self._samples:
            table = Table(title="validation", title_justify="left")
            for column in ("prompt", "response", "ground truth", "score"):
                table.add_column(column, overflow="ellipsis", no_wrap=True, max_width=40)
            for row in self._samples:
                table.add_row(*(Text(str(row[key])) for key in ("prompt", "response", "ground_truth", "score")))
            self._console.print(table)
        if self.rewards:
            self._console.print(f"reward  {sparkline(self.rewards)}  {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}")
        if self.validations:
            (first_step, before), (last_step, after) = self.validations[0], self.validations[-1]
            self._console.print(f"validation: {before:.3f} after step {first_step}, {after:.3f} after step {last_step}")
        self._console.print(f"run folder: {run_folder}", markup=False)
