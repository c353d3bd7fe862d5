"""Comparing runs of the same work: what took how long, and which differences are significant.

Owns the comparison as numbers, table and page (every number comes from the metrics and spans of the runs), and
training one recipe with several placements, one after another, each in its own process.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader
from rich.table import Table

from rolepool.config import load_config, show
from rolepool.errors import ConfigError, PlacementError, Terminated, collected
from rolepool.files import write_atomically
from rolepool.metrics.run_folder import validation_score
from rolepool.metrics.spans import Bar, first_rank_lanes, step_bounds
from rolepool.placement import build_plan
from rolepool.placement.checks import find_problems
from rolepool.report import plots
from rolepool.report.findings import duration, outside_load
from rolepool.report.run import TIMING, Run, distinct_names, finite_values, metric_names, read_parts, value_at

NUM_RESAMPLES = 2000
MIN_STEPS = 5
"""With fewer steps, no interval is given."""

TABLE_WIDTH = 200
"""Wide enough that every column fits, whatever the terminal."""


NUM_LINES_SHOWN = 10
"""Lines from the end of a failed run's output that are reported."""


WaitFor = Callable[[int], tuple[int, int]]
"""Waits for a process. Returns its exit code, and the last signal that was passed on to it, or 0."""

TEMPLATES = Environment(loader=PackageLoader("rolepool", "report"), autoescape=True, trim_blocks=True)


class Ratio(NamedTuple):
    """Ratio of a run's mean to the first run's mean, with its 95% bootstrap interval (NaN for too few steps)."""

    value: float
    low: float
    high: float
    verdict: str


class Line(NamedTuple):
    """One measure of one run. Percentiles and ratio exist only if there is a value for each step."""

    measure: str
    run: str
    mean: float
    p50: float | None = None
    p95: float | None = None
    ratio: Ratio | None = None


def read_runs(folders: Sequence[str | Path]) -> dict[str, Run]:
    """The runs by distinct names, in the given order. A run that moved counts as several, one for each placement."""
    parts = (read_parts(folder, name) for folder, name in zip(folders, distinct_names(folders), strict=True))
    return dict(chain.from_iterable(named.items() for named in parts))


def check_same_work(runs: Mapping[str, Run]) -> None:
    """Raise ConfigError with a line for each key that makes the runs' work differ."""
    problems = []
    for key in plots.TABLES.work_keys:
        values = {name: value_at(run.config, key) for name, run in runs.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            shown = ", ".join(f"{show(value)} in {name}" for name, value in values.items())
            problems.append(f"{key}: the work of the runs differs ({shown}); to compare them anyway, use --force")
    ConfigError.raise_if_any(problems)


def compare(runs: Mapping[str, Run]) -> list[Line]:
    """A line for each measure and run: first measures that differ significantly, then other measures of steps, then
    measures of whole runs. If another program slowed a run down, its differences get no verdict."""
    lines: list[Line] = []
    by_run = {name: _step_measures(run) for name, run in runs.items()}
    first_name, first = next(iter(by_run.items()))
    disturbed = {name for name, run in runs.items() if outside_load(run)}
    for measure in dict.fromkeys(chain.from_iterable(by_run.values())):
        for name, measures in by_run.items():
            if measure in measures:
                values = measures[measure]
                has_ratio = measure in first and measures is not first
                ratio = ratio_of_means(first[measure], values) if has_ratio else None
                if ratio is not None and disturbed & {name, first_name}:
                    ratio = ratio._replace(verdict="outside load")
                p50, p95 = np.quantile(values, [0.5, 0.95])
                lines.append(Line(measure, name, float(np.mean(values)), float(p50), float(p95), ratio))
    differs = {line.measure for line in lines if line.ratio is not None and line.ratio.verdict in ("less", "more")}
    lines.sort(key=lambda line: line.measure not in differs)
    totals = {name: _run_measures(run) for name, run in runs.items()}
    for measure in dict.fromkeys(chain.from_iterable(totals.values())):
        lines += [Line(measure, name, total[measure]) for name, total in totals.items() if measure in total]
    return lines


def headlines(runs: Mapping[str, Run], lines: Sequence[Line]) -> Iterator[str]:
    """For each run after the first: how much faster or slower its steps are, or why there is no verdict."""
    first, *others = runs
    ratios = {line.run: line.ratio for line in lines if line.measure == f"{TIMING}step"}
    loads = {name: outside_load(run) for name, run in runs.items()}
    for name in others:
        reasons = [f"{which}: {loads[which]}" for which in (first, name) if loads[which]]
        refusal = f"no verdict on {name} and {first}. {' '.join(reasons)}"
        yield refusal if reasons else _headline(name, first, ratios.get(name))


def _headline(name: str, first: str, ratio: Ratio | None) -> str:
    if ratio is None or not ratio.low > 0:
        return f"no verdict on {name} and {first}: at least {MIN_STEPS} steps after the warm-up are needed"
    factor, low, high = ratio[:3] if ratio.verdict == "more" else (1 / ratio.value, 1 / ratio.high, 1 / ratio.low)
    interval = f"{low:.2f} to {high:.2f} with 95% confidence"
    if ratio.verdict == "within noise":
        return f"no difference can be seen between {name} and {first}: {factor:.2f}x as fast, {interval}"
    return f"{name} is {factor:.2f}x {'slower' if ratio.verdict == 'more' else 'faster'} than {first}, {interval}"


def ratio_of_means(first: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """Mean of `other` divided by mean of `first`, with a bootstrap interval; None if `first` has mean 0."""
    one, two = np.asarray(first), np.asarray(other)
    if not one.mean():
        return None
    value = float(two.mean() / one.mean())
    if min(len(one), len(two)) < MIN_STEPS:
        return Ratio(value, np.nan, np.nan, "too few steps")
    generator = np.random.default_rng(0)
    ones, twos = (steps[generator.integers(len(steps), size=(NUM_RESAMPLES, len(steps)))] for steps in (one, two))
    low, high = np.quantile(twos.mean(axis=1) / ones.mean(axis=1), [0.025, 0.975])
    return Ratio(value, float(low), float(high), "less" if high < 1 else "more" if low > 1 else "within noise")


def _after_warm_up(steps: list[Any]) -> list[Any]:
    """Skip the warm-up: the first 10% of the steps, at least one and at most ten."""
    return steps[min(10, max(1, len(steps) // 10)) :] or steps


def measured_steps(run: Run) -> dict[int, dict[str, float]]:
    """The metrics of the steps after the warm-up."""
    return dict(_after_warm_up([(step, row) for step, row in run.metrics.items() if f"{TIMING}step" in row]))


def _step_measures(run: Run) -> dict[str, list[float]]:
    """The values of all steps after the warm-up, for each measure."""
    if not run.metrics:
        raise ConfigError(f"{run.folder}: its metrics.jsonl has no rows; compare runs that have completed some steps")
    steps = measured_steps(run)
    found = sorted(metric_names(steps))
    names = [f"{TIMING}{name}" for name in ("step", *plots.timed_operations(steps))]
    names += ["perf/throughput", *(name for name in found if name.startswith("overlap/"))]
    names += [name for name in found if name.endswith("/busy_fraction")]
    return {name: [*values.values()] for name in names if (values := finite_values(steps, name))}


def _run_measures(run: Run) -> dict[str, float]:
    """Measures that a run has only once: peak memory, and reward and validation at its end."""
    measures: dict[str, float] = {}
    if scores := [*finite_values(run.metrics, "critic/score/mean").values()]:
        measures["critic/score/mean (last 10%)"] = fmean(scores[-max(1, len(scores) // 10) :])
    for row in run.metrics.values():
        if (score := validation_score(row)) is not None:
            measures["val-core (last)"] = score
    for name in sorted(metric_names(run.metrics)):
        if name.endswith(("memory_allocated_gb", "/peak_memory_gb")):
            measures[f"{name} (most)"] = max(finite_values(run.metrics, name).values(), default=np.nan)
    return measures


# The table and the page


def as_table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("measure", "run", "mean", "p50", "p95", "ratio", "95% interval", "difference"):
        table.add_column(name, justify="right" if name in ("mean", "p50", "p95", "ratio") else "left", no_wrap=True)
    for measure, group in groupby(lines, key=lambda line: line.measure):
        for number, line in enumerate(group):
            table.add_row("" if number else measure, line.run, *cells_of(line))
    return table


def cells_of(line: Line) -> list[str]:
    """Mean, p50, p95, ratio, its interval and the verdict, as text."""
    cells = ["" if value is None else with_unit(line.measure, value) for value in line[2:5]]
    if line.ratio is None:
        return [*cells, "", "", ""]
    _, low, high, verdict = line.ratio
    return [*cells, f"{line.ratio.value:.3f}", "" if np.isnan(low) else f"{low:.3f} to {high:.3f}", verdict]


def with_unit(measure: str, value: float) -> str:
    """A value with its unit: `0.55 ms`, `3.2 GiB`, `58%`; without one if the name of the measure does not tell it."""
    if measure.startswith(TIMING) or measure.endswith("_s"):
        return duration(value)
    if measure.endswith("fraction"):
        return f"{value:.0%}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return number + (" GiB" if "_gb" in measure else " tokens/s" if "throughput" in measure else "")


def render_comparison(runs: Mapping[str, Run], lines: Sequence[Line]) -> str:
    """The page: headlines, a typical step of each run, the mean times of operations, and the table."""
    means = {name: plots.mean_times(measured_steps(run)) for name, run in runs.items()}
    operations = plots.in_step_order({name for times in means.values() for name in times} - {"step"})
    groups = groupby(lines, key=lambda line: line.measure)
    return TEMPLATES.get_template("comparison.html").render(
        headlines=[*headlines(runs, lines)],
        steps=typical_steps(runs),
        means=means,
        colors=plots.colors_for(operations),
        measures={measure: [(line.run, cells_of(line)) for line in group] for measure, group in groups},
        duration=duration,
    )


def write_comparison(runs: Mapping[str, Run], lines: Sequence[Line], folder: Path) -> Path:
    """Write the page as `comparison.html` in a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_atomically(folder / "comparison.html", [render_comparison(runs, lines)])


def typical_steps(runs: Mapping[str, Run]) -> dict[str, tuple[int, float, dict[str, list[Bar]]]]:
    """For each run that has recorded a step: the number of the step with the median duration, its seconds, and what the
    first rank of each pool did in it."""
    found = {}
    for name, run in runs.items():
        steps = _after_warm_up([(step, *bounds) for step, bounds in step_bounds(run.spans).items()])
        if steps:
            number, start_s, end_s = sorted(steps, key=lambda step: step[2] - step[1])[len(steps) // 2]
            found[name] = number, end_s - start_s, first_rank_lanes(run.spans, start_s, end_s)
    return found


# Training with several placements


def overrides_of(word: str) -> list[str]:
    """`split` is a strategy; `placement.strategy=split,placement.split.share=0.5` is a list of overrides."""
    return re.split(r",(?=[A-Za-z_][\w.-]*=)", word) if "=" in word else [f"placement.strategy={word}"]


def run_placements(
    recipe: str, overrides: Sequence[str], words: Sequence[str], say: Callable[[str], None], wait_for: WaitFor
) -> tuple[list[Path], list[str]]:
    """Train with each placement. Returns the folders of the runs that succeeded, and why the others failed.

    `wait_for` waits for a process, and passes Ctrl-C and SIGTERM on to it. They end the comparison after the run.
    """
    placements = {re.sub(r"[^\w.=-]+", "_", word.replace("placement.", "")): overrides_of(word) for word in words}
    if len(words) < 2 or len(placements) < len(words):
        raise ConfigError("compare --run: give at least two placements after `--`, such as `-- standard split`")
    _check_placements(recipe, overrides, placements)
    # A new folder each time, so that runs are never mixed.
    name = f"compare_{Path(recipe).stem}"
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    home = next(folder for folder in map(Path("runs").joinpath, names) if not folder.exists())
    home.mkdir(parents=True)
    folders, failures = [], []
    for name, placement in placements.items():
        folder, log = home / name, home / f"{name}.log"
        keys = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
        say(f"training with {name}; its output is in {log}")
        with log.open("w", encoding="utf-8") as output:
            command = [sys.executable, "-m", "rolepool", "train", recipe, *overrides, *placement, *keys]
            streams = [(os.POSIX_SPAWN_DUP2, output.fileno(), number) for number in (1, 2)]
            code, asked = wait_for(os.posix_spawn(sys.executable, command, os.environ, file_actions=streams))
        if asked:
            raise (KeyboardInterrupt if asked == signal.SIGINT else Terminated)("the training run has ended too")
        if code == 0:
            folders.append(folder)
        else:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LINES_SHOWN:]
            failures.append("\n".join([f"{name}: training ended with code {code}; the end of {log}:", *last]))
    return folders, failures


def _check_placements(recipe: str, overrides: Sequence[str], placements: Mapping[str, list[str]]) -> None:
    """Raise ConfigError before the first run starts if one of the placements cannot run."""
    problems: list[str] = []
    for name, placement in placements.items():
        with collected(problems, f"{recipe} with {name}: "):
            config = load_config([recipe], [*overrides, *placement]).config
            PlacementError.raise_if_any(find_problems(config, build_plan(config)))
    if problems:
        raise ConfigError([*problems, f"write keys that belong to one placement after `--`, not into {recipe}"])
