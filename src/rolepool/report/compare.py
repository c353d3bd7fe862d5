"""Comparing runs: what took how long, which differences are significant, and which keys differ.

Owns the comparison as numbers, words and table. Every number comes from the metrics of the runs.
Does not know the page.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from rich.table import Table

from rolepool.config import show
from rolepool.config.schema import all_keys
from rolepool.errors import ConfigError
from rolepool.metrics.row_text import validation_score
from rolepool.report.metrics_by_step import (
    REWARD,
    THROUGHPUT,
    TIMING,
    finite_values,
    metric_names,
    timed_steps,
)
from rolepool.report.operations import timed_operations
from rolepool.report.outside_load import outside_load
from rolepool.report.run import ReadRun, distinct_names, read_parts, value_at
from rolepool.report.tables import TABLES
from rolepool.units import duration

NUM_RESAMPLES = 2000
MIN_STEPS = 5
"""With fewer steps, no interval is given."""

TABLE_WIDTH = 200
"""Wide enough that every column fits, whatever the terminal."""

NAME_KEYS = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
"""Keys that only name a run."""

LAST_REWARDS = "critic/score/mean (last 10%)"
LAST_SCORE = "val-core (last)"
"""Measures of a whole run."""

T = TypeVar("T")
Array = npt.NDArray[np.float64]


class Ratio(NamedTuple):
    """Ratio of a run's mean to the first run's mean, with its 95% bootstrap interval (NaN for too
    few steps)."""

    value: float
    low: float
    high: float
    verdict: str


class Line(NamedTuple):
    """One measure of one run. Percentiles and ratio exist only if there is a value for each
    step."""

    measure: str
    run: str
    mean: float
    p50: float | None = None
    p95: float | None = None
    ratio: Ratio | None = None


class Difference(NamedTuple):
    """A key that has different values in the runs."""

    key: str
    values: dict[str, str]
    """The value of each run, as text."""
    is_work: bool
    """Whether it changes what a step has to compute, so that times cannot be compared directly."""

    def __str__(self) -> str:
        """`data.train_batch_size: 64 in one and three, 32 in two`"""
        runs_of: dict[str, list[str]] = {}
        for run, value in self.values.items():
            runs_of.setdefault(value, []).append(run)
        phrases = []
        for value, runs in runs_of.items():
            phrases.append(f"{value} in {' and '.join(runs)}")
        return f"{self.key}: {', '.join(phrases)}"


def read_runs(folders: Sequence[str | Path]) -> dict[str, ReadRun]:
    """The runs by distinct names, in the given order. A run that moved counts as several, one for
    each placement."""
    runs: dict[str, ReadRun] = {}
    for folder, name in zip(folders, distinct_names(folders), strict=True):
        runs.update(read_parts(folder, name))
    return runs


def differences(runs: Mapping[str, ReadRun]) -> list[Difference]:
    """The keys that differ between the runs, without those that only name a run; first those of the
    work."""
    configs = {name: run.config for name, run in runs.items() if run.config}
    keys = dict.fromkeys([*TABLES.work_keys, *all_keys()])
    different = []
    for key in keys:
        values = [value_at(config, key) for config in configs.values()]
        if key in NAME_KEYS or _are_equal(values):
            continue
        texts = _distinct_texts(values)
        difference = Difference(
            key=key,
            values=dict(zip(configs, texts, strict=True)),
            is_work=key in TABLES.work_keys,
        )
        different.append(difference)
    return different


def _distinct_texts(values: Sequence[object]) -> list[str]:
    """Values that are not all equal, as short texts that are not all equal either."""
    texts = list(map(show, values))
    if _are_equal(texts):  # long values whose beginnings are equal
        return list(map(str, values))
    return texts


def _differences_of_work(runs: Mapping[str, ReadRun]) -> list[Difference]:
    return [difference for difference in differences(runs) if difference.is_work]


def _are_equal(values: Sequence[object]) -> bool:
    """Not by a set, because some values are lists."""
    return all(value == values[0] for value in values)


def compare(runs: Mapping[str, ReadRun]) -> list[Line]:
    """A line for each measure and run: first measures that differ significantly, then other
    measures of steps, then measures of whole runs. If another program slowed a run down, its
    differences get no verdict."""
    by_run = {name: _step_measures(run) for name, run in runs.items()}
    disturbed = _slowed_down(runs)
    significant: list[Line] = []
    others: list[Line] = []
    for measure in _all_names(by_run):
        lines_of_measure = list(_lines_of_measure(measure, by_run, disturbed))
        if any(_is_significant(line.ratio) for line in lines_of_measure):
            significant += lines_of_measure
        else:
            others += lines_of_measure
    return [*significant, *others, *_lines_of_runs(runs)]


def _lines_of_runs(runs: Mapping[str, ReadRun]) -> Iterator[Line]:
    """A line for each run and each measure that it has only once."""
    totals = {name: _run_measures(run) for name, run in runs.items()}
    for measure in _all_names(totals):
        for name, total in totals.items():
            if measure in total:
                yield Line(measure, name, total[measure])


def _slowed_down(runs: Mapping[str, ReadRun]) -> list[str]:
    """The runs that other programs slowed down."""
    return [name for name, run in runs.items() if outside_load(run)]


def _all_names(by_run: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The measures of all runs, in the order in which they first appear."""
    names: dict[str, None] = {}
    for measures in by_run.values():
        names.update(dict.fromkeys(measures))
    return list(names)


def _lines_of_measure(
    measure: str,
    by_run: Mapping[str, Mapping[str, list[float]]],
    disturbed: Sequence[str],
) -> Iterator[Line]:
    """A line for each run that has the measure. The others are compared with the first run."""
    first_name, first = next(iter(by_run.items()))
    for name, measures in by_run.items():
        if measure not in measures:
            continue
        values = measures[measure]
        ratio = None
        if measure in first and name != first_name:
            ratio = ratio_of_means(first[measure], values)
        if ratio is not None and (name in disturbed or first_name in disturbed):
            ratio = ratio._replace(verdict="outside load")
        p50, p95 = np.quantile(values, [0.5, 0.95])
        yield Line(
            measure=measure,
            run=name,
            mean=float(np.mean(values)),
            p50=float(p50),
            p95=float(p95),
            ratio=ratio,
        )


def _is_significant(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.verdict in ("less", "more")


def headline(runs: Mapping[str, ReadRun], lines: Sequence[Line]) -> str:
    """One sentence: how much faster or slower the steps of the other runs are than those of the
    first, or why there is no verdict."""
    first, *others = runs
    ratios = {line.run: line.ratio for line in lines if line.measure == f"{TIMING}step"}
    disturbed = _slowed_down(runs)
    if len(others) == 1:
        (other,) = others
        sentence = _of_two(other, first, ratios.get(other), disturbed)
    else:
        clauses = []
        for name in others:
            is_disturbed = name in disturbed or first in disturbed
            clauses.append(_clause(name, ratios.get(name), is_disturbed))
        sentence = f"compared with {first}: {', '.join(clauses)}"
    num_keys = len(_differences_of_work(runs))
    if not num_keys:
        return sentence
    plural = "s" if num_keys > 1 else ""
    return f"{sentence}; their work differs in {num_keys} key{plural}"


def _of_two(name: str, first: str, ratio: Ratio | None, disturbed: Sequence[str]) -> str:
    if disturbed:
        slowed_down = " and ".join(disturbed)
        return f"no verdict on {name} and {first}: other programs slowed {slowed_down} down"
    if ratio is None or not ratio.low > 0:
        return f"no verdict on {name} and {first}: at least {MIN_STEPS} steps after the warm-up are needed"
    factor, low, high = _factor(ratio)
    interval = f"{low:.2f} to {high:.2f} with 95% confidence"
    if ratio.verdict == "within noise":
        return f"no difference can be seen between {name} and {first}: {factor:.2f}x as fast, {interval}"
    return f"{name} is {factor:.2f}x {_faster_or_slower(ratio)} than {first}, {interval}"


def _clause(name: str, ratio: Ratio | None, is_disturbed: bool) -> str:
    """The verdict on one of several runs, as a part of a sentence."""
    if is_disturbed:
        return f"no verdict on {name} (other programs used the machine)"
    if ratio is None or not ratio.low > 0:
        return f"no verdict on {name} (too few steps)"
    if ratio.verdict == "within noise":
        return f"no difference can be seen to {name}"
    factor, low, high = _factor(ratio)
    return f"{name} is {factor:.2f}x {_faster_or_slower(ratio)} ({low:.2f} to {high:.2f})"


def _faster_or_slower(ratio: Ratio) -> str:
    return "slower" if ratio.verdict == "more" else "faster"


def _factor(ratio: Ratio) -> tuple[float, float, float]:
    """How many times slower a run is if its steps take longer, or else how many times faster, with
    the interval."""
    if ratio.verdict == "more":
        return ratio.value, ratio.low, ratio.high
    return 1 / ratio.value, 1 / ratio.high, 1 / ratio.low


def loads_on(runs: Mapping[str, ReadRun]) -> Iterator[str]:
    """A line for each run that other programs slowed down."""
    for name, run in runs.items():
        load = outside_load(run)
        if load is not None:
            yield f"{name}: {load}"


def notes_on(runs: Mapping[str, ReadRun]) -> Iterator[str]:
    """What limits the comparison: a line for each run that other programs slowed down, and for each
    key that changes the work."""
    yield from loads_on(runs)
    work = _differences_of_work(runs)
    if work:
        yield "The work of a step differs, so times cannot be compared directly:"
        for difference in work:
            yield f"  {difference}"


def ratio_of_means(first: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """Mean of `other` divided by mean of `first`, with a bootstrap interval; None if `first` has
    mean 0."""
    first_values = np.asarray(first)
    other_values = np.asarray(other)
    if not first_values.mean():
        return None
    value = float(other_values.mean() / first_values.mean())
    num_steps = min(len(first_values), len(other_values))
    if num_steps < MIN_STEPS:
        return Ratio(value, low=np.nan, high=np.nan, verdict="too few steps")

    generator = np.random.default_rng(0)
    first_means = _resampled_means(first_values, generator)
    other_means = _resampled_means(other_values, generator)
    ratios = other_means / first_means
    low, high = np.quantile(ratios, [0.025, 0.975])
    verdict = "within noise"
    if high < 1:
        verdict = "less"
    elif low > 1:
        verdict = "more"
    return Ratio(
        value=value,
        low=float(low),
        high=float(high),
        verdict=verdict,
    )


def _resampled_means(values: Array, generator: np.random.Generator) -> Array:
    """The means of values that are drawn from these, with repetitions."""
    num_values = len(values)
    drawn = generator.integers(num_values, size=(NUM_RESAMPLES, num_values))
    means: Array = values[drawn].mean(axis=1)
    return means


def after_warm_up(steps: list[T]) -> list[T]:
    """Skip the warm-up: the first 10% of the steps, at least one and at most ten."""
    num_skipped = min(10, max(1, len(steps) // 10))
    return steps[num_skipped:] or steps


def measured_steps(run: ReadRun) -> dict[int, dict[str, float]]:
    """The metrics of the steps after the warm-up."""
    timed = timed_steps(run.metrics)
    return dict(after_warm_up(list(timed.items())))


def _step_measures(run: ReadRun) -> dict[str, list[float]]:
    """The values of all steps after the warm-up, for each measure."""
    if not run.metrics:
        raise ConfigError(
            f"{run.folder}: its metrics.jsonl has no rows; compare runs that have completed some steps"
        )
    steps = measured_steps(run)
    names = [f"{TIMING}step"]
    names += [f"{TIMING}{operation}" for operation in timed_operations(steps)]
    names.append(THROUGHPUT)
    recorded = sorted(metric_names(steps))
    names += fnmatch.filter(recorded, "overlap/*")
    names += fnmatch.filter(recorded, "*/busy_fraction")
    measures = {}
    for name in names:
        values = finite_values(steps, name)
        if values:
            measures[name] = list(values.values())
    return measures


def _run_measures(run: ReadRun) -> dict[str, float]:
    """Measures that a run has only once: peak memory, and reward and validation at its end."""
    measures: dict[str, float] = {}
    rewards = list(finite_values(run.metrics, REWARD).values())
    if rewards:
        num_last = max(1, len(rewards) // 10)
        last_rewards = rewards[-num_last:]
        measures[LAST_REWARDS] = fmean(last_rewards)
    for row in run.metrics.values():
        score = validation_score(row)
        if score is not None:
            measures[LAST_SCORE] = score
    for name in sorted(metric_names(run.metrics)):
        if name.endswith(("memory_allocated_gb", "/peak_memory_gb")):
            values = finite_values(run.metrics, name).values()
            peak = max(values, default=np.nan)
            measures[f"{name} (most)"] = peak
    return measures


# The table


def as_table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns: dict[str, Literal["left", "right"]] = {
        "measure": "left",
        "run": "left",
        "mean": "right",
        "p50": "right",
        "p95": "right",
        "ratio": "right",
        "95% interval": "left",
        "difference": "left",
    }
    for name, side in columns.items():
        table.add_column(name, justify=side, no_wrap=True)
    for measure, group in groupby(lines, key=lambda line: line.measure):
        title = measure
        for line in group:
            table.add_row(title, line.run, *cells_of(line))
            title = ""  # only the first row of a measure has its name
    return table


def cells_of(line: Line) -> list[str]:
    """Mean, p50, p95, ratio, its interval and the verdict, as text."""
    cells = []
    for value in (line.mean, line.p50, line.p95):
        if value is None:
            cells.append("")
        else:
            cells.append(with_unit(line.measure, value))
    if line.ratio is None:
        return [*cells, "", "", ""]

    ratio, low, high, verdict = line.ratio
    interval = ""
    if not np.isnan(low):
        interval = f"{low:.3f} to {high:.3f}"
    return [*cells, f"{ratio:.3f}", interval, verdict]


def with_unit(measure: str, value: float) -> str:
    """A value with its unit: `0.55 ms`, `3.2 GiB`, `58%`; without one if the name of the measure
    does not tell it."""
    if measure.startswith(TIMING) or measure.endswith("_s"):
        return duration(value)
    if measure.endswith("fraction"):
        return f"{value:.0%}"
    if abs(value) >= 1000:
        number = f"{value:,.0f}"
    else:
        number = f"{value:.3g}"
    if "_gb" in measure:
        return f"{number} GiB"
    if "throughput" in measure:
        return f"{number} tokens/s"
    return number
