"""Whether two programs with the same weights compute the same probabilities: those of a rollout
engine and the actor's.

Owns the measure, and the limits up to which both programs count as correct.
`benchmarks/parity_limit.py` compares correct and wrong programs with it.
"""

from torch import Tensor

NUM_TOKENS = 64
"""The number of tokens of each rank that are compared."""
LIMITS = {"cpu": 2e-4, "cuda": 0.2}
"""The largest error, by device: CPU slots compute in float32, GPUs in 16 bits. In 16 bits, two
correct programs were up to 0.1 apart with SmolLM2-135M. The limit is twice that, because models
with larger logits round more."""
LEAST_DOUBT = 0.01
"""The smallest mean of 1 - p that is divided by. Below it, rounding of the log-probs themselves
would be measured."""


def logit_error(theirs: Tensor, ours: Tensor, temperature: float) -> float:
    """How wrong logits are, in the mean, if these log-probs of sampled tokens are apart only
    because of that.

    If the logit of a token is wrong by d, its log-prob is wrong by d (1 - p) / temperature, where p
    is its probability. Therefore the differences of log-probs depend on how sure the model is of
    its tokens. This number does not: it is about the same at every temperature, and before and
    after training.
    """
    theirs = theirs.double()
    ours = ours.double()
    distance = (theirs - ours).abs().mean()
    doubt = (1 - ours.exp()).mean().clamp(min=LEAST_DOUBT)
    return float(distance / doubt * temperature)
