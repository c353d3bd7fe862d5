"""Other programs on the machine: whether they slowed a part of a run down.

Owns the periods of a run that are compared, and the thresholds. The text is in `tables.yaml`.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from rolepool.placement.plan import RULE_POOL
from rolepool.report.metrics_by_step import TIMING
from rolepool.report.run import ReadRun
from rolepool.report.tables import TABLES
from rolepool.units import duration

MAX_PERIODS = 10
"""Periods that are compared."""
MIN_STEPS = 4
"""Steps with samples that each period needs."""
SLOWER = 1.5
"""Outside load makes a period at least this many times as slow as the fastest one ..."""
LESS_USE = 0.85
"""... while its utilization is at most this part of the fastest one's."""


class Period(NamedTuple):
    """Consecutive steps: their median duration, median seconds per token, and utilization (%) while
    ranks are busy."""

    first: int
    last: int
    step_s: float
    token_s: float
    use: float


def outside_load(run: ReadRun) -> str | None:
    """What shows that other programs slowed a part of the run down; None if nothing does.

    A run that slows down by itself, because its responses grow or its ranks wait for each other,
    does as much as before in each second in which it is busy. If another program takes the
    processors, it does less.
    """
    periods = _periods(run)
    if not periods:
        return None
    fast = min(periods, key=lambda period: period.token_s)
    slow = max(periods, key=lambda period: period.token_s)
    is_slower = slow.token_s >= SLOWER * fast.token_s
    does_less = slow.use <= LESS_USE * fast.use
    if not (is_slower and does_less):
        return None
    return TABLES.findings["outside_load"].format(
        slow=slow,
        slow_s=duration(slow.step_s),
        fast=fast,
        factor=slow.token_s / fast.token_s,
    )


def _periods(run: ReadRun) -> list[Period]:
    """Consecutive parts of the run, without its first step; none if it is too short, or without
    samples."""
    measured = [step for step, row in run.metrics.items() if _is_measured(row)]
    steps = measured[1:]
    num_steps = len(steps)
    count = min(MAX_PERIODS, num_steps // MIN_STEPS)
    periods = []
    for index in range(count):
        begin = num_steps * index // count
        end = num_steps * (index + 1) // count
        periods.append(_period(run, steps[begin:end]))
    return periods


def _period(run: ReadRun, steps: Sequence[int]) -> Period:
    rows = []
    times_s = []
    times_of_token_s = []
    for step in steps:
        row = run.metrics[step]
        step_s = row[f"{TIMING}step"]
        rows.append(row)
        times_s.append(step_s)
        times_of_token_s.append(step_s / row["perf/total_num_tokens"])
    utilization = _mean_of_pools(rows, "utilization")
    busy_fraction = _mean_of_pools(rows, "busy_fraction")
    return Period(
        first=steps[0],
        last=steps[-1],
        step_s=median(times_s),
        token_s=median(times_of_token_s),
        use=utilization / busy_fraction,
    )


def _is_measured(row: Mapping[str, float]) -> bool:
    """Whether a row has what a period is made of. A row of another program, or of a damaged file,
    may lack it."""
    needed = (
        row.get(f"{TIMING}step", 0.0),
        row.get("perf/total_num_tokens", 0.0),
        _mean_of_pools([row], "utilization"),
        _mean_of_pools([row], "busy_fraction"),
    )
    return min(needed) > 0


def _mean_of_pools(rows: Sequence[Mapping[str, float]], metric: str) -> float:
    """The mean of a metric of pools, without the pool of the rule reward; 0 if there is none."""
    pattern = re.compile(rf"pool/(?!{RULE_POOL}/).*/{metric}")
    values = []
    for row in rows:
        for name, value in row.items():
            if pattern.fullmatch(name):
                values.append(value)
    if not values:
        return 0.0
    return fmean(values)
