"""The row of metrics of a step: what its workers measured, put together when its last call has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolepool.metrics import Span
from rolepool.metrics.timing import operation_times, per_token_times
from rolepool.placement import Plan
from rolepool.trainer.step import StepCalls

Spans = Mapping[str, Sequence[Sequence[Span]]]
"""Of each operation its calls, and of each call what every rank did."""


def spans_of(step: StepCalls) -> Spans:
    """Waits for every call of the step."""
    spans = {name: [call.spans() for call in calls] for name, calls in step.calls.items()}
    return {**spans, "adv": [[step.estimated.span]]}


def step_metrics(step: StepCalls, spans: Spans, plan: Plan, next_start_s: float | None) -> dict[str, float]:
    """All metrics of a step. It ends where the next one's generation starts, or with its last call."""
    metrics = {**_update_metrics(step), **step.estimated.metrics}
    every = [span for calls in spans.values() for call in calls for span in call]
    start_s = min(span.start_s for span in every)
    times = operation_times(spans)
    times["timing_s/step"] = (next_start_s or max(span.end_s for span in every)) - start_s
    num_tokens = metrics["perf/total_num_tokens"]
    num_processes = sum(pool.world_size for pool in plan.pools.values())
    return {
        **metrics,
        **times,
        **per_token_times(times, num_tokens),
        "perf/time_per_step": times["timing_s/step"],
        "perf/throughput": num_tokens / times["timing_s/step"] / num_processes,
        "perf/max_memory_allocated_gb": max(span.peak_memory_bytes for span in every) / 2**30,
    }


def _update_metrics(step: StepCalls) -> dict[str, float]:
    """Of several epochs, the mean."""
    metrics: dict[str, float] = {}
    for name in ("update_critic", "update_actor"):
        rows = [call.get()[0] for call in step.calls[name]]
        for key in rows[0] if rows else ():
            metrics[key] = sum(row[key] for row in rows) / len(rows)
    return metrics
