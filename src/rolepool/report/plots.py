"""Plots of what logs and run folders recorded, and the numbers behind them as CSV.

Owns how figures look. matplotlib is imported where a figure is made, and never its global state.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rolepool.metrics.run_folder import whole_file
from rolepool.report.colors import SERIES_COLORS, colors_for, in_step_order
from rolepool.report.logs import Log, read_logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 9.0
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++")
"""Tell runs apart where colours tell operations."""

TIMING = "timing_s/"
INSIDE_OTHERS = ("generate_sequences", "reshard")
"""Timings that verl's logs give beside the operation (`gen`) that they are a part of."""

CSV_NAME = "timing_metrics.csv"
PERFORMANCE = {
    "perf/throughput": "tokens/s per process",
    "perf/time_per_step": "s",
    "perf/total_num_tokens": "tokens per step",
}


def plot_logs(paths: Sequence[str | Path], output_dir: str | Path) -> list[Path]:
    """Write every plot that the logs have numbers for, and the CSV. Returns the files."""
    logs = read_logs(paths)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted({key for log in logs for row in log.rows.values() for key in row})
    timings = [
        f"{TIMING}{name}" for name in in_step_order(key[len(TIMING) :] for key in keys if key.startswith(TIMING))
    ]
    memory = [key for key in keys if key == "perf/max_memory_allocated_gb" or key.endswith("/peak_memory_gb")]
    written = [folder / CSV_NAME]
    write_csv(written[0], logs, keys)
    with style():
        figures: dict[str, Figure | None] = {
            "time_per_step": _stacked(logs) if timings else None,
            "timings": _small_multiples(logs, dict.fromkeys(timings, "s")),
            "time_per_token": _small_multiples(
                logs, {key: "ms per token" for key in keys if key.startswith("timing_per_token_ms/")}
            ),
            "throughput": _small_multiples(logs, {key: unit for key, unit in PERFORMANCE.items() if key in keys}),
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
    """One line a step; empty where a step has no such number."""
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", *keys])
        for log in logs:
            writer.writerows([log.name, step, *(row.get(key, "") for key in keys)] for step, row in log.rows.items())


def mean_times(log: Log) -> dict[str, float]:
    """Mean seconds of each operation, over the steps that have it."""
    keys = {key for row in log.rows.values() for key in row if key.startswith(TIMING)}
    return {key[len(TIMING) :]: float(np.mean(log.values(key)[1])) for key in sorted(keys) if log.values(key)[1]}


# The look of all figures


def style() -> AbstractContextManager[None]:
    """Figures are made and saved inside it."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "font.size": 9,
            "text.parse_math": False,  # a run may be named a$b
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.titlesize": "medium",
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "grid.color": "#E5E5E5",
            "legend.frameon": False,
            "svg.hashsalt": "rolepool",  # the same numbers give the same file
        }
    )


def new_figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def save(figure: Figure, path: Path, *formats: str) -> list[Path]:
    """Write the figure once for each format, as `path` with that ending."""
    files = [path.parent / f"{path.name}.{ending}" for ending in formats]
    for file in files:
        metadata = {"Date": None} if file.suffix == ".svg" else None
        with whole_file(file) as temporary:
            figure.savefig(temporary, dpi=150, facecolor="white", metadata=metadata)
    return files


# Figures


def _stacked(logs: Sequence[Log]) -> Figure:
    """Time per step by component, a panel for each log, with the step's own time as a line on top."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = new_figure(1.0 + 2.4 * len(logs))
    shown: set[str] = set()
    panels = figure.subplots(len(logs), 1, sharey=True, squeeze=False)[:, 0]
    parts = _operations({name for log in logs for name in mean_times(log)} - {"step"})
    colors = colors_for(parts)
    for axes, log in zip(panels, logs, strict=True):
        rows = {step: row for step, row in log.rows.items() if f"{TIMING}step" in row} or log.rows
        steps = np.array(list(rows), dtype=float)
        middles = (steps[1:] + steps[:-1]) / 2
        edges = np.array([steps[0] - 0.5, *middles, steps[-1] + 0.5])
        below = np.zeros(len(steps))
        for name in parts:
            heights = np.nan_to_num([row.get(f"{TIMING}{name}", 0.0) for row in rows.values()])
            if heights.any():
                axes.stairs(below + heights, edges, baseline=below, fill=True, color=colors[name])
                shown.add(name)
            below = below + heights
        whole = np.array([row.get(f"{TIMING}step", np.nan) for row in rows.values()])
        axes.stairs(whole, edges, baseline=None, color="black", linewidth=1.2)
        total = float(np.nansum(whole))
        note = f": parts add up to {below.sum() / total:.0%} of the step times" if total else ""
        axes.set_title(log.name + note)
        axes.set_ylabel("time per step (s)")
        axes.margins(x=0)
        _step_axis(axes)
    handles = [Patch(color=colors[name], label=name) for name in reversed(parts) if name in shown]
    figure.legend(handles=[Line2D([], [], color="black", label="step"), *handles], loc="outside right upper")
    note = "A stack above the line: parts ran side by side, or outside of the step as validation may."
    figure.supxlabel(note, fontsize=8, color="#595959")
    return figure


def _small_multiples(logs: Sequence[Log], units: Mapping[str, str]) -> Figure | None:
    """A panel for each key, in it a line for each log."""
    lines = {key: [log.values(key) for log in logs] for key in units}
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
        axes.set_title(key if len(key) < 36 else "/\n".join(key.rsplit("/", 1)))  # as wide as its panel
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
    """Mean seconds by run and operation: a group of bars an operation, each with its ratio to the first run's."""
    from matplotlib.patches import Patch

    operations = _operations({name for means in times.values() for name in means})
    colors = {**colors_for(operations), "step": "#333333"}
    width = 0.84 / len(times)
    first = next(iter(times.values()))
    for index, means in enumerate(times.values()):
        for position, name in enumerate(operations):
            if name not in means:
                continue
            place = position + (index - (len(times) - 1) / 2) * width
            hatch = HATCHES[index % len(HATCHES)]
            axes.bar(place, means[name], width * 0.94, color=colors[name], hatch=hatch, edgecolor="white", linewidth=0)
            if index and first.get(name):
                ratio, rotation = f"×{means[name] / first[name]:.2f}", 90 if len(times) > 2 else 0
                axes.text(place, means[name], ratio, ha="center", va="bottom", fontsize=7, rotation=rotation)
    labels = ["_\n".join(name.rsplit("_", 1)) for name in operations]
    axes.set_xticks(range(len(operations)), labels, fontsize=8)
    axes.set_ylabel("mean time (s)")
    axes.margins(x=0.02, y=0.12)
    axes.grid(axis="y")
    handles = [
        Patch(facecolor="#8C8C8C", edgecolor="white", hatch=HATCHES[index % len(HATCHES)], label=name)
        for index, name in enumerate(times)
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(times), handlelength=2.4)


def _operations(names: set[str]) -> list[str]:
    """Those that are not parts of others, in the order of a step."""
    return [name for name in in_step_order(names) if name not in INSIDE_OTHERS and "/" not in name]


def _step_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
