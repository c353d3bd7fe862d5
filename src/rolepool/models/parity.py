"""Whether two programs with the same weights compute the same probabilities: those of a rollout
engine and the actor's.

Owns the measure, and the limits up to which both programs count as correct.
`benchmarks/parity_limit.py` compares correct and wrong programs with it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_TOKENS = 64
"""The number of tokens of each rank that are compared if the actor computes old log-probs."""
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
    apart = Apart()
    apart.add(theirs, ours, torch.ones_like(ours, dtype=torch.bool))
    return apart.read().logit_error(temperature)


@dataclass(frozen=True)
class Difference:
    """How far apart two programs are, as means over tokens."""

    num_tokens: int
    distance: float
    """The mean difference of log-probs."""
    doubt: float
    """The mean of 1 - p."""

    def logit_error(self, temperature: float) -> float:
        """The same as the function `logit_error`."""
        return self.distance / max(self.doubt, LEAST_DOUBT) * temperature


class Apart:
    """Adds up how far apart two programs are, over micro-batches. The sums stay on the device until
    they are read, so that the host does not wait for it before."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, theirs: Tensor, ours: Tensor, mask: Tensor) -> None:
        """Add the tokens of the mask, with both programs' log-probs of them."""
        theirs = theirs.detach().double()
        ours = ours.detach().double()
        # A sum over the mask alone: what is outside of it may be NaN.
        distance = torch.where(mask, (theirs - ours).abs(), 0.0).sum()
        doubt = torch.where(mask, 1 - ours.exp(), 0.0).sum()
        sums = torch.stack([mask.sum().double(), distance, doubt])
        self._sums = sums if self._sums is None else self._sums + sums

    def read(self) -> Difference:
        """The means of what was added since the last time. This waits for the device."""
        sums = [0.0, 0.0, 0.0] if self._sums is None else self._sums.tolist()
        self._sums = None
        num_tokens, distance, doubt = sums
        divisor = max(num_tokens, 1.0)
        return Difference(int(num_tokens), distance / divisor, doubt / divisor)
