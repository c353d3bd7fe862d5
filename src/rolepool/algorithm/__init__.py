"""The mathematics of PPO and related algorithms: tensors in, tensors out.

Owns advantages, losses, KL and masked statistics. Does not know models or process groups: callers pass plain arguments,
and the counts of the whole mini-batch if losses of its parts must add up. The names below are those that estimators and
losses of users need (docs/extending.md); the other names are imported from their modules.
"""

from rolepool.algorithm.losses import agg_loss, keep_masked, masked_mean, masked_sum
from rolepool.algorithm.registry import register_adv_est, register_policy_loss

__all__ = ["agg_loss", "keep_masked", "masked_mean", "masked_sum", "register_adv_est", "register_policy_loss"]
