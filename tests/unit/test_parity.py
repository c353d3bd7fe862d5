"""The measure of the parity check: the same for sure and for unsure models, small for rounding,
large for mistakes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolepool.config import load_config
from rolepool.models.parity import LIMITS, Apart, logit_error
from rolepool.protocol.batches import ComparableTokens
from rolepool.protocol.columns import ragged
from rolepool.roles.actor_critic import Actor

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


# Which rows the actor compares


def compared(k: int, versions: list[int], mask: Tensor | None) -> Tensor | None:
    """The tokens that an actor compares whose weights were last sent as version 3."""
    actor = Actor.__new__(Actor)
    actor.config = load_config([], [f"algorithm.max_staleness={k}"]).config
    actor.weights_version = 3
    lengths = torch.tensor([2, 1, 3])
    log_probs = ragged(torch.rand(6), lengths)
    rows = ComparableTokens(
        input_ids=ragged(torch.zeros(6, dtype=torch.int64), lengths),
        num_prompt_tokens=torch.zeros(3, dtype=torch.int64),
        response_mask=None if mask is None else ragged(mask, lengths),
        rollout_log_probs=log_probs,
        weights_version=torch.tensor(versions),
    )
    return actor._compared_tokens(rows, log_probs)


def test_only_rows_of_the_present_weights_are_compared_if_others_may_be_older() -> None:
    assert compared(0, [3, 2, 3], None) is None, "without staleness an old version is an error"
    found = compared(1, [3, 2, 3], None)
    assert found is not None and found.tolist() == [True, True, False, True, True, True]
    sampled = torch.tensor([True, False, True, False, True, True])
    found = compared(1, [3, 2, 3], sampled)
    assert found is not None and found.tolist() == [True, False, False, False, True, True]
    found = compared(2, [1, 2, -1], None)
    assert found is not None and not found.any()


def test_if_no_row_is_compared_there_is_no_difference() -> None:
    apart = Apart()
    apart.add(torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bool))
    assert apart.read().logit_error(1.0) == 0
    assert Apart().read().logit_error(1.0) == 0
