"""Log-probs and entropies from hidden states and the head: the same as from all logits, made some
at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from rolepool.models.packing import LinearLogProbs

TOKENS, SIZE, VOCABULARY = 7, 4, 11


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.arange(TOKENS) * 3 % VOCABULARY
    return (
        2 * random(TOKENS, SIZE).requires_grad_(),
        random(VOCABULARY, SIZE, seed=1).requires_grad_(),
        labels,
    )


def plain_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies as torch computes them."""
    tokens = Categorical(logits=logits)
    return tokens.log_prob(labels), tokens.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_logits", [1, VOCABULARY, 3 * VOCABULARY, 10_000])
def test_any_number_of_logits_at_a_time_gives_what_all_at_once_give(
    max_logits: int, temperature: float
) -> None:
    hidden, weight, labels = inputs()
    logits = hidden @ weight.T / temperature
    expected = plain_scores(logits, labels)
    found = LinearLogProbs(max_logits)(hidden, weight, labels, temperature)
    weights = random(2, TOKENS, seed=2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for kept in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        grads = [
            torch.autograd.grad(
                sum((k * w * s).sum() for k, w, s in zip(kept, weights, scores, strict=True)),
                (hidden, weight),
                retain_graph=True,
            )
            for scores in (found, expected)
        ]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    hidden, weight, labels = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: LinearLogProbs(2 * VOCABULARY)(h, w, labels, 0.8), (hidden, weight)
    )


def test_a_weight_that_is_also_the_embedding_gets_the_gradients_of_both() -> None:
    _, weight, labels = inputs()

    def loss(scores: tuple[Tensor, Tensor]) -> Tensor:
        return scores[0].sum() + 0.1 * scores[1].sum()

    embedded = weight[labels]
    (found,) = torch.autograd.grad(loss(LinearLogProbs(30)(embedded, weight, labels, 1.0)), weight)
    logits = weight[labels] @ weight.T
    (expected,) = torch.autograd.grad(loss(plain_scores(logits, labels)), weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_nothing_of_the_size_of_all_logits_is_kept_for_the_backward_pass() -> None:
    hidden, weight, labels = inputs()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        LinearLogProbs(VOCABULARY)(hidden, weight, labels, 1.0)
    assert kept and max(tensor.numel() for tensor in kept) < TOKENS * VOCABULARY


def test_forbidden_logits_nearly_certain_tokens_and_masked_nan_are_no_trouble() -> None:
    identity = torch.eye(3)
    rows = torch.tensor([[-math.inf, 0.0, 0.0], [1000.0, 986.0, -1e30], [math.nan, 0.0, 0.0]])

    def score(row: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return LinearLogProbs(3)(row, identity.requires_grad_(), labels, 1.0)

    finite = rows[1:2].clone().requires_grad_()
    log_probs, entropies = score(finite, torch.tensor([0]))
    assert log_probs.item() == pytest.approx(-math.log1p(math.exp(-14)), rel=1e-2)
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropies.sum(), finite)
    assert gradient.isfinite().all()
    # A product with infinity is NaN off the diagonal, so these logits are handed in by a head of
    # one column.
    head = torch.tensor([[-math.inf], [0.0], [0.0]])
    log_probs, entropies = LinearLogProbs(3)(torch.ones(1, 1), head, torch.tensor([1]), 1.0)
    torch.testing.assert_close(
        torch.cat((log_probs, entropies)), torch.tensor([-math.log(2), math.log(2)])
    )
    masked = rows[2:].clone().requires_grad_()
    log_probs, _ = score(masked, torch.tensor([1]))
    (gradient,) = torch.autograd.grad((log_probs * 0).sum(), masked)
    assert gradient.eq(0).all()


def test_half_precision_is_computed_in_float32_and_keeps_its_type_in_gradients() -> None:
    hidden, weight, labels = (tensor.detach() for tensor in inputs())
    short = hidden.to(torch.float16).requires_grad_(), weight.to(torch.float16).requires_grad_()
    found = LinearLogProbs(VOCABULARY)(*short, labels, 1.0)
    expected = LinearLogProbs(VOCABULARY)(
        *(tensor.detach().double() for tensor in short), labels, 1.0
    )
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=1e-2)
    assert {tensor.dtype for tensor in torch.autograd.grad(found[0].sum(), short)} == {
        torch.float16
    }


def test_no_tokens_are_tokens() -> None:
    hidden, weight, labels = inputs()
    log_probs, entropies = LinearLogProbs(5)(hidden[:0], weight, labels[:0], 1.0)
    assert log_probs.shape == entropies.shape == (0,)
    (gradient,) = torch.autograd.grad(log_probs.sum(), weight)
    assert gradient.eq(0).all()
