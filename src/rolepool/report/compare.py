"""Comparing runs: what took how long, which differences are significant, and which keys differ.

Owns the comparison as numbers, words and table (every number comes from the metrics of the runs),
and training one recipe with several placements, one after another, each in its own process. Does
not know the page.
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
from rich.table import Table

from rolepool.config import read_config, show
from rolepool.config.schema import all_keys
from rolepool.errors import ConfigError, Terminated, collected
from rolepool.metrics.row_text import validation_score
from rolepool.placement.checks import plan_problems
from rolepool.report.metrics_by_step import REWARD, THROUGHPUT, TIMING, finite_values, metric_names
from rolepool.report.operations import timed_operations
from rolepool.report.outside_load import outside_load
from rolepool.report.run import Run, distinct_names, read_parts, value_at
from rolepool.report.tables import TABLES
from rolepool.units import duration

NUM_RESAMPLES = 2000
MIN_STEPS = 5
"""With fewer steps, no interval is given."""

TABLE_WIDTH = 200
"""Wide enough that every column fits, whatever the terminal."""


NUM_LINES_SHOWN = 10
"""Lines from the end of a failed run's output that are reported."""


WaitFor = Callable[[int], tuple[int, int]]
"""Waits for a process. Returns its exit code, and the last signal that was passed on to it, or
0."""

NAME_KEYS = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
"""Keys that only name a run."""

LAST_REWARDS, LAST_SCORE = "critic/score/mean (last 10%)", "val-core (last)"
"""Measures of a whole run."""


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
        names: dict[str, list[str]] = {}
        for name, value in self.values.items():
            names.setdefault(value, []).append(name)
        return f"{self.key}: " + ", ".join(
            f"{value} in {' and '.join(runs)}" for value, runs in names.items()
        )


def read_runs(folders: Sequence[str | Path]) -> dict[str, Run]:
    """The runs by distinct names, in the given order. A run that moved counts as several, one for
    each placement."""
    parts = (
        read_parts(folder, name)
        for folder, name in zip(folders, distinct_names(folders), strict=True)
    )
    return dict(chain.from_iterable(named.items() for named in parts))


def differences(runs: Mapping[str, Run]) -> list[Difference]:
    """The keys that differ between the runs, without those that only name a run; first those of the
    work."""
    configs = {name: run.config for name, run in runs.items() if run.config}
    keys = dict.fromkeys([*TABLES.work_keys, *all_keys()])
    found = []
    for key in keys:
        values = {name: value_at(config, key) for name, config in configs.items()}
        if key in NAME_KEYS or all(
            value == next(iter(values.values())) for value in values.values()
        ):
            continue
        texts = {name: show(value) for name, value in values.items()}
        if len(set(texts.values())) < 2:  # long values whose beginnings are equal
            texts = {name: str(value) for name, value in values.items()}
        found.append(Difference(key, texts, key in TABLES.work_keys))
    return found


def compare(runs: Mapping[str, Run]) -> list[Line]:
    """A line for each measure and run: first measures that differ significantly, then other
    measures of steps, then measures of whole runs. If another program slowed a run down, its
    differences get no verdict."""
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
                lines.append(
                    Line(measure, name, float(np.mean(values)), float(p50), float(p95), ratio)
                )
    differs = {
        line.measure
        for line in lines
        if line.ratio is not None and line.ratio.verdict in ("less", "more")
    }
    lines.sort(key=lambda line: line.measure not in differs)
    totals = {name: _run_measures(run) for name, run in runs.items()}
    for measure in dict.fromkeys(chain.from_iterable(totals.values())):
        lines += [
            Line(measure, name, total[measure])
            for name, total in totals.items()
            if measure in total
        ]
    return lines


def headline(runs: Mapping[str, Run], lines: Sequence[Line]) -> str:
    """One sentence: how much faster or slower the steps of the other runs are than those of the
    first, or why there is no verdict."""
    first, *others = runs
    ratios = {line.run: line.ratio for line in lines if line.measure == f"{TIMING}step"}
    disturbed = [name for name, run in runs.items() if outside_load(run)]
    if len(others) == 1:
        sentence = _of_two(others[0], first, ratios.get(others[0]), disturbed)
    else:
        clauses = [_clause(name, ratios.get(name), {name, first} & {*disturbed}) for name in others]
        sentence = f"compared with {first}: {', '.join(clauses)}"
    num_keys = sum(difference.is_work for difference in differences(runs))
    if not num_keys:
        return sentence
    return f"{sentence}; their work differs in {num_keys} key{'s' if num_keys > 1 else ''}"


def _of_two(name: str, first: str, ratio: Ratio | None, disturbed: Sequence[str]) -> str:
    if disturbed:
        return f"no verdict on {name} and {first}: other programs slowed {' and '.join(disturbed)} down"
    if ratio is None or not ratio.low > 0:
        return f"no verdict on {name} and {first}: at least {MIN_STEPS} steps after the warm-up are needed"
    factor, low, high = _factor(ratio)
    interval = f"{low:.2f} to {high:.2f} with 95% confidence"
    if ratio.verdict == "within noise":
        return f"no difference can be seen between {name} and {first}: {factor:.2f}x as fast, {interval}"
    return f"{name} is {factor:.2f}x {_faster_or_slower(ratio)} than {first}, {interval}"


def _clause(name: str, ratio: Ratio | None, disturbed: set[str]) -> str:
    """The verdict on one of several runs, as a part of a sentence."""
    if disturbed:
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


def loads_on(runs: Mapping[str, Run]) -> Iterator[str]:
    """A line for each run that other programs slowed down."""
    for name, run in runs.items():
        if load := outside_load(run):
            yield f"{name}: {load}"


def notes_on(runs: Mapping[str, Run]) -> Iterator[str]:
    """What limits the comparison: a line for each run that other programs slowed down, and for each
    key that changes the work."""
    yield from loads_on(runs)
    work = [difference for difference in differences(runs) if difference.is_work]
    if work:
        yield "The work of a step differs, so times cannot be compared directly:"
        yield from (f"  {difference}" for difference in work)


def ratio_of_means(first: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """Mean of `other` divided by mean of `first`, with a bootstrap interval; None if `first` has
    mean 0."""
    one, two = np.asarray(first), np.asarray(other)
    if not one.mean():
        return None
    value = float(two.mean() / one.mean())
    if min(len(one), len(two)) < MIN_STEPS:
        return Ratio(value, np.nan, np.nan, "too few steps")
    generator = np.random.default_rng(0)
    ones, twos = (
        steps[generator.integers(len(steps), size=(NUM_RESAMPLES, len(steps)))]
        for steps in (one, two)
    )
    low, high = np.quantile(twos.mean(axis=1) / ones.mean(axis=1), [0.025, 0.975])
    return Ratio(
        value,
        float(low),
        float(high),
        "less" if high < 1 else "more" if low > 1 else "within noise",
    )


def after_warm_up(steps: list[Any]) -> list[Any]:
    """Skip the warm-up: the first 10% of the steps, at least one and at most ten."""
    return steps[min(10, max(1, len(steps) // 10)) :] or steps


def measured_steps(run: Run) -> dict[int, dict[str, float]]:
    """The metrics of the steps after the warm-up."""
    return dict(
        after_warm_up([(step, row) for step, row in run.metrics.items() if f"{TIMING}step" in row])
    )


def _step_measures(run: Run) -> dict[str, list[float]]:
    """The values of all steps after the warm-up, for each measure."""
    if not run.metrics:
        raise ConfigError(
            f"{run.folder}: its metrics.jsonl has no rows; compare runs that have completed some steps"
        )
    steps = measured_steps(run)
    found = sorted(metric_names(steps))
    names = [f"{TIMING}{name}" for name in ("step", *timed_operations(steps))]
    names += [THROUGHPUT, *(name for name in found if name.startswith("overlap/"))]
    names += [name for name in found if name.endswith("/busy_fraction")]
    return {name: [*values.values()] for name in names if (values := finite_values(steps, name))}


def _run_measures(run: Run) -> dict[str, float]:
    """Measures that a run has only once: peak memory, and reward and validation at its end."""
    measures: dict[str, float] = {}
    if scores := [*finite_values(run.metrics, REWARD).values()]:
        measures[LAST_REWARDS] = fmean(scores[-max(1, len(scores) // 10) :])
    for row in run.metrics.values():
        if (score := validation_score(row)) is not None:
            measures[LAST_SCORE] = score
    for name in sorted(metric_names(run.metrics)):
        if name.endswith(("memory_allocated_gb", "/peak_memory_gb")):
            measures[f"{name} (most)"] = max(
                finite_values(run.metrics, name).values(), default=np.nan
            )
    return measures


# The table


def as_table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("measure", "run", "mean", "p50", "p95", "ratio", "95% interval", "difference"):
        table.add_column(
            name,
            justify="right" if name in ("mean", "p50", "p95", "ratio") else "left",
            no_wrap=True,
        )
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
    return [
        *cells,
        f"{line.ratio.value:.3f}",
        "" if np.isnan(low) else f"{low:.3f} to {high:.3f}",
        verdict,
    ]


def with_unit(measure: str, value: float) -> str:
    """A value with its unit: `0.55 ms`, `3.2 GiB`, `58%`; without one if the name of the measure
    does not tell it."""
    if measure.startswith(TIMING) or measure.endswith("_s"):
        return duration(value)
    if measure.endswith("fraction"):
        return f"{value:.0%}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return number + (" GiB" if "_gb" in measure else " tokens/s" if "throughput" in measure else "")


# Training with several placements


def overrides_of(word: str) -> list[str]:
    """`split` is a strategy; `placement.strategy=split,placement.split.share=0.5` is a list of
    overrides."""
    return (
        re.split(r",(?=[A-Za-z_][\w.-]*=)", word) if "=" in word else [f"placement.strategy={word}"]
    )


def run_placements(
    recipe: str,
    overrides: Sequence[str],
    words: Sequence[str],
    say: Callable[[str], None],
    wait_for: WaitFor,
) -> tuple[list[Path], list[str]]:
    """Train with each placement. Returns the folders of the runs that succeeded, and why the others
    failed.

    `wait_for` waits for a process, and passes Ctrl-C and SIGTERM on to it. They end the comparison
    after the run.
    """
    placements = {
        re.sub(r"[^\w.=-]+", "_", word.replace("placement.", "")): overrides_of(word)
        for word in words
    }
    if len(words) < 2 or len(placements) < len(words):
        raise ConfigError(
            "compare --run: give at least two placements after `--`, such as `-- standard split`"
        )
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
            command = [
                sys.executable,
                "-m",
                "rolepool",
                "train",
                recipe,
                *overrides,
                *placement,
                *keys,
            ]
            streams = [(os.POSIX_SPAWN_DUP2, output.fileno(), number) for number in (1, 2)]
            code, asked = wait_for(
                os.posix_spawn(sys.executable, command, os.environ, file_actions=streams)
            )
        if asked:
            raise (KeyboardInterrupt if asked == signal.SIGINT else Terminated)(
                "the training run has ended too"
            )
        if code == 0:
            folders.append(folder)
        else:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LINES_SHOWN:]
            failures.append(
                "\n".join([f"{name}: training ended with code {code}; the end of {log}:", *last])
            )
    return folders, failures


def _check_placements(
    recipe: str, overrides: Sequence[str], placements: Mapping[str, list[str]]
) -> None:
    """Raise ConfigError before the first run starts if one of the placements cannot run."""
    problems: list[str] = []
    for name, placement in placements.items():
        with collected(problems, f"{recipe} with {name}: "):
            draft = read_config([recipe], [*overrides, *placement])
            draft.checked(*plan_problems(draft.loaded.config))
    if problems:
        raise ConfigError(
            [*problems, f"write keys that belong to one placement after `--`, not into {recipe}"]
        )
