"""How a row of metrics and a curve look as one line of text, and the score that stands for a
validation."""

import re
from collections.abc import Mapping, Sequence

BARS = "▁▂▃▄▅▆▇█"
VALIDATION_MEAN = re.compile(r"val-core/(.+/)?[^/@]+/mean(@\d+)?")


def console_line(step: int, metrics: Mapping[str, float]) -> str:
    """`step:N - key:value - key:value ...`"""
    numbers = [f"{name}:{value:.6g}" for name, value in metrics.items()]
    return " - ".join([f"step:{step}", *numbers])


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """The mean score over the data sources of a validation; None if the row has none. Names may be
    those of `validation_metrics`, of older runs (without `@N`), or of verl."""
    means = []
    for name, value in metrics.items():
        if VALIDATION_MEAN.fullmatch(name):
            means.append(value)
    if not means:
        return None
    return sum(means) / len(means)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values as a line of bars. Its scale goes from 0 (or the minimum) to 1 (or the
    maximum)."""
    low = min(0.0, *values)
    high = max(1.0, *values)
    bars = []
    for column in range(width):
        start = len(values) * column // width
        end = len(values) * (column + 1) // width
        group = values[start:end]
        if not group:  # there are fewer values than columns
            continue
        mean = sum(group) / len(group)
        share = (mean - low) / (high - low)
        height = int(share * len(BARS))
        highest = len(BARS) - 1
        bars.append(BARS[min(highest, height)])
    return "".join(bars)
