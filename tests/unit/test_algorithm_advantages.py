"""Advantage estimators: by hand, against slow loops over ragged masks, and blind to what is
masked."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rolepool.algorithm.advantages import (
    GroupIndex,
    compute_advantage,
    compute_gae_advantage_return,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from rolepool.config.functions import ADV_ESTIMATORS
from rolepool.errors import DataError

GAMMA, LAM = 0.9, 0.8
ESTIMATORS = (*ADV_ESTIMATORS, "dr_grpo", "dr_grpo_passk")
"""All in the config, and two without the division by the standard deviation."""
Grid = list[list[float]]


class Rollouts(NamedTuple):
    rewards: Tensor
    values: Tensor
    mask: Tensor
    index: GroupIndex
    baselines: Tensor


def random_rollouts(seed: int) -> Rollouts:
    """Rows of unequal length with holes; groups of one to four, in no order; the last row is
    padding."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 9, 8
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.7)
    mask[:, 0] = True
    mask[-1] = False
    uids = np.array(["a", "b", "c", "a", "b", "a", "lone", "a", "b"], dtype=object)
    rewards, values = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return Rollouts(
        rewards,
        values,
        mask.long(),
        uids,
        torch.randn(rows, generator=generator, dtype=torch.float64),
    )


def estimate(
    name: str, rollouts: Rollouts, gamma: float = GAMMA, lam: float = LAM
) -> tuple[Tensor, Tensor]:
    return compute_advantage(
        name.removeprefix("dr_"),
        rollouts.rewards,
        rollouts.mask,
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=not name.startswith("dr_"),
        values=rollouts.values,
        index=rollouts.index,
        reward_baselines=rollouts.baselines,
    )


def tensor(rows: list[list[float]] | list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def assert_close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def whitened(numbers: list[float]) -> list[float]:
    mean, variance = statistics.fmean(numbers), statistics.variance(numbers)
    return [(number - mean) / math.sqrt(variance + 1e-8) for number in numbers]


# By hand


def test_gae_of_three_tokens() -> None:
    # delta = 0.9 * 0.4 - 0.5 = -0.14; 0.9 * 0.2 - 0.4 = -0.22; 1 - 0.2 = 0.8, and gamma * lam =
    # 0.72: A3 = 0.8; A2 = -0.22 + 0.72 * 0.8 = 0.356; A1 = -0.14 + 0.72 * 0.356 = 0.11632; returns
    # = A + V.
    rewards, values = tensor([[0, 0, 1]]), tensor([[0.5, 0.4, 0.2]])
    advantages, returns = compute_gae_advantage_return(rewards, values, torch.ones(1, 3), 0.9, 0.8)
    assert_close(returns, tensor([[0.61632, 0.756, 1.0]]))
    assert_close(advantages, tensor([whitened([0.11632, 0.356, 0.8])]))


def test_gae_steps_over_a_hole_as_if_it_were_not_there() -> None:
    rewards, values = tensor([[0, 7, 0, 1, 7]]), tensor([[0.5, 7, 0.4, 0.2, 7]])
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    assert_close(returns, tensor([[0.61632, 0, 0.756, 1.0, 0]]))
    first, second, third = whitened([0.11632, 0.356, 0.8])
    assert_close(advantages, tensor([[first, 0, second, third, 0]]))


def test_grpo_of_a_pair_and_a_lone_response() -> None:
    # Scores 1 and 3: mean 2, standard deviation sqrt((1 + 1) / 1). The lone 5 takes mean 0 and
    # deviation 1.
    rewards, mask = tensor([[0, 1], [0, 5], [3, 9]]), torch.tensor([[1, 1], [1, 1], [1, 0]])
    index = np.array(["x", "y", "x"], dtype=object)
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, index)
    pair, lone = 1 / (math.sqrt(2) + 1e-6), 5 / (1 + 1e-6)
    assert_close(advantages, tensor([[-pair, -pair], [lone, lone], [pair, 0]]))
    assert torch.equal(returns, advantages)
    plain, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert_close(plain, tensor([[-1, -1], [5, 5], [1, 0]]))


def test_rloo_of_three_responses_and_a_lone_one() -> None:
    # Against the mean of the others: 1 - (2 + 6)/2 = -3; 2 - (1 + 6)/2 = -1.5; 6 - (1 + 2)/2 = 4.5.
    rewards, mask = tensor([[1], [2], [5], [6]]), torch.ones(4, 1)
    advantages, returns = compute_rloo_outcome_advantage(
        rewards, mask, np.array([0, 0, 1, 0], dtype=object)
    )
    assert_close(advantages, tensor([[-3], [-1.5], [5], [4.5]]))
    assert torch.equal(returns, advantages)


def test_grpo_passk_gives_only_the_best_response_an_advantage_over_the_second_best() -> None:
    # Scores 1, 4, 2 of one prompt: 4 - 2. Their mean is 7/3, the variance (16/9 + 25/9 + 1/9) / 2 =
    # 7/3. A tie gives 0.
    rewards, mask = (
        tensor([[0, 1], [4, 9], [0, 2], [5, 0], [5, 0]]),
        torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]),
    )
    index = np.array(["x", "x", "x", "tie", "tie"], dtype=object)
    advantages, returns = compute_grpo_passk_outcome_advantage(rewards, mask, index)
    assert_close(
        advantages, tensor([[0, 0], [2 / (math.sqrt(7 / 3) + 1e-6), 0], [0, 0], [0, 0], [0, 0]])
    )
    assert torch.equal(returns, advantages)
    plain, _ = compute_grpo_passk_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=False
    )
    assert_close(plain, tensor([[0, 0], [2, 0], [0, 0], [0, 0], [0, 0]]))


def test_opo_weights_the_baseline_by_length() -> None:
    # Scores 1 on three tokens and 5 on one: the baseline is (3 * 1 + 1 * 5) / 4 = 2. The lone 7 has
    # none.
    rewards, mask = (
        tensor([[0, 0, 1], [5, 9, 9], [0, 7, 9]]),
        torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
    )
    advantages, returns = compute_opo_outcome_advantage(
        rewards, mask, np.array(["x", "x", "y"], dtype=object)
    )
    assert_close(advantages, tensor([[-1, -1, -1], [3, 0, 0], [7, 7, 0]]))
    assert torch.equal(returns, advantages)


def test_gpg_grows_with_the_share_of_scores_that_are_zero() -> None:
    # Scores 4 and 0, mean 2: one of two is not 0, so differences count twice. f_norm divides.
    rewards, mask, index = tensor([[4], [0]]), torch.ones(2, 1), np.array(["x", "x"], dtype=object)
    assert_close(compute_gpg_outcome_advantage(rewards, mask, index)[0], tensor([[4], [-4]]))
    assert_close(
        compute_gpg_outcome_advantage(rewards, mask, index, f_norm=0.5)[0], tensor([[8], [-8]])
    )
    alone = compute_gpg_outcome_advantage(
        tensor([[0, 3, 0]]), torch.ones(1, 3), np.array(["x"], dtype=object)
    )[0]
    assert_close(alone, tensor([[3, 3, 3]]))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_the_vectorized_name_means_the_same(name: str) -> None:
    rollouts = random_rollouts(5)
    assert torch.equal(estimate(name, rollouts)[0], estimate(f"{name}_vectorized", rollouts)[0])


def test_remax_takes_the_greedy_score_off_what_is_still_to_come() -> None:
    rewards, mask = tensor([[0, -0.1, 1, 9]]), torch.tensor([[1, 1, 1, 0]])
    advantages, returns = compute_remax_outcome_advantage(rewards, tensor([0.5]), mask)
    assert_close(returns, tensor([[0.9, 0.9, 1.0, 0]]))
    assert_close(advantages, tensor([[0.4, 0.4, 0.5, 0]]))


def test_reinforce_plus_plus_discounts_and_whitens() -> None:
    rewards, mask = tensor([[0, 9, 0, 1]]), torch.tensor([[1, 0, 1, 1]])
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, 0.5)
    assert_close(returns, tensor([[0.25, 0, 0.5, 1]]))
    first, second, third = whitened([0.25, 0.5, 1.0])
    assert_close(advantages, tensor([[first, 0, second, third]]))


def test_reinforce_plus_plus_baseline_whitens_over_tokens_not_responses() -> None:
    # Scores 1 and 3, mean 2: -1 on two tokens, +1 on one.
    # Their mean is -1/3, their variance (4/9 + 4/9 + 16/9) / 2 = 4/3.
    rewards, mask = tensor([[0, 1], [3, 9]]), torch.tensor([[1, 1], [1, 0]])
    index = np.array(["x", "x"], dtype=object)
    advantages, returns = compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards, mask, index
    )
    low, high = -2 / 3 / math.sqrt(4 / 3 + 1e-8), 4 / 3 / math.sqrt(4 / 3 + 1e-8)
    assert_close(advantages, tensor([[low, low], [high, 0]]))
    assert torch.equal(returns, advantages)


# Against slow loops. Each takes one response at a time as the list of its kept tokens.


class Response(NamedTuple):
    rewards: list[float]
    values: list[float]
    uid: str
    baseline: float

    @property
    def score(self) -> float:
        return math.fsum(self.rewards)


def slow_returns(response: Response, gamma: float) -> list[float]:
    rewards = response.rewards
    return [
        sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def slow_gae(response: Response) -> list[float]:
    values = [*response.values, 0.0]
    deltas = [
        reward + GAMMA * values[t + 1] - values[t] for t, reward in enumerate(response.rewards)
    ]
    return [
        sum((GAMMA * LAM) ** (u - t) * deltas[u] for u in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def whiten_all(rows: Grid) -> Grid:
    numbers = iter(whitened([number for row in rows for number in row]))
    return [[next(numbers) for _ in row] for row in rows]


def slow_lead(response: Response, group: list[float], *, divided: bool) -> float:
    """Pass@k: how far the best response of a group is ahead of the second best."""
    first, second = sorted(group, reverse=True)[:2] if group[1:] else (group[0], 0.0)
    if response.score != first or first == second:
        return 0.0
    deviation = statistics.stdev(group) if group[1:] else 1.0
    return (first - second) / (deviation + 1e-6 if divided else 1)


def slow_estimate(name: str, responses: list[Response]) -> tuple[Grid, Grid]:
    groups = [
        [other.score for other in responses if other.uid == response.uid] for response in responses
    ]
    pairs = list(zip(responses, groups, strict=True))

    def spread(score_of: Callable[[Response, list[float]], float]) -> Grid:
        return [[score_of(response, group)] * len(response.rewards) for response, group in pairs]

    def centre(response: Response, group: list[float]) -> float:
        return response.score - (statistics.fmean(group) if len(group) > 1 else 0)

    if name == "gae":
        raw = [slow_gae(response) for response in responses]
        both = zip(raw, responses, strict=True)
        return whiten_all(raw), [
            [a + v for a, v in zip(row, r.values, strict=True)] for row, r in both
        ]
    if name == "remax":
        returns = [slow_returns(response, 1.0) for response in responses]
        return [
            [x - r.baseline for x in row] for row, r in zip(returns, responses, strict=True)
        ], returns
    if name == "reinforce_plus_plus":
        returns = [slow_returns(response, GAMMA) for response in responses]
        return whiten_all(returns), returns
    if name in ("rloo", "rloo_vectorized"):

        def leave_one_out(response: Response, group: list[float]) -> float:
            others = list(group)
            others.remove(response.score)
            return response.score - (statistics.fmean(others) if others else 0)

        result = spread(leave_one_out)
    elif name == "opo":

        def below_weighted_mean(response: Response, group: list[float]) -> float:
            members = [other for other in responses if other.uid == response.uid]
            total = sum(len(other.rewards) * other.score for other in members)
            baseline = total / sum(len(other.rewards) for other in members)
            return response.score - (baseline if group[1:] else 0)

        result = spread(below_weighted_mean)
    elif name == "gpg":
        growth = len(responses) / sum(response.score != 0 for response in responses)
        result = spread(lambda r, group: growth * centre(r, group))
    elif name.endswith("passk"):
        result = spread(lambda r, group: slow_lead(r, group, divided=name == "grpo_passk"))
    elif name in ("grpo", "grpo_vectorized"):
        result = spread(
            lambda r, group: (
                centre(r, group) / ((statistics.stdev(group) if group[1:] else 1) + 1e-6)
            )
        )
    elif name == "dr_grpo":
        result = spread(centre)
    else:
        result = whiten_all(spread(centre))
    return result, result


def responses_of(rollouts: Rollouts) -> list[Response]:
    rows = zip(*(rollouts[i].tolist() for i in range(5)), strict=True)
    return [
        Response(
            [x for x, kept in zip(rewards, mask, strict=True) if kept],
            [x for x, kept in zip(values, mask, strict=True) if kept],
            uid,
            baseline,
        )
        for rewards, values, mask, uid, baseline in rows
        if any(mask)
    ]


def laid_out(rows: Grid, mask: Tensor) -> Tensor:
    result = torch.zeros(mask.shape, dtype=torch.float64)
    result[mask.bool()] = tensor([number for row in rows for number in row])
    return result


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_agrees_with_the_slow_version_on_ragged_rollouts(name: str, seed: int) -> None:
    rollouts = random_rollouts(seed)
    slow_advantages, slow_returns_ = slow_estimate(name, responses_of(rollouts))
    advantages, returns = estimate(name, rollouts)
    torch.testing.assert_close(
        advantages, laid_out(slow_advantages, rollouts.mask), rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(
        returns, laid_out(slow_returns_, rollouts.mask), rtol=1e-10, atol=1e-10
    )


# What must not matter


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e300])
def test_what_masked_tokens_hold_changes_nothing(name: str, garbage: float) -> None:
    rollouts = random_rollouts(0)
    dirty = rollouts._replace(
        rewards=torch.where(rollouts.mask.bool(), rollouts.rewards, garbage),
        values=torch.where(rollouts.mask.bool(), rollouts.values, garbage),
    )
    for clean_result, dirty_result in zip(
        estimate(name, rollouts), estimate(name, dirty), strict=True
    ):
        assert torch.equal(clean_result, dirty_result)
        assert (dirty_result[rollouts.mask == 0] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_rows_change_nothing_even_with_a_groups_id(name: str) -> None:
    rollouts = random_rollouts(1)
    assert not rollouts.mask[-1].any() and rollouts.index[-1] in rollouts.index[:-1]
    without = Rollouts(*(column[:-1] for column in rollouts))
    for padded, plain in zip(estimate(name, rollouts), estimate(name, without), strict=True):
        torch.testing.assert_close(padded[:-1], plain, rtol=0, atol=1e-12)
        assert (padded[-1] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_rows_and_columns_of_padding_do_not_matter(name: str) -> None:
    rollouts = random_rollouts(2)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    wider = [torch.cat([column, column.new_full((9, 3), 0)], dim=1) for column in rollouts[:3]]
    moved = Rollouts(
        *(column[order] for column in wider),
        rollouts.index[order.numpy()],
        rollouts.baselines[order],
    )
    for there, here in zip(estimate(name, moved), estimate(name, rollouts), strict=True):
        torch.testing.assert_close(there[:, :-3], here[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_of_nothing_but_padding_gives_zeros(name: str) -> None:
    rollouts = random_rollouts(3)
    for result in estimate(name, rollouts._replace(mask=torch.zeros_like(rollouts.mask))):
        assert (result == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_float32_stays_float32_and_no_gradient_flows(name: str) -> None:
    rollouts = random_rollouts(4)
    single = rollouts._replace(
        rewards=rollouts.rewards.float().requires_grad_(),
        values=rollouts.values.float().requires_grad_(),
        baselines=rollouts.baselines.float(),
    )
    for result in estimate(name, single):
        assert result.dtype == torch.float32 and not result.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.1, 10.1, 1 / 3, 123456.7])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_scores_give_advantages_of_exactly_zero(
    name: str, score: float, dtype: torch.dtype
) -> None:
    num_rows, width = 24, 5
    mask = (torch.arange(width) < torch.tensor([3, 5, 4]).repeat(8)[:, None]).long()
    is_last = torch.arange(width) == mask.sum(dim=1, keepdim=True) - 1
    rewards = torch.where(is_last, score, 0.0).to(dtype)
    index = np.repeat(np.array(["a", "b", "c"], dtype=object), 8)
    rollouts = Rollouts(rewards, torch.full_like(rewards, 0.3), mask, index, rewards.sum(dim=1))
    advantages, _ = estimate(name, rollouts, gamma=1.0, lam=1.0)
    assert advantages.shape == (num_rows, width) and (advantages == 0).all()


@pytest.mark.parametrize(
    ("name", "missing"),
    [("gae", "values"), ("grpo", "index"), ("rloo", "index"), ("remax", "reward_baselines")],
)
def test_a_missing_input_is_named(name: str, missing: str) -> None:
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{missing}'"):
        compute_advantage(
            name, torch.ones(1, 1), torch.ones(1, 1), gamma=1, lam=1, norm_adv_by_std_in_grpo=True
        )


def test_wrong_names_and_sizes_are_refused() -> None:
    ones = torch.ones(2, 1)
    with pytest.raises(ValueError, match="must be one of gae, grpo"):
        compute_advantage("gea", ones, ones, gamma=1, lam=1, norm_adv_by_std_in_grpo=True)
    with pytest.raises(DataError, match="1 group ids for 2 rows"):
        compute_rloo_outcome_advantage(ones, ones, np.array(["a"], dtype=object))
