"""Masked statistics: sums, means, variances, whitening."""

import math
import statistics

import pytest
import torch

from rolepool.algorithm.losses import (
    compute_explained_variance,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from rolepool.errors import DataError

VALUES = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
GARBAGE = (math.nan, math.inf, -math.inf, 1e300)


def test_worked_out_by_hand() -> None:
    # Kept are 1, 2, 6: sum 9, mean 3, squares of the differences 4 + 1 + 9 = 14.
    assert masked_sum(VALUES, MASK) == 9
    assert masked_mean(VALUES, MASK) == 3
    assert masked_var(VALUES, MASK) == 14 / 2
    assert masked_sum(VALUES, MASK, axis=-1).tolist() == [3, 6, 0]
    assert masked_mean(VALUES, MASK, axis=-1).tolist() == [1.5, 6, 0]
    scale = 1 / math.sqrt(7 + 1e-8)
    expected = torch.tensor([[-2, -1, 0], [3, 0, 0], [0, 0, 0]], dtype=torch.float64) * scale
    torch.testing.assert_close(masked_whiten(VALUES, MASK), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_a_mask_may_be_of_any_type(dtype: torch.dtype) -> None:
    assert masked_mean(VALUES, MASK.to(dtype)) == 3
    assert masked_mean(VALUES, MASK.to(dtype)).dtype == torch.float64
    assert masked_whiten(VALUES.float(), MASK.to(dtype)).dtype == torch.float32


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_the_statistics_module_on_random_masks(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = 1e3 + torch.randn(5, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 7, generator=generator) < 0.4
    mask[0, :2] = True
    kept = [
        value
        for value, keep in zip(values.flatten().tolist(), mask.flatten().tolist(), strict=True)
        if keep
    ]
    assert masked_sum(values, mask).item() == pytest.approx(math.fsum(kept), rel=1e-14)
    assert masked_mean(values, mask).item() == pytest.approx(statistics.fmean(kept), rel=1e-14)
    assert masked_var(values, mask).item() == pytest.approx(statistics.variance(kept), rel=1e-10)
    whitened = masked_whiten(values, mask)
    assert masked_mean(whitened, mask).item() == pytest.approx(0, abs=1e-10)
    assert masked_var(whitened, mask).item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_dropped_tokens_hold_reaches_neither_results_nor_gradients(garbage: float) -> None:
    dirty = torch.where(MASK.bool(), VALUES, garbage).requires_grad_()
    for function in (masked_sum, masked_mean, masked_var, masked_whiten):
        result = function(dirty, MASK)
        assert torch.equal(result, function(VALUES, MASK))
        (gradient,) = torch.autograd.grad(result.sum(), dirty)
        assert gradient.isfinite().all() and (gradient[MASK == 0] == 0).all()


@pytest.mark.parametrize("num_kept", [0, 1])
def test_too_few_tokens_for_a_variance_give_zeros(num_kept: int) -> None:
    mask = torch.zeros_like(MASK)
    mask[0, :num_kept] = 1
    assert masked_var(VALUES, mask) == 0
    assert masked_mean(VALUES, mask) == num_kept
    assert (masked_whiten(VALUES, mask) == 0).all()


def test_equal_values_are_whitened_to_exactly_zero() -> None:
    values = torch.full((7, 3), 0.1)
    assert (values.mean() != values).all()  # as float32 rounds
    assert (masked_whiten(values, torch.ones(7, 3)) == 0).all()
    assert masked_whiten(values[:0], torch.ones(0, 3)).shape == (0, 3)


def test_a_mask_of_another_shape_is_an_error_not_a_broadcast() -> None:
    with pytest.raises(DataError, match=r"\(3, 3\).*\(3, 1\)"):
        masked_mean(VALUES, MASK[:, :1])


def test_explained_variance() -> None:
    returns, mask = VALUES, MASK
    assert compute_explained_variance(returns, returns, mask) == 1
    constant = torch.full_like(returns, 2.0)
    assert compute_explained_variance(returns, constant, mask).item() == pytest.approx(0, abs=1e-5)
    # Errors 0, 0, 3 have mean 1 and variance (1 + 1 + 4) / 2 = 3; the returns' is 7.
    wrong_once = torch.tensor(
        [[1.0, 2.0, math.nan], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64
    )
    assert compute_explained_variance(returns, wrong_once, mask).item() == pytest.approx(
        1 - 3 / (7 + 1e-5), rel=1e-12
    )
