"""How operations and figures look, and the plots of console logs and run folders, with their
numbers as CSV. Also the tables of all reports: which metrics are shown and how, and the texts of
findings.

One colour for each operation, in every plot of a run and on every page, and one for each run in
plots of several runs. The colours of operations and series are those of Okabe and Ito, which
colour-blind readers can tell apart; the others are greys and tints. matplotlib and numpy are
imported only when a figure is made; matplotlib's global state is not used.
"""

from __future__ import annotations

import csv
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING

from rolepool.config.base import Items, Section, read_table
from rolepool.files import atomic_path
from rolepool.placement.roles import OPERATIONS
from rolepool.report.run import TIMING, MetricsByStep, finite_values, metric_names, read_logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

PARTS_OF_GEN = ("generate_sequences", "reshard")
"""Timings in verl's logs that are part of the operation `gen`."""

REWARD, THROUGHPUT = "critic/score/mean", "perf/throughput"
LEGEND_WIDTH = 20
"""Letters of a line in a legend; longer names have several lines."""


class Tables(Section):
    """The content of `tables.yaml`."""

    work_keys: Items[str]
    """The keys that define the work of a step. Other keys, such as placement and micro-batches, may
    differ."""
    curves: dict[str, Items[str]]
    """The charts of the report page: the title, and patterns of the metrics in it. `{unit}` is a
    GPU or a CPU slot."""
    figures: dict[str, dict[str, str]]
    """The plots with a panel for each metric: patterns of the metrics, and their units."""
    series_colors: Items[str]
    """Colours of lines and bars that are no operations (runs, pools, GPUs), used in this order and
    then repeated."""
    findings: dict[str, str]
    """The text of each kind of finding. Names that end with `_s` stand for seconds with their
    unit."""


TABLES = read_table(Path(__file__).with_name("tables.yaml"), Tables)


def in_step_order(operations: Iterable[str]) -> list[str]:
    """Known operations, or the metrics of their times, in the order of a step, which is also the
    order of legends; then the others by name."""
    order = {name: place for place, name in enumerate(OPERATIONS)}
    return sorted(
        operations, key=lambda name: (order.get(name.removeprefix(TIMING), len(order)), name)
    )


def colors_for(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: the operation's own colour, or the next of `series_colors`."""
    others = cycle(TABLES.series_colors)
    return {name: OPERATIONS[name].color if name in OPERATIONS else next(others) for name in names}


def timed_operations(metrics: MetricsByStep) -> list[str]:
    """The operations that have a time in some step, in the order of a step; without `step`
    itself."""
    names = [name.removeprefix(TIMING) for name in metric_names(metrics) if name.startswith(TIMING)]
    return in_step_order(name for name in names if name != "step")


def plot_logs(paths: Sequence[str | Path], output_dir: str | Path) -> list[Path]:
    """Write the CSV, and every plot for which the logs have numbers. Returns the files."""
    logs = read_logs(paths)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    keys = in_step_order({key for metrics in logs.values() for key in metric_names(metrics)})
    means = {name: mean_times(metrics) for name, metrics in logs.items()}
    written = [folder / "timing_metrics.csv"]
    # One line for each step. A cell is empty if the step does not have that number.
    with (
        atomic_path(written[0]) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["run", "step", *map(csv_text, keys)])
        for name, metrics in logs.items():
            for step, row in metrics.items():
                writer.writerow([csv_text(name), step, *(row.get(key, "") for key in keys)])
    with style():
        figures = {"overview": _overview(logs)}
        for name, patterns in TABLES.figures.items():
            units = {
                key: unit
                for pattern, unit in patterns.items()
                for key in fnmatch.filter(keys, pattern)
            }
            figures[name] = _small_multiples(logs, units)
        if any(means.values()) and len(logs) > 1:
            figures["comparison"] = comparison = new_figure(3.6)
            grouped_bars(comparison.subplots(), means)
        for name, figure in figures.items():
            if figure.axes:
                written.append(folder / f"{name}.png")
                with atomic_path(written[-1]) as temporary:
                    figure.savefig(temporary)
    return written


def csv_text(text: str) -> str:
    """A cell of text. A spreadsheet would take one that begins with one of these characters for a
    formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def mean_times(metrics: MetricsByStep) -> dict[str, float]:
    """Mean seconds of each operation, and of the step, over the steps that have a time of it."""
    names = ("step", *timed_operations(metrics))
    times = {name: finite_values(metrics, f"{TIMING}{name}") for name in names}
    return {name: fmean(values.values()) for name, values in times.items() if values}


# All figures


def style() -> AbstractContextManager[None]:
    """The style of all figures. Make and save figures inside it."""
    import matplotlib

    return matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle"))


def new_figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(9.0, height_in))


def _operations(names: set[str]) -> list[str]:
    """Operations that are not part of another one, in the order of a step."""
    return [name for name in in_step_order(names) if name not in PARTS_OF_GEN and "/" not in name]


# Each figure


def _overview(logs: Mapping[str, MetricsByStep]) -> Figure:
    """Reward, step time by operation (a panel for each log) and throughput; without panels if there
    are no numbers."""
    timed = [log for log, metrics in logs.items() if mean_times(metrics)]
    panels = [*_logged(logs, [REWARD]), *timed, *_logged(logs, [THROUGHPUT])]
    figure = new_figure(0.6 + 2.4 * len(panels))
    operations = _operations(
        {name for metrics in logs.values() for name in mean_times(metrics)} - {"step"}
    )
    last_timed: Axes | None = None
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(
            len(panels), 1, place, sharey=last_timed if panel in timed else None
        )
        if panel in timed:
            _stack(axes, panel, logs[panel], operations)
            last_timed = axes
        else:
            _lines(
                axes, logs, panel, {REWARD: "mean reward", THROUGHPUT: "tokens/s per GPU"}[panel]
            )
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=panel in timed)
    return figure


def _logged(logs: Mapping[str, MetricsByStep], keys: Iterable[str]) -> list[str]:
    """The keys for which some log has numbers."""
    return [key for key in keys if any(finite_values(metrics, key) for metrics in logs.values())]


def _stack(axes: Axes, log: str, metrics: MetricsByStep, operations: Sequence[str]) -> None:
    """Stacked times of operations over steps, with the step's own time as a line."""
    import numpy as np

    rows = {step: row for step, row in metrics.items() if f"{TIMING}step" in row} or metrics
    times = np.array(
        [
            [row.get(f"{TIMING}{name}", np.nan) for row in rows.values()]
            for name in (*operations, "step")
        ]
    )
    # Every value holds from halfway to its neighbours; those at the ends are as wide as the others.
    steps = [min(rows) - 0.5, *rows, max(rows) + 0.5]
    times = np.pad(times, ((0, 0), (1, 1)), mode="edge")
    stack = np.nan_to_num(times[:-1])
    axes.stackplot(
        steps, stack, step="mid", colors=colors_for(operations).values(), labels=operations
    )
    axes.plot(steps, times[-1], drawstyle="steps-mid", color="black", linewidth=1.2, label="step")
    label = "step (a stack above the line: operations overlapped, or ran outside the step)"
    axes.set(title=fill(log, 80), xlabel=label, ylabel="time per step (s)")
    axes.margins(x=0)
    axes.locator_params(axis="x", integer=True)


def _lines(
    axes: Axes, logs: Mapping[str, MetricsByStep], key: str, unit: str, title_width: int = 80
) -> None:
    """A metric over steps, with a line for each log. The axis begins at zero, or below if there are
    negative values."""
    for color, (log, metrics) in zip(cycle(TABLES.series_colors), logs.items(), strict=False):
        found = finite_values(metrics, key)
        label, marker = fill(log, LEGEND_WIDTH), "." if len(found) < 40 else ""
        axes.plot(
            list(found),
            list(found.values()),
            color=color,
            linewidth=1.4,
            marker=marker,
            label=label,
        )
    title = fill(key.replace("/", "/ "), title_width).replace("/ ", "/")  # lines end after a slash
    low, high = axes.get_ylim()
    axes.set(title=title, xlabel="step", ylabel=unit, ylim=(min(0, low), max(0, high * 1.05)))
    axes.grid(axis="y")
    axes.locator_params(axis="x", integer=True)


def _small_multiples(logs: Mapping[str, MetricsByStep], units: Mapping[str, str]) -> Figure:
    """A panel for each key that has numbers."""
    keys = _logged(logs, units)
    num_columns = max(1, min(3, len(keys)))
    num_rows = -(-len(keys) // num_columns)
    figure = new_figure(0.6 + 1.9 * num_rows)
    for place, key in enumerate(keys, 1):
        _lines(
            figure.add_subplot(num_rows, num_columns, place),
            logs,
            key,
            units[key],
            title_width=90 // num_columns,
        )
    if len(logs) > 1 and keys:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(logs)))
    return figure


def grouped_bars(axes: Axes, times: Mapping[str, Mapping[str, float]]) -> None:
    """Mean seconds by run and operation: a group of bars for each operation, with ratios to the
    first run. A run has the colour of its lines in other plots."""
    operations = _operations({name for means in times.values() for name in means})
    width = 0.84 / len(times)
    first = next(iter(times.values()))
    for index, (color, (run, means)) in enumerate(
        zip(cycle(TABLES.series_colors), times.items(), strict=False)
    ):
        names = [name for name in operations if name in means]
        places = [operations.index(name) + (index - (len(times) - 1) / 2) * width for name in names]
        heights = [means[name] for name in names]
        bars = axes.bar(places, heights, width * 0.94, color=color, label=fill(run, LEGEND_WIDTH))
        if index:
            ratios = [
                f"×{means[name] / first[name]:.2f}" if first.get(name) else "" for name in names
            ]
            axes.bar_label(bars, ratios, fontsize=7, rotation=90 if len(times) > 2 else 0)
    axes.set_xticks(
        range(len(operations)), ["_\n".join(name.rsplit("_", 1)) for name in operations], fontsize=8
    )
    axes.set_ylabel("mean time (s)")
    axes.margins(x=0.02, y=0.12)
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(times))
