"""Statistics over the tokens of a mask, KL estimators, the aggregation of losses, and the loss of
the critic.

A mask is 1 (or True) for a token that is kept and 0 for a token that is dropped, anywhere in the
row. The value of a dropped token, even NaN or inf, does not affect any result or gradient. Sums and
means of no tokens are 0.

The losses do not depend on how a mini-batch is split. Every loss and every metric here is a sum
over rows divided by a count of the *whole* mini-batch. With the counts of the whole mini-batch
(`LossCounts`), a call on some of its rows returns their share, and the shares of all micro-batches
and ranks add up to the result of one call on all rows:

    counts = LossCounts.of(response_mask_of_the_mini_batch)
    loss   = sum over micro-batches and ranks of compute_..._loss(micro_batch, ..., counts=counts)

Without counts a call treats its own rows as the whole mini-batch. Shares are added, never averaged:
if the gradients of ranks are averaged (the default of DDP and FSDP), multiply the loss by the
number of ranks. A row is never split. Rows without a 1 in `response_mask` are padding: they add
nothing and are not counted.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from rolepool.errors import DataError

Loss = tuple[Tensor, dict[str, Tensor]]
"""A loss to minimise, and metrics by name."""

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
WHITEN_EPSILON = 1e-8


def keep_masked(values: Tensor, mask: Tensor) -> Tensor:
    """values if mask is 1, exactly 0 otherwise: `x_i if m_i else 0` (not `x_i * m_i`, which keeps
    NaN)."""
    if values.shape != mask.shape:
        raise DataError(
            f"values of shape {tuple(values.shape)} do not match a mask of shape {tuple(mask.shape)}"
        )
    return torch.where(
        mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device)
    )


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """sum_i m_i x_i, over all axes or over `axis`."""
    return keep_masked(values, mask).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """sum_i m_i x_i / sum_i m_i, over all axes or over `axis`; 0 if no token is kept."""
    num_kept = mask.bool().sum(dim=axis)
    return masked_sum(values, mask, axis) / num_kept.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """sum_i m_i (x_i - mean)^2 / (n - 1) with n = sum_i m_i. 0 for fewer than two tokens."""
    differences = keep_masked(values, mask) - masked_mean(values, mask)
    num_kept = mask.bool().sum()
    return masked_sum(differences.square(), mask) / (num_kept - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) for the kept tokens, 0 elsewhere.

    Computed in float64 from differences to the first kept value, so that equal values give exactly
    0: the mean of equal numbers may differ from them by rounding, which the division would multiply
    by up to 10,000.
    """
    first = values[mask.bool()][:1].sum().double()
    differences = keep_masked(values.double() - first, mask)
    mean = masked_mean(differences, mask)
    variance = masked_var(differences, mask)
    whitened = (differences - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return keep_masked(whitened, mask).to(values.dtype)


def compute_explained_variance(returns: Tensor, values: Tensor, response_mask: Tensor) -> Tensor:
    """1 - var(returns - values) / (var(returns) + 1e-5): 1 for an exact critic, 0 for a constant
    one."""
    errors = keep_masked(returns, response_mask) - keep_masked(values, response_mask)
    variance_of_errors = masked_var(errors, response_mask)
    variance_of_returns = masked_var(returns, response_mask)
    return 1 - variance_of_errors / (variance_of_returns + 1e-5)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimates of KL(policy || reference) from each sampled token (Schulman, "Approximating KL
    divergence", 2020).

    With d = log p - log q, p the policy and q the reference:

    kl, k1          d                  unbiased, may be negative
    abs             |d|
    mse, k2         d^2 / 2            biased, low variance
    low_var_kl, k3  exp(-d) - 1 + d    unbiased, never negative; d is clamped to [-20, 20] and the result to at most
                                       10, so that one outlier token cannot dominate the batch; such a token has no
                                       gradient
    k3+ and others  with a + after its name, an estimator keeps its value and has the gradient d of k2, which in
                    expectation is the gradient of the KL; a capped token has this gradient, too
    """
    difference = logprob - ref_logprob
    k2 = 0.5 * difference.square()
    match kl_penalty.removesuffix("+"):
        case "kl" | "k1":
            estimate = difference
        case "abs":
            estimate = difference.abs()
        case "mse" | "k2":
            estimate = k2
        case "low_var_kl" | "k3":
            clamped = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            estimate = (torch.expm1(-clamped) + clamped).clamp(max=MAX_K3)
        case name:
            raise ValueError(f"unknown KL estimator {name!r}")
    if kl_penalty.endswith("+"):
        return estimate.detach() + (k2 - k2.detach())
    return estimate


def masked_kl_penalty(
    logprob: Tensor,
    ref_logprob: Tensor,
    response_mask: Tensor,
    estimator: str,
) -> Tensor:
    """`kl_penalty` of the tokens of the mask, 0 elsewhere."""
    logprob = keep_masked(logprob, response_mask)
    ref_logprob = keep_masked(ref_logprob, response_mask)
    return kl_penalty(logprob, ref_logprob, estimator)


class LossCounts(NamedTuple):
    """The divisors of a mini-batch's losses: plain numbers, the same on every rank."""

    num_tokens: int
    """Number of ones in the mini-batch's response mask."""
    num_sequences: int
    """Number of rows of the mini-batch that are not padding."""
    loss_scale_factor: float
    """Divisor of seq-mean-token-sum-norm: the longest possible response, the same in every step."""

    @classmethod
    def of(cls, response_mask: Tensor, loss_scale_factor: float | None = None) -> Self:
        """The counts of a whole mini-batch; loss_scale_factor is by default the width of the
        mask."""
        mask = response_mask.bool()
        if loss_scale_factor is None:
            width = float(mask.shape[-1])
        else:
            width = loss_scale_factor
        return cls(
            num_tokens=int(mask.sum()),
            num_sequences=int(mask.any(dim=-1).sum()),
            loss_scale_factor=width,
        )


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    counts: LossCounts | None = None,
) -> Tensor:
    """Aggregate the losses of tokens: these rows' share of the mini-batch's loss (see the module's
    docstring).

    With l_it the loss of token t of row i, m the mask, n_i = sum_t m_it, N rows that are not
    padding:

    token-mean               sum_it m_it l_it / sum_i n_i
    token-sum                sum_it m_it l_it
    seq-mean-token-sum       1/N sum_i sum_t m_it l_it
    seq-mean-token-mean      1/N sum_i (1/n_i) sum_t m_it l_it
    seq-mean-token-sum-norm  1/N sum_i sum_t m_it l_it / loss_scale_factor       (Dr. GRPO)
    """
    if counts is None:
        counts = LossCounts.of(loss_mask)
    num_tokens = max(counts.num_tokens, 1)
    num_sequences = max(counts.num_sequences, 1)
    if loss_agg_mode == "seq-mean-token-mean":
        return masked_mean(loss_mat, loss_mask, axis=-1).sum() / num_sequences
    divisors: dict[str, float] = {
        "token-mean": num_tokens,
        "token-sum": 1,
        "seq-mean-token-sum": num_sequences,
        "seq-mean-token-sum-norm": num_sequences * counts.loss_scale_factor,
    }
    if loss_agg_mode not in divisors:
        raise ValueError(f"unknown loss_agg_mode {loss_agg_mode!r}")
    return masked_sum(loss_mat, loss_mask) / divisors[loss_agg_mode]


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str,
    *,
    counts: LossCounts | None = None,
) -> tuple[Tensor, Tensor]:
    """The critic's clipped squared error, and vf_clipfrac.

    L = 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)

    vf_clipfrac is the fraction of tokens with the clipped term; like the metrics of the policy loss
    it is a share of the mini-batch's token mean, without gradient.
    """
    vpreds = keep_masked(vpreds, response_mask)
    returns = keep_masked(returns, response_mask)
    values = keep_masked(values, response_mask)
    unclipped = (vpreds - returns).square()
    clipped_vpreds = vpreds.clamp(values - cliprange_value, values + cliprange_value)
    clipped = (clipped_vpreds - returns).square()
    losses = 0.5 * torch.maximum(unclipped, clipped)
    loss = agg_loss(losses, response_mask, loss_agg_mode, counts=counts)
    is_clipped = clipped > unclipped
    return loss, token_mean(is_clipped, response_mask, unclipped.dtype, counts)


def token_mean(
    metric: Tensor,
    response_mask: Tensor,
    dtype: torch.dtype,
    counts: LossCounts | None,
) -> Tensor:
    """These rows' share of the metric's mean over all tokens of the mini-batch, without
    gradient."""
    values = metric.detach().to(dtype)
    return agg_loss(values, response_mask, "token-mean", counts=counts)
