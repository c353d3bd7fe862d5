"""The cost of work: what a fit learns from recorded times, and how sure it is."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from rolepool.planner.costs import LEAST_NOISE, LinearCost, Work

TRUTH = np.array([0.02, 1e-4, 2e-7, 0.01, 0.03, 0.004])
"""Seconds per piece, token, attended token, piece that has collectives, share of it that is
exchanged, and round of messages."""


def fitted(works: Sequence[tuple[Work, int]], times: Iterable[float]) -> LinearCost:
    return LinearCost.fit([(*work, seconds) for work, seconds in zip(works, times, strict=True)])


def random_works(number: int, seed: int = 0) -> list[tuple[Work, int]]:
    chance = random.Random(seed)
    works = []
    for _ in range(number):
        pieces, length = chance.randint(1, 20), chance.randint(20, 2000)
        tokens = pieces * chance.randint(1, 16) * length
        works.append((Work(pieces, tokens, tokens * length), chance.choice([1, 2, 4, 8])))
    return works


def true_s(work: Work, ranks: int, truth: np.ndarray = TRUTH) -> float:
    return float(np.array(work.features(ranks)) @ truth)


def times_of(
    works: list[tuple[Work, int]], noise: float = 0.0, truth: np.ndarray = TRUTH
) -> list[float]:
    chance = random.Random(1)
    return [true_s(work, ranks, truth) * (1 + chance.gauss(0, noise)) for work, ranks in works]


def relative_deviation(fit: LinearCost, work: Work, ranks: int) -> float:
    found = fit.seconds(work, ranks)
    return float(np.sqrt(found.variance)) / found.mean


def test_the_fit_recovers_known_coefficients() -> None:
    works = random_works(400)
    fit = fitted(works, times_of(works))
    assert fit.coefficients[:3] == pytest.approx(TRUTH[:3], rel=0.1)
    for work, ranks in random_works(50, seed=9):
        assert fit.seconds(work, ranks).mean == pytest.approx(true_s(work, ranks), rel=0.05)


def test_noise_does_not_shift_the_fit() -> None:
    works = random_works(400)
    fit = fitted(works, times_of(works, noise=0.1))
    ratios = [
        fit.seconds(work, ranks).mean / true_s(work, ranks)
        for work, ranks in random_works(50, seed=9)
    ]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.02)
    assert max(ratios) < 1.1
    assert min(ratios) > 0.9


@pytest.mark.parametrize("slower", [3.0, 5.0])
def test_a_few_times_that_are_much_too_long_do_not_count(slower: float) -> None:
    """Such as those of calls during which another program used the machine."""
    works = random_works(300)
    disturbed = [
        seconds * (slower if at % 20 == 0 else 1.0)
        for at, seconds in enumerate(times_of(works, noise=0.02))
    ]
    fit = fitted(works, disturbed)
    ratios = [
        fit.seconds(work, ranks).mean / true_s(work, ranks)
        for work, ranks in random_works(50, seed=9)
    ]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_no_coefficient_is_ever_negative(seed: int) -> None:
    """Also if the times fall as the work grows, which no costs explain."""
    chance = random.Random(seed)
    works = random_works(chance.randint(1, 40), seed)
    times = [chance.uniform(0, 1) / work.num_tokens for work, _ in works]
    fit = fitted(works, times)
    assert (fit.coefficients >= 0).all()
    assert all(fit.seconds(work, ranks).mean >= 0 for work, ranks in works)


def test_what_was_not_measured_is_unsure_and_what_was_measured_is_not() -> None:
    """All records have one rank and pieces of 500 tokens, so neither collectives nor the cost of a
    piece are known."""
    works = [(Work(pieces, pieces * 500, pieces * 50_000), 1) for pieces in range(1, 40)]
    fit = fitted(works, times_of(works, noise=0.01))
    near = relative_deviation(fit, Work(4, 2000, 200_000), 1)
    more_ranks = relative_deviation(fit, Work(4, 2000, 200_000), 8)
    more_pieces = relative_deviation(fit, Work(40, 2000, 200_000), 1)
    assert near < 1.5 * LEAST_NOISE
    assert more_ranks > 3 * near
    assert more_pieces > 3 * near


def test_more_records_make_a_prediction_surer() -> None:
    asked = Work(30, 40_000, 40_000_000), 4
    few, many = (
        fitted(works, times_of(works, noise=0.1)) for works in (random_works(4), random_works(400))
    )
    assert relative_deviation(many, *asked) < relative_deviation(few, *asked)


def test_a_single_record_is_repeated_exactly_enough() -> None:
    fit = fitted([(Work(1, 1000), 2)], [0.5])
    assert fit.seconds(Work(1, 1000), 2).mean == pytest.approx(0.5, rel=0.02)


def test_times_of_zero_cost_nothing() -> None:
    fit = fitted([(Work(1, 10), 1)] * 3, [0.0] * 3)
    assert fit.seconds(Work(1, 10), 1).mean < 1e-6
