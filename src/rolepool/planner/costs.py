"""What a piece of work costs: a linear model that is fitted to recorded times.

Owns the fit and its uncertainty. Does not know operations, roles or placements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

PRIOR_SHARES = np.array([0.1, 0.75, 0.08, 0.02, 0.03, 0.02])
"""What is assumed before anything is measured: how the time of typical work is divided among the features."""
PRIOR_STD = np.array([0.3, 0.6, 0.1, 0.3, 0.6, 0.1])
"""How unsure these shares are."""
NOISE = 0.1
"""The relative noise of one recorded time that the first fit assumes."""
LEAST_NOISE = 0.03
LEAST_EXPECTED = 0.05
"""Times that are expected to be a smaller part of the mean time count as this part."""
NUM_FITS = 3
STALL = 30.0
"""Times that are so many times longer than what is usual for the assumed shares are those of a process that stood
still. They would distort the first fit, so they are not used at all."""
OUTLIER = 4.0
"""Times that are so many times the usual deviation away from the first fit are not used, such as those of a call that
was interrupted by another program."""


class Work(NamedTuple):
    """An amount of work on one rank."""

    num_pieces: float
    num_tokens: float = 0.0
    num_attended: float = 0.0

    def features(self, num_ranks: int) -> list[float]:
        """What its time depends on. The last three stand for collectives: that there are any, the data that each rank
        exchanges, and the rounds of messages. Sharded models are gathered and reduced around a ring of ranks, which
        takes one round less than there are ranks."""
        is_shared, exchanged, rounds = num_ranks > 1, (num_ranks - 1) / num_ranks, num_ranks - 1
        return [*self, *(self.num_pieces * each for each in (is_shared, exchanged, rounds))]


class Seconds(NamedTuple):
    """A time and its variance."""

    mean: float
    variance: float


@dataclass(frozen=True)
class LinearCost:
    """The time of some kind of work as a linear function of its features; no coefficient is negative."""

    coefficients: Array
    covariance: Array
    noise: float
    """The relative deviation of recorded times."""

    @classmethod
    def fit(cls, seen: Sequence[tuple[Work, int, float]]) -> "LinearCost":
        """Fit recorded times: work, the number of ranks, and seconds. Directions in which the records do not vary stay
        as assumed before, and are as unsure."""
        raw = np.array([work.features(num_ranks) for work, num_ranks, _ in seen])
        scale = raw.mean(0)
        prior = np.where(scale > 0, PRIOR_SHARES, 0.0)
        scale = np.where(scale > 0, scale, raw[:, 0].mean())
        prior[0] += 1 - prior.sum()
        features, times = raw / scale, np.array([seconds for *_, seconds in seen])
        ratios = times / (features @ prior)
        kept = ratios <= STALL * np.median(ratios)
        features, times = features[kept], times[kept]
        typical_s = max(float(times.mean()), 1e-9)
        times /= typical_s
        expected = features @ prior
        for _ in range(NUM_FITS - 1):  # what a time may deviate is in proportion to what is expected
            solved, _ = _solve(features, times, NOISE * np.maximum(expected, LEAST_EXPECTED), prior)
            expected = features @ solved
        expected = np.maximum(expected, LEAST_EXPECTED)
        errors = (times - expected) / expected
        deviation = max(float(np.median(np.abs(errors))), LEAST_NOISE)
        usual = np.abs(errors) <= OUTLIER * deviation
        solved, covariance = _solve(features[usual], times[usual], deviation * expected[usual], prior)
        unit = typical_s / scale
        return cls(solved * unit, covariance * np.outer(unit, unit), deviation)

    def seconds(self, work: Work, num_ranks: int) -> Seconds:
        features = np.array(work.features(num_ranks))
        mean = float(features @ self.coefficients)
        return Seconds(mean, float(features @ self.covariance @ features) + (LEAST_NOISE * mean) ** 2)


def _solve(features: Array, times: Array, deviations: Array, prior: Array) -> tuple[Array, Array]:
    """The coefficients, none negative, and their covariance, by least squares with a prior."""
    weights = 1 / deviations**2
    kept = np.ones(len(prior), dtype=bool)
    covariance = np.zeros((len(prior), len(prior)))
    solved = np.zeros(len(prior))
    while kept.any():
        some = features[:, kept]
        precision = (some.T * weights) @ some + np.diag(1 / PRIOR_STD[kept] ** 2)
        part = np.linalg.inv(precision)
        solved[kept] = part @ (some.T @ (weights * times) + prior[kept] / PRIOR_STD[kept] ** 2)
        covariance[:] = 0.0
        covariance[np.ix_(kept, kept)] = part
        if (solved >= 0).all():
            break
        kept &= solved > 0
        solved[~kept] = 0.0
    return solved, covariance
