"""Rows of metrics: of a step, made when its last call has ended, and of a validation; and when training has diverged.

Owns what a bad step is, the warning about skipped updates, and the error that ends the run.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config, LoadedConfig
from rolepool.config.loading import show
from rolepool.data.prompts import PromptSet, validation_batches
from rolepool.errors import DivergedError
from rolepool.metrics.spans import Recorded, Span, Timeline, operation_times, step_metrics
from rolepool.placement import Plan
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, trained_roles
from rolepool.protocol import DataProto
from rolepool.protocol.ragged import TOKENS, rows_of_responses
from rolepool.trainer.advantages import describe, repeated
from rolepool.trainer.checkpoint import Checkpoints
from rolepool.trainer.step import Roles, StepCalls

logger = logging.getLogger(__name__)

NUM_SAMPLES = 64
"""The number of responses of a validation whose texts are recorded."""


def record(step: StepCalls) -> list[Recorded]:
    """The spans of a step. Waits for all its calls."""
    spans = [(name, span) for name, calls in step.calls.items() for call in calls for span in call.spans()]
    return [Recorded(step.number, name, span) for name, span in [*spans, ("adv", step.estimated.span)]]


def step_row(
    step: StepCalls, recorded: Sequence[Recorded], around: Sequence[Recorded], next_start_s: float | None, plan: Plan
) -> dict[str, float]:
    """All metrics of a step. A step ends when the generation of the next one starts, or with its last call.

    `around` are the spans before and after it, which say what its first and last calls waited for. Metrics of updates
    are means over the epochs, except the numbers of updates, which are sums.
    """
    metrics = {"training/global_step": float(step.number)}
    for name in (name for name, operation in OPERATIONS.items() if operation.trains and step.calls.get(name)):
        epochs = [call.get()[0] for call in step.calls[name]]
        for key in epochs[0]:
            total = sum(epoch[key] for epoch in epochs)
            metrics[key] = total if key.endswith("updates") else total / len(epochs)
    metrics |= {**step.estimated.metrics, **describe(step.estimated, step.scored.get())}
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


def validate(
    config: Config, roles: Roles, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, float], list[dict[str, Any]], list[Span]]:
    """Generate responses to validation prompts and score them. Returns metrics, some responses (all of them if they are
    written to a file), and the spans.

    Metrics are the mean score of each data source and, with several samples per prompt, the mean of the best scores.
    """
    start_s = time.monotonic()
    num_samples = config.actor_rollout_ref.rollout.val_kwargs.n
    scores_of: dict[str, list[np.ndarray[Any, np.dtype[np.float64]]]] = {}
    samples: list[dict[str, Any]] = []
    spans: list[Span] = []
    writes_all, num_logged = config.trainer.validation_data_dir is not None, config.trainer.log_val_generations
    most_samples = len(prompts) * num_samples if writes_all else max(NUM_SAMPLES, num_logged)
    for batch in validation_batches(prompts, config.data.val_batch_size):
        rows = repeated(batch, num_samples)
        columns = rows.non_tensor_batch
        rollouts = roles.rollout.generate_sequences(rows, purpose="validate")
        scored = roles.reward.compute_scores(rollouts.union(rows))
        scores = scored.get().batch["scores"].double().numpy()
        for source, of_prompt in zip(columns["data_source"][::num_samples], np.split(scores, len(batch)), strict=True):
            scores_of.setdefault(source, []).append(of_prompt)
        if len(samples) < most_samples:
            generated = samples_of(rows, rollouts.get(keys=TOKENS), scored.get(), tokenizer)
            samples.extend(islice(generated, most_samples - len(samples)))
        spans.extend((*rollouts.spans(), *scored.spans()))
    metrics: dict[str, float] = {}
    for source, table in scores_of.items():
        metrics[f"val-core/{source}/reward/mean"] = float(np.mean(table))
        if num_samples > 1:
            metrics[f"val-core/{source}/reward/best@{num_samples}"] = float(np.max(table, axis=1).mean())
    return {**metrics, "timing_s/testing": time.monotonic() - start_s}, samples, spans


def samples_of(
    prompts: DataProto, rollouts: DataProto, scored: DataProto, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """The texts, ground truth, score and data source of each response, and other numbers of the reward function."""
    columns, scores = prompts.non_tensor_batch, scored.batch["scores"].tolist()
    numbers = {name.removeprefix("reward/"): array.tolist() for name, array in scored.non_tensor_batch.items()}
    for index, response in enumerate(rows_of_responses(rollouts.batch)):
        sample = {
            "prompt": tokenizer.decode(columns["raw_prompt_ids"][index], skip_special_tokens=True),
            "response": tokenizer.decode(response, skip_special_tokens=True),
            "ground_truth": (columns["reward_model"][index] or {}).get("ground_truth"),
            "score": scores[index],
            "data_source": columns["data_source"][index],
        }
        # A number that the function did not return for this response is NaN.
        given = {name: values[index] for name, values in numbers.items() if not math.isnan(values[index])}
        yield {**sample, **given, **sample}  # a number with the name of a column does not replace it


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
