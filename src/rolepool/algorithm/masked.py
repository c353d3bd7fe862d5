"""Sums, means and variances over the tokens of a mask.

Owns what a mask means: 1 (or True) keeps a token, 0 drops it, anywhere in the row. The value of a dropped token, even
NaN or inf, does not affect any result or gradient. Sums and means of no tokens are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.errors import DataError

WHITEN_EPSILON = 1e-8


def keep_masked(values: Tensor, mask: Tensor) -> Tensor:
    """values if mask is 1, exactly 0 otherwise: `x_i if m_i else 0` (not `x_i * m_i`, which keeps NaN)."""
    if values.shape != mask.shape:
        raise DataError(f"values of shape {tuple(values.shape)} do not match a mask of shape {tuple(mask.shape)}")
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """sum_i m_i x_i, over all axes or over `axis`."""
    return keep_masked(values, mask).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """sum_i m_i x_i / sum_i m_i, over all axes or over `axis`; 0 if no token is kept."""
    return masked_sum(values, mask, axis) / mask.bool().sum(dim=axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """sum_i m_i (x_i - mean)^2 / (n - 1) with n = sum_i m_i. 0 for fewer than two tokens."""
    squares = (keep_masked(values, mask) - masked_mean(values, mask)).square()
    return masked_sum(squares, mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) for the kept tokens, 0 elsewhere.

    Computed in float64 from differences to the first kept value, so that equal values give exactly 0: the mean of
    equal numbers may differ from them by rounding, which the division would multiply by up to 10,000.
    """
    first = values[mask.bool()][:1].sum().double()
    differences = keep_masked(values.double() - first, mask)
    mean = masked_mean(differences, mask)
    whitened = (differences - mean) * torch.rsqrt(masked_var(differences, mask) + WHITEN_EPSILON)
    return keep_masked(whitened, mask).to(values.dtype)


def compute_explained_variance(returns: Tensor, values: Tensor, response_mask: Tensor) -> Tensor:
    """1 - var(returns - values) / (var(returns) + 1e-5): 1 for an exact critic, 0 for a constant one."""
    errors = keep_masked(returns, response_mask) - keep_masked(values, response_mask)
    return 1 - masked_var(errors, response_mask) / (masked_var(returns, response_mask) + 1e-5)
