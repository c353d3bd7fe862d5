"""The mathematics of PPO and related algorithms: tensors in, tensors out.

Owns advantages, losses, KL and masked statistics. Does not know models or process groups: callers pass plain arguments,
and the counts of the whole mini-batch if losses of its parts must add up.
"""

from rolepool.algorithm.advantages import GroupIndex as GroupIndex
from rolepool.algorithm.advantages import compute_advantage as compute_advantage
from rolepool.algorithm.kl import apply_kl_penalty as apply_kl_penalty
from rolepool.algorithm.kl import get_kl_controller as get_kl_controller
from rolepool.algorithm.kl import kl_penalty as kl_penalty
from rolepool.algorithm.log_probs import LinearLogProbs as LinearLogProbs
from rolepool.algorithm.log_probs import entropy_from_logits as entropy_from_logits
from rolepool.algorithm.log_probs import logprobs_from_logits as logprobs_from_logits
from rolepool.algorithm.losses import LossCounts as LossCounts
from rolepool.algorithm.losses import agg_loss as agg_loss
from rolepool.algorithm.losses import compute_kl_loss as compute_kl_loss
from rolepool.algorithm.losses import compute_policy_loss_vanilla as compute_policy_loss_vanilla
from rolepool.algorithm.losses import compute_value_loss as compute_value_loss
from rolepool.algorithm.masked import compute_explained_variance as compute_explained_variance
from rolepool.algorithm.masked import keep_masked as keep_masked
from rolepool.algorithm.masked import masked_mean as masked_mean
from rolepool.algorithm.masked import masked_sum as masked_sum
from rolepool.algorithm.masked import masked_whiten as masked_whiten
from rolepool.algorithm.registry import register_adv_est as register_adv_est
from rolepool.algorithm.registry import register_policy_loss as register_policy_loss
