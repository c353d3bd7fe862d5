"""The plots of console logs and run folders, with their numbers as CSV.

Owns the figures and their style. matplotlib and numpy are imported only when a figure is made;
matplotlib's global state is not used.
"""

from __future__ import annotations

import csv
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from rolepool.files import atomic_path
from rolepool.report.console_logs import read_logs
from rolepool.report.metrics_by_step import (
    REWARD,
    THROUGHPUT,
    TIMING,
    MetricsByStep,
    finite_values,
    metric_names,
    timed_steps,
)
from rolepool.report.operations import colors_for, in_step_order, mean_times
from rolepool.report.tables import TABLES

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

PARTS_OF_GEN = ("generate_sequences", "reshard")
"""Timings in verl's logs that are part of the operation `gen`."""

LEGEND_WIDTH = 20
"""Letters of a line in a legend; longer names have several lines."""
MAX_DOTTED_STEPS = 40
"""A line with fewer steps shows each of them as a dot."""


def plot_logs(paths: Sequence[str | Path], output_dir: str | Path) -> list[Path]:
    """Write the CSV, and every plot for which the logs have numbers. Returns the files."""
    logs = read_logs(paths)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    for rows in logs.values():
        names.update(metric_names(rows))
    metrics = in_step_order(names)
    csv_file = folder / "timing_metrics.csv"
    _write_csv(csv_file, logs, metrics)
    written = [csv_file]
    with style():
        for name, figure in _figures(logs, metrics).items():
            if not figure.axes:  # no log has numbers for it
                continue
            path = folder / f"{name}.png"
            with atomic_path(path) as temporary:
                figure.savefig(temporary)
            written.append(path)
    return written


def _figures(logs: Mapping[str, MetricsByStep], metrics: Sequence[str]) -> dict[str, Figure]:
    """All figures by the names of their files; those without numbers have no panels."""
    figures = {"overview": _overview(logs)}
    for name, patterns in TABLES.figures.items():
        units: dict[str, str] = {}
        for pattern, unit in patterns.items():
            for metric in fnmatch.filter(metrics, pattern):
                units[metric] = unit
        figures[name] = _small_multiples(logs, units)

    means = {log: mean_times(rows) for log, rows in logs.items()}
    if len(logs) > 1 and any(means.values()):
        comparison = new_figure(3.6)
        axes = comparison.subplots()
        grouped_bars(axes, means)
        figures["comparison"] = comparison
    return figures


# Numbers as CSV


def _write_csv(
    path: Path,
    logs: Mapping[str, MetricsByStep],
    metrics: Sequence[str],
) -> None:
    """One line for each step. A cell is empty if the step does not have that number."""
    with (
        atomic_path(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file)
        titles = map(csv_text, metrics)
        writer.writerow(["run", "step", *titles])
        for name, rows in logs.items():
            run = csv_text(name)
            for step, row in rows.items():
                numbers = [row.get(metric, "") for metric in metrics]
                writer.writerow([run, step, *numbers])


def csv_text(text: str) -> str:
    """A cell of text. A spreadsheet would take one that begins with one of these characters for a
    formula."""
    if text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{text}"
    return text


# All figures


def style() -> AbstractContextManager[None]:
    """The style of all figures. Make and save figures inside it."""
    import matplotlib

    return matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle"))


def new_figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(9.0, height_in))


def _whole_operations(means: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The operations that have a time in some log and are not part of another one, in the order of
    a step."""
    timed: set[str] = set()
    for times_s in means.values():
        timed.update(times_s)
    whole = {name for name in timed if "/" not in name}
    return in_step_order(whole.difference(PARTS_OF_GEN))


def _logged(logs: Mapping[str, MetricsByStep], metrics: Iterable[str]) -> list[str]:
    """The metrics for which some log has numbers."""

    def is_logged(metric: str) -> bool:
        return any(finite_values(rows, metric) for rows in logs.values())

    return [metric for metric in metrics if is_logged(metric)]


# Each figure


def _overview(logs: Mapping[str, MetricsByStep]) -> Figure:
    """Reward, step time by operation (a panel for each log) and throughput; without panels if there
    are no numbers."""
    means = {log: mean_times(rows) for log, rows in logs.items()}
    timed_logs = [log for log, times in means.items() if times]
    operations = _whole_operations(means)
    if "step" in operations:
        operations.remove("step")
    units = {
        REWARD: "mean reward",
        THROUGHPUT: "tokens/s per GPU",
    }

    panels = [
        *_logged(logs, [REWARD]),
        *timed_logs,
        *_logged(logs, [THROUGHPUT]),
    ]
    num_panels = len(panels)
    figure = new_figure(0.6 + 2.4 * num_panels)
    last_timed: Axes | None = None
    for place, panel in enumerate(panels, 1):
        is_stack = panel in timed_logs
        if is_stack:
            # The same scale for all logs, so that their times can be compared.
            axes = figure.add_subplot(num_panels, 1, place, sharey=last_timed)
            _stack(axes, panel, logs[panel], operations)
            last_timed = axes
        else:
            axes = figure.add_subplot(num_panels, 1, place)
            _lines(axes, logs, panel, units[panel])
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1, 1),
            reverse=is_stack,  # so that the legend has the order of the stack
        )
    return figure


def _stack(axes: Axes, log: str, metrics: MetricsByStep, operations: Sequence[str]) -> None:
    """Stacked times of operations over steps, with the step's own time as a line."""
    import numpy as np

    rows = timed_steps(metrics) or metrics

    def times_of(name: str) -> npt.NDArray[np.float64]:
        """A value for each step, and the first and the last one twice: every value holds from
        halfway to its neighbours, and those at the ends are as wide as the others."""
        values = [row.get(f"{TIMING}{name}", np.nan) for row in rows.values()]
        return np.pad(values, 1, mode="edge")

    steps = [min(rows) - 0.5, *rows, max(rows) + 0.5]
    if operations:  # a log may have the times of its steps only
        heights = [np.nan_to_num(times_of(name)) for name in operations]
        axes.stackplot(
            steps,
            heights,
            step="mid",
            colors=colors_for(operations).values(),
            labels=operations,
        )
    axes.plot(
        steps,
        times_of("step"),
        drawstyle="steps-mid",
        color="black",
        linewidth=1.2,
        label="step",
    )
    axes.set(
        title=fill(log, 80),
        xlabel="step (a stack above the line: operations overlapped, or ran outside the step)",
        ylabel="time per step (s)",
    )
    axes.margins(x=0)
    axes.locator_params(axis="x", integer=True)


def _lines(
    axes: Axes,
    logs: Mapping[str, MetricsByStep],
    metric: str,
    unit: str,
    title_width: int = 80,
) -> None:
    """A metric over steps, with a line for each log. The axis begins at zero, or below if there are
    negative values."""
    colors = cycle(TABLES.series_colors)
    for log, rows in logs.items():
        values = finite_values(rows, metric)
        marker = ""
        if len(values) < MAX_DOTTED_STEPS:
            marker = "."
        axes.plot(
            list(values),
            list(values.values()),
            color=next(colors),
            linewidth=1.4,
            marker=marker,
            label=fill(log, LEGEND_WIDTH),
        )
    # `fill` breaks at spaces, so that lines of the title end after a slash.
    title = fill(metric.replace("/", "/ "), title_width).replace("/ ", "/")
    low, high = axes.get_ylim()
    axes.set(
        title=title,
        xlabel="step",
        ylabel=unit,
        ylim=(min(0, low), max(0, high * 1.05)),
    )
    axes.grid(axis="y")
    axes.locator_params(axis="x", integer=True)


def _small_multiples(logs: Mapping[str, MetricsByStep], units: Mapping[str, str]) -> Figure:
    """A panel for each metric that has numbers."""
    metrics = _logged(logs, units)
    num_columns = max(1, min(3, len(metrics)))
    num_rows = math.ceil(len(metrics) / num_columns)
    figure = new_figure(0.6 + 1.9 * num_rows)
    for place, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        _lines(
            axes,
            logs,
            metric=metric,
            unit=units[metric],
            title_width=90 // num_columns,
        )
    if len(logs) > 1 and metrics:
        # All panels have the same lines, so one legend is enough.
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(4, len(logs)),
        )
    return figure


def grouped_bars(axes: Axes, times: Mapping[str, Mapping[str, float]]) -> None:
    """Mean seconds by run and operation: a group of bars for each operation, with ratios to the
    first run. A run has the colour of its lines in other plots."""
    operations = _whole_operations(times)
    num_runs = len(times)
    width = 0.84 / num_runs
    first = next(iter(times.values()))
    colors = cycle(TABLES.series_colors)
    for index, (run, means) in enumerate(times.items()):
        offset = (index - (num_runs - 1) / 2) * width
        places = []
        heights = []
        ratios = []
        for place, name in enumerate(operations):
            if name not in means:
                continue
            mean_s = means[name]
            places.append(place + offset)
            heights.append(mean_s)
            ratios.append(_ratio_text(mean_s, first.get(name)))
        bars = axes.bar(
            places,
            heights,
            width * 0.94,
            color=next(colors),
            label=fill(run, LEGEND_WIDTH),
        )
        if index > 0:
            rotation = 90 if num_runs > 2 else 0
            axes.bar_label(bars, ratios, fontsize=7, rotation=rotation)
    # Names break after their last underscore, because two lines need less width.
    labels = ["_\n".join(name.rsplit("_", 1)) for name in operations]
    axes.set_xticks(range(len(operations)), labels, fontsize=8)
    axes.set_ylabel("mean time (s)")
    axes.margins(x=0.02, y=0.12)
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=num_runs)


def _ratio_text(seconds: float, first_s: float | None) -> str:
    """How many times as long as in the first run; empty if that run has no time of it."""
    if not first_s:
        return ""
    return f"×{seconds / first_s:.2f}"
