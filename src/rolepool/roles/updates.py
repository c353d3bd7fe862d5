"""One pass of updates over a batch: the same loop for actor and critic, whose losses are handed in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from rolepool.algorithm import LossCounts
from rolepool.models.sharding import sum_over_ranks
from rolepool.models.training import TrainedModel
from rolepool.protocol import DataProto
from rolepool.roles.passes import cut_into_passes

LossOfRows = Callable[[dict[str, Tensor], Sequence[int], LossCounts], tuple[Tensor, dict[str, Tensor]]]


def mini_batches(
    trained: TrainedModel,
    data: DataProto,
    *,
    rows_per_mini_batch: int,
    rows_per_pass: int | None,
    max_tokens: int | None,
    loss_of: LossOfRows,
) -> dict[str, float]:
    """An optimizer step for each mini-batch of this rank's rows. Returns the mean of each metric over them."""
    totals: dict[str, float] = defaultdict(float)
    starts = range(0, len(data), rows_per_mini_batch)
    for start in starts:
        rows = data.batch[start : start + rows_per_mini_batch]
        batch = {key: value.to(trained.device) for key, value in rows.items()}
        passes = cut_into_passes(
            batch["attention_mask"], rows_per_pass=rows_per_pass, max_tokens=max_tokens, device=trained.device
        )
        counts = count_losses(batch["response_mask"], trained.device)
        for name, value in trained.step(passes, partial(_swap, loss_of, batch, counts)).items():
            totals[name] += value
    return {name: total / len(starts) for name, total in totals.items()}


def _swap(
    loss_of: LossOfRows, batch: dict[str, Tensor], counts: LossCounts, rows: Sequence[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    return loss_of(batch, rows, counts)


def count_losses(response_mask: Tensor, device: str) -> LossCounts:
    """What the losses of a mini-batch are divided by, counted over all ranks."""
    mine = LossCounts.of(response_mask)
    total = sum_over_ranks({"tokens": float(mine.num_tokens), "sequences": float(mine.num_sequences)}, device)
    return LossCounts(int(total["tokens"]), int(total["sequences"]), mine.loss_scale_factor)
