"""Plots of console logs and run folders, and their numbers as CSV.

Owns how figures look. matplotlib is imported only when a figure is made; its global state is not used.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rolepool.files import atomic_path
from rolepool.report.colors import SERIES_COLORS, colors_for, in_step_order
from rolepool.report.logs import Log, read_logs
from rolepool.report.run import TIMING, finite_values, metric_names, timed_operations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 9.0
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++")
"""Patterns that tell runs apart if colours already tell operations apart."""

PARTS_OF_GEN = ("generate_sequences", "reshard")
"""Timings in verl's logs that are part of the operation `gen`."""

CSV_NAME = "timing_metrics.csv"
PERFORMANCE = {
    "perf/throughput": "tokens/s per process",
    "perf/time_per_step": "s",
    "perf/total_num_tokens": "tokens per step",
}


def plot_logs(paths: Sequence[str | Path], output_dir: str | Path) -> list[Path]:
    """Write the CSV, and every plot for which the logs have numbers. Returns the files."""
    logs = read_logs(paths)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted({key for log in logs for key in metric_names(log.metrics)})
    operations = in_step_order(key.removeprefix(TIMING) for key in keys if key.startswith(TIMING))
    timings = [f"{TIMING}{operation}" for operation in operations]
    tokens = [key for key in keys if key.startswith("timing_per_token_ms/")]
    memory = [key for key in keys if key == "perf/max_memory_allocated_gb" or key.endswith("/peak_memory_gb")]
    written = [folder / CSV_NAME]
    write_csv(written[0], logs, keys)
    with style():
        figures: dict[str, Figure | None] = {
            "time_per_step": _stacked(logs) if timings else None,
            "timings": _small_multiples(logs, dict.fromkeys(timings, "s")),
            "time_per_token": _small_multiples(logs, dict.fromkeys(tokens, "ms per token")),
            "throughput": _small_multiples(logs, PERFORMANCE),
            "memory": _small_multiples(logs, dict.fromkeys(memory, "GB")),
        }
        if timings and len(logs) > 1:
            figures["comparison"] = comparison = new_figure(3.6)
            grouped_bars(comparison.subplots(), {log.name: mean_times(log) for log in logs})
        for name, figure in figures.items():
            if figure is not None:
                written += save(figure, folder / name, "png")
    return written


def write_csv(path: Path, logs: Sequence[Log], keys: Sequence[str]) -> None:
    """One line for each step; a cell is empty if the step does not have that number."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", *keys])
        for log in logs:
            writer.writerows([log.name, step, *(row.get(key, "") for key in keys)] for step, row in log.metrics.items())


def mean_times(log: Log) -> dict[str, float]:
    """Mean seconds of each operation, and of the step, over the steps that have a time of it."""
    names = ("step", *timed_operations(log.metrics))
    times = {name: finite_values(log.metrics, f"{TIMING}{name}")[1] for name in names}
    return {name: float(np.mean(values)) for name, values in times.items() if values}


# The look of all figures


def style() -> AbstractContextManager[None]:
    """The style of all figures. Make and save figures inside it."""
    import matplotlib

    return matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle"))


def new_figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def save(figure: Figure, path: Path, *formats: str) -> list[Path]:
    """Write the figure in each format, as `path` with that ending. Returns the files."""
    files = [path.parent / f"{path.name}.{ending}" for ending in formats]
    for file in files:
        metadata = {"Date": None} if file.suffix == ".svg" else None
        with atomic_path(file) as temporary:
            figure.savefig(temporary, dpi=150, facecolor="white", metadata=metadata)
    return files


# Figures


def _stacked(logs: Sequence[Log]) -> Figure:
    """Stacked times of operations over steps, with the step's own time as a line; a panel for each log."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = new_figure(1.0 + 2.4 * len(logs))
    shown: set[str] = set()
    panels = figure.subplots(len(logs), 1, sharey=True, squeeze=False)[:, 0]
    operations = _operations({name for log in logs for name in mean_times(log)} - {"step"})
    colors = colors_for(operations)
    for axes, log in zip(panels, logs, strict=True):
        rows = {step: row for step, row in log.metrics.items() if f"{TIMING}step" in row} or log.metrics
        steps = np.array(list(rows), dtype=float)
        middles = (steps[1:] + steps[:-1]) / 2
        edges = np.array([steps[0] - 0.5, *middles, steps[-1] + 0.5])
        below = np.zeros(len(steps))
        for name in operations:
            heights = np.nan_to_num([row.get(f"{TIMING}{name}", 0.0) for row in rows.values()])
            if heights.any():
                axes.stairs(below + heights, edges, baseline=below, fill=True, color=colors[name])
                shown.add(name)
            below = below + heights
        whole = np.array([row.get(f"{TIMING}step", np.nan) for row in rows.values()])
        axes.stairs(whole, edges, baseline=None, color="black", linewidth=1.2)
        total = float(np.nansum(whole))
        note = f": operations add up to {below.sum() / total:.0%} of the step times" if total else ""
        axes.set_title(log.name + note)
        axes.set_ylabel("time per step (s)")
        axes.margins(x=0)
        _step_axis(axes)
    handles = [Patch(color=colors[name], label=name) for name in reversed(operations) if name in shown]
    figure.legend(handles=[Line2D([], [], color="black", label="step"), *handles], loc="outside right upper")
    note = "Stack above the line: operations overlapped, or ran outside the step (such as validation)."
    figure.supxlabel(note, fontsize=8, color="#595959")
    return figure


def _small_multiples(logs: Sequence[Log], units: Mapping[str, str]) -> Figure | None:
    """A panel for each key that has numbers, with a line for each log."""
    lines = {key: [finite_values(log.metrics, key) for log in logs] for key in units}
    keys = [key for key in units if any(steps for steps, _ in lines[key])]
    if not keys:
        return None
    num_columns = min(3, len(keys))
    num_rows = -(-len(keys) // num_columns)
    figure = new_figure(0.6 + 1.9 * num_rows)
    panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes, key in zip(panels, keys, strict=False):
        for index, (log, (steps, values)) in enumerate(zip(logs, lines[key], strict=True)):
            color = SERIES_COLORS[index % len(SERIES_COLORS)]
            axes.plot(steps, values, color=color, linewidth=1.4, marker="." if len(steps) < 40 else "", label=log.name)
        axes.set_title(key if len(key) < 36 else "/\n".join(key.rsplit("/", 1)))  # a longer title would not fit
        axes.set_ylabel(units[key])
        axes.set_ylim(min(0, axes.get_ylim()[0]), axes.get_ylim()[1] * 1.05)
        axes.grid(axis="y")
        _step_axis(axes)
    for axes in panels[len(keys) :]:
        axes.remove()
    if len(logs) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(logs)))
    return figure


def grouped_bars(axes: Axes, times: Mapping[str, Mapping[str, float]]) -> None:
    """Mean seconds by run and operation: a group of bars for each operation, with ratios to the first run."""
    from matplotlib.patches import Patch

    operations = _operations({name for means in times.values() for name in means})
    colors = {**colors_for(operations), "step": "#333333"}
    width = 0.84 / len(times)
    first = next(iter(times.values()))
    handles = []
    for index, (run, means) in enumerate(times.items()):
        names = [name for name in operations if name in means]
        places = [operations.index(name) + (index - (len(times) - 1) / 2) * width for name in names]
        look: dict[str, Any] = {"hatch": HATCHES[index % len(HATCHES)], "edgecolor": "white"}
        heights = [means[name] for name in names]
        bars = axes.bar(places, heights, width * 0.94, color=[colors[name] for name in names], linewidth=0, **look)
        if index:
            ratios = [f"×{means[name] / first[name]:.2f}" if first.get(name) else "" for name in names]
            axes.bar_label(bars, ratios, fontsize=7, rotation=90 if len(times) > 2 else 0)
        handles.append(Patch(facecolor="#8C8C8C", label=run, **look))
    labels = ["_\n".join(name.rsplit("_", 1)) for name in operations]
    axes.set_xticks(range(len(operations)), labels, fontsize=8)
    axes.set_ylabel("mean time (s)")
    axes.margins(x=0.02, y=0.12)
    axes.grid(axis="y")
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(times), handlelength=2.4)


def _operations(names: set[str]) -> list[str]:
    """Operations that are not part of another one, in the order of a step."""
    return [name for name in in_step_order(names) if name not in PARTS_OF_GEN and "/" not in name]


def _step_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
