"""Rows of metrics: of a step, made when its last call has ended, and of a validation."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.prompts import PromptSet, validation_batches
from rolepool.data.rewards import PRED
from rolepool.metrics.spans import Recorded, Span, Timeline, operation_times, step_bounds, step_metrics
from rolepool.metrics.validation import ScoredResponse, validation_metrics
from rolepool.placement import Plan
from rolepool.placement.roles import OPERATIONS
from rolepool.protocol import DataProto
from rolepool.protocol.columns import TOKENS, rows_of_responses
from rolepool.trainer.advantages import Estimated, describe, repeated, reward_numbers
from rolepool.trainer.step import Roles, StepCalls, update_orders

NUM_SAMPLES = 64
"""The number of responses of a validation whose texts are recorded."""


def record(step: StepCalls) -> list[Recorded]:
    """The spans of a step. Waits for all its calls."""
    spans = [(name, span) for name, calls in step.calls.items() for call in calls for span in call.spans()]
    return [Recorded(step.number, name, span) for name, span in [*spans, ("adv", step.estimated.span)]]


def step_row(
    step: StepCalls, recorded: Sequence[Recorded], before: Sequence[Recorded], after: Sequence[Recorded], plan: Plan
) -> dict[str, float]:
    """All metrics of a step. A step ends when the generation of the next one starts, or with its last call.

    `before` and `after` are the spans around it, which say what its first calls waited for and what waited for its last
    ones. Metrics of updates are means over the epochs, except the numbers of updates, which are sums.
    """
    metrics = {"training/global_step": float(step.number)}
    for name in (name for name, operation in OPERATIONS.items() if operation.trains and step.calls.get(name)):
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
        "perf/throughput": metrics["perf/total_num_tokens"] / times["timing_s/step"] / len(plan.slots),
        "perf/max_memory_allocated_gb": max(span.peak_memory_bytes for _, _, span in recorded) / 2**30,
        "perf/max_memory_reserved_gb": max(span.reserved_memory_bytes for _, _, span in recorded) / 2**30,
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


def length_metrics(config: Config, lengths: Sequence[int], num_ranks: int, step: int) -> dict[str, float]:
    """`global_seqlen/*`, with trainer.balance_batch: the numbers of tokens of the actor's ranks if they got the rows in
    order, and those of its first epoch, in which the rows are balanced."""
    if not config.trainer.balance_batch:
        return {}
    order, _ = next(update_orders(config, config.actor_rollout_ref.actor, lengths, num_ranks, step))
    in_order = np.reshape(lengths, (num_ranks, -1)).sum(axis=1)
    balanced = np.asarray(lengths)[order].reshape(num_ranks, -1).sum(axis=1)
    found = {"min": in_order.min(), "max": in_order.max(), "minmax_diff": np.ptp(in_order), "mean": in_order.mean()}
    found |= {"balanced_min": balanced.min(), "balanced_max": balanced.max()}
    return {f"global_seqlen/{name}": float(value) for name, value in found.items()}


def validate(
    config: Config, roles: Roles, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, float], list[dict[str, Any]], list[Span]]:
    """Generate responses to validation prompts and score them. Returns metrics, some responses (all of them if they are
    written to a file), and the spans."""
    start_s = time.monotonic()
    num_samples = config.actor_rollout_ref.rollout.val_kwargs.n
    all_graded: list[ScoredResponse] = []
    samples: list[dict[str, Any]] = []
    spans: list[Span] = []
    writes_all, num_logged = config.trainer.validation_data_dir is not None, config.trainer.log_val_generations
    most_samples = len(prompts) * num_samples if writes_all else max(NUM_SAMPLES, num_logged)
    for batch in validation_batches(prompts, config.data.val_batch_size):
        rows = repeated(batch, num_samples)
        rollouts = roles.rollout.generate_sequences(rows, purpose="validate")
        scored = roles.reward.compute_scores(rollouts.union(rows))
        all_graded.extend(_scored_responses(rows.non_tensor_batch["data_source"], scored.get()))
        samples.extend(islice(samples_of(rows, rollouts, scored.get(), tokenizer), most_samples - len(samples)))
        spans.extend((*rollouts.spans(), *scored.spans()))
    metrics = validation_metrics(all_graded, num_samples)
    return {**metrics, "timing_s/testing": time.monotonic() - start_s}, samples, spans


def samples_of(
    prompts: DataProto, rollouts: Any, scored: DataProto, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """The texts, ground truth, score and data source of each response, and other numbers of the reward function.
    `rollouts` is the future of the generation; only its tokens are fetched."""
    columns = prompts.non_tensor_batch
    graded = _scored_responses(columns["data_source"], scored)
    for index, response in enumerate(rows_of_responses(rollouts.get(keys=TOKENS).batch)):
        numbers = dict(graded[index].numbers)
        sample = {
            "prompt": tokenizer.decode(columns["raw_prompt_ids"][index], skip_special_tokens=True),
            "response": tokenizer.decode(response, skip_special_tokens=True),
            "ground_truth": (columns["reward_model"][index] or {}).get("ground_truth"),
            "score": numbers.pop("reward"),
            "data_source": columns["data_source"][index],
        }
        yield {**sample, **numbers, **sample}  # a number with the name of a column does not replace it


def _scored_responses(data_sources: Iterable[str], scored: DataProto) -> list[ScoredResponse]:
    scores = scored.batch["scores"].tolist()
    preds = scored.non_tensor_batch.get(PRED, [None] * len(scores))
    others = {name.removeprefix("reward/"): array for name, array in reward_numbers(scored).items()}
    found = []
    for index, (data_source, score, pred) in enumerate(zip(data_sources, scores, preds, strict=True)):
        numbers = {name: float(array[index]) for name, array in others.items() if not np.isnan(array[index])}
        found.append(ScoredResponse(data_source, {**numbers, "reward": score}, pred))
    return found
