"""The parts of the benchmarks of `algorithm.max_staleness` that decide what they say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from commands import load_benchmark
from rolepool.rollout.engine import Request, Sampling
from rolepool.rollout.native import NativeEngine


@pytest.fixture(scope="module")
def equivalence() -> ModuleType:
    return load_benchmark("equivalence")


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    # Printed tables of Student's distribution.
    [(0.95, 1, 6.3138), (0.95, 7, 1.8946), (0.975, 3, 3.1824), (0.05, 10, -1.8125)],
)
def test_quantiles_are_those_of_printed_tables(
    equivalence: ModuleType, probability: float, freedom: int, expected: float
) -> None:
    assert equivalence.quantile(probability, freedom) == pytest.approx(expected, abs=1e-4)


def test_both_tests_succeed_exactly_if_the_interval_lies_within_the_margin(
    equivalence: ModuleType,
) -> None:
    numbers = random.Random(3)
    verdicts = []
    for _ in range(200):
        center = numbers.uniform(-0.03, 0.03)
        differences = [numbers.gauss(center, 0.015) for _ in range(8)]
        tested = equivalence.compare(differences, 0.02)
        assert tested.is_equivalent == (tested.low > -0.02 and tested.high < 0.02)
        assert tested.is_not_worse == (tested.low > -0.02)
        verdicts.append(tested.is_equivalent)
    assert 0 < sum(verdicts) < 200


def test_equal_results_are_equivalent_and_few_noisy_ones_are_not(equivalence: ModuleType) -> None:
    assert equivalence.compare([0.0, 0.0, 0.0], 0.02).is_equivalent
    assert not equivalence.compare([-0.02, -0.02, -0.02], 0.02).is_not_worse
    assert not equivalence.compare([0.05, -0.05], 0.02).is_equivalent
    with pytest.raises(ValueError, match="1 pairs"):
        equivalence.compare([0.0], 0.02)


def test_every_tenth_response_is_long_and_seeds_choose_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The extension replaces it when it is imported. This brings it back after the test.
    monkeypatch.setattr(NativeEngine, "generate", NativeEngine.generate)
    lengths = load_benchmark("fixed_lengths")
    sampling = Sampling(1.0, 1.0, -1, True, 64, True, ())
    requests = [Request([1], seed=seed) for seed in range(20)]
    random.Random(1).shuffle(requests)
    limits = {
        one.seed: one.max_new_tokens for one in lengths.with_fixed_lengths(requests, sampling)
    }
    assert sorted(limits.values()) == [8] * 18 + [64] * 2
    requests.reverse()
    again = lengths.with_fixed_lengths(requests, sampling)
    assert [one.seed for one in again] == [one.seed for one in requests]
    assert {one.seed: one.max_new_tokens for one in again} == limits


def test_sides_are_compared_by_seeds_that_both_have() -> None:
    learning = load_benchmark("staleness_learning")

    def result(value: float) -> dict[str, object]:
        return {"validations": {"0": 0.1, "15": value - 0.2, "60": value}}

    results = {
        "k0": {1: result(0.9), 2: result(0.8), 3: result(0.7)},
        "k1": {2: result(0.81), 3: result(0.69), 4: result(0.2)},
        "k2": {1: result(0.5)},
    }
    tests = learning.tests_of(results, "last")
    assert list(tests) == ["k1"]
    assert tests["k1"]["seeds"] == [2, 3]
    assert tests["k1"]["differences"] == pytest.approx([0.01, -0.01])
    assert learning.score(result(0.9), "mean") == pytest.approx(0.8)


def test_a_kept_result_of_other_keys_is_refused(tmp_path: Path) -> None:
    learning = load_benchmark("staleness_learning")
    assert learning.kept_result(tmp_path, ["trainer.seed=1"]) is None
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"words": ["trainer.seed=1"], "validations": {"1": 0.5}}))
    kept = learning.kept_result(tmp_path, ["trainer.seed=1"])
    assert kept["validations"] == {"1": 0.5}
    with pytest.raises(SystemExit, match="other keys"):
        learning.kept_result(tmp_path, ["trainer.seed=2"])
