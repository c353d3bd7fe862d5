"""Curves over steps or time, made small for a page: points in bins, each with its mean, minimum and
maximum.

Owns how many points and how many charts a page has. Does not know which metrics a page shows.
"""

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

import numpy as np

from rolepool.report.metrics_by_step import MetricsByStep, metric_names

MAX_POINTS = 500
"""Points of a line in a large chart."""
MAX_SMALL_POINTS = 120
"""Points of a line in a small chart."""
MAX_SMALL_CHARTS = 400

Point = tuple[float, float]
"""A step or a time, and a value."""
Points = Sequence[Point]


class Bins(TypedDict):
    """The columns of a line, with one value for each bin."""

    x: list[float]
    mean: list[float]
    min: list[float]
    max: list[float]


class Series(Bins):
    """A line in a large chart."""

    name: str


class LargeChart(TypedDict):
    """A chart with several lines, as the page's script reads it."""

    title: str
    x_label: str
    series: list[Series]


class SmallChart(TypedDict):
    """A chart of one metric."""

    name: str
    x: int
    """The place of its list of x in `SmallCharts.x`."""
    last: float
    """The value of the last step."""
    mean: list[float]
    min: NotRequired[list[float]]
    """Missing if every bin holds one step; so is `max`."""
    max: NotRequired[list[float]]


class SmallCharts(TypedDict):
    """All metrics of a run."""

    x: list[list[float]]
    """Metrics that were logged in the same steps share one list of x."""
    charts: list[SmallChart]
    constants: list[tuple[str, float]]
    """Metrics that have the same value in all steps."""
    num_hidden: int


def binned(points: Points, max_bins: int) -> Bins:
    """The points in at most this many bins: the mean x of each bin, and the mean, minimum and
    maximum y."""
    x, y = np.asarray(points, dtype=float).T
    num_points = len(x)
    num_bins = min(num_points, max_bins)
    places = np.linspace(0, num_points, num_bins, endpoint=False)
    # Several bins would begin at the same point if there were fewer points than bins.
    starts = np.unique(places.astype(int))
    sizes = np.diff([*starts, num_points])
    mean_x = np.add.reduceat(x, starts) / sizes
    mean_y = np.add.reduceat(y, starts) / sizes
    min_y = np.minimum.reduceat(y, starts)
    max_y = np.maximum.reduceat(y, starts)
    return {
        "x": mean_x.tolist(),
        "mean": mean_y.tolist(),
        "min": min_y.tolist(),
        "max": max_y.tolist(),
    }


def chart_of(title: str, x_label: str, series: Mapping[str, Points]) -> LargeChart:
    """A large chart with several lines."""
    lines: list[Series] = []
    for name, points in series.items():
        bins = binned(points, MAX_POINTS)
        lines.append({"name": name, **bins})
    return {"title": title, "x_label": x_label, "series": lines}


def points_of(metrics: MetricsByStep, name: str) -> list[Point]:
    """Step and value of a metric, for all steps that have it."""
    points: list[Point] = []
    for step, row in metrics.items():
        if name in row:
            points.append((step, row[name]))
    return points


def small_charts(metrics: MetricsByStep) -> SmallCharts:
    """All metrics by name. Those that change have a small chart, the others only their value.

    Metrics after the first `MAX_SMALL_CHARTS` that change are only counted.
    """
    all_x: list[list[float]] = []
    charts: list[SmallChart] = []
    constants: list[tuple[str, float]] = []
    num_hidden = 0
    for name in sorted(metric_names(metrics)):
        points = points_of(metrics, name)
        if _is_constant(points):
            constants.append((name, points[0][1]))
        elif len(charts) >= MAX_SMALL_CHARTS:
            num_hidden += 1
        else:
            bins = binned(points, MAX_SMALL_POINTS)
            x = bins["x"]
            if x not in all_x:
                all_x.append(x)
            chart = _small_chart(name, points, bins, place_of_x=all_x.index(x))
            charts.append(chart)
    return {
        "x": all_x,
        "charts": charts,
        "constants": constants[:MAX_SMALL_CHARTS],
        "num_hidden": num_hidden + len(constants[MAX_SMALL_CHARTS:]),
    }


def _is_constant(points: Points) -> bool:
    _, first_value = points[0]
    first = str(first_value)
    # Compared as text, because NaN is not equal to itself.
    return all(str(value) == first for _, value in points)


def _small_chart(name: str, points: Points, bins: Bins, place_of_x: int) -> SmallChart:
    chart: SmallChart = {
        "name": name,
        "x": place_of_x,
        "last": points[-1][1],
        "mean": _rounded(bins["mean"]),
    }
    # A bin that holds one step has no other minimum and maximum than its mean.
    if len(points) > MAX_SMALL_POINTS:
        chart["min"] = _rounded(bins["min"])
        chart["max"] = _rounded(bins["max"])
    return chart


def _rounded(values: Sequence[float]) -> list[float]:
    """Four digits, which is more than a small chart can show."""
    return [float(f"{value:.4g}") for value in values]
