"""The mathematics of PPO and its relatives: tensors in, tensors out.

Owns advantages, losses, KL and the masked statistics under them. Knows no model, no configuration object, no
process group: whoever calls hands in plain arguments, and counts of the whole mini-batch where parts must add up.
"""

from __future__ import annotations

from rolepool.algorithm.advantages import (
    GroupIndex,
    compute_advantage,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from rolepool.algorithm.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
    masked_kl_penalty,
)
from rolepool.algorithm.linear_log_probs import LinearLogProbs
from rolepool.algorithm.log_probs import entropy_from_logits, logprobs_from_logits
from rolepool.algorithm.losses import (
    LossCounts,
    agg_loss,
    compute_entropy_loss,
    compute_kl_loss,
    compute_policy_loss_vanilla,
    compute_value_loss,
)
from rolepool.algorithm.masked import (
    compute_explained_variance,
    keep_masked,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "GroupIndex",
    "KLController",
    "LinearLogProbs",
    "LossCounts",
    "agg_loss",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_entropy_loss",
    "compute_explained_variance",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_kl_loss",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "entropy_from_logits",
    "get_kl_controller",
    "keep_masked",
    "kl_penalty",
    "logprobs_from_logits",
    "masked_kl_penalty",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
]
