"""The row of metrics of a step: what its workers measured, put together when its last call has ended."""

from __future__ import annotations

from collections.abc import Sequence

from rolepool.metrics.spans import Recorded, Timeline, operation_times, step_metrics
from rolepool.placement import Plan
from rolepool.placement.roles import OPERATIONS
from rolepool.trainer.advantages import describe
from rolepool.trainer.step import StepCalls


def record(step: StepCalls) -> list[Recorded]:
    """What was done for a step. Waits for every call of it."""
    spans = [(name, span) for name, calls in step.calls.items() for call in calls for span in call.spans()]
    return [Recorded(step.number, name, span) for name, span in [*spans, ("adv", step.estimated.span)]]


def step_row(
    step: StepCalls, recorded: Sequence[Recorded], around: Sequence[Recorded], next_start_s: float | None, plan: Plan
) -> dict[str, float]:
    """All metrics of a step. It ends where the next one's generation starts, or with its last call.

    `around` are the spans before and after it, which explain what its first and last calls waited for.
    """
    metrics = {
        "training/global_step": float(step.number),
        **_update_metrics(step),
        **step.estimated.metrics,
        **describe(step.estimated, step.scored.get()),
    }
    times = operation_times(recorded)
    start_s = min(span.start_s for _, _, span in recorded)
    end_s = next_start_s or max(span.end_s for _, _, span in recorded)
    times["timing_s/step"] = end_s - start_s
    num_tokens = metrics["perf/total_num_tokens"]
    num_processes = sum(pool.world_size for pool in plan.pools.values())
    return {
        **metrics,
        **times,
        **{
            f"timing_per_token_ms/{name}": times[f"timing_s/{name}"] * 1000 / num_tokens
            for name, operation in OPERATIONS.items()
            if operation.is_per_token and f"timing_s/{name}" in times and num_tokens
        },
        "perf/time_per_step": times["timing_s/step"],
        "perf/throughput": num_tokens / times["timing_s/step"] / num_processes,
        "perf/max_memory_allocated_gb": max(span.peak_memory_bytes for _, _, span in recorded) / 2**30,
        **step_metrics(Timeline([*recorded, *around]), start_s, end_s),
    }


def _update_metrics(step: StepCalls) -> dict[str, float]:
    """Of several epochs the mean, and of updates the sum."""
    metrics: dict[str, float] = {}
    for name in (name for name, operation in OPERATIONS.items() if operation.trains):
        rows = [call.get()[0] for call in step.calls[name]]
        for key in rows[0] if rows else ():
            total = sum(row[key] for row in rows)
            metrics[key] = total if key.endswith("updates") else total / len(rows)
    return metrics
