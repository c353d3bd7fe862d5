"""Operations in reports: their order, their colours and their mean times.

One colour for each operation, in every plot of a run and on every page, and one for each run in
plots of several runs. The colours of operations and series are those of Okabe and Ito, which
colour-blind readers can tell apart; the others are greys and tints.
"""

from collections.abc import Iterable
from itertools import cycle
from statistics import fmean

from rolepool.placement.roles import OPERATIONS
from rolepool.report.metrics_by_step import TIMING, MetricsByStep, finite_values, metric_names
from rolepool.report.tables import TABLES


def in_step_order(operations: Iterable[str]) -> list[str]:
    """Known operations, or the metrics of their times, in the order of a step, which is also the
    order of legends; then the others by name."""
    places = {name: place for place, name in enumerate(OPERATIONS)}

    def sort_key(name: str) -> tuple[int, str]:
        return places.get(name.removeprefix(TIMING), len(places)), name

    return sorted(operations, key=sort_key)


def colors_for(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: the operation's own colour, or the next of `series_colors`."""
    series_colors = cycle(TABLES.series_colors)
    colors = {}
    for name in names:
        if name in OPERATIONS:
            colors[name] = OPERATIONS[name].color
        else:
            colors[name] = next(series_colors)
    return colors


def timed_operations(metrics: MetricsByStep) -> list[str]:
    """The operations that have a time in some step, in the order of a step; without `step`
    itself."""
    names = []
    for metric in metric_names(metrics):
        if metric.startswith(TIMING) and metric != f"{TIMING}step":
            names.append(metric.removeprefix(TIMING))
    return in_step_order(names)


def mean_times(metrics: MetricsByStep) -> dict[str, float]:
    """Mean seconds of each operation, and of the step, over the steps that have a time of it."""
    means = {}
    for name in ("step", *timed_operations(metrics)):
        times_s = finite_values(metrics, f"{TIMING}{name}")
        if times_s:
            means[name] = fmean(times_s.values())
    return means
