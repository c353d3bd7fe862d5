"""The page of a comparison: one file without scripts, which needs no network.

Owns what is on it and its charts, in which the curves of all runs are drawn over each other.
`compare` owns the numbers and verdicts, `comparison.html` the layout.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader

from rolepool.files import write_atomically
from rolepool.metrics.spans import step_bounds
from rolepool.metrics.timeline import Bar, first_rank_lanes
from rolepool.report.compare import (
    LAST_REWARDS,
    LAST_SCORE,
    Line,
    after_warm_up,
    cells_of,
    differences,
    headline,
    loads_on,
    measured_steps,
    with_unit,
)
from rolepool.report.curves import Bins, Point, Points, binned
from rolepool.report.metrics_by_step import (
    REWARD,
    TIMING,
    MetricsByStep,
    finite_values,
    validation_scores,
)
from rolepool.report.operations import colors_for, in_step_order, mean_times
from rolepool.report.run import ReadRun
from rolepool.units import duration

MAX_POINTS = 200
"""Points of a line."""
MAX_DOTS = 25
"""A line with at most this many points shows each of them as a dot."""
WIDTH = 480
HEIGHT = 230
LEFT = 50
RIGHT = 16
TOP = 10
BOTTOM = 34
"""The size of a chart, and the space around its lines."""
NUM_TICKS = 5

TEMPLATES = Environment(
    loader=PackageLoader("rolepool", "report"), autoescape=True, trim_blocks=True
)

Tick = tuple[float, str]
"""The place of a tick on an axis, and its text."""


class Curve(NamedTuple):
    """The line of one run in a chart."""

    run: str
    place: int
    """Its place among all runs, which decides its colour."""
    path: list[Point]
    """Points in the chart's own units."""


class Chart(NamedTuple):
    """The curves of several runs, and the places and texts of the ticks of both axes."""

    title: str
    curves: list[Curve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def render_comparison(runs: Mapping[str, ReadRun], lines: Sequence[Line]) -> str:
    """The page: the headline, the curves of rewards and scores, times, the keys that differ, and
    all measures."""
    means = {}
    timed: set[str] = set()
    for name, run in runs.items():
        means[name] = mean_times(measured_steps(run))
        timed.update(means[name])
    operations = in_step_order(timed - {"step"})
    measures: dict[str, list[tuple[str, list[str]]]] = {}
    for line in lines:
        rows = measures.setdefault(line.measure, [])
        rows.append((line.run, cells_of(line)))
    return TEMPLATES.get_template("comparison.html").render(
        headline=headline(runs, lines),
        loads=list(loads_on(runs)),
        summary=_summary(runs, lines),
        charts=list(charts_of(runs)),
        chart={
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": RIGHT,
            "top": TOP,
            "bottom": BOTTOM,
        },
        max_dots=MAX_DOTS,
        steps=typical_steps(runs),
        means=means,
        colors=colors_for(operations),
        differences=differences(runs),
        measures=measures,
        duration=duration,
    )


def write_comparison(runs: Mapping[str, ReadRun], lines: Sequence[Line], folder: Path) -> Path:
    """Write the page as `comparison.html` in a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_atomically(folder / "comparison.html", [render_comparison(runs, lines)])


def _summary(runs: Mapping[str, ReadRun], lines: Sequence[Line]) -> dict[str, dict[str, str]]:
    """The most important numbers of each run, by the titles of their columns."""
    values = {(line.measure, line.run): line.mean for line in lines}

    def cell(measure: str, name: str) -> str:
        value = values.get((measure, name))
        if value is None:
            return ""
        return with_unit(measure, value)

    summary = {}
    for name, run in runs.items():
        pools = ""
        if run.plan is not None:
            pools = run.plan.in_words
        times_s = finite_values(run.metrics, f"{TIMING}step")
        summary[name] = {
            "pools": pools,
            "steps": f"{len(times_s):,}",
            "reward at the end": cell(LAST_REWARDS, name),
            "validation score": cell(LAST_SCORE, name),
            "mean step": cell(f"{TIMING}step", name),
            "all steps": duration(sum(times_s.values())),
        }
    return summary


class TypicalStep(NamedTuple):
    """A step of a run, and what the first rank of each pool did in it."""

    number: int
    seconds: float
    lanes: dict[str, list[Bar]]


def typical_steps(runs: Mapping[str, ReadRun]) -> dict[str, TypicalStep]:
    """The step with the median duration of each run that has recorded one."""
    typical = {}
    for name, run in runs.items():
        step = _typical_step(run)
        if step is not None:
            typical[name] = step
    return typical


def _typical_step(run: ReadRun) -> TypicalStep | None:
    bounds = step_bounds(run.spans)

    def duration_s(number: int) -> float:
        start_s, end_s = bounds[number]
        return end_s - start_s

    steps = after_warm_up(list(bounds))
    by_duration = sorted(steps, key=duration_s)
    if not by_duration:
        return None
    median = by_duration[len(by_duration) // 2]
    start_s, end_s = bounds[median]
    return TypicalStep(
        number=median,
        seconds=end_s - start_s,
        lanes=first_rank_lanes(run.spans, start_s, end_s),
    )


# Charts


def charts_of(runs: Mapping[str, ReadRun]) -> Iterator[Chart]:
    """Rewards and validation scores of all runs, each by step and by time."""
    rewards = {}
    scores = {}
    for name, run in runs.items():
        rewards[name] = finite_values(run.metrics, REWARD)
        scores[name] = validation_scores(run.metrics)
    yield from _charts_of_metric("Reward", runs, rewards)
    yield from _charts_of_metric("Validation score", runs, scores)


def _charts_of_metric(
    title: str,
    runs: Mapping[str, ReadRun],
    values: Mapping[str, Mapping[int, float]],
) -> Iterator[Chart]:
    """A metric of all runs by step, and by time if the runs have recorded times; none if no run has
    values. `values` are the values of each run by step."""
    if not any(values.values()):
        return
    by_step: dict[str, Points] = {}
    by_time: dict[str, Points] = {}
    latest_s = 0.0
    for name, value_of_step in values.items():
        by_step[name] = list(value_of_step.items())
        points = _by_time(runs[name].metrics, value_of_step)
        by_time[name] = points
        if points:
            last_s, _ = points[-1]
            latest_s = max(latest_s, last_s)
    yield _chart(f"{title} by step", by_step, _step_ticks)
    if latest_s > 0:
        yield _chart(f"{title} by time", by_time, _time_ticks)


def _by_time(metrics: MetricsByStep, values: Mapping[int, float]) -> list[Point]:
    """The values against the time of all steps until then, without validations and checkpoints."""
    times_s = finite_values(metrics, f"{TIMING}step")
    all_steps = times_s.keys() | values.keys()
    points = []
    now_s = 0.0
    for step in sorted(all_steps):
        now_s += times_s.get(step, 0.0)
        if step in values:
            points.append((now_s, values[step]))
    return points


def _chart(
    title: str,
    points_of: Mapping[str, Points],
    ticks_of: Callable[[float, float], list[Tick]],
) -> Chart:
    """One line for each run, in bins if a run is long."""
    lines: dict[str, Bins] = {}
    xs: list[float] = []
    ys: list[float] = []
    for name, points in points_of.items():
        if points:
            bins = binned(points, MAX_POINTS)
            lines[name] = bins
            xs += bins["x"]
            ys += bins["mean"]
    first = min(xs)
    last = max(xs)
    low, high = _range_of(ys)

    def place_x(x: float) -> float:
        share = 0.5
        if last > first:
            share = (x - first) / (last - first)
        width_of_lines = WIDTH - LEFT - RIGHT
        return round(LEFT + share * width_of_lines, 1)

    def place_y(y: float) -> float:
        share = (high - y) / (high - low)
        height_of_lines = HEIGHT - TOP - BOTTOM
        return round(TOP + share * height_of_lines, 1)

    curves = []
    for place, name in enumerate(points_of):
        if name not in lines:
            continue
        bins = lines[name]
        path = []
        for x, y in zip(bins["x"], bins["mean"], strict=True):
            path.append((place_x(x), place_y(y)))
        curves.append(Curve(name, place, path))

    x_ticks = [(place_x(at), text) for at, text in ticks_of(first, last)]
    y_ticks = [(place_y(at), f"{at:.4g}") for at in ticks(low, high, NUM_TICKS)]
    return Chart(
        title=title,
        curves=curves,
        x_ticks=x_ticks,
        y_ticks=y_ticks,
    )


def _range_of(values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis: that of the values, from 0 on if they are not far from it, and never
    empty."""
    low = min(values)
    high = max(values)
    if 0 < low <= high / 2:
        low = 0.0
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    if low != 0:
        low -= margin
    return low, high + margin


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers in a range, about `count` of them."""
    rough = (high - low) / count or 1.0
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    for factor in (1, 2, 5, 10):
        step = factor * power
        if step >= rough * 0.999:  # rounding must not double the step
            break
    # A range that begins or ends at a round number has a tick there, whatever rounding makes of it.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _step_ticks(first: float, last: float) -> list[Tick]:
    whole_numbers = []
    for at in ticks(first, last, NUM_TICKS):
        if at == int(at):
            whole_numbers.append((at, f"{at:,.0f}"))
    return whole_numbers


def _time_ticks(first: float, last: float) -> list[Tick]:
    """Times with a unit that fits the longest one."""
    unit = "s"
    size = 1.0
    if last >= 2 * 3600:
        unit = "h"
        size = 3600.0
    elif last >= 2 * 60:
        unit = "min"
        size = 60.0
    places = ticks(first / size, last / size, NUM_TICKS)
    return [(place * size, f"{place:g} {unit}") for place in places]
