"""Whether two generations say the same, on any CPU.

CPUs round differently. If two tokens are so close that rounding decides between them, a tie, one
CPU chooses the one and another CPU the other, and the rest of that response differs. So a
difference is accepted if it begins with a tie. Few rows may have one: ties are rare, and an engine
that is wrong differs in many rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_contract import ROUNDING, forward_logits
from rolepool.rollout import Completion, Request, Sampling, generation
from rolepool.rollout.sampling import filter_logits, seed_streams, uniforms

NOISE = 1e-5
"""Added to logits in tests, up or down: more than the rounding of any CPU."""
MAX_TIES = 0.1
"""Rows that may differ, as a fraction; one row always may."""


def assert_same_completions(
    model: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    got: list[Completion],
    expected: list[Completion],
) -> None:
    """The same tokens, log-probs, reasons to end and versions, up to the first tie of a row."""
    all_same = assert_same_tokens(model, requests, sampling, token_ids(got), token_ids(expected))
    for num_same, one, other in zip(all_same, got, expected, strict=True):
        assert one.log_probs[:num_same] == pytest.approx(other.log_probs[:num_same], abs=ROUNDING)
        assert one.weights_version == other.weights_version
        if num_same == len(one.token_ids):
            assert one.finish_reason == other.finish_reason


def assert_same_tokens(
    model: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    got: list[list[int]],
    expected: list[list[int]],
) -> list[int]:
    """The same tokens, up to the first tie of a row; returns how many tokens of each row are the
    same."""
    all_same, tied = [], []
    for row, (request, one, other) in enumerate(zip(requests, got, expected, strict=True)):
        pairs = enumerate(zip(one, other, strict=False))
        num_same = next(
            (place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other))
        )
        all_same.append(num_same)
        if one == other:
            continue
        assert num_same < min(len(one), len(other)), (
            f"row {row} ends after {len(one)} and {len(other)} tokens"
        )
        candidates = (one[num_same], other[num_same])
        missing = [
            distance_to_choice(model, request, sampling, one[:num_same], token)
            for token in candidates
        ]
        assert max(missing) < ROUNDING, (
            f"row {row}, token {num_same}: {candidates[0]} and {candidates[1]} are chosen, "
            f"which miss being the right one by {missing[0]:.1e} and {missing[1]:.1e}"
        )
        tied.append(row)
    assert len(tied) <= max(1, MAX_TIES * len(got)), (
        f"rows {tied} of {len(got)} differ: too many to be ties"
    )
    return all_same


def distance_to_choice(
    model: Any, request: Request, sampling: Sampling, said: Sequence[int], token: int
) -> float:
    """By how much a token misses being chosen after `said`, by a plain forward of `model`; 0 if it
    is chosen."""
    logits_v = forward_logits(model, request, [*said, token])[-1]
    if sampling.is_greedy:
        return float(logits_v.max() - logits_v[token])
    cumulative_v = (
        filter_logits(logits_v[None], sampling)[0].double().softmax(dim=-1).cumsum(dim=-1)
    )
    target = uniforms(seed_streams([request.seed]), torch.tensor([len(said)]))[0]
    begin = cumulative_v[token - 1] if token else 0.0
    return max(0.0, float(begin - target), float(target - cumulative_v[token]))


def token_ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


@contextmanager
def noise_on_logits(scale: float, seed: int = 0) -> Iterator[None]:
    """Add pseudo-random numbers within `scale` to all logits that engines sample from, other ones
    in every step."""
    exact, generator = generation.choose, torch.Generator().manual_seed(seed)

    def noisy(logits_bv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        noise = 2 * torch.rand(logits_bv.shape, generator=generator, dtype=logits_bv.dtype) - 1
        return exact(logits_bv + scale * noise, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "choose", noisy)
        yield
