"""The check that two generations say the same accepts ties, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rollout_native import GREEDY, SAMPLED, make_engine, make_model, make_requests
from torch import Tensor

from engine_contract import ROUNDING, forward_logits
from rolepool.rollout import Request, Sampling, generation
from rolepool.rollout.decoder import Decoder
from rolepool.rollout.kv_cache import SlotCache
from rolepool.rollout.sampling import seed_streams, uniforms
from same_tokens import assert_same_completions, assert_same_tokens, distance_to_choice

PROMPT = [1, 2, 3]


def nearest_tie(model: Any) -> tuple[Request, list[int]]:
    """The seed, of many, whose number is nearest to the border between two tokens of some
    probability, and the two."""
    seeds = list(range(20_000))
    probs = forward_logits(model, Request(PROMPT, 0), [0])[0].double().softmax(dim=-1)
    numbers = uniforms(seed_streams(seeds), torch.zeros(len(seeds), dtype=torch.int64))
    distances = (numbers[:, None] - probs.cumsum(dim=-1)[:-1]).abs()
    distances[:, torch.minimum(probs[:-1], probs[1:]) < 100 * ROUNDING] = 1.0
    seed, token = divmod(int(distances.argmin()), len(probs) - 1)
    return Request(PROMPT, seeds[seed]), [token, token + 1]


def test_two_tokens_between_which_rounding_decides_are_a_tie_and_what_follows_does_not_count() -> (
    None
):
    model = make_model()
    request, (one, other) = nearest_tie(model)
    assert (
        max(distance_to_choice(model, request, SAMPLED, [], token) for token in (one, other))
        < ROUNDING
    )
    assert assert_same_tokens(model, [request], SAMPLED, [[one, 5, 6]], [[other, 7]]) == [0]
    third = other + 1
    with pytest.raises(AssertionError, match=f"row 0, token 0: {one} and {third} are chosen"):
        assert_same_tokens(model, [request], SAMPLED, [[one, 5, 6]], [[third, 7]])


def test_few_rows_may_have_a_tie() -> None:
    model = make_model()
    request, (one, other) = nearest_tie(model)
    got, expected = [[one]] * 20, [[other]] * 2 + [[one]] * 18
    assert assert_same_tokens(model, [request] * 20, SAMPLED, got, expected) == [0] * 2 + [1] * 18
    with pytest.raises(AssertionError, match=r"rows \[0, 1, 2\] of 20 differ: too many"):
        assert_same_tokens(model, [request] * 20, SAMPLED, got, [[other]] * 3 + [[one]] * 17)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_token_that_an_engine_chooses_misses_by_nothing_and_others_by_more_than_rounding(
    sampling: Sampling,
) -> None:
    model, request = make_model(), make_requests()[3]
    (completion,) = make_engine(model).generate([request], sampling)
    said, token = completion.token_ids[:5], completion.token_ids[5]
    missing = [distance_to_choice(model, request, sampling, said, each) for each in range(97)]
    assert missing[token] == 0
    assert min(missing[:token] + missing[token + 1 :]) > ROUNDING


def test_a_response_that_only_ends_earlier_is_no_tie() -> None:
    with pytest.raises(AssertionError, match="row 0 ends after 2 and 3 tokens"):
        assert_same_tokens(make_model(), [Request(PROMPT, 0)], GREEDY, [[1, 2]], [[1, 2, 3]])


def test_threads_and_instructions_are_those_that_the_environment_names() -> None:
    """Else runs with the rounding of another CPU would say nothing."""
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    own = torch.backends.cpu.get_cpu_capability().lower()
    assert own == os.environ.get("ATEN_CPU_CAPABILITY", own)


# Engines that are wrong


def with_wrong_positions(patch: pytest.MonkeyPatch) -> None:
    """Every decode step of a row stands where the token before it does."""
    decode = Decoder.decode

    def wrong(self: Decoder, cache: Any, *, positions_b: Tensor, **inputs: Any) -> Tensor:
        return decode(self, cache, positions_b=positions_b - 1, **inputs)

    patch.setattr(Decoder, "decode", wrong)


def with_stale_slots(patch: pytest.MonkeyPatch) -> None:
    """A row that moves into a slot that is free finds the keys of the row that was there."""
    patch.setattr(SlotCache, "copy", lambda *_: None)


def with_seeds_by_row(patch: pytest.MonkeyPatch) -> None:
    """A sample depends on its place in the batch."""
    choose = generation.choose

    def wrong(
        logits: Tensor, streams: Tensor, steps: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        return choose(logits, streams + torch.arange(len(streams)), steps, sampling)

    patch.setattr(generation, "choose", wrong)


@pytest.mark.parametrize(
    "break_engine", [with_wrong_positions, with_stale_slots, with_seeds_by_row]
)
def test_an_engine_that_is_wrong_is_noticed(
    break_engine: Callable[[pytest.MonkeyPatch], None],
) -> None:
    model, requests = make_model(), make_requests(max_new=(20, 5, 9))
    expected = make_engine(model, max_num_seqs=1).generate(requests, SAMPLED)
    assert_same_completions(
        model, requests, SAMPLED, make_engine(model).generate(requests, SAMPLED), expected
    )
    with pytest.MonkeyPatch.context() as patch:
        break_engine(patch)
        got = make_engine(model).generate(requests, SAMPLED)
    with pytest.raises(AssertionError, match="miss being the right one"):
        assert_same_completions(model, requests, SAMPLED, got, expected)
