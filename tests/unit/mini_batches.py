"""Mini-batches for the tests of losses: random ones, cut up in many ways, and plain loops over
their tokens."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rolepool.algorithm.losses import LossCounts
from rolepool.config import load_config
from rolepool.config.functions import policy_losses
from rolepool.config.model_keys import ActorConfig

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
LOW, HIGH, COV_LOW, COV_HIGH, KL_COEF = 0.2, 0.28, 0.05, 1.5, 0.7


class MiniBatch(NamedTuple):
    """Columns of [rows, tokens]; `old`, `advantages` and `returns` are data, `new` is what has a
    gradient."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor

    def take(self, rows: Tensor) -> "MiniBatch":
        return MiniBatch(*(column[rows] for column in self))


Loss = Callable[[MiniBatch, str, LossCounts | None], tuple[Tensor, dict[str, Tensor]]]


@cache
def actor_keys(*overrides: str) -> ActorConfig:
    """The actor's section of the config, with clip ranges that the random mini-batches leave on
    both sides."""
    policy_loss = [
        f"clip_cov_lb={COV_LOW}",
        f"clip_cov_ub={COV_HIGH}",
        "clip_cov_ratio=1",
        "kl_cov_ratio=0.2",
    ]
    policy_loss += [f"ppo_kl_coef={KL_COEF}", *overrides]
    keys = [
        f"clip_ratio_low={LOW}",
        f"clip_ratio_high={HIGH}",
        *(f"policy_loss.{key}" for key in policy_loss),
    ]
    return load_config(
        [], [f"actor_rollout_ref.actor.{key}" for key in keys]
    ).config.actor_rollout_ref.actor


def loss_named(name: str, *overrides: str) -> Loss:
    """The policy loss of this name in the config, called as the actor calls it."""
    keys = actor_keys(*overrides)

    def loss_of(
        batch: MiniBatch, mode: str, counts: LossCounts | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = policy_losses.find(name)(
            old_log_prob=batch.old,
            log_prob=batch.new,
            advantages=batch.advantages,
            response_mask=batch.mask,
            loss_agg_mode=mode,
            config=keys,
            clip_ratio_low=keys.clip_ratio_low,
            clip_ratio_high=keys.clip_ratio_high,
            clip_ratio_c=keys.clip_ratio_c,
            counts=counts,
        )
        return loss, metrics

    loss_of.__name__ = name
    return loss_of


def random_mini_batch(seed: int, rows: int = 10, width: int = 7) -> MiniBatch:
    """Ragged rows with holes, ratios on all sides of every clip; the third row and the last are
    padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.7)
    mask[:, 0] = True
    mask[2] = mask[-1] = False
    old, new, advantages = torch.randn(3, rows, width, generator=generator, dtype=torch.float64)
    return MiniBatch(old, new, advantages, mask.long())


def gradient_of(
    loss_of: Loss, batch: MiniBatch, mode: str, counts: LossCounts | None = None
) -> Tensor:
    new = batch.new.clone().requires_grad_()
    loss, metrics = loss_of(batch._replace(new=new), mode, counts)
    assert not any(metric.requires_grad for metric in metrics.values())
    return torch.autograd.grad(loss, new)[0]


def slow_aggregate(rows: list[list[float]], mode: str, width: int) -> float:
    """`rows` holds the losses of the kept tokens of every row that is not padding."""
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows) / (width if mode == "seq-mean-token-sum-norm" else 1)


def kept_tokens(batch: MiniBatch) -> Iterator[list[tuple[float, float, float]]]:
    for old, new, advantages, mask in zip(*(column.tolist() for column in batch), strict=True):
        row = [token[:3] for token in zip(old, new, advantages, mask, strict=True) if token[3]]
        if row:
            yield row


def cut_up(batch: MiniBatch, seed: int) -> Iterator[tuple[Tensor, MiniBatch]]:
    """Micro-batches of random rows and sizes, each as narrow as its rows allow, some with more
    padding rows."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch.mask), generator=generator)
    while len(order):
        size = int(torch.randint(1, 5, (), generator=generator))
        rows, order = order[:size], order[size:]
        part = batch.take(rows)
        width = max(int(part.mask.any(dim=0).nonzero().max()) + 1, 1) if part.mask.any() else 1
        part = MiniBatch(*(column[:, :width] for column in part))
        if torch.rand((), generator=generator) < 0.5:
            padding = MiniBatch(
                *(torch.full_like(column[:1], 77) for column in part[:3]),
                torch.zeros_like(part.mask[:1]),
            )
            part = MiniBatch(*(torch.cat(columns) for columns in zip(part, padding, strict=True)))
        yield rows, part
