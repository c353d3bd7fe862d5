"""Rows of metrics of a step, made when its last call has ended."""

from collections.abc import Mapping, Sequence

import numpy as np

from rolepool.config import Config
from rolepool.metrics.spans import Recorded, operation_times, step_bounds
from rolepool.metrics.timeline import Timeline, step_metrics
from rolepool.placement import Plan
from rolepool.placement.built_in_roles import ADV
from rolepool.placement.roles import OPERATIONS
from rolepool.trainer.advantages import Estimated, describe
from rolepool.trainer.step import StepCalls, update_orders


def record(step: StepCalls) -> list[Recorded]:
    """The spans of a step. Waits for all its calls."""
    recorded: list[Recorded] = []
    for operation, calls in step.calls.items():
        for call in calls:
            for span in call.spans():
                recorded.append(Recorded(step.number, operation, span))
    recorded.append(Recorded(step.number, ADV.name, step.estimated.span))
    return recorded


def step_row(
    step: StepCalls,
    recorded: Sequence[Recorded],
    before: Sequence[Recorded],
    after: Sequence[Recorded],
    plan: Plan,
) -> dict[str, float]:
    """All metrics of a step. A step ends when the generation of the next one starts, or with its
    last call.

    `before` and `after` are the spans around it, which say what its first calls waited for and what
    waited for its last ones. Metrics of updates are means over the epochs, except the numbers of
    updates, which are sums.
    """
    metrics = {"training/global_step": float(step.number)}
    for name in (
        name for name, operation in OPERATIONS.items() if operation.trains and step.calls.get(name)
    ):
        epochs = [call.get()[0] for call in step.calls[name]]
        for key in epochs[0]:
            total = sum(epoch[key] for epoch in epochs)
            metrics[key] = total if key.endswith("updates") else total / len(epochs)
    metrics |= {**step.estimated.metrics, **describe(step.estimated, step.scored.get())}
    times = operation_times(recorded)
    start_s, end_s = step_bounds([*recorded, *after])[step.number]
    times["timing_s/step"] = end_s - start_s
    return {
        **metrics,
        **times,
        **_times_per_token(times, step.estimated),
        "perf/time_per_step": times["timing_s/step"],
        "perf/throughput": metrics["perf/total_num_tokens"]
        / times["timing_s/step"]
        / len(plan.slots),
        "perf/max_memory_allocated_gb": max(span.peak_memory_bytes for _, _, span in recorded)
        / 2**30,
        "perf/max_memory_reserved_gb": max(span.reserved_memory_bytes for _, _, span in recorded)
        / 2**30,
        **step_metrics(Timeline([*recorded, *before, *after]), start_s, end_s),
    }


def _times_per_token(times: Mapping[str, float], estimated: Estimated) -> dict[str, float]:
    """`timing_per_token_ms/NAME` of the operations that the role table lists for it."""
    num_sampled, num_all = int(estimated.mask.sum()), sum(estimated.lengths)
    found = {}
    for name, operation in OPERATIONS.items():
        num_tokens = num_sampled if operation.generates else num_all
        if operation.is_per_token and f"timing_s/{name}" in times and num_tokens:
            found[f"timing_per_token_ms/{name}"] = times[f"timing_s/{name}"] * 1000 / num_tokens
    return found


def length_metrics(
    config: Config, lengths: Sequence[int], num_ranks: int, step: int
) -> dict[str, float]:
    """`global_seqlen/*`, with trainer.balance_batch: the numbers of tokens of the actor's ranks if
    they got the rows in order, and those of its first epoch, in which the rows are balanced."""
    if not config.trainer.balance_batch:
        return {}
    order, _ = next(update_orders(config, config.actor_rollout_ref.actor, lengths, num_ranks, step))
    in_order = np.reshape(lengths, (num_ranks, -1)).sum(axis=1)
    balanced = np.asarray(lengths)[order].reshape(num_ranks, -1).sum(axis=1)
    found = {
        "min": in_order.min(),
        "max": in_order.max(),
        "minmax_diff": np.ptp(in_order),
        "mean": in_order.mean(),
    }
    found |= {"balanced_min": balanced.min(), "balanced_max": balanced.max()}
    return {f"global_seqlen/{name}": float(value) for name, value in found.items()}
