"""A validation: responses to the validation prompts, their scores, and the metrics of these."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.prompts import PromptSet, validation_batches
from rolepool.metrics.spans import Span
from rolepool.trainer.advantages import repeated
from rolepool.trainer.samples import ScoredResponse, samples_of, scored_responses
from rolepool.trainer.step import Roles

NUM_SAMPLES = 64
"""The number of responses of a validation whose texts are recorded."""


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
        all_graded.extend(scored_responses(rows.non_tensor_batch["data_source"], scored.get()))
        samples.extend(
            islice(samples_of(rows, rollouts, scored.get(), tokenizer), most_samples - len(samples))
        )
        spans.extend((*rollouts.spans(), *scored.spans()))
    metrics = validation_metrics(all_graded, num_samples)
    return {**metrics, "timing_s/testing": time.monotonic() - start_s}, samples, spans


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
