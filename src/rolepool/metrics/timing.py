"""Timings of a step, computed from its spans.

An operation took as long as its slowest rank worked on it; what the driver waited for does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolepool.metrics.spans import Span

PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")


def operation_times(spans: Mapping[str, Sequence[Sequence[Span]]]) -> dict[str, float]:
    """`timing_s/NAME` of each operation, given as calls of spans: the slowest rank of each call, calls added up."""
    return {
        f"timing_s/{name}": sum(max(span.duration_s for span in call) for call in calls)
        for name, calls in spans.items()
        if calls
    }


def per_token_times(times: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """`timing_per_token_ms/NAME`."""
    return {
        f"timing_per_token_ms/{name}": times[f"timing_s/{name}"] * 1000 / num_tokens
        for name in PER_TOKEN
        if f"timing_s/{name}" in times and num_tokens
    }
