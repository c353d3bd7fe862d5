"""One pass of updates over a batch: the same loop for actor and critic, whose losses are handed in."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from rolepool.algorithm import LossCounts
from rolepool.models.packing import Batch, rows_on
from rolepool.models.sharding import sum_over_ranks
from rolepool.models.training import TrainedModel
from rolepool.protocol import DataProto, Worker
from rolepool.roles.passes import Passes

logger = logging.getLogger(__name__)

LossOfPass = Callable[[Batch, LossCounts], tuple[Tensor, dict[str, Tensor]]]
"""Of the rows of one pass, on the device."""


def mini_batches(
    worker: Worker,
    trained: TrainedModel,
    data: DataProto,
    *,
    rows_per_mini_batch: int,
    passes: Passes,
    loss_of: LossOfPass,
) -> dict[str, float]:
    """An optimizer step for each mini-batch of this rank's rows. Returns the mean of each metric over them."""
    totals: dict[str, float] = defaultdict(float)
    starts = range(0, len(data), rows_per_mini_batch)
    for start in starts:
        rows = data.batch[start : start + rows_per_mini_batch]
        batch = dict(rows.items())
        counts = count_losses(batch["response_mask"], trained.device)
        cut = passes.cut(batch["attention_mask"])
        metrics = trained.step(cut, partial(_loss_of_rows, loss_of, trained.device, batch, counts))
        if worker.rank == 0 and not math.isfinite(metrics["grad_norm"]):
            logger.warning(
                "%s: the norm of the gradients is %s, so this optimizer step is left out",
                worker.context.role,
                metrics["grad_norm"],
            )
        for name, value in metrics.items():
            totals[name] += value
    return {name: total / len(starts) for name, total in totals.items()}


def _loss_of_rows(
    loss_of: LossOfPass, device: str, batch: Batch, counts: LossCounts, rows: Sequence[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    return loss_of(rows_on(device, batch, rows), counts)


def count_losses(response_mask: Tensor, device: str) -> LossCounts:
    """What the losses of a mini-batch are divided by, counted over all ranks."""
    mine = LossCounts.of(response_mask)
    total = sum_over_ranks({"tokens": float(mine.num_tokens), "sequences": float(mine.num_sequences)}, device)
    return LossCounts(int(total["tokens"]), int(total["sequences"]), mine.loss_scale_factor)
