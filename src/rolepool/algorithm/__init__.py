"""The mathematics of PPO and related algorithms: tensors in, tensors out.

Owns advantages, losses, KL and masked statistics. Does not know models or process groups: callers
pass plain arguments, and the counts of the whole mini-batch if losses of its parts must add up. The
names in `__all__` are those that users' code may import from here (docs/extending.md). The other
two modules register the functions that come with rolepool.
"""

from rolepool.algorithm import advantages, policy_losses
from rolepool.algorithm.losses import agg_loss, keep_masked, masked_mean, masked_sum, masked_whiten
from rolepool.config.functions import register_adv_est, register_policy_loss

__all__ = [
    "advantages",
    "agg_loss",
    "keep_masked",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "policy_losses",
]
__all__ += ["register_adv_est", "register_policy_loss"]
