"""Two one-sided tests (TOST): are paired results of two sides the same, up to a margin?

A usual test that finds no difference shows nothing, because few pairs never find one. Here the
burden is turned around: the sides count as equivalent only if the data exclude a difference of the
margin or more, in both directions. Owns the statistics. Does not know what is compared.

scipy is no dependency of rolepool, so Student's distribution is computed here: its density has a
closed form, and Simpson's rule adds it up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEVEL = 0.05
NUM_INTERVALS = 2000
"""The pairs of intervals of Simpson's rule. The result is exact to 1e-9 for every number of pairs."""
LARGEST_QUANTILE = 1e4


@dataclass(frozen=True)
class Equivalence:
    """What two one-sided tests say about paired differences."""

    num_pairs: int
    mean: float
    """Mean difference: the compared side minus the reference."""
    low: float
    """With `high` the interval of confidence 1 - 2 * LEVEL. The tests succeed exactly if it lies
    within the margin."""
    high: float
    p_not_worse: float
    """The p-value of the test against "worse by the margin or more"."""
    p_not_better: float
    """The p-value of the test against "better by the margin or more"."""

    @property
    def is_not_worse(self) -> bool:
        return self.p_not_worse < LEVEL

    @property
    def is_equivalent(self) -> bool:
        return self.is_not_worse and self.p_not_better < LEVEL


def probability_below(t: float, freedom: int) -> float:
    """Student's distribution function: how probable a value of at most `t` is."""
    # With t = sqrt(freedom) * tan(angle) the density is a power of a cosine, on a finite interval.
    angle = math.atan(abs(t) / math.sqrt(freedom))
    width = angle / NUM_INTERVALS
    total = 0.0
    for index in range(NUM_INTERVALS + 1):
        if index in (0, NUM_INTERVALS):
            weight = 1
        elif index % 2:
            weight = 4
        else:
            weight = 2
        total += weight * math.cos(index * width) ** (freedom - 1)
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    half = math.exp(log_factor) / math.sqrt(math.pi) * total * width / 3
    if t < 0:
        return 0.5 - half
    return 0.5 + half


def quantile(probability: float, freedom: int) -> float:
    """The value that a variable with Student's distribution does not exceed with this
    probability, by bisection."""
    low = -LARGEST_QUANTILE
    high = LARGEST_QUANTILE
    while high - low > 1e-9 * max(1.0, abs(low)):
        middle = (low + high) / 2
        if probability_below(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def compare(differences: Sequence[float], margin: float) -> Equivalence:
    """Test paired differences. Two pairs are the least."""
    num_pairs = len(differences)
    if num_pairs < 2:
        raise ValueError(f"{num_pairs} pairs: a deviation needs at least two")
    freedom = num_pairs - 1
    mean = fmean(differences)
    error = stdev(differences) / math.sqrt(num_pairs)
    half_width = quantile(1 - LEVEL, freedom) * error
    return Equivalence(
        num_pairs=num_pairs,
        mean=mean,
        low=mean - half_width,
        high=mean + half_width,
        p_not_worse=_p_above(mean + margin, error, freedom),
        p_not_better=_p_above(margin - mean, error, freedom),
    )


def _p_above(distance: float, error: float, freedom: int) -> float:
    """How probable such a distance from the margin, or a larger one, is by chance."""
    if error == 0:  # all differences are equal
        return 0.0 if distance > 0 else 1.0
    return 1 - probability_below(distance / error, freedom)
