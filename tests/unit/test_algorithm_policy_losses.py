"""The policy losses besides PPO's own: by hand, and against loops over tokens, with their gradients
as formulas."""

import math
import pickle
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from mini_batches import (
    COV_HIGH,
    COV_LOW,
    HIGH,
    KL_COEF,
    LOW,
    MODES,
    MiniBatch,
    cut_up,
    gradient_of,
    kept_tokens,
    loss_named,
    random_mini_batch,
)
from torch import Tensor

from rolepool.algorithm.losses import LossCounts
from rolepool.config.functions import POLICY_LOSSES, policy_losses
from rolepool.errors import ConfigError

NAMES = tuple(name for name in POLICY_LOSSES if name != "vanilla")
KL_COV_RATIO = 0.2
CLIPPED_METRICS = {"pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"}
METRICS = {
    "gspo": CLIPPED_METRICS,
    "gpg": set(),
    "clip_cov": {"pg_clipfrac", "ppo_kl"},
    "kl_cov": {"ppo_kl"},
    "geo_mean": CLIPPED_METRICS,
    "cispo": CLIPPED_METRICS,
}


def one_row(*tokens: tuple[float, float, float]) -> MiniBatch:
    """A response whose tokens have this old probability, new probability and advantage."""
    old, new, advantages = (
        torch.tensor([column], dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    return MiniBatch(old.log(), new.log(), advantages, torch.ones(1, len(tokens)))


def assert_close(result: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(
        result, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


# By hand


def test_gspo_has_one_ratio_for_the_sequence_and_a_gradient_for_each_token() -> None:
    # Ratios 2 and 0.605: the geometric mean is 1.1, inside of the clip range. L = -A * 1.1, and the
    # gradient of each token is -A * 1.1 / 2, because the mean over tokens divides by 2.
    inside = one_row((0.1, 0.2, 1.0), (0.4, 0.4 * 0.605, -2.0))
    loss, metrics = loss_named("gspo")(inside, "token-mean", None)
    assert loss.item() == pytest.approx((-1.1 + 2.2) / 2, rel=1e-12)
    assert_close(gradient_of(loss_named("gspo"), inside, "token-mean"), [[-0.55, 1.1]])
    assert metrics["pg_clipfrac"] == 0 and metrics["pg_clipfrac_lower"] == 0
    # Ratios 2 and 2: only the token with a positive advantage is clipped, to 1.28.
    outside = one_row((0.1, 0.2, 1.0), (0.1, 0.2, -1.0))
    loss, metrics = loss_named("gspo")(outside, "token-mean", None)
    assert loss.item() == pytest.approx((-1.28 + 2) / 2, rel=1e-12)
    assert_close(gradient_of(loss_named("gspo"), outside, "token-mean"), [[0, 1]])
    assert metrics["pg_clipfrac"] == 0.5 and metrics["ppo_kl"].item() == pytest.approx(-math.log(2))


def test_the_ratio_of_gspo_is_at_most_exp_10_and_has_no_gradient_there() -> None:
    batch = one_row((math.exp(-13), math.exp(-1), -1.0))  # the ratio is exp(12)
    assert loss_named("gspo")(batch, "token-sum", None)[0].item() == pytest.approx(
        math.exp(10), rel=1e-12
    )
    assert_close(gradient_of(loss_named("gspo"), batch, "token-sum"), [[0]])


GSPO_ROWS = [[(0.0, math.log(1.1), 1.0), (0.0, math.log(1.1), 1.0)], [(0.0, 0.0, 2.0)]]
"""A sequence of two tokens with ratio 1.1 and advantage 1, and one of a token with ratio 1 and
advantage 2. No token is clipped, so the losses of the tokens are -1.1, -1.1 and -2."""


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", -(1.1 + 1.1 + 2) / 3),
        ("token-sum", -(1.1 + 1.1 + 2)),
        ("seq-mean-token-sum", -(1.1 + 1.1 + 2) / 2),
        ("seq-mean-token-mean", -(1.1 + 2) / 2),
        ("seq-mean-token-sum-norm", -(1.1 + 1.1 + 2) / 2 / 7),
    ],
)
def test_gspo_is_aggregated_as_loss_agg_mode_says(mode: str, expected: float) -> None:
    tokens = torch.zeros(2, 2, 3, dtype=torch.float64)
    for row, values in enumerate(GSPO_ROWS):
        tokens[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    batch = MiniBatch(*tokens.unbind(dim=-1), torch.tensor([[1, 1], [1, 0]]))
    loss, _ = loss_named("gspo")(batch, mode, LossCounts.of(batch.mask, 7.0))
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_gpg_is_reinforce() -> None:
    batch = one_row((0.5, 0.25, 3.0), (0.5, 0.5, -1.0))
    loss, metrics = loss_named("gpg")(batch, "token-mean", None)
    assert (
        loss.item() == pytest.approx((3 * math.log(4) - math.log(2)) / 2, rel=1e-12)
        and metrics == {}
    )
    assert_close(gradient_of(loss_named("gpg"), batch, "token-mean"), [[-1.5, 0.5]])


def test_geo_mean_clips_each_token_and_takes_the_geometric_mean() -> None:
    # d = log 2 and log 0.5. With A > 0 the first is held at 0.28 and the second is not: exp((0.28 -
    # log 2) / 2).
    good = one_row((0.2, 0.4, 1.0), (0.4, 0.2, 1.0))
    ratio = math.exp((0.28 - math.log(2)) / 2)
    loss, metrics = loss_named("geo_mean")(good, "token-sum", None)
    assert loss.item() == pytest.approx(-ratio, rel=1e-12)
    assert_close(gradient_of(loss_named("geo_mean"), good, "token-sum"), [[0, -ratio / 2]])
    assert metrics["pg_clipfrac"] == 1 and metrics["pg_clipfrac_lower"] == 0
    # With A < 0 the first is not held, and the second is held at -0.2.
    bad = good._replace(advantages=-2 * good.advantages)
    ratio = math.exp((math.log(2) - 0.2) / 2)
    loss, metrics = loss_named("geo_mean")(bad, "token-sum", None)
    assert loss.item() == pytest.approx(2 * ratio, rel=1e-12)
    assert_close(gradient_of(loss_named("geo_mean"), bad, "token-sum"), [[ratio, 0]])
    assert metrics["pg_clipfrac"] == 0 and metrics["pg_clipfrac_lower"] == 1


def test_cispo_clips_the_weight_but_not_the_gradient() -> None:
    batch = one_row((0.2, 0.4, 1.0), (0.4, 0.2, 1.0), (0.5, 0.5, -1.0))
    loss, metrics = loss_named("cispo")(batch, "token-sum", None)
    expected = -1.28 * math.log(0.4) - 0.8 * math.log(0.2) + math.log(0.5)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert_close(gradient_of(loss_named("cispo"), batch, "token-sum"), [[-1.28, -0.8, 1]])
    assert (
        metrics["pg_clipfrac"].item() == pytest.approx(2 / 3) and metrics["pg_clipfrac_lower"] == 0
    )


def test_kl_cov_adds_a_kl_term_to_the_token_of_largest_covariance() -> None:
    # Advantages 3, 0, 0 have mean 1. Log-probs -1, -2, -3 have mean -2. Covariances: 2 * 1, -1 * 0,
    # -1 * -1.
    advantages, new = (
        torch.tensor([[3.0, 0.0, 0.0]]).double(),
        torch.tensor([[-1.0, -2.0, -3.0]]).double(),
    )
    batch = MiniBatch(new - math.log(2), new, advantages, torch.ones(1, 3))  # all ratios are 2
    loss, metrics = loss_named("kl_cov")(batch, "token-sum", None)
    assert loss.item() == pytest.approx(-3 * 2 + KL_COEF * math.log(2), rel=1e-12)
    assert_close(gradient_of(loss_named("kl_cov"), batch, "token-sum"), [[-6 + KL_COEF, 0, 0]])
    assert metrics["ppo_kl"].item() == pytest.approx(math.log(2))


def test_clip_cov_removes_tokens_inside_of_the_band() -> None:
    # The same covariances 2, 0 and 1; the band is 0.05 to 1.5, so only the third token can go. All
    # ratios are 1.
    advantages, new = (
        torch.tensor([[3.0, 0.0, 0.0]]).double() + 1,
        torch.tensor([[-1.0, -2.0, -3.0]]).double(),
    )
    batch = MiniBatch(new, new, advantages, torch.ones(1, 3))
    loss, metrics = loss_named("clip_cov")(batch, "token-sum", None)
    assert loss.item() == -4 - 1
    assert_close(gradient_of(loss_named("clip_cov"), batch, "token-sum"), [[-4, -1, 0]])
    assert metrics["pg_clipfrac"].item() == pytest.approx(1 / 3)


# Against loops over tokens


class Token(NamedTuple):
    """The loss of one token, its derivative with respect to the token's own log-prob, and the
    token's metrics."""

    loss: float
    slope: float
    metrics: dict[str, float]


Row = list[tuple[float, float, float]]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def slow_clipped(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """PPO's clipped objective as a loss, its slope, and whether the clipped term was used."""
    clipped_ratio = clip(ratio, 1 - LOW, 1 + HIGH)
    is_clipped = clipped_ratio * advantage < ratio * advantage
    return (
        -advantage * (clipped_ratio if is_clipped else ratio),
        0.0 if is_clipped else -advantage * ratio,
        is_clipped,
    )


def slow_gspo(rows: list[Row]) -> Iterator[list[Token]]:
    for row in rows:
        ratio = math.exp(min(sum(new - old for old, new, _ in row) / len(row), 10))
        tokens = []
        for old, new, advantage in row:
            loss, slope, is_clipped = slow_clipped(ratio, advantage)
            metrics = {
                "pg_clipfrac": float(is_clipped),
                "ppo_kl": old - new,
                "pg_clipfrac_lower": 0.0,
            }
            tokens.append(Token(loss, slope, metrics))
        yield tokens


def slow_gpg(rows: list[Row]) -> Iterator[list[Token]]:
    for row in rows:
        yield [Token(-advantage * new, -advantage, {}) for _, new, advantage in row]


def slow_cispo(rows: list[Row]) -> Iterator[list[Token]]:
    for row in rows:
        tokens = []
        for old, new, advantage in row:
            ratio = math.exp(new - old)
            weight = clip(ratio, 1 - LOW, 1 + HIGH)
            metrics = {
                "pg_clipfrac": float(weight != ratio),
                "ppo_kl": old - new,
                "pg_clipfrac_lower": 0.0,
            }
            tokens.append(Token(-advantage * weight * new, -advantage * weight, metrics))
        yield tokens


def slow_geo_mean(rows: list[Row]) -> Iterator[list[Token]]:
    for row in rows:
        held, is_free = [], []
        for old, new, advantage in row:
            d, limited = new - old, clip(new - old, -LOW, HIGH)
            used = min(d, limited) if advantage > 0 else max(d, limited)
            held.append(used)
            is_free.append(used == d)
        advantage_of_row = sum(advantage for *_, advantage in row) / len(row)
        loss = -advantage_of_row * math.exp(sum(held) / len(row))
        tokens = []
        for (old, new, advantage), free in zip(row, is_free, strict=True):
            is_outside = not -LOW <= new - old <= HIGH
            metrics = {
                "pg_clipfrac": float(is_outside and advantage > 0),
                "ppo_kl": old - new,
                "pg_clipfrac_lower": float(is_outside and advantage < 0),
            }
            tokens.append(Token(loss, loss if free else 0.0, metrics))
        yield tokens


def slow_covariances(rows: list[Row]) -> dict[tuple[int, int], float]:
    tokens = [token for row in rows for token in row]
    mean_new = sum(new for _, new, _ in tokens) / len(tokens)
    mean_advantage = sum(advantage for *_, advantage in tokens) / len(tokens)
    return {
        (i, t): (advantage - mean_advantage) * (new - mean_new)
        for i, row in enumerate(rows)
        for t, (_, new, advantage) in enumerate(row)
    }


def slow_clip_cov(rows: list[Row]) -> Iterator[list[Token]]:
    """With clip_cov_ratio=1, so that all tokens of the band are removed."""
    covariances = slow_covariances(rows)
    for i, row in enumerate(rows):
        tokens = []
        for t, (old, new, advantage) in enumerate(row):
            loss, slope, is_clipped = slow_clipped(math.exp(new - old), advantage)
            is_removed = COV_LOW < covariances[i, t] < COV_HIGH and not is_clipped
            metrics = {"pg_clipfrac": float(is_removed), "ppo_kl": old - new}
            tokens.append(Token(0.0, 0.0, metrics) if is_removed else Token(loss, slope, metrics))
        yield tokens


def slow_kl_cov(rows: list[Row]) -> Iterator[list[Token]]:
    covariances = slow_covariances(rows)
    num_chosen = max(1, int(KL_COV_RATIO * len(covariances)))
    chosen = sorted(covariances, key=lambda place: covariances[place], reverse=True)[:num_chosen]
    for i, row in enumerate(rows):
        tokens = []
        for t, (old, new, advantage) in enumerate(row):
            loss = slope = -advantage * math.exp(new - old)
            if (i, t) in chosen:
                loss += KL_COEF * abs(new - old)
                slope += KL_COEF * math.copysign(1, new - old)
            tokens.append(Token(loss, slope, {"ppo_kl": abs(new - old)}))
        yield tokens


SLOW = {
    "gspo": slow_gspo,
    "gpg": slow_gpg,
    "clip_cov": slow_clip_cov,
    "kl_cov": slow_kl_cov,
    "geo_mean": slow_geo_mean,
    "cispo": slow_cispo,
}


def assert_agrees(name: str, batch: MiniBatch, mode: str, counts: LossCounts) -> None:
    """Compare loss, gradient and metrics of these rows, as a share of a mini-batch with these
    counts."""
    rows = list(kept_tokens(batch))
    tokens = list(SLOW[name](rows)) if rows else []
    used = "seq-mean-token-mean" if name == "geo_mean" else mode
    expected_loss, expected_gradient = 0.0, torch.zeros_like(batch.new)
    places = iter(batch.mask.nonzero().tolist())
    for row in tokens:
        weight = {
            "token-mean": 1 / counts.num_tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / counts.num_sequences,
            "seq-mean-token-mean": 1 / counts.num_sequences / len(row),
            "seq-mean-token-sum-norm": 1 / counts.num_sequences / counts.loss_scale_factor,
        }[used]
        for token in row:
            expected_loss += weight * token.loss
            i, t = next(places)
            expected_gradient[i, t] = weight * token.slope
    loss, metrics = loss_named(name)(batch, mode, counts)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-11, abs=1e-13)
    gradient = gradient_of(loss_named(name), batch, mode, counts)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-13)
    assert set(metrics) == METRICS[name]
    for key, metric in metrics.items():
        share = sum(token.metrics[key] for row in tokens for token in row) / counts.num_tokens
        assert metric.item() == pytest.approx(share, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_a_loop_over_tokens(name: str, seed: int, mode: str) -> None:
    batch = random_mini_batch(seed)
    assert_agrees(name, batch, mode, LossCounts.of(batch.mask))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_each_micro_batch_agrees_with_a_loop_over_its_tokens(
    name: str, seed: int, mode: str
) -> None:
    batch = random_mini_batch(seed)
    counts = LossCounts.of(batch.mask, 12.0)
    for _, part in cut_up(batch, seed):
        assert_agrees(name, part, mode, counts)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_masked_tokens_are_never_chosen_even_if_zeros_would_have_the_largest_covariance(
    name: str,
) -> None:
    batch = random_mini_batch(0)
    batch = MiniBatch(batch.old - 9, batch.new - 9, batch.advantages - 9, batch.mask)
    assert_agrees(name, batch, "token-mean", LossCounts.of(batch.mask))


@pytest.mark.parametrize("name", NAMES)
def test_the_random_rows_meet_every_clip_and_band(name: str) -> None:
    _, metrics = loss_named(name)(random_mini_batch(0), "token-mean", None)
    for key in METRICS[name] - {"ppo_kl"}:
        assert 0 < metrics[key] < 1 or (key == "pg_clipfrac_lower" and name != "geo_mean")


# Which tokens clip_cov and kl_cov choose


def removed(batch: MiniBatch, *overrides: str) -> set[tuple[int, ...]]:
    """The kept tokens that clip_cov takes out, with a clip range so wide that no other token is
    without a gradient."""
    wide = ("clip_cov_lb=-100", "clip_cov_ub=100", *overrides)
    batch = batch._replace(new=batch.old + 0.01 * batch.new)
    without_gradient = gradient_of(loss_named("clip_cov", *wide), batch, "token-mean") == 0
    return {tuple(place) for place in (without_gradient & (batch.mask != 0)).nonzero().tolist()}


@pytest.mark.parametrize(("ratio", "num_removed"), [(1e-9, 1), (0.1, 2), (0.5, 12), (1, 25)])
def test_clip_cov_removes_a_fraction_of_the_tokens_but_at_least_one(
    ratio: float, num_removed: int
) -> None:
    batch = random_mini_batch(0)
    assert int(batch.mask.sum()) == 25
    assert len(removed(batch, f"clip_cov_ratio={ratio}")) == num_removed


def test_what_clip_cov_removes_depends_on_neither_the_random_state_nor_the_padding() -> None:
    batch = random_mini_batch(0)
    torch.manual_seed(1)
    first = removed(batch, "clip_cov_ratio=0.2")
    torch.manual_seed(2)
    assert removed(batch, "clip_cov_ratio=0.2") == first
    wider = MiniBatch(*(torch.cat([column, column[:, :2] * 0], dim=1) for column in batch))
    taller = MiniBatch(*(torch.cat([column, column[:2] * 0]) for column in wider))
    assert removed(taller, "clip_cov_ratio=0.2") == first


def test_clip_cov_chooses_from_all_places() -> None:
    seen = set()
    for width in range(1, 60):
        ones = torch.ones(1, width, dtype=torch.float64)
        batch = MiniBatch(-torch.linspace(1, 2, width).double()[None], -3 * ones, ones, ones)
        ((_, place),) = removed(batch, "clip_cov_ratio=1e-9")
        seen.add(10 * place // width)
    assert seen == set(range(10))


def test_kl_cov_chooses_one_token_of_a_large_batch_but_one_of_each_micro_batch() -> None:
    advantages = torch.linspace(-2, 3, 8192, dtype=torch.float64).reshape(64, 128)
    new = advantages.square() * 0.1 - 4
    batch = MiniBatch(new - 1, new, advantages, torch.ones_like(new))
    with_term, without = (
        loss_named("kl_cov", "kl_cov_ratio=0.0002"),
        loss_named("kl_cov", "ppo_kl_coef=0"),
    )

    def num_chosen(part: MiniBatch) -> int:
        counts = LossCounts.of(batch.mask)
        difference = with_term(part, "token-sum", counts)[0] - without(part, "token-sum", counts)[0]
        return round(difference.item() / KL_COEF)

    assert num_chosen(batch) == 1
    assert [num_chosen(batch.take(rows)) for rows in torch.arange(64).chunk(8)] == [1] * 8


# In a run


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_reaches_worker_processes_by_its_name(name: str) -> None:
    loss = policy_losses.find(name)
    assert pickle.loads(pickle.dumps(loss)) is loss  # noqa: S301
    assert (
        policy_losses.find(f"rolepool.algorithm.policy_losses:compute_policy_loss_{name}") is loss
    )
    assert loss.__doc__ is not None and "L" in loss.__doc__


@pytest.mark.parametrize(
    "override",
    ["loss_mode=gsop", "clip_cov_ratio=0", "kl_cov_ratio=1.5", "ppo_kl_coef=-1", "clip_cov_lb=nan"],
)
def test_wrong_keys_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=f"policy_loss.{override.partition('=')[0]}"):
        loss_named("gspo", override)
