"""Rows of metrics of a step, made when its last call has ended."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rolepool.config import Config
from rolepool.metrics.spans import Recorded, operation_times, step_bounds
from rolepool.metrics.timeline import Timeline, step_metrics
from rolepool.placement import Plan
from rolepool.placement.built_in_roles import ADV, UPDATE_WEIGHTS
from rolepool.placement.roles import OPERATIONS
from rolepool.trainer.advantages import Estimated, describe
from rolepool.trainer.pipeline import RunningStep
from rolepool.trainer.state import FilteredGroups
from rolepool.trainer.step import StepCalls, update_orders
from rolepool.weights.process_group import Sent


def record(step: StepCalls) -> list[Recorded]:
    """The spans of a step. Waits for all its calls."""
    number = step.number
    recorded: list[Recorded] = []
    for operation, calls in step.calls.items():
        for call in calls:
            for span in call.spans():
                recorded.append(Recorded(number, operation, span))
    adv_span = step.estimated.span
    recorded.append(Recorded(number, ADV.name, adv_span))
    return recorded


def record_ahead(step: RunningStep) -> list[Recorded]:
    """The spans of the calls that were made ahead for later steps, if they have ended."""
    recorded: list[Recorded] = []
    for batch in step.ahead:
        for operation, future in batch.calls:
            if not future.done():
                continue
            for span in future.spans():
                recorded.append(Recorded(batch.number, operation, span))
    return recorded


def step_row(
    step: StepCalls,
    recorded: Sequence[Recorded],
    before: Sequence[Recorded],
    after: Sequence[Recorded],
    plan: Plan,
    ahead: Sequence[Recorded] = (),
) -> dict[str, float]:
    """All metrics of a step. A step ends when the next one starts, or with its last call.

    `before` and `after` are the spans around it, which say what its first calls waited for and what
    waited for its last ones. `ahead` are those of later steps whose responses were generated
    meanwhile. Metrics of updates are means over the epochs, except the numbers of updates, which
    are sums.
    """
    metrics = {
        "training/global_step": float(step.number),
        **_means_over_epochs(step),
        **step.estimated.metrics,
        **describe(step.estimated, step.scored.get()),
    }
    times = operation_times(recorded)
    # Calls of this step that were queued before the last ones of the step before do not begin it.
    of_step_before = [line for line in before if line.step == step.number - 1]
    bounds = step_bounds([*of_step_before, *recorded, *after])
    start_s, end_s = bounds[step.number]
    step_s = end_s - start_s
    times["timing_s/step"] = step_s
    tokens_per_s = metrics["perf/total_num_tokens"] / step_s
    # What was generated ahead is in several of these lists.
    timeline = Timeline(dict.fromkeys([*recorded, *before, *ahead, *after]))
    return {
        **metrics,
        **times,
        **_times_per_token(times, step.estimated),
        "perf/time_per_step": step_s,
        "perf/throughput": tokens_per_s / len(plan.slots),
        **_peaks(recorded),
        **_sent_weights(step),
        **step_metrics(timeline, start_s, end_s),
    }


def staleness_metrics(
    step: int,
    versions: Tensor | None,
    critic_warmup: int,
) -> dict[str, float]:
    """How many steps older the weights are that generated the rows of a step than those with which
    the step begins. The weights are the same after all steps in which only the critic trains. Empty
    if the rollout does not say the versions."""
    if versions is None:
        return {}
    known = versions[versions >= 0]
    if not len(known):
        return {}
    newest = max(step - 1, critic_warmup)
    staleness = newest - known.clamp(min=critic_warmup)
    return {
        "training/staleness/mean": float(staleness.double().mean()),
        "training/staleness/max": float(staleness.max()),
    }


def group_metrics(groups: FilteredGroups | None) -> dict[str, float]:
    """What was filtered for a step; empty without `algorithm.filter_groups`."""
    if groups is None:
        return {}
    return {
        "train/num_gen_batches": float(groups.num_batches),
        "train/filtered_groups": float(groups.num_filtered),
        "train/surplus_groups": float(groups.num_surplus),
    }


def _means_over_epochs(step: StepCalls) -> dict[str, float]:
    """The metrics of updates."""
    metrics: dict[str, float] = {}
    for name, operation in OPERATIONS.items():
        calls = step.calls.get(name)
        if not operation.trains or not calls:
            continue
        epochs = [call.get()[0] for call in calls]
        for key in epochs[0]:
            # The first epoch may have metrics that later ones do not have.
            values = [epoch[key] for epoch in epochs if key in epoch]
            total = sum(values)
            if key.endswith("updates"):
                metrics[key] = total
            else:
                metrics[key] = total / len(values)
    return metrics


def _peaks(recorded: Sequence[Recorded]) -> dict[str, float]:
    """The largest memory of a process during the step."""
    allocated_bytes = max(span.peak_memory_bytes for _, _, span in recorded)
    reserved_bytes = max(span.reserved_memory_bytes for _, _, span in recorded)
    return {
        "perf/max_memory_allocated_gb": allocated_bytes / 2**30,
        "perf/max_memory_reserved_gb": reserved_bytes / 2**30,
    }


def _sent_weights(step: StepCalls) -> dict[str, float]:
    """What the actor's ranks sent to a rollout in another pool; empty if weights took another
    way."""
    num_bytes = 0
    num_values = 0
    num_changed = 0
    is_compared = True
    for call in step.calls.get(UPDATE_WEIGHTS, ()):
        for sent in call.get() or ():
            if not isinstance(sent, Sent):
                continue
            num_bytes += sent.num_bytes
            num_values += sent.num_values
            num_changed += sent.num_changed or 0
            is_compared = is_compared and sent.num_changed is not None
    if num_values == 0:
        return {}
    metrics = {"perf/weights/bytes": float(num_bytes)}
    if is_compared:
        metrics["perf/weights/changed"] = num_changed / num_values
    return metrics


def _times_per_token(times: Mapping[str, float], estimated: Estimated) -> dict[str, float]:
    """`timing_per_token_ms/NAME` of the operations that the role table lists for it."""
    num_sampled = int(estimated.mask.sum())
    num_all = sum(estimated.lengths)
    per_token: dict[str, float] = {}
    for name, operation in OPERATIONS.items():
        if not operation.is_per_token:
            continue
        seconds = times.get(f"timing_s/{name}")
        num_tokens = num_sampled if operation.generates else num_all
        if seconds is not None and num_tokens > 0:
            per_token[f"timing_per_token_ms/{name}"] = seconds * 1000 / num_tokens
    return per_token


def length_metrics(
    config: Config,
    lengths: Sequence[int],
    num_ranks: int,
    step: int,
) -> dict[str, float]:
    """`global_seqlen/*`, with trainer.balance_batch: the numbers of tokens of the actor's ranks if
    they got the rows in order, and those of its first epoch, in which the rows are balanced."""
    if not config.trainer.balance_batch:
        return {}
    keys = config.actor_rollout_ref.actor
    orders = update_orders(config, keys, lengths, num_ranks, step)
    order, _ = next(orders)

    def tokens_of_ranks(lengths_of_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        by_rank = lengths_of_rows.reshape(num_ranks, -1)
        num_tokens: npt.NDArray[np.int64] = by_rank.sum(axis=1)
        return num_tokens

    all_lengths = np.asarray(lengths)
    in_order = tokens_of_ranks(all_lengths)
    balanced = tokens_of_ranks(all_lengths[order])
    return {
        "global_seqlen/min": float(in_order.min()),
        "global_seqlen/max": float(in_order.max()),
        "global_seqlen/minmax_diff": float(np.ptp(in_order)),
        "global_seqlen/mean": float(in_order.mean()),
        "global_seqlen/balanced_min": float(balanced.min()),
        "global_seqlen/balanced_max": float(balanced.max()),
    }
