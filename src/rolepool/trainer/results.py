"""What the first phase of a step has computed, as data in the driver's memory: responses, scores, and
the scores of greedy responses.

Owns how they are fetched, and how a step learns from them as if their calls had just ended. The
results of a process on this node are not copied; those of another node are.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from rolepool.config import Config
from rolepool.errors import DataError, WorkerError
from rolepool.protocol import DataProto, DataProtoFuture
from rolepool.protocol.batches import Tokens
from rolepool.protocol.columns import flat_values, split_tokens
from rolepool.protocol.data import tensordict_to_batch
from rolepool.protocol.futures import Stripe, rows_with_keys
from rolepool.trainer.step import Generated

Batch = DataProto | DataProtoFuture
VERSION = "weights_version"
ENDED_TIMEOUT_S = 60.0
"""Fetching the results of calls that have ended takes so long at most."""


class Results(NamedTuple):
    """What the calls of a first phase have returned."""

    rollouts: DataProto
    scores: DataProto
    baselines: DataProto | None = None


def results_of(generated: Generated, what: str, timeout_s: float) -> Results:
    """Wait for the calls of a first phase. Raises WorkerError, which says `what` has not ended, if
    that takes longer than `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s

    def value_of(batch: Batch) -> DataProto:
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            return _fetched(batch, left_s)
        except WorkerError as error:
            if error.is_death or time.monotonic() < deadline_s:
                raise
            reason = error.problems[0]
            raise WorkerError(f"{what} belong to a state that is saved, and {reason}") from None

    baselines = None
    if generated.baselines is not None:
        baselines = value_of(generated.baselines)
    return Results(value_of(generated.rollouts), value_of(generated.scores), baselines)


def results_if_ended(generated: Generated) -> Results | None:
    """The results of a first phase; None if a call has not ended, or if a result is lost."""
    for batch in (generated.rollouts, generated.scores, generated.baselines):
        if not isinstance(batch, DataProtoFuture):
            continue
        for call in batch.sources:
            if not call.has_ended(within_s=0):
                return None
    try:
        return results_of(generated, "results that have ended", ENDED_TIMEOUT_S)
    except WorkerError:  # a process failed or died, or a node was lost
        return None


def _fetched(batch: Batch, timeout_s: float) -> DataProto:
    """The data of a batch. A step of the user may hand on a batch instead of a future."""
    if isinstance(batch, DataProto):
        return batch
    value = tensordict_to_batch(batch.get(timeout_s))
    if not isinstance(value, DataProto):
        kind = type(value).__name__
        raise DataError(f"a step that waits in the queue returned a {kind}, not a DataProto")
    return value


def why_not_used(config: Config, prompts: DataProto, results: Results) -> str | None:
    """Why a step with this config cannot learn from these results, which may have been saved with
    another config; None if it can."""
    rollouts = results.rollouts
    if len(rollouts) != len(prompts):
        return f"they are {len(rollouts)} responses, and a step has {len(prompts)}"
    tokens = Tokens.of(rollouts)
    prompt_tokens, _ = split_tokens(vars(tokens))
    read_again = np.concatenate(prompts.non_tensor_batch["raw_prompt_ids"])
    if not np.array_equal(flat_values(prompt_tokens).numpy(), read_again):
        return "their prompts have changed"
    needed = []
    if config.bypasses_old_log_prob:
        needed.append("old_log_probs")
    if config.returns_log_probs:
        needed.append("rollout_log_probs")
    for name in needed:
        if name not in rollouts.columns():
            return f"they have no {name}, which other keys need now"
    needs_baselines = config.algorithm.adv_estimator == "remax"
    if needs_baselines and results.baselines is None:
        return "they have no baselines, which algorithm.adv_estimator=remax needs"
    return None


def generated_from(
    number: int, prompts: DataProto, results: Results, *, is_compared: bool
) -> Generated:
    """The first phase of a step, from its results. Without `is_compared`, the engine's log-probs
    are not compared with the actor's."""
    rollouts = results.rollouts
    if not is_compared and VERSION in rollouts.columns():
        others = rollouts.columns().keys() - {VERSION}
        rollouts = rows_with_keys(rollouts, None, frozenset(others))
    baselines = None
    if results.baselines is not None:
        baselines = _future_of(results.baselines)
    return Generated(
        number,
        prompts,
        rollouts=_future_of(rollouts),
        scores=_future_of(results.scores),
        baselines=baselines,
    )


def _future_of(batch: DataProto) -> DataProtoFuture:
    """A future of a batch that the driver has."""
    return DataProtoFuture((), [Stripe(batch)])
