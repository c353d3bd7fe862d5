"""Rewards and advantages: the KL penalty in the reward, and how much better each token was than
expected.

Tensors are [rows, tokens]. `response_mask` is 1 on the tokens that the policy generated; it may
have holes (tool turns), and rows without a 1 are padding. Only tokens with mask 1 count as time
steps: a hole neither discounts nor resets. Rewards outside the mask are not counted, so a
response's score belongs on its last token with mask 1.

Every estimator returns (advantages, returns), both 0 outside the mask. Padding rows change nothing,
not even the statistics of a group whose id they have. `index` has one group id (uid) per row: the
rows of one prompt share it. Does not know where values and rewards come from.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolepool.algorithm.losses import (
    keep_masked,
    masked_kl_penalty,
    masked_mean,
    masked_sum,
    masked_whiten,
)
from rolepool.config.functions import adv_estimators, register_adv_est
from rolepool.config.run_keys import KlCtrlConfig
from rolepool.errors import ConfigError, DataError

MAX_PROPORTIONAL_ERROR = 0.2
GroupIndex = npt.NDArray[np.object_]
Estimate = tuple[Tensor, Tensor]


class GroupedScores(NamedTuple):
    """The score of every row, in float64, and the rows of its group. Padding rows are in group
    0."""

    scores: Tensor
    num_tokens: Tensor
    group_of_row: Tensor

    @classmethod
    def of(cls, rewards: Tensor, response_mask: Tensor, index: GroupIndex) -> Self:
        if len(index) != len(rewards):
            raise DataError(f"index holds {len(index)} group ids for {len(rewards)} rows")
        scores = masked_sum(rewards.double(), response_mask, axis=-1)
        num_tokens = response_mask.bool().sum(dim=-1)
        is_response = num_tokens > 0
        # Equal ids have equal numbers.
        ids = index.astype(str)
        _, numbers = np.unique(ids, return_inverse=True)
        groups = torch.from_numpy(numbers).to(rewards.device)
        return cls(
            scores=scores,
            num_tokens=num_tokens,
            # Padding rows are in group 0.
            group_of_row=(1 + groups) * is_response,
        )

    def over_groups(self, numbers: Tensor, how: str) -> Tensor:
        """For every row: the sum, the largest (amax) or the smallest (amin) number of its group."""
        # There are at most as many groups as rows, and group 0.
        zeros = numbers.new_zeros(len(numbers) + 1)
        of_groups = zeros.scatter_reduce(0, self.group_of_row, numbers, how, include_self=False)
        return of_groups[self.group_of_row]

    @property
    def size_of_row(self) -> Tensor:
        """For every row: the number of rows of its group."""
        return self.over_groups(torch.ones_like(self.scores), "sum")

    def centred(self, weights: Tensor | None = None) -> Tensor:
        """Each score minus the mean of its group, in which rows may have weights; for a group of
        one, the score.

        Equal scores give exactly 0. The mean of equal numbers may differ from them by rounding,
        which a small standard deviation would turn into an advantage; the mean of their differences
        to the lowest is exactly 0.
        """
        if weights is None:
            weights = torch.ones_like(self.scores)
        else:
            weights = weights.double()
        lowest = self.over_groups(self.scores, "amin")
        above = self.scores - lowest
        total_weight = self.over_groups(weights, "sum").clamp(min=1)
        total_above = self.over_groups(weights * above, "sum")
        mean_above = total_above / total_weight
        is_only_one = self.size_of_row == 1
        return torch.where(is_only_one, self.scores, above - mean_above)

    def deviations(self) -> Tensor:
        """The standard deviation of the scores of each row's group, over n - 1; 1 for a group of
        one."""
        squares = self.centred().square()
        sum_of_squares = self.over_groups(squares, "sum")
        num_rows = self.size_of_row
        variance = sum_of_squares / (num_rows - 1).clamp(min=1)
        return torch.where(num_rows == 1, 1.0, variance.sqrt())


AdvantageOfRow = Callable[..., Tensor]
"""Gets `GroupedScores`, and takes from the keyword arguments of an estimator what it needs."""
Estimator = Callable[..., Estimate]


def _by_group(*names: str, whiten: bool = False) -> Callable[[AdvantageOfRow], Estimator]:
    """A decorator that registers a function of grouped scores as an estimator. The function returns
    a number for every row, which is the advantage of all tokens of the row. It may be whitened over
    all tokens of the mask."""

    def registered(advantage_of_row: AdvantageOfRow) -> Estimator:
        @wraps(advantage_of_row)
        def compute(
            token_level_rewards: Tensor,
            response_mask: Tensor,
            index: GroupIndex,
            **options: Any,
        ) -> Estimate:
            grouped = GroupedScores.of(token_level_rewards, response_mask, index)
            of_rows = advantage_of_row(grouped, **options)
            of_tokens = of_rows.unsqueeze(-1).expand(response_mask.shape)
            advantages = keep_masked(of_tokens, response_mask)
            if whiten:
                advantages = masked_whiten(advantages, response_mask)
            advantages = advantages.to(token_level_rewards.dtype)
            # Without a critic, the returns are the advantages.
            return advantages, advantages

        for name in names:
            register_adv_est(name)(compute)
        return compute

    return registered


@register_adv_est("gae")
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    **_: object,
) -> Estimate:
    """Generalized advantage estimation (Schulman et al. 2016), whitened over all tokens of the
    mask.

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}        with V and A 0 after the last token
    R_t     = A_t + V_t                          from A before whitening
    """
    advantages, returns = _gae(token_level_rewards, values, response_mask, gamma, lam)
    return masked_whiten(advantages, response_mask), returns


@_by_group("grpo", "grpo_vectorized")
def compute_grpo_outcome_advantage(
    grouped: GroupedScores,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **_: object,
) -> Tensor:
    """GRPO (Shao et al. 2024): a response's score compared with its group, the same for all its
    tokens.

    s_i = sum_t r_it
    A_it = (s_i - mean_group(s)) / (std_group(s) + epsilon)      std over n - 1
    A_it =  s_i - mean_group(s)                                  if not norm_adv_by_std_in_grpo (Dr. GRPO)

    A group of one uses mean 0 and std 1, so its advantage is its score (divided by 1 + epsilon).
    `grpo_vectorized` is another name for the same estimator.
    """
    centred = grouped.centred()
    if norm_adv_by_std_in_grpo:
        return centred / (grouped.deviations() + epsilon)
    return centred


@_by_group("grpo_passk")
def compute_grpo_passk_outcome_advantage(
    grouped: GroupedScores,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **_: object,
) -> Tensor:
    """Pass@k in the form of GRPO (Walder and Karkhanis 2025): only the best response of a group has
    an advantage.

    A_it = (s_i - second_group(s)) / (std_group(s) + epsilon)    for the best response; std over n - 1
    A_it =  s_i - second_group(s)                                if not norm_adv_by_std_in_grpo
    A_it =  0                                                    for all others, and if two responses are the best

    second_group(s) is the score of the second best response. A group of one uses 0 for it, and std
    1.
    """
    centred = grouped.centred()
    best = grouped.over_groups(centred, "amax")
    is_best = centred == best
    others = torch.where(is_best, -torch.inf, centred)
    best_of_others = grouped.over_groups(others, "amax")
    second = torch.where(grouped.size_of_row == 1, 0.0, best_of_others)

    num_best = grouped.over_groups(is_best.double(), "sum")
    is_alone = is_best & (num_best == 1)
    lead = torch.where(is_alone, centred - second, 0.0)
    if norm_adv_by_std_in_grpo:
        return lead / (grouped.deviations() + epsilon)
    return lead


@_by_group("opo")
def compute_opo_outcome_advantage(grouped: GroupedScores, **_: object) -> Tensor:
    """OPO (Hao et al. 2025): a response's score compared with the mean of its group, weighted by
    length.

    A_it = s_i - sum_j n_j s_j / sum_j n_j       over the group; n_j is the number of tokens of response j

    The advantage of a group of one is its score.
    """
    return grouped.centred(weights=grouped.num_tokens)


@_by_group("gpg")
def compute_gpg_outcome_advantage(
    grouped: GroupedScores,
    f_norm: float = 1.0,
    **_: object,
) -> Tensor:
    """GPG (Chu et al. 2025): the score minus the group's mean, scaled up if many scores of the
    batch are 0.

    A_it = N / M (s_i - mean_group(s)) / f_norm      N responses in the batch, M of them with a score that is not 0

    A group of one has no baseline.
    """
    num_scored = grouped.scores.count_nonzero().clamp(min=1)
    num_responses = (grouped.num_tokens > 0).sum()
    return grouped.centred() * num_responses / num_scored / f_norm


@_by_group("rloo", "rloo_vectorized")
def compute_rloo_outcome_advantage(grouped: GroupedScores, **_: object) -> Tensor:
    """REINFORCE leave-one-out (Ahmadian et al. 2024): a response's score compared with the mean of
    the others.

    A_it = s_i - 1/(n - 1) sum_{j != i} s_j = n/(n - 1) (s_i - mean_group(s))      with s_i = sum_t r_it

    The advantage of a group of one is its score. `rloo_vectorized` is another name for the same
    estimator.
    """
    num_rows = grouped.size_of_row
    num_others = (num_rows - 1).clamp(min=1)
    return grouped.centred() * num_rows / num_others


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    **_: object,
) -> Estimate:
    """ReMax (Li et al. 2024): the rewards from each token on, minus the score b_i of the prompt's
    greedy response.

    R_it = sum_{u >= t} r_iu
    A_it = R_it - b_i                            reward_baselines is [rows]
    """
    returns = _discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    advantages = returns - reward_baselines.unsqueeze(-1)
    return keep_masked(advantages, response_mask), returns


@register_adv_est("reinforce_plus_plus")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    gamma: float,
    **_: object,
) -> Estimate:
    """REINFORCE++ (Hu 2025): discounted returns, whitened over all tokens of the mask.

    R_it = sum_{u >= t} gamma^(u - t) r_iu
    A_it = (R_it - mean(R)) / std(R)
    """
    returns = _discounted_returns(token_level_rewards, response_mask, gamma)
    return masked_whiten(returns, response_mask), returns


@_by_group("reinforce_plus_plus_baseline", whiten=True)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    grouped: GroupedScores, **_: object
) -> Tensor:
    """REINFORCE++ with a baseline: the score minus the group's mean, whitened over all tokens of
    the mask.

    B_it = s_i - mean_group(s)                   with s_i = sum_t r_it
    A_it = (B_it - mean(B)) / std(B)

    A group of one has no baseline: its score is whitened.
    """
    return grouped.centred()


@torch.no_grad()
def compute_advantage(
    adv_estimator: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    **inputs: Any,
) -> Estimate:
    """(advantages, returns) from the estimator of that name, which takes from the inputs what it
    needs."""
    estimator = adv_estimators.find(adv_estimator)
    estimated: Estimate = estimator(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        **inputs,
    )
    for name, tensor in zip(("advantages", "returns"), estimated, strict=True):
        if tensor.shape != response_mask.shape:
            shape = f"{name} of shape {list(tensor.shape)}"
            problem = f"the advantage estimator {adv_estimator!r} returned {shape}"
            needed = f"they must have the shape of response_mask, {list(response_mask.shape)}"
            raise DataError(f"{problem}; {needed}")
    return estimated


@torch.no_grad()
def apply_kl_penalty(
    scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kl_penalty: str,
) -> tuple[Tensor, Tensor]:
    """The rewards r_t = score_t - kl_coef * KL_t, and the KL for the controller.

    current_kl = mean over responses of (mean over their tokens of KL_t). Padding rows are not
    responses; rewards are 0 outside the mask.
    """
    kl_bt = masked_kl_penalty(old_log_probs, ref_log_prob, response_mask, kl_penalty)
    rewards = keep_masked(scores, response_mask) - kl_coef * kl_bt
    is_response = response_mask.bool().any(dim=-1)
    kl_of_row = masked_mean(kl_bt, response_mask, axis=-1)
    return rewards, masked_mean(kl_of_row, is_response)


class KLController:
    """The coefficient of the KL penalty. A fixed one keeps its configured value, also after a
    resume.

    An adaptive one keeps the KL near a target (Ziegler et al. 2019):

    error = clip(current_kl / target_kl - 1, -0.2, 0.2)
    value <- value * (1 + error * num_sequences / horizon)
    """

    def __init__(self, keys: KlCtrlConfig) -> None:
        self.keys = keys
        self.value = keys.kl_coef

    def update(self, current_kl: float, num_sequences: int) -> None:
        """Adapt the coefficient after a step with this KL and this number of sequences."""
        if self.keys.type == "fixed":
            return
        target = self.keys.target_kl
        horizon = self.keys.horizon
        # One such step could make the coefficient zero or negative, which would reward a larger KL.
        if MAX_PROPORTIONAL_ERROR * num_sequences >= horizon:
            problem = f"too short for {num_sequences} sequences per step"
            reason = "because one step could change the sign of the KL coefficient"
            fix = f"set it above {num_sequences // 5}"
            raise ConfigError(f"algorithm.kl_ctrl.horizon={horizon}: {problem}, {reason}; {fix}")
        error = current_kl / target - 1
        error = min(max(error, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR)
        self.value *= 1 + error * num_sequences / horizon

    def restore(self, value: float) -> None:
        """Restore an adaptive coefficient."""
        self.value = self.keys.kl_coef if self.keys.type == "fixed" else value


def _gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
) -> Estimate:
    """A_t and R_t as in `compute_gae_advantage_return`, but A_t is not whitened.

    Tokens of the mask are moved together, so that the next column is the next time step and zeros
    follow the last one. Time is then the first axis, and each time step is one addition.
    """
    rewards = keep_masked(rewards, mask)
    values = keep_masked(values, mask)
    # The places of the tokens of the mask, and then the other places.
    is_outside = mask.bool().logical_not()
    order = is_outside.sort(dim=-1, stable=True).indices
    rewards_tr = rewards.gather(-1, order).T
    values_tr = values.gather(-1, order).T

    deltas_tr = rewards_tr - values_tr
    deltas_tr[:-1] += gamma * values_tr[1:]
    # Each time step becomes its advantage in place, from the last but one back to the first.
    advantages_tr = deltas_tr.contiguous()
    steps = advantages_tr.unbind()
    last = len(steps) - 1
    decay = gamma * lam
    for now in reversed(range(last)):
        following = steps[now + 1]
        steps[now].add_(following, alpha=decay)

    # Back to where the tokens were.
    advantages_rt = advantages_tr.T
    zeros = torch.zeros_like(advantages_rt)
    advantages = zeros.scatter(-1, order, advantages_rt)
    returns = advantages + values
    return keep_masked(advantages, mask), keep_masked(returns, mask)


def _discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over the tokens of the mask: GAE with lam 1 and values 0."""
    values = torch.zeros_like(rewards)
    _, returns = _gae(rewards, values, mask, gamma, lam=1.0)
    return returns
