"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The course of values between 0 (or their least) and 1 (or their most) as a line of bars."""
    low, high = min(0.0, *values), max(1.0, *values)
    groups = [values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)]
    means = [sum(group) / len(group) for group in groups if group]
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means)
