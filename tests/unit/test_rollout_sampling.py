"""Tokens are drawn from the distribution that temperature, top-k and top-p describe, each row by
its own seed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rolepool.config import load_config
from rolepool.errors import ConfigError
from rolepool.rollout import Sampling, sample_seed
from rolepool.rollout.sampling import choose, filter_logits, seed_streams, uniforms

PLAIN = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    do_sample=True,
    max_new_tokens=8,
    ignore_eos=False,
    stop_token_ids=(),
)
FILTERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"temperature": 1.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.3, "top_k": 3, "top_p": 0.5},
]


def with_settings(**settings: object) -> Sampling:
    return dataclasses.replace(PLAIN, **settings)  # type: ignore[arg-type]


def processed_by_transformers(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores = (
        TemperatureLogitsWarper(sampling.temperature)(ids, logits)
        if sampling.temperature != 1
        else logits
    )
    scores = TopKLogitsWarper(sampling.top_k)(ids, scores) if sampling.top_k > 0 else scores
    return TopPLogitsWarper(sampling.top_p)(ids, scores) if sampling.top_p < 1 else scores


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0])
def test_filtered_probabilities_are_those_of_transformers(
    settings: dict[str, float], spread: float
) -> None:
    sampling = with_settings(**settings)
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)) * spread
    ours = filter_logits(logits, sampling).softmax(dim=-1)
    theirs = processed_by_transformers(logits, sampling).softmax(dim=-1)
    assert (ours - theirs).abs().max() < 1e-5


def test_tokens_as_likely_as_the_kth_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
    kept = filter_logits(logits, with_settings(top_k=2)).isfinite()
    assert kept.tolist() == [[False, True, True, False, True]]


def test_filtering_leaves_the_logits_alone() -> None:
    logits = torch.randn(4, 20)
    copy = logits.clone()
    filter_logits(logits, with_settings(top_k=3, top_p=0.5, temperature=2.0))
    assert torch.equal(logits, copy)


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(settings: dict[str, float]) -> None:
    sampling = with_settings(**settings)
    num_draws = 40_000
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)) * 2
    streams = seed_streams(
        [sample_seed(0, "prompt", index) for index in range(num_draws // 100)]
    ).repeat_interleave(100)
    steps = torch.arange(100).repeat(num_draws // 100)
    tokens, _ = choose(logits.expand(num_draws, -1), streams, steps, sampling)
    expected = filter_logits(logits, sampling).softmax(dim=-1)[0].double() * num_draws
    counts = torch.bincount(tokens, minlength=300).double()
    assert counts[expected == 0].sum() == 0
    # Chi-square over cells of at least 5 expected draws, the rest being one cell.
    large = expected >= 5
    cells = torch.cat((expected[large], expected[~large].sum()[None]))
    drawn = torch.cat((counts[large], counts[~large].sum()[None]))
    cells, drawn = cells[cells > 0], drawn[cells > 0]
    chi_square, freedom = float(((drawn - cells) ** 2 / cells).sum()), len(cells) - 1
    assert chi_square <= freedom + 4 * (2 * max(freedom, 1)) ** 0.5


def test_log_probs_are_those_of_the_filtered_distribution() -> None:
    sampling = with_settings(temperature=0.8, top_k=50, top_p=0.9)
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(3)) * 3
    tokens, log_probs = choose(
        logits, seed_streams(list(range(64))), torch.zeros(64, dtype=torch.int64), sampling
    )
    expected = filter_logits(logits, sampling).log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    assert (log_probs - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "settings", [{"do_sample": False}, {"temperature": 0.0}, {"do_sample": False, "top_k": 3}]
)
def test_greedy_takes_the_likeliest_token_and_reports_plain_log_probs(
    settings: dict[str, float],
) -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(4))
    zeros = torch.zeros(8, dtype=torch.int64)
    tokens, log_probs = choose(logits, zeros, zeros, with_settings(**settings))
    assert torch.equal(tokens, logits.argmax(dim=-1))
    assert torch.allclose(log_probs, logits.log_softmax(dim=-1).max(dim=-1).values)


def test_a_row_is_drawn_the_same_in_any_company() -> None:
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(5))
    streams, steps = seed_streams(list(range(16))), torch.arange(16)
    together, _ = choose(logits, streams, steps, PLAIN)
    alone = [
        choose(logits[i : i + 1], streams[i : i + 1], steps[i : i + 1], PLAIN)[0].item()
        for i in range(16)
    ]
    assert together.tolist() == alone


def test_uniforms_are_uniform_and_uncorrelated_over_seeds_and_steps() -> None:
    seeds, steps = torch.meshgrid(seed_streams(list(range(300))), torch.arange(300), indexing="ij")
    numbers = uniforms(seeds.flatten(), steps.flatten()).view(300, 300)
    assert 0 < numbers.min() and numbers.max() < 1  # noqa: SIM300
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    assert float(((counts - 900) ** 2 / 900).sum()) < 99 + 4 * (2 * 99) ** 0.5
    for one, other in [(numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])]:
        correlation = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 0.015


def split_mix(number: int) -> int:
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


def test_uniforms_are_those_of_exact_integer_arithmetic() -> None:
    seeds, steps = [0, 1, 2**63 - 1, 2**63 + 5, -3], [0, 1, 1000, 2**40, 7]
    numbers = uniforms(seed_streams(seeds), torch.tensor(steps)).tolist()
    for seed, step, number in zip(seeds, steps, numbers, strict=True):
        bits = split_mix((split_mix(seed % 2**64) + (step + 1) * 0x9E3779B97F4A7C15) % 2**64)
        assert number == ((bits >> 16) + 0.5) / 2**48


def test_a_token_of_probability_zero_is_never_drawn_at_the_ends() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(1000, -1)
    tokens, log_probs = choose(
        logits, seed_streams(list(range(1000))), torch.zeros(1000, dtype=torch.int64), PLAIN
    )
    assert set(tokens.tolist()) == {1, 2}
    assert log_probs.isfinite().all()


def test_a_sample_seed_depends_on_every_part_and_not_on_numpy() -> None:
    seeds = {
        sample_seed(run, prompt, index, step)
        for run in (1, 2)
        for prompt in "ab"
        for index in (0, 1)
        for step in (0, 1)
    }
    assert len(seeds) == 16
    assert sample_seed(1, 7, 0) == sample_seed(np.int32(1), np.int64(7), np.int64(0))  # type: ignore[arg-type]
    assert sample_seed(1, "7", 0) == sample_seed(1, np.str_("7"), 0) != sample_seed(1, 7, 0)
    assert sample_seed(1, "prompt", 3) == 8080837054629534262


@pytest.mark.parametrize(
    "section", ["actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"]
)
@pytest.mark.parametrize("setting", ["temperature=-1.0", "top_p=0.0", "top_p=1.5", "top_k=0"])
def test_settings_that_mean_nothing_are_refused_by_name(section: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{section}.{setting}: "):
        load_config([], [f"{section}.{setting}"])


def test_a_response_without_tokens_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^data\.max_response_length=0: "):
        load_config([], ["data.max_response_length=0"])
