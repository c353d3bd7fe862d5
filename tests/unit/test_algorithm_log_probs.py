"""Log-probabilities and entropies from logits: right and stable."""

import math

import pytest
import torch
from torch import Tensor

from rolepool.algorithm import entropy_from_logits, logprobs_from_logits


def random_logits(*shape: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_worked_out_by_hand() -> None:
    # Probabilities 1/4, 1/4, 1/2: entropy 2 * 1/4 * log 4 + 1/2 * log 2 = 1.5 log 2.
    logits = torch.tensor([[0.0, 0.0, math.log(2)]], dtype=torch.float64)
    assert logprobs_from_logits(logits, torch.tensor([2])).item() == pytest.approx(math.log(0.5), rel=1e-15)
    assert logprobs_from_logits(logits, torch.tensor([0])).item() == pytest.approx(math.log(0.25), rel=1e-15)
    assert entropy_from_logits(logits).item() == pytest.approx(1.5 * math.log(2), rel=1e-15)


def test_gradients_agree_with_finite_differences() -> None:
    logits, labels = random_logits(2, 3, 4).requires_grad_(), torch.tensor([[0, 1, 2], [3, 3, 0]])
    assert torch.autograd.gradcheck(lambda z: logprobs_from_logits(z, labels), logits)
    assert torch.autograd.gradcheck(entropy_from_logits, logits)


def test_a_slice_of_a_larger_tensor_will_do() -> None:
    whole = random_logits(3, 6, 5)
    part, labels = whole[:, 2:-1], torch.ones(3, 3, dtype=torch.long)
    assert torch.equal(logprobs_from_logits(part, labels), logprobs_from_logits(part.contiguous(), labels))
    assert torch.equal(entropy_from_logits(part), entropy_from_logits(part.contiguous()))


def test_huge_and_forbidden_logits_are_no_trouble() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-math.inf, 0.0, 0.0]], requires_grad=True)
    results = logprobs_from_logits(logits, torch.tensor([0, 1])), entropy_from_logits(logits)
    torch.testing.assert_close(results[0], torch.tensor([0.0, -math.log(2)]))
    torch.testing.assert_close(results[1], torch.tensor([0.0, math.log(2)]))
    for result in results:
        (gradient,) = torch.autograd.grad(result.sum(), logits)
        assert gradient.isfinite().all()


def test_a_nearly_certain_token_keeps_its_digits() -> None:
    # log p = -log(1 + e^-14), about -8e-7, from logits near 1000 where float32 resolves only 6e-5.
    logits = torch.tensor([[1000.0, 986.0]])
    assert logprobs_from_logits(logits, torch.tensor([0])).item() == pytest.approx(-math.log1p(math.exp(-14)), rel=1e-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = random_logits(4, 50).to(dtype).requires_grad_(), torch.tensor([0, 1, 2, 3])
    exact = logits.detach().double()
    chosen, entropy = logprobs_from_logits(logits, labels), entropy_from_logits(logits)
    assert chosen.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(chosen.double(), logprobs_from_logits(exact, labels), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), entropy_from_logits(exact), rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(chosen.sum() + entropy.sum(), logits)
    assert gradient.dtype == dtype


def test_an_empty_batch_is_a_batch() -> None:
    logits = torch.zeros(0, 3, 5, requires_grad=True)
    assert logprobs_from_logits(logits, torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)
    assert entropy_from_logits(torch.zeros(2, 0, 5)).shape == (2, 0)
