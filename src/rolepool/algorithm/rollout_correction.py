"""Corrections for responses that another policy has generated than the one that learns from them.

With p the probability of a sampled token under the actor and q the one under the engine that
sampled it, d = log p - log q for each token. Everything here is computed from d, in float64, and
without gradient. Tensors are [rows, tokens], and only tokens of the mask count, whatever the others
are (even NaN).

Owns weights of tokens, which tokens are left out of the loss, and the metrics that describe both.
The definitions are those of verl. Does not know who computed the log-probs, nor what is done with
the weights.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rolepool.algorithm.losses import (
    MAX_LOG_RATIO,
    LossCounts,
    keep_masked,
    masked_mean,
    masked_sum,
    token_mean,
)
from rolepool.config.rollout_correction import (
    Bounds,
    Rule,
    read_bounds,
    read_rules_with_bounds,
)
from rolepool.config.run_keys import RolloutCorrectionConfig

PREFIX = "rollout_corr/"
MEAN_WEIGHT = f"{PREFIX}rollout_is_mean"
MEAN_SQUARE = f"{PREFIX}rollout_is_mean_square"
"""Only a part of the effective sample size, and not a metric itself."""
SAMPLE_SIZE = f"{PREFIX}rollout_is_eff_sample_size"
LEAST_MEAN = 1e-8
"""Weights are not divided by a smaller mean."""


class Correction(NamedTuple):
    """What a batch is corrected by."""

    weights: Tensor | None
    """The weight of each token in the policy loss, 0 outside of the mask; None if there are no
    weights."""
    kept: Tensor | None
    """The tokens of the mask that stay in the loss; None if all of them do."""


def log_ratios(actor: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
    """d of each token, 0 outside of the mask."""
    ratios = actor.detach().double() - engine.detach().double()
    return keep_masked(ratios, mask)


# Weights


def raw_weights(d: Tensor, mask: Tensor, level: str) -> Tensor:
    """p / q of each token, or the product of these over the sequence of each token. The logarithm
    is limited to [-20, 20].

    token     w_it = exp(d_it)
    sequence  w_it = exp(sum_t d_it)
    """
    if level == "sequence":
        logs = masked_sum(d, mask, axis=-1).unsqueeze(-1).expand(d.shape)
    else:
        logs = d
    weights = logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return keep_masked(weights, mask)


def bounded(weights: Tensor, bounds: Bounds) -> Tensor:
    """Weights above the upper bound are truncated to it. If there is a lower bound, too, weights
    outside of the bounds become 0."""
    if bounds.lower is None:
        return weights.clamp(max=bounds.upper)
    is_inside = (weights >= bounds.lower) & (weights <= bounds.upper)
    return torch.where(is_inside, weights, 0.0)


def sums_for_mean(weights: Tensor, mask: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """What the mean weight is computed from: the sum of weights, and their number. A sequence
    without tokens has no weight. Sums of some rows add up to those of all."""
    if level == "sequence":
        of_rows = masked_mean(weights, mask, axis=-1)
        return of_rows.sum(), mask.bool().any(dim=-1).sum()
    return masked_sum(weights, mask), mask.bool().sum()


def divisor_of_weights(total: float, number: float) -> float:
    """The mean that weights are divided by; 1 if it is too small for that."""
    mean = total / max(number, 1)
    return mean if mean > LEAST_MEAN else 1.0


# Rejection


def kept_tokens(d: Tensor, mask: Tensor, bounds_of: Mapping[Rule, Bounds]) -> Tensor:
    """The tokens of the mask that all rules keep.

    k1  -d                   between the logarithms of its bounds
    k2  d^2 / 2              at most its bound
    k3  exp(d) - 1 - d       at most its bound

    A rule `token_...` compares this for each token; `seq_sum_...`, `seq_mean_...` and `seq_max_...`
    compare the sum, the mean or the largest value over the tokens of a sequence, and keep the whole
    sequence or nothing of it. d is limited to [-20, 20].
    """
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept = mask.bool()
    for rule, bounds in bounds_of.items():
        over, _, estimator = rule.rpartition("_")
        numbers = _over(over, _estimates(estimator, d), mask)
        if estimator == "k1":
            assert bounds.lower is not None, "bounds of a ratio are a pair"
            is_inside = (numbers >= math.log(bounds.lower)) & (numbers <= math.log(bounds.upper))
        else:
            is_inside = numbers <= bounds.upper
        kept = kept & is_inside
    return kept


def _estimates(estimator: str, d: Tensor) -> Tensor:
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    return torch.expm1(d) - d


def _over(over: str, numbers: Tensor, mask: Tensor) -> Tensor:
    """The number that decides about each token."""
    if over == "token":
        return numbers
    if over == "seq_sum":
        of_rows = masked_sum(numbers, mask, axis=-1)
    elif over == "seq_mean":
        of_rows = masked_mean(numbers, mask, axis=-1)
    else:  # seq_max, of k2 and k3, which are never negative
        of_rows = keep_masked(numbers, mask).amax(dim=-1)
    return of_rows.unsqueeze(-1).expand(numbers.shape)


# A whole batch, before its updates


def correct_batch(
    actor: Tensor,
    engine: Tensor,
    mask: Tensor,
    keys: RolloutCorrectionConfig,
) -> tuple[Correction, dict[str, float]]:
    """The correction of a whole batch, and metrics of it."""
    if not bool(mask.any()):  # all responses are aborted
        return Correction(None, None), {}
    d = log_ratios(actor, engine, mask)
    metrics: dict[str, float] = {}
    weights = None
    if keys.weighs:
        weights, metrics = _weights_of_batch(d, mask, keys)
    kept = None
    if keys.rollout_rs is not None:
        kept = kept_tokens(d, mask, _bounds_of_rules(keys))
        metrics |= _rejection_metrics(kept, mask)
    return Correction(weights, kept), metrics


def _weights_of_batch(
    d: Tensor,
    mask: Tensor,
    keys: RolloutCorrectionConfig,
) -> tuple[Tensor, dict[str, float]]:
    """The weights of tokens, and metrics of them."""
    level = str(keys.rollout_is)
    bounds = _bounds_of_weights(keys)
    raw = raw_weights(d, mask, level)
    weights = bounded(raw, bounds)

    largest = weights if level == "token" else raw  # as verl reports it
    mean_weight = float(masked_mean(weights, mask))
    mean_square = float(masked_mean(weights.square(), mask))
    metrics = {
        MEAN_WEIGHT: mean_weight,
        f"{PREFIX}rollout_is_max": float(largest.max()),
        SAMPLE_SIZE: sample_size(mean_weight, mean_square),
    }
    if bounds.lower is not None:
        is_outside = (weights == 0) & mask.bool()
        metrics[f"{PREFIX}rollout_is_oob_ratio"] = float(masked_mean(is_outside.double(), mask))
    if keys.rollout_is_batch_normalize:
        total, number = sums_for_mean(weights, mask, level)
        mean = divisor_of_weights(float(total), float(number))
        metrics[f"{PREFIX}rollout_is_batch_norm_factor"] = mean
        weights = weights / mean
    return weights, metrics


def _bounds_of_weights(keys: RolloutCorrectionConfig) -> Bounds:
    assert keys.rollout_is_threshold is not None, "the config was checked"
    return read_bounds(keys.rollout_is_threshold)


def _bounds_of_rules(keys: RolloutCorrectionConfig) -> dict[Rule, Bounds]:
    assert keys.rollout_rs is not None and keys.rollout_rs_threshold is not None
    return read_rules_with_bounds(keys.rollout_rs, keys.rollout_rs_threshold)


def sample_size(mean: float, mean_square: float) -> float:
    """The effective sample size of weights, as a fraction of the tokens: mean(w)^2 / mean(w^2),
    which is 1 for equal weights. 0 if all weights are 0."""
    return mean * mean / mean_square if mean_square > 0 else 0.0


def _rejection_metrics(kept: Tensor, mask: Tensor) -> dict[str, float]:
    """The fraction of tokens that are left out, and the fraction of sequences of which at least one
    token is."""
    is_rejected = mask.bool() & ~kept
    has_tokens = mask.bool().any(dim=-1)
    is_touched = is_rejected.any(dim=-1)
    return {
        f"{PREFIX}rollout_rs_masked_fraction": float(masked_mean(is_rejected.double(), mask)),
        f"{PREFIX}rollout_rs_seq_masked_fraction": float(
            masked_mean(is_touched.double(), has_tokens)
        ),
    }


def mismatch_metrics(actor: Tensor, engine: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the actor is from the engine, over all tokens of a batch. Sequences without tokens do
    not count.

    kl          mean(-d)                                   an estimate of KL(engine || actor)
    k3_kl       mean(exp(d) - 1 - d)                       the same, never negative
    ppl_ratio   mean over sequences of exp(mean_t(-d))     perplexity of actor / that of engine
    chi2_token  mean(exp(d)^2) - 1
    chi2_seq    mean over sequences of exp(sum_t d)^2 - 1

    Exponents of d are limited to [-20, 20].
    """
    has_tokens = mask.bool().any(dim=-1)
    if not bool(has_tokens.any()):
        return {}
    d = log_ratios(actor, engine, mask)
    limited = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    of_rows = masked_sum(d, mask, axis=-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_of_rows = masked_mean(-d, mask, axis=-1).exp()
    numbers = {
        "kl": masked_mean(-d, mask),
        "k3_kl": masked_mean(torch.expm1(limited) - d, mask),
        "ppl_ratio": masked_mean(ratio_of_rows, has_tokens),
        "chi2_token": masked_mean((2 * limited).exp(), mask) - 1,
        "chi2_seq": masked_mean((2 * of_rows).exp(), has_tokens) - 1,
    }
    return {f"{PREFIX}{name}": float(number) for name, number in numbers.items()}


# A micro-batch, in an update that has no log-probs of the actor before it


def sums_of_weights(
    actor: Tensor,
    engine: Tensor,
    mask: Tensor,
    keys: RolloutCorrectionConfig,
) -> Tensor:
    """The sum and the number of the weights of some rows, for the mean of a mini-batch."""
    level = str(keys.rollout_is)
    raw = raw_weights(log_ratios(actor, engine, mask), mask, level)
    total, number = sums_for_mean(bounded(raw, _bounds_of_weights(keys)), mask, level)
    return torch.stack([total, number.double()])


def named_metrics(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The metrics of an update, in which those of `correct_rows` begin with the prefix of the role,
    with their own names and with the effective sample size."""
    named: dict[str, float] = {}
    for name, value in metrics.items():
        own_name = name.removeprefix(prefix)
        if own_name.startswith(PREFIX):
            named[own_name] = value
        else:
            named[name] = value
    mean_square = named.pop(MEAN_SQUARE, None)
    if mean_square is not None:
        named[SAMPLE_SIZE] = sample_size(named[MEAN_WEIGHT], mean_square)
    return named


def correct_rows(
    actor: Tensor,
    engine: Tensor,
    mask: Tensor,
    keys: RolloutCorrectionConfig,
    *,
    divisor: float,
    counts: LossCounts,
) -> tuple[Correction, dict[str, Tensor]]:
    """The correction of some rows, and metrics: shares of the mini-batch's token means, which add
    up over micro-batches and ranks. Weights are divided by `divisor`."""
    d = log_ratios(actor, engine, mask)
    limited = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    of_tokens = {
        f"{PREFIX}kl": -d,
        f"{PREFIX}k3_kl": torch.expm1(limited) - d,
        f"{PREFIX}chi2_token": torch.expm1(2 * limited),
    }
    weights = None
    if keys.weighs:
        raw = raw_weights(d, mask, str(keys.rollout_is))
        weights = bounded(raw, _bounds_of_weights(keys))
        of_tokens[MEAN_WEIGHT] = weights
        of_tokens[MEAN_SQUARE] = weights.square()
        weights = weights / divisor
    kept = None
    if keys.rollout_rs is not None:
        kept = kept_tokens(d, mask, _bounds_of_rules(keys))
        of_tokens[f"{PREFIX}rollout_rs_masked_fraction"] = mask.bool() & ~kept
    metrics: dict[str, Tensor] = {}
    for name, numbers in of_tokens.items():
        metrics[name] = token_mean(numbers, mask, torch.float64, counts)
    return Correction(weights, kept), metrics
