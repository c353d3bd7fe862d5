"""What `rolepool signal` says about the scores of responses."""

from __future__ import annotations

import pytest

from rolepool.trainer.signal import Signal, Source

EXAMPLE = ("2 + 2?", "It is 4.", "4")


def signal_of(*groups: list[float], truncated: int = 0) -> Signal:
    num_responses = sum(map(len, groups))
    source = Source(list(groups), [5] * num_responses, truncated, EXAMPLE)
    return Signal({"sums": source}, num_samples=4, max_response_length=8, tokens_per_s=100.0)


def test_scores_of_groups_are_summed_up() -> None:
    source = signal_of([0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], truncated=3).sources["sums"]
    assert source.mean == pytest.approx(5 / 12)
    assert source.best == pytest.approx(2 / 3)
    assert source.mixed == pytest.approx(1 / 3)
    assert source.truncated == pytest.approx(3 / 12)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            [[0, 0], [0, 0]],
            "no signal: no response has a score, such as '2 + 2?', answered 'It is 4.'",
        ),
        ([[1, 1], [0, 0]], "no signal: all responses to a prompt have the same score"),
        ([[1, 1], [1, 1], [1, 1], [1, 0.9]], "the policy can do this already; use harder prompts"),
        ([[0, 0]] * 9 + [[0, 1]], "only 10% of the prompts have responses with different scores"),
    ],
)
def test_what_keeps_a_policy_from_learning_is_named(
    groups: list[list[float]], expected: str
) -> None:
    (line,) = signal_of(*groups).advice()
    assert line.startswith(f"sums: {expected}")


def test_nothing_is_said_about_a_good_task_and_truncated_responses_are_named() -> None:
    groups = [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0]]
    assert signal_of(*groups).advice() == []
    (line,) = signal_of(*groups, truncated=4).advice()
    assert line.startswith("sums: 50% of the responses reach data.max_response_length=8")


def test_scores_that_hardly_differ_are_no_signal_and_are_named_if_the_algorithm_divides_by_their_deviation() -> (
    None
):
    source = Source(groups=[[0.0, 0.01], [0.0, 0.0], [0.0, 1.0], [1.0, 0.99]], lengths=[3] * 8)
    assert source.mixed == pytest.approx(1 / 4)
    assert source.nearly_equal == pytest.approx(2 / 4)
    warned = Signal({"words": source}, 2, 10, 1.0, divides_by_std=True).advice()
    assert any("norm_adv_by_std_in_grpo=false" in line and "50%" in line for line in warned)
    assert not Signal({"words": source}, 2, 10, 1.0).advice()
