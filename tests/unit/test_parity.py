"""The measure of the parity check: the same for sure and for unsure models, small for rounding,
large for mistakes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolepool.models.parity import LIMITS, logit_error

NUM_ROWS, VOCAB_SIZE = 2000, 50


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, None]).squeeze(-1)


def sampled(temperature: float) -> tuple[Tensor, Tensor]:
    """Logits, and tokens that were sampled from them at this temperature."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(
        -1
    )
    return logits, tokens


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_errors_of_logits_are_measured_alike_however_sure_the_model_is(temperature: float) -> None:
    logits, tokens = sampled(temperature)
    noise = 0.05 * torch.randn(
        logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    ours = log_probs(logits / temperature, tokens)
    theirs = log_probs((logits + noise) / temperature, tokens)
    assert logit_error(theirs, ours, temperature) == pytest.approx(0.05, rel=0.25)
    assert logit_error(ours, ours, temperature) == 0


def test_the_mean_difference_alone_would_depend_on_how_sure_the_model_is() -> None:
    means = []
    for temperature in (0.1, 3.0):
        logits, tokens = sampled(temperature)
        noise = 0.05 * torch.randn(
            logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        theirs = log_probs((logits + noise) / temperature, tokens)
        means.append(float((theirs - log_probs(logits / temperature, tokens)).abs().mean()))
    assert max(means) > 3 * min(means)


def test_tokens_of_which_the_model_is_certain_are_no_error_of_their_own() -> None:
    """Rounding of log-probs near 0 is divided by next to nothing otherwise."""
    certain = torch.full((64,), -1e-9)
    assert logit_error(certain - 1e-6, certain, 1.0) < LIMITS["cpu"]


def test_numbers_that_are_none_are_an_error() -> None:
    assert (
        not logit_error(torch.tensor([float("nan")]), torch.tensor([-1.0]), 1.0) <= LIMITS["cuda"]
    )
    assert (
        not logit_error(torch.tensor([-float("inf")]), torch.tensor([-1.0]), 1.0) <= LIMITS["cuda"]
    )
