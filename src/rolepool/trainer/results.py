"""What the first phase of a step has computed, as data in the driver's memory: responses, scores, and
the scores of greedy responses.

Owns how they are fetched, and how a step learns from them as if their calls had just ended. The
results of a process on this node are not copied; those of another node are.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from rolepool.errors import DataError, WorkerError
from rolepool.protocol import DataProto, DataProtoFuture
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
            return fetched(batch, left_s)
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


def fetched(batch: Batch, timeout_s: float | None) -> DataProto:
    """The data of a batch. A step of the user may hand on a batch instead of a future."""
    if isinstance(batch, DataProto):
        return batch
    value = tensordict_to_batch(batch.get(timeout_s))
    if not isinstance(value, DataProto):
        kind = type(value).__name__
        raise DataError(f"a step that waits in the queue returned a {kind}, not a DataProto")
    return value


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
