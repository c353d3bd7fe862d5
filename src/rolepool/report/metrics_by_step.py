"""The metrics of a run by step: the names of the most important ones, and series of values."""

import math

from rolepool.metrics.row_text import validation_score

TIMING = "timing_s/"
"""The metric of an operation's time is this prefix and the operation's name."""
REWARD = "critic/score/mean"
THROUGHPUT = "perf/throughput"
"""Tokens per second and GPU."""

MetricsByStep = dict[int, dict[str, float]]
"""The metrics of each step by name, in the order of steps."""


def metric_names(metrics: MetricsByStep) -> list[str]:
    """All names of metrics, in the order in which they first appear."""
    names: dict[str, None] = {}
    for row in metrics.values():
        names.update(dict.fromkeys(row))
    return list(names)


def timed_steps(metrics: MetricsByStep) -> MetricsByStep:
    """The steps that have ended. The rows of others have only the metrics of a validation or of a
    checkpoint."""
    return {step: row for step, row in metrics.items() if f"{TIMING}step" in row}


def finite_values(metrics: MetricsByStep, name: str) -> dict[int, float]:
    """The value of this metric for each step that has a finite one."""
    values = {}
    for step, row in metrics.items():
        value = row.get(name, math.nan)
        if math.isfinite(value):
            values[step] = value
    return values


def validation_scores(metrics: MetricsByStep) -> dict[int, float]:
    """The mean score of each validation that has a finite one, by step."""
    scores = {}
    for step, row in metrics.items():
        score = validation_score(row)
        if score is not None and math.isfinite(score):
            scores[step] = score
    return scores
