"""Losses: by hand, against slow loops, by finite differences, and the same however a mini-batch is cut up."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rolepool.algorithm.losses import (
    LossCounts,
    agg_loss,
    compute_policy_loss_vanilla,
    compute_value_loss,
    masked_kl_penalty,
)

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOW, HIGH, C, VALUE_CLIP = 0.2, 0.28, 3.0, 0.5


class MiniBatch(NamedTuple):
    """Columns of [rows, tokens]; `old`, `advantages` and `returns` are data, `new` is what has a gradient."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor

    def take(self, rows: Tensor) -> "MiniBatch":
        return MiniBatch(*(column[rows] for column in self))


Loss = Callable[[MiniBatch, str, LossCounts | None], tuple[Tensor, dict[str, Tensor]]]


def policy(batch: MiniBatch, mode: str, counts: LossCounts | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_policy_loss_vanilla(
        batch.old,
        batch.new,
        batch.advantages,
        batch.mask,
        mode,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=C,
        counts=counts,
    )


def value(batch: MiniBatch, mode: str, counts: LossCounts | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    loss, clipfrac = compute_value_loss(
        batch.new, batch.advantages, batch.old, batch.mask, VALUE_CLIP, mode, counts=counts
    )
    return loss, {"vf_clipfrac": clipfrac}


def kl_loss(batch: MiniBatch, mode: str, counts: LossCounts | None, estimator: str) -> tuple[Tensor, dict[str, Tensor]]:
    return agg_loss(masked_kl_penalty(batch.new, batch.old, batch.mask, estimator), batch.mask, mode, counts=counts), {}


def kl(batch: MiniBatch, mode: str, counts: LossCounts | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    return kl_loss(batch, mode, counts, "low_var_kl")


def mse_kl(batch: MiniBatch, mode: str, counts: LossCounts | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    return kl_loss(batch, mode, counts, "mse")


LOSSES: tuple[Loss, ...] = (policy, value, kl, mse_kl)
every_loss = pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss: loss.__name__)
every_mode = pytest.mark.parametrize("mode", MODES)


def random_mini_batch(seed: int, rows: int = 10, width: int = 7) -> MiniBatch:
    """Ragged rows with holes, ratios on all sides of every clip; the third row and the last are padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.7)
    mask[:, 0] = True
    mask[2] = mask[-1] = False
    old, new, advantages = torch.randn(3, rows, width, generator=generator, dtype=torch.float64)
    return MiniBatch(old, new, advantages, mask.long())


def gradient_of(loss_of: Loss, batch: MiniBatch, mode: str, counts: LossCounts | None = None) -> Tensor:
    new = batch.new.clone().requires_grad_()
    loss, metrics = loss_of(batch._replace(new=new), mode, counts)
    assert not any(metric.requires_grad for metric in metrics.values())
    return torch.autograd.grad(loss, new)[0]


# By hand


@pytest.mark.parametrize(
    ("mode", "expected"),
    # The rows keep (1, 2, 3) and (4); the third is padding.
    [
        ("token-mean", 10 / 4),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 2 / 3),
    ],
)
def test_aggregation(mode: str, expected: float) -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [9.0, 4.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0]])
    assert agg_loss(losses, mask, mode).item() == pytest.approx(expected, rel=1e-15)
    counts = LossCounts(num_tokens=8, num_sequences=4, loss_scale_factor=6.0)
    shrink = 2 * 2 if mode == "seq-mean-token-sum-norm" else 2  # twice the tokens, the sequences and the width
    assert agg_loss(losses, mask, mode, counts=counts).item() == pytest.approx(expected / shrink, rel=1e-15)


def test_counts_of_a_mask() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0]])
    assert LossCounts.of(mask) == LossCounts(num_tokens=4, num_sequences=2, loss_scale_factor=3.0)
    assert LossCounts.of(mask.double(), 512.0) == LossCounts(4, 2, 512.0)


def test_policy_loss_on_every_side_of_the_clips() -> None:
    # A =  1, r = 1.5: max(-1.5, -1.28) = -1.28, clipped        A =  1, r = 0.5: max(-0.5, -0.8) = -0.5
    # A = -1, r = 0.5: max( 0.5,  0.8 ) =  0.8,  clipped        A = -1, r = 5: min(max(5, 1.28), 3) = 3, bounded by c
    ratios = torch.tensor([[1.5, 0.5, 0.5, 5.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    batch = MiniBatch(torch.zeros_like(ratios), ratios.log(), advantages, torch.ones_like(ratios))
    loss, metrics = policy(batch, "token-mean")
    assert loss.item() == pytest.approx((-1.28 - 0.5 + 0.8 + 3) / 4, rel=1e-14)
    assert metrics["pg_clipfrac"] == 2 / 4
    assert metrics["pg_clipfrac_lower"] == 1 / 4
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(1.5 * 0.5 * 0.5 * 5) / 4, rel=1e-14)
    # Only the one token that no clip holds has a gradient: d(-A r)/d log_prob = -A r = -0.5, over 4 tokens.
    expected = torch.tensor([[0, -0.125, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(gradient_of(policy, batch, "token-mean"), expected, rtol=0, atol=1e-12)


def test_on_policy_the_policy_loss_has_the_gradient_of_reinforce() -> None:
    batch = random_mini_batch(0)
    batch = batch._replace(new=batch.old)
    mask = batch.mask.bool()
    expected = torch.where(mask, -batch.advantages, 0.0) / mask.sum()
    torch.testing.assert_close(gradient_of(policy, batch, "token-mean"), expected, rtol=0, atol=1e-12)


def test_value_loss_by_hand() -> None:
    # v = 2, v_old = 1, c = 0.5, so clipped to 1.5. R = 0: max(4, 2.25) = 4. R = 3: max(1, 2.25) = 2.25, clipped.
    old, new, returns = (torch.tensor([row], dtype=torch.float64) for row in ([1.0, 1.0], [2.0, 2.0], [0.0, 3.0]))
    loss, metrics = value(MiniBatch(old, new, returns, torch.ones(1, 2)), "token-mean")
    assert loss.item() == 0.5 * (4 + 2.25) / 2
    assert metrics["vf_clipfrac"] == 1 / 2


# Against slow loops


def slow_aggregate(rows: list[list[float]], mode: str, width: int) -> float:
    """`rows` holds the losses of the kept tokens of every row that is not padding."""
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows) / (width if mode == "seq-mean-token-sum-norm" else 1)


def kept_tokens(batch: MiniBatch) -> Iterator[list[tuple[float, float, float]]]:
    for old, new, advantages, mask in zip(*(column.tolist() for column in batch), strict=True):
        row = [token[:3] for token in zip(old, new, advantages, mask, strict=True) if token[3]]
        if row:
            yield row


def slow_policy_token(old: float, new: float, advantage: float) -> tuple[float, dict[str, float]]:
    ratio = math.exp(new - old)
    clipped_ratio = min(max(ratio, 1 - LOW), 1 + HIGH)
    objective = min(ratio * advantage, clipped_ratio * advantage)
    flags = {
        "pg_clipfrac": float(clipped_ratio * advantage < ratio * advantage),
        "pg_clipfrac_lower": float(advantage < 0 and objective < C * advantage),
        "ppo_kl": old - new,
    }
    return -(max(objective, C * advantage) if advantage < 0 else objective), flags


def slow_value_token(old: float, new: float, target: float) -> tuple[float, dict[str, float]]:
    clipped = min(max(new, old - VALUE_CLIP), old + VALUE_CLIP)
    plain, held = (new - target) ** 2, (clipped - target) ** 2
    return max(plain, held) / 2, {"vf_clipfrac": float(held > plain)}


@every_mode
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("loss_of", "slow"), [(policy, slow_policy_token), (value, slow_value_token)])
def test_agrees_with_the_slow_version_on_ragged_rows(
    loss_of: Loss, slow: Callable[[float, float, float], tuple[float, dict[str, float]]], seed: int, mode: str
) -> None:
    batch = random_mini_batch(seed)
    tokens = [[slow(*token) for token in row] for row in kept_tokens(batch)]
    loss, metrics = loss_of(batch, mode, None)
    assert loss.item() == pytest.approx(
        slow_aggregate([[loss for loss, _ in row] for row in tokens], mode, 7), rel=1e-12
    )
    for name, metric in metrics.items():
        column = [[flags[name] for _, flags in row] for row in tokens]
        assert metric.item() == pytest.approx(slow_aggregate(column, "token-mean", 7), rel=1e-12, abs=1e-15)


def test_the_random_rows_meet_every_clip() -> None:
    _, metrics = policy(random_mini_batch(0), "token-mean")
    assert metrics["pg_clipfrac"] > 0 and metrics["pg_clipfrac_lower"] > 0
    assert value(random_mini_batch(0), "token-mean")[1]["vf_clipfrac"] > 0


# Gradients


@every_loss
@every_mode
def test_gradients_agree_with_finite_differences(loss_of: Loss, mode: str) -> None:
    batch = random_mini_batch(0, rows=4, width=4)
    counts = LossCounts(num_tokens=11, num_sequences=5, loss_scale_factor=9.0)
    new = batch.new.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(batch._replace(new=x), mode, counts)[0], new)


# A mini-batch cut up


def cut_up(batch: MiniBatch, seed: int) -> Iterator[tuple[Tensor, MiniBatch]]:
    """Micro-batches of random rows and sizes, each as narrow as its rows allow, some with more padding rows."""
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
                *(torch.full_like(column[:1], 77) for column in part[:3]), torch.zeros_like(part.mask[:1])
            )
            part = MiniBatch(*(torch.cat(columns) for columns in zip(part, padding, strict=True)))
        yield rows, part


@every_loss
@every_mode
@pytest.mark.parametrize("seed", range(5))
def test_shares_of_any_partition_add_up_to_the_whole(loss_of: Loss, mode: str, seed: int) -> None:
    batch = random_mini_batch(seed)
    counts = LossCounts.of(batch.mask)
    whole, whole_metrics = loss_of(batch, mode, None)
    total, gradient = torch.zeros_like(whole), torch.zeros_like(batch.new)
    totals = {name: torch.zeros_like(metric) for name, metric in whole_metrics.items()}
    for rows, part in cut_up(batch, seed):
        loss, metrics = loss_of(part, mode, counts)
        total += loss
        for name, metric in metrics.items():
            totals[name] += metric
        part_gradient = gradient_of(loss_of, part, mode, counts)
        assert (part_gradient[len(rows) :] == 0).all()
        gradient[rows, : part_gradient.shape[1]] = part_gradient[: len(rows)]
    assert abs(total - whole) <= 1e-12
    torch.testing.assert_close(gradient, gradient_of(loss_of, batch, mode), rtol=0, atol=1e-12)
    for name, metric in whole_metrics.items():
        assert abs(totals[name] - metric) <= 1e-12


# What must not matter


@every_loss
@every_mode
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
def test_what_masked_tokens_hold_changes_nothing(loss_of: Loss, mode: str, garbage: float) -> None:
    batch = random_mini_batch(0)
    dirty = MiniBatch(*(torch.where(batch.mask.bool(), column, garbage) for column in batch[:3]), batch.mask)
    loss, metrics = loss_of(batch, mode, None)
    dirty_loss, dirty_metrics = loss_of(dirty, mode, None)
    assert torch.equal(loss, dirty_loss) and loss.isfinite()
    assert metrics == dirty_metrics
    gradient = gradient_of(loss_of, dirty, mode)
    assert torch.equal(gradient, gradient_of(loss_of, batch, mode))
    assert (gradient[batch.mask == 0] == 0).all()


@every_loss
@every_mode
def test_a_micro_batch_of_padding_still_has_a_backward_pass_of_zeros(loss_of: Loss, mode: str) -> None:
    batch = random_mini_batch(0)
    batch = batch._replace(mask=torch.zeros_like(batch.mask))
    loss, metrics = loss_of(batch, mode, None)
    assert loss == 0 and all(metric == 0 for metric in metrics.values())
    assert (gradient_of(loss_of, batch, mode) == 0).all()


def test_a_policy_that_ran_away_gives_finite_losses_and_gradients() -> None:
    far = torch.tensor([[1e4, -1e4, 1e4, -1e4]])
    batch = MiniBatch(torch.zeros(1, 4), far, torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4))
    loss, metrics = policy(batch, "token-mean")
    assert loss.isfinite() and all(metric.isfinite() for metric in metrics.values())
    assert gradient_of(policy, batch, "token-mean").isfinite().all()
    assert loss.dtype == torch.float32


def test_wrong_settings_are_refused() -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'"):
        agg_loss(ones, ones, "mean")
