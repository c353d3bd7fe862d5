"""KL estimators, the penalty in the reward, and the controllers of its coefficient."""

import math

import pytest
import torch

from rolepool.algorithm.advantages import KLController, apply_kl_penalty
from rolepool.algorithm.losses import kl_penalty
from rolepool.config.run_keys import KlCtrlConfig
from rolepool.errors import ConfigError

NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
WITH_PLUS = tuple(f"{name}+" for name in NAMES)


def k3(difference: float) -> float:
    return math.exp(-difference) - 1 + difference


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("kl", "k1"), [0.5, -2.0]),
        (("abs",), [0.5, 2.0]),
        (("mse", "k2"), [0.125, 2.0]),
        (("low_var_kl", "k3"), [math.exp(-0.5) - 0.5, math.exp(2) - 3]),
    ],
)
def test_worked_out_by_hand(names: tuple[str, ...], expected: list[float]) -> None:
    logprob = torch.tensor([-1.0, -3.0], dtype=torch.float64)
    ref = torch.tensor([-1.5, -1.0], dtype=torch.float64)  # log p - log q = 0.5 and -2
    for name in names:
        assert kl_penalty(logprob, ref, name).tolist() == pytest.approx(expected, rel=1e-14)


def test_k1_and_k3_are_unbiased() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    kl = (p * (p / q).log()).sum().item()
    for name in ("k1", "k3"):
        assert (p * kl_penalty(p.log(), q.log(), name)).sum().item() == pytest.approx(kl, rel=1e-13)


def test_k3_is_clamped_keeps_small_digits_and_is_never_negative() -> None:
    difference = torch.tensor([-1000.0, -30.0, 30.0, 1000.0, 1e-7, 0.0], dtype=torch.float64)
    result = kl_penalty(difference, torch.zeros_like(difference), "k3").tolist()
    assert result[:4] == [10, 10, 10, 10]
    assert result[4] == pytest.approx(
        0.5e-14, rel=1e-5, abs=0
    )  # d^2 / 2, which exp(-d) - 1 + d would lose
    assert result[5] == 0


def test_k3_at_its_cap_has_no_gradient() -> None:
    difference = torch.tensor(
        [-2.7, -2.5, 0.0, 10.9, 11.1], dtype=torch.float64, requires_grad=True
    )
    kl_penalty(difference, torch.zeros_like(difference), "k3").sum().backward()
    expected = [0, 1 - math.exp(2.5), 0, 1 - math.exp(-10.9), 0]
    assert difference.grad is not None and difference.grad.tolist() == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logprob, ref = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, name), logprob.requires_grad_())


@pytest.mark.parametrize("name", WITH_PLUS)
def test_with_a_plus_the_value_stays_and_the_gradient_is_the_difference(name: str) -> None:
    logprob = torch.tensor([-3.0, -1.0, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(
        [0.0, -1.5, -1.5, 0.0], dtype=torch.float64
    )  # log p - log q = -3, 0.5, 2, 0; k3 is at its cap
    estimate = kl_penalty(logprob, ref, name)
    assert torch.equal(estimate, kl_penalty(logprob, ref, name[:-1]))
    (gradient,) = torch.autograd.grad(estimate.sum(), logprob)
    assert gradient.tolist() == pytest.approx([-3.0, 0.5, 2.0, 0.0], rel=1e-14)


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="unknown KL estimator"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k3++")


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, 1e300])
def test_rewards_and_current_kl_by_hand(garbage: float) -> None:
    x = garbage
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    scores = torch.tensor([[0.0, x, 1.0], [2.0, x, x], [x, x, x]], dtype=torch.float64)
    old = torch.tensor([[-1.0, x, -2.0], [-1.0, x, x], [x, x, x]], dtype=torch.float64)
    ref = torch.tensor([[-1.5, x, -2.1], [-1.4, x, x], [x, x, x]], dtype=torch.float64)
    # KL 0.5 and 0.1 in the first response (mean 0.3), 0.4 in the second: current_kl = (0.3 + 0.4) /
    # 2.
    rewards, current_kl = apply_kl_penalty(scores, old, ref, mask, 0.1, "kl")
    expected = torch.tensor([[-0.05, 0, 0.99], [1.96, 0, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(rewards, expected, rtol=0, atol=1e-12)
    assert current_kl.item() == pytest.approx(0.35, rel=1e-14)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", NAMES + WITH_PLUS)
def test_apply_kl_penalty_agrees_with_a_loop(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, old, ref = torch.randn(3, 5, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 6, generator=generator) < 0.5
    mask[-1] = False
    estimators = {
        "kl": lambda d: d,
        "abs": abs,
        "mse": lambda d: d * d / 2,
        "low_var_kl": lambda d: min(k3(d), 10.0),
    }
    base = name.removesuffix("+")
    estimator = estimators[{"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(base, base)]
    expected, means = torch.zeros_like(scores), []
    for i in range(5):
        kls = {t: estimator((old[i, t] - ref[i, t]).item()) for t in range(6) if mask[i, t]}
        for t, kl in kls.items():
            expected[i, t] = scores[i, t] - 0.3 * kl
        if kls:
            means.append(sum(kls.values()) / len(kls))
    rewards, current_kl = apply_kl_penalty(scores, old, ref, mask, 0.3, name)
    torch.testing.assert_close(rewards, expected, rtol=0, atol=1e-12)
    assert current_kl.item() == pytest.approx(sum(means) / len(means), rel=1e-12)


def test_a_fixed_coefficient_stays_what_the_configuration_says() -> None:
    controller = KLController(KlCtrlConfig(kl_coef=0.02, horizon=100))
    controller.update(5.0, 1_000_000)
    controller.restore(7.0)
    assert controller.value == 0.02


def adaptive(kl_coef: float = 0.1, horizon: int = 100) -> KLController:
    return KLController(
        KlCtrlConfig(type="adaptive", kl_coef=kl_coef, target_kl=0.1, horizon=horizon)
    )


def test_an_adaptive_coefficient_follows_the_target() -> None:
    controller = adaptive()
    controller.update(0.2, 50)  # the error of 1 is clipped to 0.2: 0.1 * (1 + 0.2 * 0.5)
    assert controller.value == pytest.approx(0.11)
    controller.update(0.01, 50)  # -0.9 is clipped to -0.2: 0.11 * 0.9
    assert controller.value == pytest.approx(0.099)
    controller.update(0.11, 50)  # 0.1 stays: 0.099 * 1.05
    assert controller.value == pytest.approx(0.10395)
    controller.update(0.1, 50)
    assert controller.value == pytest.approx(0.10395)


def test_an_adaptive_coefficient_resumes_where_it_was() -> None:
    first, second = adaptive(), adaptive(kl_coef=0.5)
    first.update(0.2, 50)
    second.restore(first.value)
    for controller in (first, second):
        controller.update(0.05, 30)
    assert first.value == second.value


@pytest.mark.parametrize("num_sequences", [500, 5000])
def test_a_step_that_could_turn_the_coefficients_sign_is_refused(num_sequences: int) -> None:
    with pytest.raises(ConfigError, match=f"horizon=100: too short for {num_sequences} sequences"):
        adaptive().update(0.1, num_sequences)
    controller = adaptive(horizon=num_sequences // 5 + 1)
    controller.update(0.0, num_sequences)
    assert controller.value > 0
