"""What a piece of work costs: the linear model of time that is fitted to recorded times.

Owns the features that a time depends on, what is assumed before anything is measured, the fit and
how sure it is. Does not know where the times come from.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rolepool.planner.sharding import PieceSharding

Array = npt.NDArray[np.float64]

PRIOR_SHARES = np.array([0.1, 0.75, 0.08, 0.02, 0.03, 0.02])
"""What is assumed before anything is measured: how the time of typical work is divided among the
features. That of decode steps is divided in another way: a step reads all weights, however many
sequences it extends."""
PRIOR_SHARES_OF_DECODING = np.array([0.75, 0.1, 0.08, 0.02, 0.03, 0.02])
PRIOR_SHARES_OF_REST = np.array([0.45, 0.2, 0.0, 0.25, 0.1, 0.0])
"""That of the rest of a call: most of it is the same for all sizes, and in it ranks wait for each
other."""
PRIOR_STD = np.array([0.6, 0.6, 0.1, 0.3, 0.6, 0.1])
"""How unsure these shares are."""
NOISE = 0.1
"""The relative noise of one recorded time that the first fit assumes."""
LEAST_NOISE = 0.03
LEAST_EXPECTED = 0.05
"""Times that are expected to be a smaller part of the mean time count as this part."""
NUM_FITS = 3
NUM_ALIKE = 4
ALIKE = 3.0
"""Amounts of work within about a third are alike."""
STALL = 30.0
"""Times that are so many times longer than what is usual for the assumed shares are those of a
process that stood still. They would distort the first fit, so they are not used at all."""
OUTLIER = 4.0
"""Times that are so many times the usual deviation away from the first fit are not used, such as
those of a call that was interrupted by another program."""
NUM_AMOUNTS = 3
"""The features that are amounts of work: pieces, tokens, attended tokens. The others are about
several ranks."""
OTHER_RANKS = 0.5
"""The relative deviation of the time of sharding for numbers of ranks outside of those that were
measured."""


class Work(NamedTuple):
    """An amount of work on one rank."""

    num_pieces: float
    num_tokens: float = 0.0
    num_attended: float = 0.0

    def features(self, num_ranks: int, sharding: PieceSharding | None = None) -> list[float]:
        """What its time depends on. If it was measured what sharding adds, the last one is that
        time. Otherwise the last three stand for collectives: that there are any, the data that each
        rank exchanges, and the rounds of messages. Sharded models are gathered and reduced around a
        ring of ranks, which takes one round less than there are ranks."""
        if sharding is not None:
            return [*self, self.num_pieces * sharding.seconds(num_ranks)]
        is_shared = num_ranks > 1
        exchanged = (num_ranks - 1) / num_ranks
        num_rounds = num_ranks - 1
        return [
            *self,
            self.num_pieces * is_shared,
            self.num_pieces * exchanged,
            self.num_pieces * num_rounds,
        ]


class Seconds(NamedTuple):
    """A time and its variance."""

    mean: float
    variance: float


class MeasuredWork(NamedTuple):
    """What a recording says about one piece of work."""

    work: Work
    num_ranks: int
    seconds: float


ALL_VISIBLE = Seconds(1.0, 0.2**2)
"""On CPU slots nothing overlaps with collectives, so a step waits for all of the time that sharding
was measured to take. Noise makes this unsure."""
PARTLY_VISIBLE = Seconds(0.5, 0.3**2)
"""On GPUs layers are gathered while others compute, so a step waits for some part between none and
all of it."""


class LinearCost(NamedTuple):
    """The time of some kind of work as a linear function of its features; no coefficient is
    negative."""

    coefficients: Array
    covariance: Array
    noise: float
    """The relative deviation of recorded times."""
    sharding: PieceSharding | None = None
    """What sharding adds to a piece of work, if it was measured."""

    @classmethod
    def fit(
        cls,
        measured: Sequence[MeasuredWork],
        shares: Array = PRIOR_SHARES,
        sharding: PieceSharding | None = None,
        visible: Seconds = ALL_VISIBLE,
    ) -> "LinearCost":
        """Fit recorded times. Directions in which the records do not vary stay as assumed before,
        and are as unsure. `visible` is the part of the time of sharding that a step waits for."""
        raw_rows = []
        recorded_s = []
        for work, num_ranks, seconds in measured:
            raw_rows.append(work.features(num_ranks, sharding))
            recorded_s.append(seconds)
        raw = np.array(raw_rows)
        times = np.array(recorded_s)
        num_plain = raw.shape[1]
        if sharding is not None:
            num_plain -= 1

        scale = raw.mean(0)
        scale = np.where(scale > 0, scale, raw[:, 0].mean())
        plain = raw[:, :num_plain]
        prior = _prior(plain, shares)
        deviations = PRIOR_STD[:num_plain]

        assumed = plain / scale[:num_plain] @ prior
        ratios = times / assumed
        is_usable = ratios <= STALL * np.median(ratios)
        raw = raw[is_usable]
        times = times[is_usable]
        surer = np.sqrt(_weights(raw))

        # From here on, times are in units of the mean time, and features in units of their means.
        # The prior is about such units.
        typical_s = max(float(times.mean()), 1e-9)
        times /= typical_s
        if sharding is not None:
            scale[-1] = typical_s  # this feature is a time, so its coefficient has no unit
            typical_sharding_s = float(raw[:, -1].mean())
            sharding_share = visible.mean * typical_sharding_s / typical_s
            others = max(LEAST_EXPECTED, 1 - sharding_share)
            prior = np.append(prior * others, visible.mean)
            visible_std = math.sqrt(visible.variance)
            deviations = np.append(deviations * others, visible_std)
        features = raw / scale

        fit = _fit_robustly(features, times, surer, prior, deviations)
        unit = typical_s / scale
        return cls(
            coefficients=fit.solved * unit,
            covariance=fit.covariance * np.outer(unit, unit),
            noise=fit.deviation,
            sharding=sharding,
        )

    def seconds(self, work: Work, num_ranks: int) -> Seconds:
        features = np.array(work.features(num_ranks, self.sharding))
        mean = float(features @ self.coefficients)
        variance_of_fit = float(features @ self.covariance @ features)
        variance_of_noise = (self.noise * mean) ** 2
        variance = variance_of_fit + variance_of_noise
        if self.sharding is not None and not self.sharding.covers(num_ranks):
            sharding_s = float(features[-1])
            variance += (OTHER_RANKS * sharding_s) ** 2
        return Seconds(mean, variance)


def _prior(raw: Array, shares: Array) -> Array:
    """The assumed coefficients of scaled features. Those of features that never occur go to the
    first one."""
    num_features = raw.shape[1]
    is_seen = raw.mean(0) > 0
    # Work without tokens never has any. Collectives that one rank does not have are expected of
    # several ranks.
    is_collective = np.arange(num_features) >= NUM_AMOUNTS
    prior = np.where(is_seen | is_collective, shares[:num_features], 0.0)
    prior[0] += 1 - prior[is_seen].sum()
    return prior


def _weights(raw: Array) -> Array:
    """How much each record counts. Records of about the same work have noise in common, such as
    another program that runs for some steps, so many of them together count as `NUM_ALIKE`.
    Otherwise small differences in work, and such noise, would decide what a token costs."""
    kinds = np.round(ALIKE * np.log1p(raw)).astype(np.int64)
    _, kind_of, counts = np.unique(
        kinds,
        axis=0,
        return_inverse=True,
        return_counts=True,
    )
    num_of_same_kind = counts[kind_of.reshape(-1)]
    return np.minimum(1.0, NUM_ALIKE / num_of_same_kind)


class _RobustFit(NamedTuple):
    """Coefficients, and how sure they are."""

    solved: Array
    covariance: Array
    deviation: float
    """The usual error of a time, relative to the expected one."""


def _fit_robustly(
    features: Array,
    times: Array,
    surer: Array,
    prior: Array,
    deviations: Array,
) -> _RobustFit:
    """Fit a few times, because the noise of a time is in proportion to the time that is expected,
    then once more without outliers. `surer` says how much less noise a time has than others."""
    expected = features @ prior
    for _ in range(NUM_FITS - 1):
        noise = NOISE * np.maximum(expected, LEAST_EXPECTED) / surer
        solved, _ = _solve(
            features=features,
            times=times,
            noise=noise,
            prior=prior,
            deviations=deviations,
        )
        expected = features @ solved

    expected = np.maximum(expected, LEAST_EXPECTED)
    errors = np.abs((times - expected) / expected)
    median_error = float(np.median(errors))
    deviation = max(median_error, LEAST_NOISE)
    usual = errors <= OUTLIER * deviation
    noise = deviation * expected / surer
    solved, covariance = _solve(
        features=features[usual],
        times=times[usual],
        noise=noise[usual],
        prior=prior,
        deviations=deviations,
    )
    return _RobustFit(solved, covariance, deviation)


def _solve(
    features: Array,
    times: Array,
    noise: Array,
    prior: Array,
    deviations: Array,
) -> tuple[Array, Array]:
    """The coefficients, none negative, and their covariance, by least squares with a prior and its
    deviations."""
    weights = 1 / noise**2
    prior_precision = 1 / deviations**2
    num_features = len(prior)
    kept = np.ones(num_features, dtype=bool)
    covariance = np.zeros((num_features, num_features))
    solved = np.zeros(num_features)
    while kept.any():
        columns = features[:, kept]
        precision_of_times = (columns.T * weights) @ columns
        precision = precision_of_times + np.diag(prior_precision[kept])
        kept_covariance = np.linalg.inv(precision)
        pull_of_times = columns.T @ (weights * times)
        pull_of_prior = prior[kept] / deviations[kept] ** 2
        solved[kept] = kept_covariance @ (pull_of_times + pull_of_prior)
        covariance[:] = 0.0
        covariance[np.ix_(kept, kept)] = kept_covariance
        if (solved >= 0).all():
            break
        # A time cannot fall with the amount of work: without the negative ones, and once more.
        kept &= solved > 0
        solved[~kept] = 0.0
    return solved, covariance
