"""The row of metrics of a step, made when its last call has ended; and the steps after which training has diverged.

Owns what a bad step is, the warning about skipped updates, and the error that ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rolepool.config import LoadedConfig
from rolepool.config.loading import show
from rolepool.errors import DivergedError
from rolepool.metrics.spans import Recorded, Timeline, operation_times, step_metrics
from rolepool.placement import Plan
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, trained_roles
from rolepool.trainer.advantages import describe
from rolepool.trainer.checkpoint import Checkpoints
from rolepool.trainer.step import StepCalls

logger = logging.getLogger(__name__)


def record(step: StepCalls) -> list[Recorded]:
    """The spans of a step. Waits for all its calls."""
    spans = [(name, span) for name, calls in step.calls.items() for call in calls for span in call.spans()]
    return [Recorded(step.number, name, span) for name, span in [*spans, ("adv", step.estimated.span)]]


def step_row(
    step: StepCalls, recorded: Sequence[Recorded], around: Sequence[Recorded], next_start_s: float | None, plan: Plan
) -> dict[str, float]:
    """All metrics of a step. A step ends when the generation of the next one starts, or with its last call.

    `around` are the spans before and after it, which say what its first and last calls waited for.
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
    """The metrics of updates: numbers of updates are sums over the epochs, the others are means."""
    metrics: dict[str, float] = {}
    for name in (name for name, operation in OPERATIONS.items() if operation.trains and name in step.calls):
        rows = [call.get()[0] for call in step.calls[name]]
        for key in rows[0] if rows else ():
            total = sum(row[key] for row in rows)
            metrics[key] = total if key.endswith("updates") else total / len(rows)
    return metrics


class BadSteps:
    """The number of bad steps in a row of each trained role.

    A step is bad for a role that skipped all its updates of the step, because no gradient was finite.
    """

    def __init__(self, loaded: LoadedConfig, checkpoints: Checkpoints) -> None:
        self._loaded, self._checkpoints = loaded, checkpoints
        self._num_in_a_row = dict.fromkeys(trained_roles(), 0)

    @property
    def reason(self) -> str | None:
        """Why the last step must not be saved; None if it was not bad."""
        roles = [role for role, number in self._num_in_a_row.items() if number]
        return f"{' and '.join(roles)} made no finite update in it" if roles else None

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a step by its row of metrics. Raises DivergedError after too many bad steps in a row."""
        skipped = []
        for role in self._num_in_a_row:
            if f"{role}/updates" not in metrics:  # the actor, while the critic warms up
                continue
            num_made, num_skipped = int(metrics[f"{role}/updates"]), int(metrics[f"{role}/skipped_updates"])
            self._num_in_a_row[role] = 0 if num_made else self._num_in_a_row[role] + 1
            if num_skipped:
                skipped.append(f"{num_skipped} of {num_made + num_skipped} updates of {role}")
        if skipped:
            logger.warning("step %d: skipped %s because the gradients are not finite", step, " and ".join(skipped))
        limit = self._loaded.config.trainer.max_bad_steps
        diverged = [role for role, number in self._num_in_a_row.items() if number >= limit]
        if diverged:
            keys = [f"{ROLE_SPECS[role].section}.{name}" for role in diverged for name in ("optim.lr", "grad_clip")]
            values = " or ".join(f"{key}={show(self._loaded.value_of(key))}" for key in keys)
            raise DivergedError(
                f"{' and '.join(diverged)} made no finite update in the last {limit} steps, up to step {step} "
                f"(trainer.max_bad_steps={limit}): training has diverged; lower {values}, or look for rewards that are "
                f"too large; {self._checkpoints.newest_in_words}"
            )
