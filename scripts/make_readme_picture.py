"""Draw docs/images/standard_vs_split.png from two recorded runs: a step of median duration of each,
on one time axis.

`bash demo.sh && bash demo_split.sh`, then `python scripts/make_readme_picture.py runs/demo
runs/demo_split`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rolepool.metrics.timeline import Bar
from rolepool.report import plots
from rolepool.report.compare import measured_steps, read_runs, typical_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "standard_vs_split.png"
LANE_HEIGHT = 0.8
SMALLEST_LABEL = 0.012
"""A bar gets its name if it has this fraction of the axis for each letter."""


def draw(folders: Sequence[str], file: Path) -> None:
    """One panel for each run, with a lane for each pool."""
    runs = read_runs(folders)
    steps = typical_steps(runs)
    longest_s = max(seconds for _, seconds, _ in steps.values())
    heights = [len(lanes) for _, _, lanes in steps.values()]
    with plots.style():
        figure = plots.new_figure(height_in=1.6 + 0.55 * sum(heights))
        panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (name, (_, seconds, lanes)) in zip(panels[:, 0], steps.items(), strict=True):
            durations = [row["timing_s/step"] for row in measured_steps(runs[name]).values()]
            axes.set_title(
                f"{name}: mean step {fmean(durations):.2f} s", loc="left", fontweight="bold"
            )
            draw_step(axes, lanes, seconds, longest_s)
        panels[-1, 0].set_xlabel(
            "seconds since the start of a step of median duration (grey: the pool waits)"
        )
        add_legend(figure, [lanes for _, _, lanes in steps.values()])
        figure.savefig(file, dpi=150)


def draw_step(axes: Axes, lanes: dict[str, list[Bar]], seconds: float, longest_s: float) -> None:
    """A lane for each pool. Grey is the time in which the pool waits."""
    colors = plots.colors_for(
        dict.fromkeys(operation for bars in lanes.values() for operation, _, _ in bars)
    )
    for place, bars in enumerate(lanes.values()):
        axes.barh(place, seconds, height=LANE_HEIGHT, color="#eeeeee")
        for bar in bars:
            draw_bar(axes, bar, place, colors[bar[0]], longest_s)
    axes.axvline(seconds, color="black", linewidth=1.5)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlim(0, longest_s * 1.02)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)


def draw_bar(axes: Axes, bar: Bar, place: int, color: str, longest_s: float) -> None:
    """A call, with its name if the name fits."""
    operation, start_s, end_s = bar
    width_s = end_s - start_s
    axes.barh(
        place,
        width_s,
        left=start_s,
        height=LANE_HEIGHT,
        color=color,
        edgecolor="white",
        linewidth=0.5,
    )
    if width_s > SMALLEST_LABEL * len(operation) * longest_s:
        axes.text(
            start_s + width_s / 2,
            place,
            operation,
            ha="center",
            va="center",
            fontsize=8,
            color="white",
        )


def add_legend(figure: Figure, panels: Sequence[dict[str, list[Bar]]]) -> None:
    """One entry for each operation, because short bars have no room for a name."""
    from matplotlib.patches import Patch

    names = {operation for lanes in panels for bars in lanes.values() for operation, _, _ in bars}
    operations = plots.in_step_order(names)
    colors = plots.colors_for(operations)
    patches = [Patch(color=colors[name], label=name) for name in operations]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    draw(options.runs, options.output)
    print(f"wrote {options.output}")
