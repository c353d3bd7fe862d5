"""A training run in the terminal: its start, a progress bar, a line of metrics for each step, a
summary at the end.

Owns the text. Every number comes from the metrics of a step. Imports nothing that is slow to
import.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rolepool.errors import printable
from rolepool.metrics.row_text import console_line, sparkline, validation_score
from rolepool.metrics.run_rows import event_lines
from rolepool.terminal import Terminal

NUM_SHOWN_SAMPLES = 4
SHORT_LINE: dict[str, tuple[str, ...]] = {
    "reward {:.3f}": ("critic/score/mean",),
    "KL {:.4f}": ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
    "length {:.0f}": ("response_length/mean",),
    "{:.2f} s": ("timing_s/step",),
}
"""Parts of the line of a step, each with the metrics it may come from; the first that the step has
is shown."""

OnStep = Callable[[int, dict[str, float]], object]
"""Called with the number of a step and its metrics."""
Sample = dict[str, Any]
"""A response with its texts and numbers, as `rolepool.trainer.samples` makes it."""
OnValidation = Callable[[int, dict[str, float], list[Sample]], object]
"""Called with the number of the last step, the metrics of the validation, and all responses with
their scores."""


def short_line(step: int, metrics: Mapping[str, float]) -> str:
    """`step 3/60  reward 0.512  KL 0.0012  length 4  0.31 s  8,214 tokens/s`"""
    num_steps = metrics["training/num_steps"]
    parts = [f"step {step}/{num_steps:.0f}"]
    for form, names in SHORT_LINE.items():
        for name in names:
            if name in metrics:
                parts.append(form.format(metrics[name]))
                break
    tokens_per_s = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
    parts.append(f"{tokens_per_s:,.0f} tokens/s")
    return "  ".join(parts)


class Observer:
    """Is told what happens in a run. This one does nothing; `TrainingConsole` prints it."""

    def on_phase(self, what: str) -> None:
        """A part of the start begins, such as loading models; the part before it has ended."""

    def on_notice(self, line: str) -> None:
        """Where the run starts, where an earlier run was moved, or why a checkpoint is not
        saved."""

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        """A row of metrics was written."""

    def on_samples(self, step: int, samples: list[Sample]) -> None:
        """A validation generated these responses and scored them."""

    def on_training_samples(self, step: int, samples: list[Sample]) -> None:
        """Some responses of the last training step, if no validation follows it."""


class TrainingConsole(Observer):
    """Shows metrics as they arrive. Use it as the `observer` of a Trainer, inside `with
    console.progress_of(steps)`.

    `loggers` is the value of trainer.logger. With `console` there is a short line for each step,
    with `verl` a line with all metrics. `on_step` is called after each step, and `on_validation`
    after each validation.
    """

    def __init__(
        self,
        loggers: Sequence[str],
        on_step: OnStep | None = None,
        on_validation: OnValidation | None = None,
    ) -> None:
        self._console = Terminal(soft_wrap=True)
        self._loggers = loggers
        self._on_step = on_step
        self._on_validation = on_validation
        self._phase: tuple[str, float] | None = None
        """The part of the start that runs now, and when it began."""
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self.progress.add_task("starting", total=None)
        self.rewards: list[float] = []
        self.validations: list[tuple[int, float]] = []
        self._samples: list[Sample] = []
        """The newest responses, which the summary shows."""
        self._samples_title = ""
        self._metrics: dict[str, float] = {}
        """The newest row."""

    def progress_of(self, num_steps: int) -> Progress:
        """The progress bar, for a `with` block."""
        self.progress.update(self._task, total=num_steps)
        return self.progress

    def on_phase(self, what: str) -> None:
        now_s = time.monotonic()
        line = f"{what} ..."
        if self._phase is not None:
            before, began_s = self._phase
            line += f" ({before} took {now_s - began_s:.1f} s)"
        self._phase = (what, now_s)
        self.progress.update(self._task, description=what)
        self.on_notice(line)

    def on_notice(self, line: str) -> None:
        self._console.print(line)

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        score = validation_score(metrics)
        if score is not None:
            self.validations.append((step, score))
        if "critic/score/mean" in metrics:
            reward = metrics["critic/score/mean"]
            step_s = metrics["timing_s/step"]
            self.rewards.append(reward)
            words = f"reward {reward:.3f}  {step_s:.2f} s per step"
            self.progress.update(self._task, completed=step, description=words)
        # The row of a validation or of a checkpoint has no time of a step.
        is_row_of_step = "timing_s/step" in metrics
        shows_all_metrics = "verl" in self._loggers
        if shows_all_metrics:
            self._console.print(console_line(step, metrics))
        if "console" in self._loggers and is_row_of_step:
            self._console.print(short_line(step, metrics))
        if score is not None and not shows_all_metrics:
            self._console.print(f"validation after step {step}: mean reward {score:.3f}")
        self._metrics = metrics
        if self._on_step is not None and is_row_of_step:
            self._on_step(step, metrics)

    def on_samples(self, step: int, samples: list[Sample]) -> None:
        self._samples = samples[:NUM_SHOWN_SAMPLES]
        self._samples_title = f"validation after step {step}"
        if self._on_validation is not None:
            self._on_validation(step, self._metrics, samples)

    def on_training_samples(self, step: int, samples: list[Sample]) -> None:
        self._samples = samples
        self._samples_title = f"responses of training step {step}"

    def print_summary(self, run_folder: Path) -> None:
        """Print the newest responses, the reward curve, the scores of validations, the number of
        restarts, and the run folder."""
        if self._samples:
            self._console.print(self._table_of_samples())
        if self.rewards:
            curve = sparkline(self.rewards)
            first_and_last = f"{self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}"
            self._console.print(f"reward  {curve}  {first_and_last}")
        if self.validations:
            self._console.print(validations_in_words(self.validations))
        num_restarts = len(event_lines(run_folder, "restart"))
        if num_restarts:
            self._console.print(
                f"restarts: {num_restarts}; `rolepool report {run_folder}` lists them"
            )
        self._console.print(f"run folder: {run_folder}")

    def _table_of_samples(self) -> Table:
        names = ("question", "response", "ground_truth", "score")
        table = Table(title=self._samples_title, title_justify="left")
        for name in names:
            title = name.replace("_", " ")
            table.add_column(
                title,
                overflow="ellipsis",
                no_wrap=True,
                max_width=40,
            )
        for sample in self._samples:
            cells = [cell(sample[name]) for name in names]
            table.add_row(*cells)
        return table


def cell(value: object) -> str:
    """A value in one line of a table; numbers are rounded."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = " ".join(str(value).split())
    return printable(text)


def validations_in_words(validations: Sequence[tuple[int, float]]) -> str:
    """`validation: 0.090 after step 0, 0.996 after step 60`: the first and the last validation of
    this run."""
    first, *others = [f"{score:.3f} after step {step}" for step, score in validations]
    return ", ".join([f"validation: {first}", *others[-1:]])
