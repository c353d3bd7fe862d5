"""Validation: scores of responses to validation prompts, and some of their texts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.prompts import PromptSet, validation_batches
from rolepool.metrics import Span
from rolepool.protocol import DataProto
from rolepool.protocol.ragged import TOKENS, rows_of_responses
from rolepool.trainer.advantages import repeated
from rolepool.trainer.calls import Roles

NUM_SAMPLES = 64
"""The number of responses of a validation whose texts are recorded."""


@dataclass(frozen=True)
class Validation:
    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    spans: list[Span]


def validate(config: Config, roles: Roles, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase) -> Validation:
    """The mean score of responses for each data source; with several samples per prompt, also the mean of the best."""
    start_s = time.monotonic()
    num_samples = config.actor_rollout_ref.rollout.val_kwargs.n
    scores_of: dict[str, list[np.ndarray[Any, np.dtype[np.float64]]]] = {}
    samples: list[dict[str, Any]] = []
    spans: list[Span] = []
    for batch in validation_batches(prompts, config.data.val_batch_size):
        rows = repeated(batch, num_samples)
        rollouts = roles.rollout.generate_sequences(rows, purpose="validate")
        scored = roles.reward.compute_scores(rollouts.union(rows))
        scores = scored.get(keys=["scores"]).batch["scores"].double().numpy()
        for source, of_prompt in zip(
            batch.non_tensor_batch["data_source"], scores.reshape(-1, num_samples), strict=True
        ):
            scores_of.setdefault(source, []).append(of_prompt)
        wanted = min(len(rows), NUM_SAMPLES - len(samples))
        if wanted:
            sampled = rollouts.get(keys=TOKENS)[:wanted]
            samples.extend(_texts(rows[:wanted], sampled, scores, tokenizer))
        spans.extend((*rollouts.spans(), *scored.spans()))
    metrics: dict[str, float] = {}
    for source, table in scores_of.items():
        metrics[f"val-core/{source}/reward/mean"] = float(np.mean(table))
        if num_samples > 1:
            metrics[f"val-core/{source}/reward/best@{num_samples}"] = float(np.max(table, axis=1).mean())
    return Validation({**metrics, "timing_s/testing": time.monotonic() - start_s}, samples, spans)


def _texts(
    rows: DataProto, sampled: DataProto, scores: Any, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    columns = rows.non_tensor_batch
    for index, response in enumerate(rows_of_responses(sampled.batch)):
        yield {
            "prompt": tokenizer.decode(columns["raw_prompt_ids"][index], skip_special_tokens=True),
            "response": tokenizer.decode(response, skip_special_tokens=True),
            "ground_truth": (columns["reward_model"][index] or {}).get("ground_truth"),
            "score": float(scores[index]),
            "data_source": columns["data_source"][index],
        }
