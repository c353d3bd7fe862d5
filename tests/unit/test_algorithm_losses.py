"""Losses: by hand, against slow loops, by finite differences, and the same however a mini-batch is
cut up."""

import math
from collections.abc import Callable

import pytest
import torch
from mini_batches import (
    HIGH,
    LOW,
    MODES,
    Loss,
    MiniBatch,
    cut_up,
    gradient_of,
    kept_tokens,
    loss_named,
    random_mini_batch,
    slow_aggregate,
)
from torch import Tensor

from rolepool.algorithm.losses import (
    LossCounts,
    agg_loss,
    compute_value_loss,
    masked_kl_penalty,
)
from rolepool.algorithm.policy_losses import compute_policy_loss_vanilla
from rolepool.config.functions import POLICY_LOSSES

C, VALUE_CLIP = 3.0, 0.5


def policy(
    batch: MiniBatch, mode: str, counts: LossCounts | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
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


def value(
    batch: MiniBatch, mode: str, counts: LossCounts | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, clipfrac = compute_value_loss(
        batch.new, batch.advantages, batch.old, batch.mask, VALUE_CLIP, mode, counts=counts
    )
    return loss, {"vf_clipfrac": clipfrac}


def kl_loss(
    batch: MiniBatch, mode: str, counts: LossCounts | None, estimator: str
) -> tuple[Tensor, dict[str, Tensor]]:
    return agg_loss(
        masked_kl_penalty(batch.new, batch.old, batch.mask, estimator),
        batch.mask,
        mode,
        counts=counts,
    ), {}


def kl(
    batch: MiniBatch, mode: str, counts: LossCounts | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    return kl_loss(batch, mode, counts, "low_var_kl")


def mse_kl(
    batch: MiniBatch, mode: str, counts: LossCounts | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    return kl_loss(batch, mode, counts, "mse")


def k3_plus(
    batch: MiniBatch, mode: str, counts: LossCounts | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    return kl_loss(batch, mode, counts, "k3+")


PLAIN: tuple[Loss, ...] = (policy, value, kl, mse_kl, loss_named("gpg"), loss_named("geo_mean"))
WITH_STOPPED_GRADIENT: tuple[Loss, ...] = (k3_plus, loss_named("gspo"), loss_named("cispo"))
PER_MICRO_BATCH: tuple[Loss, ...] = (loss_named("clip_cov"), loss_named("kl_cov"))


def name_of(loss: Loss) -> str:
    return loss.__name__


every_loss = pytest.mark.parametrize(
    "loss_of", PLAIN + WITH_STOPPED_GRADIENT + PER_MICRO_BATCH, ids=name_of
)
every_mode = pytest.mark.parametrize("mode", MODES)


# By hand


@pytest.mark.parametrize(
    ("mode", "expected"),
    # The rows keep (1, 2, 3) and (4); the third is padding.
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10),
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
    shrink = {"seq-mean-token-sum-norm": 2 * 2, "token-sum": 1}.get(
        mode, 2
    )  # twice the tokens, sequences and width
    assert agg_loss(losses, mask, mode, counts=counts).item() == pytest.approx(
        expected / shrink, rel=1e-15
    )


def test_the_width_of_a_mask_or_a_constant_divides_the_sums_of_sequences() -> None:
    # Rows keep 1 + 2, 5 + 6 + 7 and 9: a sum of 30 over 3 sequences.
    losses = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(3, 4).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    assert agg_loss(losses, mask, "seq-mean-token-sum-norm").item() == 30 / 3 / 4
    loss = agg_loss(losses, mask, "seq-mean-token-sum-norm", counts=LossCounts.of(mask, 10.0))
    assert loss.item() == 30 / 3 / 10
    (gradient,) = torch.autograd.grad(loss, losses)
    torch.testing.assert_close(gradient, mask.double() / (3 * 10), rtol=1e-14, atol=0)


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
    # Only the one token that no clip holds has a gradient: d(-A r)/d log_prob = -A r = -0.5, over 4
    # tokens.
    expected = torch.tensor([[0, -0.125, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(
        gradient_of(policy, batch, "token-mean"), expected, rtol=0, atol=1e-12
    )


def test_on_policy_the_policy_loss_has_the_gradient_of_reinforce() -> None:
    batch = random_mini_batch(0)
    batch = batch._replace(new=batch.old)
    mask = batch.mask.bool()
    expected = torch.where(mask, -batch.advantages, 0.0) / mask.sum()
    torch.testing.assert_close(
        gradient_of(policy, batch, "token-mean"), expected, rtol=0, atol=1e-12
    )


def test_value_loss_by_hand() -> None:
    # v = 2, v_old = 1, c = 0.5, so clipped to 1.5. R = 0: max(4, 2.25) = 4. R = 3: max(1, 2.25) =
    # 2.25, clipped.
    old, new, returns = (
        torch.tensor([row], dtype=torch.float64) for row in ([1.0, 1.0], [2.0, 2.0], [0.0, 3.0])
    )
    loss, metrics = value(MiniBatch(old, new, returns, torch.ones(1, 2)), "token-mean")
    assert loss.item() == 0.5 * (4 + 2.25) / 2
    assert metrics["vf_clipfrac"] == 1 / 2


# Against slow loops


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
@pytest.mark.parametrize(
    ("loss_of", "slow"), [(policy, slow_policy_token), (value, slow_value_token)]
)
def test_agrees_with_the_slow_version_on_ragged_rows(
    loss_of: Loss,
    slow: Callable[[float, float, float], tuple[float, dict[str, float]]],
    seed: int,
    mode: str,
) -> None:
    batch = random_mini_batch(seed)
    tokens = [[slow(*token) for token in row] for row in kept_tokens(batch)]
    loss, metrics = loss_of(batch, mode, None)
    assert loss.item() == pytest.approx(
        slow_aggregate([[loss for loss, _ in row] for row in tokens], mode, 7), rel=1e-12
    )
    for name, metric in metrics.items():
        column = [[flags[name] for _, flags in row] for row in tokens]
        assert metric.item() == pytest.approx(
            slow_aggregate(column, "token-mean", 7), rel=1e-12, abs=1e-15
        )


def test_the_random_rows_meet_every_clip() -> None:
    _, metrics = policy(random_mini_batch(0), "token-mean")
    assert metrics["pg_clipfrac"] > 0 and metrics["pg_clipfrac_lower"] > 0
    assert value(random_mini_batch(0), "token-mean")[1]["vf_clipfrac"] > 0


# Gradients


@pytest.mark.parametrize("loss_of", PLAIN + PER_MICRO_BATCH, ids=name_of)
@every_mode
def test_gradients_agree_with_finite_differences(loss_of: Loss, mode: str) -> None:
    batch = random_mini_batch(0, rows=4, width=4)
    counts = LossCounts(num_tokens=11, num_sequences=5, loss_scale_factor=9.0)
    new = batch.new.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(batch._replace(new=x), mode, counts)[0], new)


# A mini-batch cut up


@pytest.mark.parametrize("loss_of", PLAIN + WITH_STOPPED_GRADIENT, ids=name_of)
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
    dirty = MiniBatch(
        *(torch.where(batch.mask.bool(), column, garbage) for column in batch[:3]), batch.mask
    )
    loss, metrics = loss_of(batch, mode, None)
    dirty_loss, dirty_metrics = loss_of(dirty, mode, None)
    assert torch.equal(loss, dirty_loss) and loss.isfinite()
    assert metrics == dirty_metrics
    gradient = gradient_of(loss_of, dirty, mode)
    assert torch.equal(gradient, gradient_of(loss_of, batch, mode))
    assert (gradient[batch.mask == 0] == 0).all()


@every_loss
@every_mode
def test_a_micro_batch_of_padding_still_has_a_backward_pass_of_zeros(
    loss_of: Loss, mode: str
) -> None:
    batch = random_mini_batch(0)
    batch = batch._replace(mask=torch.zeros_like(batch.mask))
    loss, metrics = loss_of(batch, mode, None)
    assert loss == 0 and all(metric == 0 for metric in metrics.values())
    assert (gradient_of(loss_of, batch, mode) == 0).all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_that_ran_away_gives_finite_losses_and_gradients(name: str) -> None:
    loss_of = loss_named(name)
    far = torch.tensor([[1e4, -1e4, 1e4, -1e4]])
    batch = MiniBatch(
        torch.zeros(1, 4), far, torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4)
    )
    loss, metrics = loss_of(batch, "token-mean", None)
    assert loss.isfinite() and all(metric.isfinite() for metric in metrics.values())
    assert gradient_of(loss_of, batch, "token-mean").isfinite().all()
    assert loss.dtype == torch.float32


def test_wrong_settings_are_refused() -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'"):
        agg_loss(ones, ones, "mean")
