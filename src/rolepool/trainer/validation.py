"""A validation: responses to the validation prompts, and their scores."""

import time
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.prompts import PromptSet, validation_batches
from rolepool.metrics.spans import Span
from rolepool.trainer.advantages import repeated
from rolepool.trainer.samples import ScoredResponse, samples_of, scored_responses
from rolepool.trainer.step import Roles
from rolepool.trainer.validation_metrics import validation_metrics

NUM_SAMPLES = 64
"""The number of responses of a validation whose texts are recorded."""


def validate(
    config: Config,
    roles: Roles,
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[str, float], list[dict[str, Any]], list[Span]]:
    """Generate responses to validation prompts and score them. Returns metrics, some responses (all
    of them if they are written to a file), and the spans."""
    start_s = time.monotonic()
    num_samples = config.actor_rollout_ref.rollout.val_kwargs.n
    if config.trainer.validation_data_dir is not None:
        most_samples = len(prompts) * num_samples
    else:
        most_samples = max(NUM_SAMPLES, config.trainer.log_val_generations)
    responses: list[ScoredResponse] = []
    samples: list[dict[str, Any]] = []
    spans: list[Span] = []
    for batch in validation_batches(prompts, config.data.val_batch_size):
        rows = repeated(batch, num_samples)
        rollouts = roles.rollout.generate_sequences(rows, purpose="validate")
        scores = roles.reward.compute_scores(rollouts.union(rows))
        scored = scores.get()
        data_sources = rows.non_tensor_batch["data_source"]
        responses += scored_responses(data_sources, scored)
        # Texts take time to decode, so only as many are made as are used.
        samples_of_batch = samples_of(rows, rollouts, scored, tokenizer)
        num_missing = most_samples - len(samples)
        samples += islice(samples_of_batch, num_missing)
        spans += rollouts.spans()
        spans += scores.spans()
    metrics = validation_metrics(responses, num_samples)
    metrics["timing_s/testing"] = time.monotonic() - start_s
    return metrics, samples, spans
