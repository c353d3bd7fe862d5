"""How long spans took, and how long they ran side by side."""

from __future__ import annotations

from collections.abc import Iterable

from rolepool.metrics.spans import Span


def extent_s(spans: Iterable[Span]) -> float:
    """Time from the first start to the last end."""
    spans = list(spans)
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def overlap_s(one: Iterable[Span], other: Iterable[Span]) -> float:
    """How long both sets of spans were under way at the same time, each taken from its first start
    to its last end."""
    one, other = list(one), list(other)
    start = max(min(span.start_s for span in spans) for spans in (one, other))
    end = min(max(span.end_s for span in spans) for spans in (one, other))
    return max(0.0, end - start)
