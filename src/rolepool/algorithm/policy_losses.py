"""The policy losses as verl defines them: PPO's own, which is vanilla, gspo, gpg, clip_cov, kl_cov,
geo_mean and cispo.

Each function here gets the tokens of a micro-batch, and returns the loss of every token and metrics
of every token. `_policy_loss` makes a policy loss from it (docs/extending.md). The loss is
aggregated as loss_agg_mode says. Metrics are means over the tokens of the mask for every
loss_agg_mode, without gradient. Both are shares that add up over micro-batches and ranks.

With `rollout_is_weights` the loss of each token is multiplied by its weight, whatever the loss is.
geo_mean has one loss for a sequence, which is multiplied by the geometric mean of the weights of
its tokens. Metrics have no weights.

In the formulas A is the advantage, d = log_prob - old_log_prob, clamped to [-20, 20], r = exp(d), p
= exp(log_prob), and sg(x) is x without gradient. low and high are the keys clip_ratio_low and
clip_ratio_high of the actor.

clip_cov and kl_cov choose tokens by comparing them with the other tokens of their micro-batch.
Therefore these two, and no other losses, depend on how a mini-batch is split into micro-batches.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolepool.algorithm.losses import (
    MAX_LOG_RATIO,
    Loss,
    LossCounts,
    agg_loss,
    keep_masked,
    masked_mean,
    token_mean,
)
from rolepool.config.functions import register_policy_loss
from rolepool.config.model_keys import ActorConfig
from rolepool.seeds import derive_seed

MAX_LOG_SEQUENCE_RATIO = 10.0
LEAST_WEIGHT = 1e-10


class Tokens(NamedTuple):
    """The tokens of a micro-batch: [rows, tokens], 0 outside of the mask."""

    log_prob: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor


TokenLosses = Callable[..., Loss]
"""Gets `Tokens`, and takes from the keyword arguments of a policy loss what it needs."""


Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From the losses, weights and mask of tokens to the losses with weights."""


def _weigh_tokens(losses: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return losses * weights


def _weigh_rows(losses: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """The loss of each row times the geometric mean of the weights of its tokens. A weight of 0
    counts as 1e-10, as in verl."""
    logs = (weights + LEAST_WEIGHT).log()
    of_rows = masked_mean(logs, mask, axis=-1).exp()
    return losses * of_rows.unsqueeze(-1)


def _of_tokens(
    losses_of: TokenLosses,
    always: str | None = None,
    weigh: Weigh = _weigh_tokens,
) -> Callable[..., Loss]:
    """A policy loss from a function of tokens. `always` is the aggregation of a loss that does not
    use the key loss_agg_mode."""

    # Worker processes import the function under the name of the one that it replaces.
    @wraps(losses_of)
    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        *,
        counts: LossCounts | None = None,
        rollout_is_weights: Tensor | None = None,
        **keys: Any,
    ) -> Loss:
        log_prob = keep_masked(log_prob, response_mask)
        old_log_prob = keep_masked(old_log_prob, response_mask)
        advantages = keep_masked(advantages, response_mask)
        log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        tokens = Tokens(
            log_prob=log_prob,
            log_ratio=log_ratio,
            advantages=advantages,
            mask=response_mask.bool(),
        )
        losses, metrics = losses_of(tokens, **keys)
        means: dict[str, Tensor] = {}
        for key, metric in metrics.items():
            means[key] = token_mean(metric, response_mask, losses.dtype, counts)
        if rollout_is_weights is not None:
            weights = keep_masked(rollout_is_weights.detach(), response_mask)
            losses = weigh(losses, weights.to(losses.dtype), response_mask)
        loss = agg_loss(losses, response_mask, always or loss_agg_mode, counts=counts)
        return loss, means

    return compute


def _policy_loss(
    name: str, always: str | None = None, weigh: Weigh = _weigh_tokens
) -> Callable[[TokenLosses], Callable[..., Loss]]:
    """A decorator that makes a policy loss from a function of tokens, and registers it."""

    def registered(losses_of: TokenLosses) -> Callable[..., Loss]:
        return register_policy_loss(name)(_of_tokens(losses_of, always, weigh))

    return registered


@_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    tokens: Tokens,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    **_: object,
) -> Loss:
    """PPO's clipped objective (Schulman et al. 2017) with dual clip (Ye et al. 2020), as a loss to
    minimise.

    L = max(-A r, -A clip(r, 1 - low, 1 + high))
    L = min(L, -A c)                             if A < 0: an unlikely bad token cannot dominate; c > 1

    pg_clipfrac is the fraction of tokens with the clipped term, ppo_kl is old_log_prob - log_prob,
    and pg_clipfrac_lower is the fraction of tokens limited by c.
    """
    ratio = tokens.log_ratio.exp()
    losses, is_clipped = _clipped(tokens, ratio, clip_ratio_low, clip_ratio_high)
    bound = -tokens.advantages * clip_ratio_c
    is_bad = tokens.advantages < 0
    is_bounded = is_bad & (losses > bound)
    losses = torch.where(is_bad, torch.minimum(losses, bound), losses)
    return losses, _clip_metrics(tokens, is_clipped, is_bounded)


@_policy_loss("gspo")
def compute_policy_loss_gspo(tokens: Tokens, config: ActorConfig, **_: object) -> Loss:
    """GSPO (Zheng et al. 2025): PPO's clipped objective with one ratio for the whole sequence.

    s_i  = exp(mean_t d_it)                      at most exp(10)
    s_it = sg(s_i) p_it / sg(p_it)               the value of s_i, and the gradient of log p_it
    L    = max(-A s_it, -A clip(s_it, 1 - low, 1 + high))

    The authors aggregate it as seq-mean-token-mean. Like all losses it is aggregated as
    loss_agg_mode says. pg_clipfrac is the fraction of tokens with the clipped term.
    """
    mean_of_row = masked_mean(tokens.log_ratio, tokens.mask, axis=-1).detach()
    # The difference is 0. It has the gradient of log_prob.
    log_ratio = tokens.log_prob - tokens.log_prob.detach() + mean_of_row.unsqueeze(-1)
    ratio = log_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    losses, is_clipped = _clipped(tokens, ratio, config.clip_ratio_low, config.clip_ratio_high)
    return losses, _clip_metrics(tokens, is_clipped)


@_policy_loss("gpg")
def compute_policy_loss_gpg(tokens: Tokens, **_: object) -> Loss:
    """GPG (Chu et al. 2025): L = -A log_prob, without a ratio and without metrics."""
    return -tokens.advantages * tokens.log_prob, {}


@_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(tokens: Tokens, config: ActorConfig, **_: object) -> Loss:
    """Clip-Cov (Cui et al. 2025): PPO's clipped objective without some tokens of high covariance.

    c = (A - mean A) (log_prob - mean log_prob)  means over the micro-batch
    L = max(-A r, -A clip(r, 1 - low, 1 + high))
    L = 0                                        for clip_cov_ratio of all tokens, at least one, chosen at random from
                                                 those with clip_cov_lb < c < clip_cov_ub that are not clipped yet

    The choice depends only on the number of tokens to choose from, so it is the same in every run.
    pg_clipfrac is the fraction of tokens that were chosen.
    """
    keys = config.policy_loss
    ratio = tokens.log_ratio.exp()
    losses, is_clipped = _clipped(tokens, ratio, config.clip_ratio_low, config.clip_ratio_high)
    covariances = _covariances(tokens)
    is_above = covariances > keys.clip_cov_lb
    is_below = covariances < keys.clip_cov_ub
    may_be_chosen = tokens.mask & is_above & is_below & ~is_clipped
    positions = may_be_chosen.flatten().nonzero().squeeze(-1)

    num_positions = len(positions)
    seed = derive_seed("clip_cov", num_positions)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_positions, generator=generator).to(positions.device)
    num_chosen = _quota(tokens, keys.clip_cov_ratio)
    chosen = positions[order[:num_chosen]]
    is_chosen = _mask_at(tokens.mask, chosen)

    losses = torch.where(is_chosen, 0.0, losses)
    metrics = {"pg_clipfrac": is_chosen, "ppo_kl": -tokens.log_ratio}
    return losses, metrics


@_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(tokens: Tokens, config: ActorConfig, **_: object) -> Loss:
    """KL-Cov (Cui et al. 2025): a KL term for the tokens of highest covariance, and no clipping.

    c = (A - mean A) (log_prob - mean log_prob)  means over the micro-batch
    L = -A r
    L = -A r + ppo_kl_coef |d|                   for kl_cov_ratio of all tokens, at least one: those with the largest c

    Here the metric ppo_kl is the mean of |d|.
    """
    keys = config.policy_loss
    # Tokens outside of the mask come last.
    is_outside = ~tokens.mask
    covariances = _covariances(tokens).masked_fill(is_outside, -torch.inf)
    order = covariances.flatten().sort(descending=True, stable=True).indices
    num_chosen = _quota(tokens, keys.kl_cov_ratio)
    is_chosen = _mask_at(tokens.mask, order[:num_chosen])

    ratio = tokens.log_ratio.exp()
    distances = tokens.log_ratio.abs()
    losses = -tokens.advantages * ratio
    penalized = losses + keys.ppo_kl_coef * distances
    losses = torch.where(is_chosen, penalized, losses)
    return losses, {"ppo_kl": distances}


@_policy_loss("geo_mean", always="seq-mean-token-mean", weigh=_weigh_rows)
def compute_policy_loss_geo_mean(tokens: Tokens, config: ActorConfig, **_: object) -> Loss:
    """GMPO (Zhao et al. 2025): the geometric mean of clipped ratios of a sequence.

    k_it = min(d_it, clip(d_it, -low, high))     if A_it > 0; the maximum if A_it < 0, and 0 if A_it = 0
    L_i  = -(mean_t A_it) exp(mean_t k_it)       the same for all tokens of the sequence

    The loss is the mean over sequences; loss_agg_mode is not used. pg_clipfrac is the fraction of
    tokens outside of the clip range with a positive advantage, pg_clipfrac_lower of those with a
    negative one.
    """
    log_ratio = tokens.log_ratio
    advantages = tokens.advantages
    clipped = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    # The minimum or the maximum, by the sign of the advantage.
    sign = advantages.sign()
    lower = torch.minimum(sign * log_ratio, sign * clipped)
    held = sign * lower
    mean_held = masked_mean(held, tokens.mask, axis=-1)
    mean_advantage = masked_mean(advantages, tokens.mask, axis=-1)
    loss_of_row = -mean_advantage * mean_held.exp()
    loss_of_token = loss_of_row.unsqueeze(-1).expand(advantages.shape)

    is_outside = log_ratio != clipped
    is_above = is_outside & (advantages > 0)
    is_below = is_outside & (advantages < 0)
    return loss_of_token, _clip_metrics(tokens, is_above, is_below)


@_policy_loss("cispo")
def compute_policy_loss_cispo(tokens: Tokens, config: ActorConfig, **_: object) -> Loss:
    """CISPO (MiniMax 2025): L = -A sg(clip(r, 1 - low, 1 + high)) log_prob, so that clipped tokens
    keep a gradient.

    pg_clipfrac is the fraction of tokens whose ratio is outside of the clip range.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = -tokens.advantages * weight * tokens.log_prob
    return losses, _clip_metrics(tokens, is_clipped=weight != ratio)


@_of_tokens
def compute_policy_loss_reinforce(tokens: Tokens, **_: object) -> Loss:
    """L = -A log_prob. It has no name in the key loss_mode: `rollout_correction.loss_type` chooses
    it, with weights of its own."""
    return -tokens.advantages * tokens.log_prob, {"ppo_kl": -tokens.log_ratio}


def _clipped(tokens: Tokens, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and whether the second term is larger."""
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * clipped_ratio
    losses = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    return losses, is_clipped


def _clip_metrics(
    tokens: Tokens,
    is_clipped: Tensor,
    is_clipped_below: Tensor | None = None,
) -> dict[str, Tensor]:
    if is_clipped_below is None:
        is_clipped_below = torch.zeros_like(is_clipped)
    return {
        "pg_clipfrac": is_clipped,
        "ppo_kl": -tokens.log_ratio,
        "pg_clipfrac_lower": is_clipped_below,
    }


def _covariances(tokens: Tokens) -> Tensor:
    """(A - mean A) (log_prob - mean log_prob), without gradient. Means are over the tokens of the
    micro-batch."""
    advantages = tokens.advantages
    log_prob = tokens.log_prob.detach()
    from_mean_advantage = advantages - masked_mean(advantages, tokens.mask)
    from_mean_log_prob = log_prob - masked_mean(log_prob, tokens.mask)
    return from_mean_advantage * from_mean_log_prob


def _quota(tokens: Tokens, fraction: float) -> int:
    """This fraction of the micro-batch's tokens, rounded down, but at least one."""
    num_tokens = int(tokens.mask.sum())
    return max(1, int(fraction * num_tokens))


def _mask_at(mask: Tensor, positions: Tensor) -> Tensor:
    """A mask of the same shape that is True at these positions of the flat mask, if the mask is,
    too."""
    chosen = torch.zeros_like(mask).flatten()
    chosen[positions] = True
    return chosen.view_as(mask) & mask
