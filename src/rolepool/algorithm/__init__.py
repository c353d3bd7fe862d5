"""The mathematics of PPO and related algorithms: tensors in, tensors out.

Owns advantages, losses, KL and masked statistics. Does not know models or process groups: callers pass plain arguments,
and the counts of the whole mini-batch if losses of its parts must add up. The names below are
those that users' code may import (docs/extending.md).
"""

from rolepool.algorithm.advantages import apply_kl_penalty as apply_kl_penalty
from rolepool.algorithm.advantages import compute_advantage as compute_advantage
from rolepool.algorithm.losses import LossCounts as LossCounts
from rolepool.algorithm.losses import agg_loss as agg_loss
from rolepool.algorithm.losses import compute_value_loss as compute_value_loss
from rolepool.algorithm.losses import keep_masked as keep_masked
from rolepool.algorithm.losses import kl_penalty as kl_penalty
from rolepool.algorithm.losses import masked_mean as masked_mean
from rolepool.algorithm.losses import masked_sum as masked_sum
from rolepool.algorithm.losses import masked_whiten as masked_whiten
from rolepool.algorithm.policy_losses import compute_policy_loss_cispo as compute_policy_loss_cispo
from rolepool.algorithm.policy_losses import compute_policy_loss_clip_cov as compute_policy_loss_clip_cov
from rolepool.algorithm.policy_losses import compute_policy_loss_geo_mean as compute_policy_loss_geo_mean
from rolepool.algorithm.policy_losses import compute_policy_loss_gpg as compute_policy_loss_gpg
from rolepool.algorithm.policy_losses import compute_policy_loss_gspo as compute_policy_loss_gspo
from rolepool.algorithm.policy_losses import compute_policy_loss_kl_cov as compute_policy_loss_kl_cov
from rolepool.algorithm.policy_losses import compute_policy_loss_vanilla as compute_policy_loss_vanilla
from rolepool.algorithm.registry import register_adv_est as register_adv_est
from rolepool.algorithm.registry import register_policy_loss as register_policy_loss
