"""Rows of metrics: of a step, made when its last call has ended, and of a validation."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.prompts import PromptSet, validation_batches
from rolepool.data.rewards import PRED
from rolepool.metrics.spans import Recorded, Span, operation_times, step_bounds
from rolepool.metrics.timeline import Timeline, step_metrics
from rolepool.placement import Plan
from rolepool.placement.roles import OPERATIONS
from rolepool.protocol import DataProto
from rolepool.protocol.columns import TOKENS, rows_of_responses
from rolepool.trainer.advantages import Estimated, describe, repeated, reward_numbers
from rolepool.trainer.step import Roles, StepCalls, update_orders

NUM_SAMPLES = 64
"""The number of responses of a validation whose texts are recorded."""
NUM_TRAINING_SAMPLES = 8
"""The number of responses of a training step whose texts are recorded."""
MAX_RECORDED_STEPS = 20
"""In about so many training steps some responses are recorded."""


class ScoredResponse(NamedTuple):
    """A response in a validation: its numbers by variable, and the answer in it if the reward
    function returned one."""

    data_source: str
    numbers: Mapping[str, float]
    pred: str | None = None


def record(step: StepCalls) -> list[Recorded]:
    """The spans of a step. Waits for all its calls."""
    spans = [
        (name, span)
        for name, calls in step.calls.items()
        for call in calls
        for span in call.spans()
    ]
    return [
        Recorded(step.number, name, span) for name, span in [*spans, ("adv", step.estimated.span)]
    ]


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


def validate(
    config: Config, roles: Roles, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, float], list[dict[str, Any]], list[Span]]:
    """Generate responses to validation prompts and score them. Returns metrics, some responses (all
    of them if they are written to a file), and the spans."""
    start_s = time.monotonic()
    num_samples = config.actor_rollout_ref.rollout.val_kwargs.n
    all_graded: list[ScoredResponse] = []
    samples: list[dict[str, Any]] = []
    spans: list[Span] = []
    writes_all, num_logged = (
        config.trainer.validation_data_dir is not None,
        config.trainer.log_val_generations,
    )
    most_samples = len(prompts) * num_samples if writes_all else max(NUM_SAMPLES, num_logged)
    for batch in validation_batches(prompts, config.data.val_batch_size):
        rows = repeated(batch, num_samples)
        rollouts = roles.rollout.generate_sequences(rows, purpose="validate")
        scored = roles.reward.compute_scores(rollouts.union(rows))
        all_graded.extend(_scored_responses(rows.non_tensor_batch["data_source"], scored.get()))
        samples.extend(
            islice(samples_of(rows, rollouts, scored.get(), tokenizer), most_samples - len(samples))
        )
        spans.extend((*rollouts.spans(), *scored.spans()))
    metrics = validation_metrics(all_graded, num_samples)
    return {**metrics, "timing_s/testing": time.monotonic() - start_s}, samples, spans


def records_responses(step: int, num_steps: int) -> bool:
    """Whether some responses of a training step are recorded: those of the first, of the last, and
    of some others."""
    every = math.ceil(num_steps / MAX_RECORDED_STEPS)
    return step in (1, num_steps) or step % every == 0


def samples_of(
    prompts: DataProto, rollouts: Any, scored: DataProto, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """The texts, ground truth, score and data source of each response, and other numbers of the
    reward function. `rollouts` is the future of the generation; only its tokens are fetched."""
    columns = prompts.non_tensor_batch
    graded = _scored_responses(columns["data_source"], scored)
    for index, response in enumerate(rows_of_responses(rollouts.get(keys=TOKENS).batch)):
        numbers = dict(graded[index].numbers)
        sample = {
            "prompt": tokenizer.decode(columns["raw_prompt_ids"][index], skip_special_tokens=True),
            "question": question_of(columns["raw_prompt"][index]),
            "response": tokenizer.decode(response, skip_special_tokens=True),
            "ground_truth": (columns["reward_model"][index] or {}).get("ground_truth"),
            "score": numbers.pop("reward"),
            "data_source": columns["data_source"][index],
        }
        yield {
            **sample,
            **numbers,
            **sample,
        }  # a number with the name of a column does not replace it


def question_of(prompt: Any) -> str:
    """What a prompt asks, without the words of the chat template: the last message of the user, or
    a prompt that is a plain string."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message.get("role") == "user"] or list(prompt)
    content = asked[-1].get("content") if asked else ""
    if isinstance(content, str):
        return content
    pieces = [piece.get("text") for piece in content or () if isinstance(piece, Mapping)]
    return " ".join(piece for piece in pieces if isinstance(piece, str))


def _scored_responses(data_sources: Iterable[str], scored: DataProto) -> list[ScoredResponse]:
    scores = scored.batch["scores"].tolist()
    preds = scored.non_tensor_batch.get(PRED, [None] * len(scores))
    others = {name.removeprefix("reward/"): array for name, array in reward_numbers(scored).items()}
    found = []
    for index, (data_source, score, pred) in enumerate(
        zip(data_sources, scores, preds, strict=True)
    ):
        numbers = {
            name: float(array[index])
            for name, array in others.items()
            if not np.isnan(array[index])
        }
        found.append(ScoredResponse(data_source, {**numbers, "reward": score}, pred))
    return found


# Metrics of a validation with N scored responses to each prompt, under verl's names and by its
# definitions
#
# For each data source and variable (`reward` is the score, others are numbers that the reward
# function returned):
#
#     mean@N, std@N                      mean and standard deviation over the responses to a prompt
#     best@n, worst@n, each /mean, /std  the largest and smallest value of n responses, for n = 2, 4, 8, ... and N
#     maj@n/mean, maj@n/std              the value of the most frequent answer (`pred`) of n responses, if given
#
# The n responses are drawn from the N with replacement, 1000 times with a fixed seed, so the same
# scores give the same metrics. Each metric is the mean over the prompts. `val-core/` has mean@N,
# best@N and maj@N of the variable `acc`, or of `reward` if there is no `acc`; everything else is in
# `val-aux/`.

NUM_DRAWS = 1000
SEED = 42

Array = npt.NDArray[Any]
Draws = tuple[int, Array, Array | None]
"""How many responses n are drawn, their positions, [draws, n], and for each prompt the position of
the response that wins the vote of each draw, [prompts, draws], if there are answers to vote for."""


def validation_metrics(responses: Sequence[ScoredResponse], num_samples: int) -> dict[str, float]:
    """All metrics of a validation. The `num_samples` responses to a prompt are next to each other.

    Prompts with a response that does not have a variable are skipped for this variable.
    """
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(response.data_source for response in responses):
        rows = [response for response in responses if response.data_source == source]
        draws = list(_draws(rows, num_samples))
        names = list(dict.fromkeys(name for row in rows for name in row.numbers))
        core = "acc" if "acc" in names else "reward"
        for name in names:
            values = np.array([row.numbers.get(name, np.nan) for row in rows]).reshape(
                -1, num_samples
            )
            is_complete = ~np.isnan(values).any(axis=1)
            if not is_complete.any():
                continue
            for statistic, value in _statistics(values, is_complete, draws):
                kind, size = statistic.split("/")[0].split("@")
                is_core = (
                    name == core and kind in ("mean", "best", "maj") and int(size) == num_samples
                )
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{statistic}"] = (
                    value
                )
    return metrics


def _draws(rows: Sequence[ScoredResponse], num_samples: int) -> Iterator[Draws]:
    """The draws for n = 2, 4, 8, ... and N."""
    numbers = {pred: number for number, pred in enumerate(dict.fromkeys(row.pred for row in rows))}
    answers = np.array([numbers[row.pred] for row in rows]).reshape(-1, num_samples)
    has_answers = any(row.pred is not None for row in rows)
    smaller = [2**power for power in range(1, num_samples.bit_length()) if 2**power < num_samples]
    for n in [*smaller, num_samples] if num_samples > 1 else []:
        drawn = np.random.RandomState(SEED).choice(
            num_samples, size=(NUM_DRAWS, n)
        )  # the numbers that verl draws
        winners = (
            [_winners(of_prompt[drawn], drawn) for of_prompt in answers] if has_answers else None
        )
        yield n, drawn, None if winners is None else np.stack(winners)


def _winners(answers: Array, drawn: Array) -> Array:
    """The first drawn position of the most frequent answer in each draw; of several, of the answer
    drawn first."""
    counts = (answers[:, :, None] == answers[:, None, :]).sum(axis=2)
    return np.take_along_axis(drawn, counts.argmax(axis=1)[:, None], axis=1)[:, 0]


def _statistics(
    values: Array, is_complete: Array, draws: Sequence[Draws]
) -> Iterator[tuple[str, float]]:
    """The statistics of a variable, [prompts, N], over its complete prompts."""
    num_samples, kept = values.shape[1], values[is_complete]
    yield f"mean@{num_samples}", float(kept.mean())
    if num_samples > 1:
        yield f"std@{num_samples}", float(kept.std(axis=1).mean())
    for n, drawn, winners in draws:
        found = {
            "best": np.stack([of_prompt[drawn].max(axis=1) for of_prompt in kept]),
            "worst": np.stack([of_prompt[drawn].min(axis=1) for of_prompt in kept]),
        }
        if winners is not None:
            found["maj"] = np.take_along_axis(kept, winners[is_complete], axis=1)
        for kind, of_draws in found.items():  # [prompts, draws]
            yield f"{kind}@{n}/mean", float(of_draws.mean())
            yield f"{kind}@{n}/std", float(of_draws.std(axis=1).mean())
