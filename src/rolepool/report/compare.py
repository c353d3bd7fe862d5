"""Comparing runs of the same work: what took how long, and which differences are significant.

Owns the comparison as numbers, table, picture and page. Every number comes from the metrics and spans of the runs.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import chain, count, groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from jinja2 import Environment, PackageLoader
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from rolepool.config.loading import show
from rolepool.errors import ConfigError
from rolepool.files import write_atomically
from rolepool.metrics.analysis import lanes, step_bounds
from rolepool.metrics.spans import DRIVER
from rolepool.report.colors import DARK, colors_for, in_step_order
from rolepool.report.logs import distinct_names
from rolepool.report.plots import grouped_bars, new_figure, save, style
from rolepool.report.run import TIMING, Run, finite_values, metric_names, points, read_run, timed_operations, value_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORK_KEYS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.override_config",
    "critic.model.path",
    "reward_model.enable",
    "reward_model.model.path",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "algorithm.adv_estimator",
    "algorithm.use_kl_in_reward",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "critic.ppo_mini_batch_size",
    "critic.ppo_epochs",
)
"""The keys that define the work of a step. Other keys, such as placement and micro-batches, may differ."""

NUM_RESAMPLES = 2000
MIN_STEPS = 5
"""With fewer steps, no interval is given."""

LETTER_WIDTH = 0.0075
"""Width of a letter in a bar, as a fraction of the time axis."""

T = TypeVar("T")


class Ratio(NamedTuple):
    """Ratio of a run's mean to the first run's mean, with its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if np.isnan(self.low):
            return "too few steps"
        return "less" if self.high < 1 else "more" if self.low > 1 else "within noise"


class Line(NamedTuple):
    """One measure of one run. Percentiles and ratio exist only if there is a value for each step."""

    measure: str
    run: str
    mean: float
    p50: float | None = None
    p95: float | None = None
    ratio: Ratio | None = None

    def cells(self) -> list[str]:
        numbers = ["" if number is None else f"{number:.4g}" for number in (self.mean, self.p50, self.p95)]
        if self.ratio is None:
            return [self.measure, self.run, *numbers, "", "", ""]
        value, low, high = self.ratio
        interval = "" if np.isnan(low) else f"{low:.3f} to {high:.3f}"
        return [self.measure, self.run, *numbers, f"{value:.3f}", interval, self.ratio.verdict]


TABLE_WIDTH = 200
"""Wide enough that no column is cut, whatever the terminal."""
COLUMNS = ("measure", "run", "mean", "p50", "p95", "ratio", "95% interval", "difference")


def read_runs(folders: Sequence[str | Path]) -> dict[str, Run]:
    """The runs by distinct names, in the given order."""
    return dict(zip(distinct_names([Path(folder) for folder in folders]), map(read_run, folders), strict=True))


def check_same_work(runs: Mapping[str, Run]) -> None:
    """Raise ConfigError with a line for each key that makes the runs' work differ."""
    problems = []
    for key in WORK_KEYS:
        values = {name: value_at(run.config, key) for name, run in runs.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            shown = ", ".join(f"{show(value)} in {name}" for name, value in values.items())
            problems.append(f"{key}: the work of the runs differs ({shown}); to compare them anyway, use --force")
    if problems:
        raise ConfigError(problems)


def compare(runs: Mapping[str, Run]) -> list[Line]:
    """A line for each measure and run: first measures of steps, then measures of whole runs."""
    lines: list[Line] = []
    by_run = {name: _step_measures(run) for name, run in runs.items()}
    first = next(iter(by_run.values()))
    for measure in dict.fromkeys(chain.from_iterable(by_run.values())):
        for name, measures in by_run.items():
            if measure in measures:
                values = measures[measure]
                has_ratio = measure in first and measures is not first
                ratio = ratio_of_means(first[measure], values) if has_ratio else None
                p50, p95 = np.quantile(values, [0.5, 0.95])
                lines.append(Line(measure, name, float(np.mean(values)), float(p50), float(p95), ratio))
    totals = {name: _run_measures(run) for name, run in runs.items()}
    for measure in dict.fromkeys(chain.from_iterable(totals.values())):
        lines += [Line(measure, name, total[measure]) for name, total in totals.items() if measure in total]
    return lines


def ratio_of_means(first: Sequence[float], other: Sequence[float], seed: int = 0) -> Ratio | None:
    """Mean of `other` divided by mean of `first`, with a bootstrap interval; None if `first` has mean 0."""
    one, two = np.asarray(first), np.asarray(other)
    if not one.mean():
        return None
    value = float(two.mean() / one.mean())
    if min(len(one), len(two)) < MIN_STEPS:
        return Ratio(value, np.nan, np.nan)
    generator = np.random.default_rng(seed)
    ones, twos = (steps[generator.integers(len(steps), size=(NUM_RESAMPLES, len(steps)))] for steps in (one, two))
    low, high = np.quantile(twos.mean(axis=1) / ones.mean(axis=1), [0.025, 0.975])
    return Ratio(value, float(low), float(high))


def as_table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("mean", "p50", "p95", "ratio") else "left", no_wrap=True)
    before = ""
    for line in lines:
        measure, run, *rest = line.cells()
        table.add_row("" if measure == before else escape_markup(measure), escape_markup(run), *rest)
        before = measure
    return table


def write_comparison(runs: Mapping[str, Run], lines: Sequence[Line], folder: Path) -> list[Path]:
    """Write `comparison.png`, `.svg` and `.html` into the folder. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        files = save(_picture(runs, lines), folder / "comparison", "png", "svg")
    return [*files, write_atomically(folder / "comparison.html", [_page(lines, files[1].read_text(encoding="utf-8"))])]


# Numbers


def _after_warm_up(steps: list[T]) -> list[T]:
    """Leave out the warm-up: the first 10% of the steps, at least one and at most ten."""
    return steps[min(10, max(1, len(steps) // 10)) :] or steps


def _step_measures(run: Run) -> dict[str, list[float]]:
    """The values of all steps after the warm-up, for each measure."""
    if not run.metrics:
        raise ConfigError(f"{run.folder}: its metrics.jsonl has no rows; compare runs that have completed some steps")
    steps = dict(_after_warm_up([(step, row) for step, row in run.metrics.items() if f"{TIMING}step" in row]))
    names = [f"{TIMING}{name}" for name in ("step", *timed_operations(steps))]
    names += ["perf/throughput", *sorted(name for name in metric_names(steps) if name.startswith("overlap/"))]
    names += sorted(name for name in metric_names(steps) if name.endswith("/busy_fraction"))
    return {name: values for name in names if (values := finite_values(steps, name)[1])}


def _run_measures(run: Run) -> dict[str, float]:
    """Measures that a run has only once: peak memory, and reward and validation at its end."""
    measures: dict[str, float] = {}
    if scores := [value for _, value in points(run.metrics, "critic/score/mean")]:
        measures["critic/score/mean (last 10%)"] = fmean(scores[-max(1, len(scores) // 10) :])
    for row in run.metrics.values():
        if values := [value for name, value in row.items() if name.startswith("val-core/")]:
            measures["val-core (last)"] = fmean(values)
    memory = [name for name in metric_names(run.metrics) if name.endswith(("memory_allocated_gb", "/peak_memory_gb"))]
    for name in sorted(memory):
        measures[f"{name} (most)"] = max(value for _, value in points(run.metrics, name))
    return measures


# The picture and the page


def _picture(runs: Mapping[str, Run], lines: Sequence[Line]) -> Figure:
    """A typical step of each run, above the mean times of its operations."""
    means: dict[str, dict[str, float]] = {name: {} for name in runs}
    for line in lines:
        if line.measure.startswith(TIMING):
            means[line.run][line.measure[len(TIMING) :]] = line.mean
    num_lanes = sum(1 + len({recorded.span.pool for recorded in run.spans}) for run in runs.values())
    heights_in = [0.6 + 0.26 * num_lanes, 3.0]
    figure = new_figure(sum(heights_in))
    above, below = figure.subplots(2, 1, height_ratios=heights_in)
    _timeline(above, runs)
    grouped_bars(below, means)
    return figure


def _typical_step(run: Run) -> tuple[int, float, float]:
    """The step with the median duration, its start and its end."""
    steps = _after_warm_up([(step, start_s, end_s) for step, (start_s, end_s) in step_bounds(run.spans).items()])
    by_duration = sorted(steps, key=lambda step: step[2] - step[1])
    return by_duration[len(by_duration) // 2]


def _timeline(axes: Axes, runs: Mapping[str, Run]) -> None:
    """The first rank of each pool in a typical step of each run, on a common time axis."""
    places = count()
    ticks: dict[int, str] = {}
    typical = {name: _typical_step(run) for name, run in runs.items() if step_bounds(run.spans)}
    longest_s = max((end_s - start_s for _, start_s, end_s in typical.values()), default=0.0)
    for name, (step, start_s, end_s) in typical.items():
        heading = next(places)
        axes.text(0, heading + 0.35, f"{name}: step {step}, {end_s - start_s:.2f} s", weight="bold", va="bottom")
        for lane in lanes(runs[name].spans, start_s, end_s):
            if lane.pool == DRIVER or lane.rank > 0:
                continue
            place = next(places)
            ticks[place] = lane.pool
            axes.barh(place, end_s - start_s, 0.8, color="#EFEFEF")
            colors = colors_for(in_step_order({recorded.operation for recorded in lane.spans}))
            for operation, group in groupby(lane.spans, key=lambda recorded: recorded.operation):
                bars = [(recorded.span.start_s - start_s, recorded.span.duration_s) for recorded in group]
                axes.broken_barh(bars, (place - 0.4, 0.8), facecolor=colors[operation])
                left, right = bars[0][0], sum(bars[-1])
                if right - left > longest_s * LETTER_WIDTH * (len(operation) + 1):
                    ink = "white" if colors[operation] in DARK else "black"
                    axes.text((left + right) / 2, place, operation, color=ink, fontsize=7.5, ha="center", va="center")
        axes.plot([end_s - start_s] * 2, [heading + 0.5, max(ticks) + 0.5], color="black", linewidth=1.2)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time in the step (s); grey: waiting")
    axes.set_xlim(left=0)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _page(lines: Sequence[Line], svg: str) -> str:
    console = Console(file=io.StringIO(), width=TABLE_WIDTH, record=True)
    console.print(as_table(lines))
    page = Environment(loader=PackageLoader("rolepool", "report"), autoescape=True).get_template("comparison.html")
    title = " and ".join(dict.fromkeys(line.run for line in lines))
    return page.render(title=title, svg=svg[svg.index("<svg") :], table=console.export_text())
