"""One pass of updates over a batch: the same loop for actor and critic, whose losses are handed in."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
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
    """An optimizer step for each mini-batch of this rank's rows. Returns the mean of each metric over them.

    What ranks must tell each other is told before the first, and metrics are read after the last: in between the host
    never waits for the device.
    """
    starts = range(0, len(data), rows_per_mini_batch)
    batches = [dict(data.batch[start : start + rows_per_mini_batch].items()) for start in starts]
    counts = count_losses([batch["response_mask"] for batch in batches], trained.device)
    cuts = [passes.cut(batch["attention_mask"]) for batch in batches]
    of_batches = [
        trained.step(cut, partial(_loss_of_rows, loss_of, trained.device, batch, count))
        for batch, count, cut in zip(batches, counts, cuts, strict=True)
    ]
    names = list(of_batches[0])
    numbers = torch.stack([torch.stack([metrics[name] for name in names]) for metrics in of_batches]).tolist()
    norms = [of_batch[names.index("grad_norm")] for of_batch in numbers]
    for norm in norms:
        if worker.rank == 0 and not math.isfinite(norm):
            logger.warning(
                "%s: the norm of the gradients is %s, so this optimizer step is left out", worker.context.role, norm
            )
    means = {name: sum(column) / len(starts) for name, column in zip(names, zip(*numbers, strict=True), strict=True)}
    return {**sum_over_ranks(means, trained.device), "grad_norm": means["grad_norm"]}


def _loss_of_rows(
    loss_of: LossOfPass, device: str, batch: Batch, counts: LossCounts, rows: Sequence[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    return loss_of(rows_on(device, batch, rows), counts)


def count_losses(response_masks: Sequence[Tensor], device: str) -> list[LossCounts]:
    """What the losses of each mini-batch are divided by, counted over all ranks."""
    mine = [LossCounts.of(mask) for mask in response_masks]
    tokens = {f"tokens {number}": float(counts.num_tokens) for number, counts in enumerate(mine)}
    sequences = {f"sequences {number}": float(counts.num_sequences) for number, counts in enumerate(mine)}
    total = sum_over_ranks({**tokens, **sequences}, device)
    return [
        replace(counts, num_tokens=int(total[f"tokens {number}"]), num_sequences=int(total[f"sequences {number}"]))
        for number, counts in enumerate(mine)
    ]
