"""Curves over steps or time, made small for a page: points in bins, each with its mean, minimum and
maximum.

Owns how many points and how many charts a page has. Does not know which metrics a page shows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rolepool.report.run import MetricsByStep, metric_names

MAX_POINTS = 500
"""Points of a line in a large chart."""
MAX_SMALL_POINTS = 120
"""Points of a line in a small chart."""
MAX_SMALL_CHARTS = 400


def binned(points: Sequence[tuple[float, float]], most: int) -> dict[str, list[float]]:
    """At most this many bins: the mean x of each bin, and the mean, minimum and maximum y."""
    x, y = np.asarray(points, dtype=float).T
    starts = np.unique(np.linspace(0, len(x), min(len(x), most), endpoint=False).astype(int))
    sizes = np.diff([*starts, len(x)])
    columns = {
        "x": np.add.reduceat(x, starts) / sizes,
        "mean": np.add.reduceat(y, starts) / sizes,
        "min": np.minimum.reduceat(y, starts),
        "max": np.maximum.reduceat(y, starts),
    }
    return {name: values.tolist() for name, values in columns.items()}


def chart_of(
    title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, Any]:
    """A large chart with several lines."""
    lines = [{"name": name, **binned(points, MAX_POINTS)} for name, points in series.items()]
    return {"title": title, "x_label": x_label, "series": lines}


def small_charts(metrics: MetricsByStep) -> dict[str, Any]:
    """All metrics by name. Those that change have a small chart, the others only their value.

    Metrics that were logged in the same steps share one list of x. Minimum and maximum are left out
    if every bin holds one step. Metrics after the first `MAX_SMALL_CHARTS` that change are only
    counted.
    """
    all_x: list[list[float]] = []
    charts: list[dict[str, Any]] = []
    constants: list[tuple[str, float]] = []
    num_hidden = 0
    for name in sorted(metric_names(metrics)):
        points = [(float(step), row[name]) for step, row in metrics.items() if name in row]
        values = {
            str(value) for _, value in points
        }  # compared as text because NaN is not equal to itself
        if len(values) == 1:
            constants.append((name, points[0][1]))
        elif len(charts) >= MAX_SMALL_CHARTS:
            num_hidden += 1
        else:
            columns = binned(points, MAX_SMALL_POINTS)
            x = columns.pop("x")
            if x not in all_x:
                all_x.append(x)
            if len(points) <= MAX_SMALL_POINTS:
                columns = {"mean": columns["mean"]}
            short = {
                column: [_rounded(value) for value in values] for column, values in columns.items()
            }
            charts.append({"name": name, "x": all_x.index(x), "last": points[-1][1], **short})
    return {
        "x": all_x,
        "charts": charts,
        "constants": constants[:MAX_SMALL_CHARTS],
        "num_hidden": num_hidden + len(constants[MAX_SMALL_CHARTS:]),
    }


def _rounded(value: float) -> float:
    """Four digits, which is more than a small chart can show."""
    return float(f"{value:.4g}")
