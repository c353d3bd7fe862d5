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
    return masked_sum(values, mask, axis) / mask.bool().sum(dim=axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """sum_i m_i (x_i - mean)^2 / (n - 1) with n = sum_i m_i. 0 for fewer than two tokens."""
    squares = (keep_masked(values, mask) - masked_mean(values, mask)).square()
    return masked_sum(squares, mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) for the kept tokens, 0 elsewhere.

    Computed in float64 from differences to the first kept value, so that equal values give exactly
    0: the mean of equal numbers may differ from them by rounding, which the division would multiply
    by up to 10,000.
    """
    first = values[mask.bool()][:1].sum().double()
    differences = keep_masked(values.double() - first, mask)
    mean = masked_mean(differences, mask)
    whitened = (differences - mean) * torch.rsqrt(masked_var(differences, mask) + WHITEN_EPSILON)
    return keep_masked(whitened, mask).to(values.dtype)


def compute_explained_variance(returns: Tensor, values: Tensor, response_mask: Tensor) -> Tensor:
    """1 - var(returns - values) / (var(returns) + 1e-5): 1 for an exact critic, 0 for a constant
    one."""
    errors = keep_masked(returns, response_mask) - keep_masked(values, response_mask)
    return 1 - masked_var(errors, response_mask) / (masked_var(returns, response_mask) + 1e-5)


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
    logprob: Tensor, ref_logprob: Tensor, response_mask: Tensor, estimator: str
) -> Tensor:
    """`kl_penalty` of the tokens of the mask, 0 elsewhere."""
    return kl_penalty(
        keep_masked(logprob, response_mask), keep_masked(ref_logprob, response_mask), estimator
    )


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
        return cls(int(mask.sum()), int(mask.any(dim=-1).sum()), width)


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, *, counts: LossCounts | None = None
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
    }
    divisors["seq-mean-token-sum-norm"] = num_sequences * counts.loss_scale_factor
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
    vpreds, returns, values = (
        keep_masked(tensor, response_mask) for tensor in (vpreds, returns, values)
    )
    unclipped = (vpreds - returns).square()
    clipped = (vpreds.clamp(values - cliprange_value, values + cliprange_value) - returns).square()
    loss = agg_loss(
        0.5 * torch.maximum(unclipped, clipped), response_mask, loss_agg_mode, counts=counts
    )
    return loss, token_mean(clipped > unclipped, response_mask, unclipped.dtype, counts)


def token_mean(
    metric: Tensor, response_mask: Tensor, dtype: torch.dtype, counts: LossCounts | None
) -> Tensor:
    """These rows' share of the metric's mean over all tokens of the mini-batch, without
    gradient."""
    return agg_loss(metric.detach().to(dtype), response_mask, "token-mean", counts=counts)
