"""KL between policy and reference: estimators, the penalty in the reward, and the controllers of its coefficient.

The KL term of the loss is `losses.compute_kl_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.algorithm.masked import keep_masked, masked_mean
from rolepool.errors import ConfigError

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
MAX_PROPORTIONAL_ERROR = 0.2


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimates of KL(policy || reference) from each sampled token (Schulman, "Approximating KL divergence", 2020).

    With d = log p - log q, p the policy and q the reference:

    kl, k1          d                  unbiased, may be negative
    abs             |d|
    mse, k2         d^2 / 2            biased, low variance
    low_var_kl, k3  exp(-d) - 1 + d    unbiased, never negative; d is clamped to [-20, 20] and the result to at most
                                       10, so that one outlier token cannot dominate the batch; such a token has no
                                       gradient
    """
    difference = logprob - ref_logprob
    match kl_penalty:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return 0.5 * difference.square()
        case "low_var_kl" | "k3":
            clamped = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (torch.expm1(-clamped) + clamped).clamp(max=MAX_K3)
    raise ValueError(f"unknown KL estimator {kl_penalty!r}")


def masked_kl_penalty(logprob: Tensor, ref_logprob: Tensor, response_mask: Tensor, estimator: str) -> Tensor:
    """`kl_penalty` of the tokens of the mask, 0 elsewhere."""
    return kl_penalty(keep_masked(logprob, response_mask), keep_masked(ref_logprob, response_mask), estimator)


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kl_penalty: str,
) -> tuple[Tensor, Tensor]:
    """The rewards r_t = score_t - kl_coef * KL_t, and the KL for the controller.

    current_kl = mean over responses of (mean over their tokens of KL_t). Padding rows are not responses; rewards
    are 0 outside the mask.
    """
    kl_bt = masked_kl_penalty(old_log_probs, ref_log_prob, response_mask, kl_penalty)
    rewards = keep_masked(token_level_scores, response_mask) - kl_coef * kl_bt
    is_response = response_mask.bool().any(dim=-1)
    return rewards, masked_mean(masked_mean(kl_bt, response_mask, axis=-1), is_response)


class FixedKLController:
    """A coefficient that always has its configured value, also after a resume."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The configured coefficient stays."""


class AdaptiveKLController(FixedKLController):
    """A coefficient that is adapted to keep the KL near a target (Ziegler et al. 2019).

    error = clip(current_kl / target_kl - 1, -0.2, 0.2)
    value <- value * (1 + error * n_steps / horizon)          n_steps is the number of sequences of the step
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(init_kl_coef)
        self.target_kl, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        # One such step could make the coefficient zero or negative, which would reward a larger KL.
        if MAX_PROPORTIONAL_ERROR * n_steps >= self.horizon:
            raise ConfigError(
                f"a KL controller with horizon={self.horizon} is too short for {n_steps} sequences per step: one step "
                f"could change the coefficient's sign; set algorithm.kl_ctrl.horizon above {n_steps // 5}"
            )
        error = min(max(current_kl / self.target_kl - 1, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR)
        self.value *= 1 + error * n_steps / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def get_kl_controller(kind: str, kl_coef: float, target_kl: float, horizon: int) -> FixedKLController:
    """The controller for `kl_ctrl.type`, fixed or adaptive; a fixed one ignores target and horizon."""
    if kind not in ("fixed", "adaptive"):
        raise ValueError(f"unknown KL controller {kind!r}; choose from fixed, adaptive")
    return AdaptiveKLController(kl_coef, target_kl, horizon) if kind == "adaptive" else FixedKLController(kl_coef)
