"""Rollout on a real GPU: kernels against plain torch, and graphs that say what eager steps and
`generate` say."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kernel_checks
from engine_contract import check_weight_updates, forward_log_probs, largest_difference
from kernel_checks import AttentionCase
from rolepool.rollout import NativeEngine, Request, Sampling, sample_seed
from rolepool.rollout.decoder import UNLIMITED
from rolepool.rollout.sampling import choose, filter_logits, seed_streams
from same_tokens import assert_same_tokens, token_ids

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Any] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 64}),
    "mistral, window": (MistralForCausalLM, MistralConfig, {"sliding_window": 19}),
}
GREEDY = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    do_sample=False,
    max_new_tokens=24,
    ignore_eos=True,
    stop_token_ids=(),
)
SAMPLED = dataclasses.replace(GREEDY, do_sample=True)


def make_model(name: str = "qwen2", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model_class, config_class, settings = MODELS[name]
    model = model_class(config_class(**{**SIZES, **settings})).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval().to("cuda", dtype)


def make_engine(model: Any, **settings: Any) -> NativeEngine:
    return NativeEngine(model, **{"max_num_seqs": 48, "max_num_batched_tokens": 300, **settings})


def make_requests(count: int = 100, most: int = 60) -> list[Request]:
    numbers = random.Random(0)
    return [
        Request(
            [numbers.randrange(5000) for _ in range(numbers.choice((1, 2, 17, 64, 130)))],
            sample_seed(0, index, 0),
            numbers.randint(1, most),
        )
        for index in range(count)
    ]


def generated_by_transformers(model: Any, request: Request) -> list[int]:
    ids = torch.tensor([list(request.token_ids)], device="cuda")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


# Kernels


@pytest.mark.parametrize("group", [1, 2, 6, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [UNLIMITED, 70], ids=["whole", "window"])
def test_attention_is_that_of_torch_on_rows_of_any_length(
    group: int, dtype: torch.dtype, window: int
) -> None:
    worst = 0.0
    for num_rows, head_dim in ((1, 64), (9, 128), (60, 80), (300, 64)):
        case = AttentionCase(num_rows, group, head_dim, dtype, window=window)
        worst = max(worst, kernel_checks.check_attention("cuda", case))
        kernel_checks.check_storing("cuda", case)
    print(f"group {group}, {dtype}: attention within {worst:.1e} of float64")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_queries_and_keys_are_normed_before_they_are_rotated(dtype: torch.dtype) -> None:
    for num_rows, num_keys, head_dim in ((2, 8, 128), (40, 3, 64), (200, 8, 128)):
        case = AttentionCase(
            num_rows, 2, head_dim, dtype, num_keys=num_keys, length=150, has_norms=True
        )
        kernel_checks.check_attention("cuda", case)
        kernel_checks.check_storing("cuda", case)


def test_slots_are_copied_as_on_a_cpu() -> None:
    kernel_checks.check_copies_of_slots("cuda")


def test_a_row_that_is_nobodys_reads_and_writes_nothing() -> None:
    kernel_checks.check_an_unused_row("cuda")


@pytest.mark.parametrize("settings", kernel_checks.FILTERS, ids=str)
def test_a_gpu_draws_the_tokens_that_a_cpu_draws(settings: dict[str, Any]) -> None:
    kernel_checks.check_draws_are_those_of_a_cpu("cuda", settings, num_rows=500)


def test_greedy_draws_take_the_likeliest_token() -> None:
    kernel_checks.check_greedy_draws("cuda")


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    kernel_checks.check_a_token_of_probability_zero_is_never_drawn("cuda", num_rows=20_000)


def test_rows_that_are_not_numbers_draw_some_token_and_say_so() -> None:
    kernel_checks.check_rows_that_are_not_numbers("cuda")


def test_tokens_are_recorded_as_on_a_cpu() -> None:
    kernel_checks.check_record("cuda")


@pytest.mark.parametrize("settings", kernel_checks.FILTERS, ids=str)
def test_draws_follow_the_distribution_and_carry_its_log_probs(settings: dict[str, Any]) -> None:
    sampling = dataclasses.replace(SAMPLED, **settings)
    torch.manual_seed(0)
    logits = torch.randn(1, 6000, device="cuda") * 3
    num_seeds, num_steps = 400, 100
    streams = seed_streams(list(range(num_seeds))).cuda()
    counts = torch.zeros(6000, dtype=torch.float64, device="cuda")
    reference = filter_logits(logits, sampling).log_softmax(dim=-1)[0]
    worst = 0.0
    for step in range(num_steps):
        steps = torch.full((num_seeds,), step, device="cuda")
        drawn, log_probs = choose(
            logits.expand(num_seeds, -1).contiguous(), streams, steps, sampling
        )
        counts += torch.bincount(drawn, minlength=6000)
        is_inside = reference[drawn].isfinite()
        worst = max(worst, float((log_probs - reference[drawn])[is_inside].abs().max()))
    expected = reference.double().exp() * num_seeds * num_steps
    # The sum that reaches top_p may be rounded the other way for one token at the edge.
    num_outside = int(counts[expected == 0].sum())
    assert num_outside <= 1e-3 * num_seeds * num_steps
    large = expected >= 5
    cells = torch.cat((expected[large], expected[~large].sum()[None]))
    seen = torch.cat((counts[large], counts[~large].sum()[None]))
    seen, cells = seen[cells > 0], cells[cells > 0]
    chi_square, freedom = float(((seen - cells) ** 2 / cells).sum()), len(cells) - 1
    print(
        f"{settings}: chi-square {chi_square:.0f} of {freedom} degrees of freedom, {num_outside} draws outside"
    )
    print(f"log-probs within {worst:.1e}")
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    assert worst < 1e-3


def test_a_draw_depends_on_its_own_row_only() -> None:
    torch.manual_seed(0)
    logits, streams = torch.randn(64, 6000, device="cuda"), seed_streams(list(range(64))).cuda()
    steps = torch.arange(64, device="cuda")
    together = choose(logits, streams, steps, SAMPLED)[0].tolist()
    alone = [
        choose(logits[i : i + 1], streams[i : i + 1], steps[i : i + 1], SAMPLED)[0].item()
        for i in range(64)
    ]
    assert together == alone
    assert (
        len(
            {
                choose(logits[:1], streams[:1], steps[i : i + 1], SAMPLED)[0].item()
                for i in range(64)
            }
        )
        > 30
    )


# The engine


@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_equals_transformers_in_full_precision(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, requests = make_model(name), make_requests(40)
    reference = make_model(name)
    completions = make_engine(model, max_num_seqs=16).generate(requests, GREEDY)
    expected = [generated_by_transformers(reference, request) for request in requests]
    num_equal = sum(
        one == other for one, other in zip(token_ids(completions), expected, strict=True)
    )
    print(
        f"{name}: {num_equal} of {len(requests)} responses equal to transformers, token for token"
    )
    assert_same_tokens(reference, requests, GREEDY, token_ids(completions), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_graphs_say_what_eager_steps_say(dtype: torch.dtype, sampling: Sampling) -> None:
    requests = make_requests()
    by_graphs = make_engine(make_model(dtype=dtype))
    eager = make_engine(make_model(dtype=dtype), enforce_eager=True)
    first, again = (token_ids(by_graphs.generate(requests, sampling)) for _ in range(2))
    assert by_graphs._state is not None and by_graphs._state.graphs is not None
    num_graphs = sum(graph is not None for graph in by_graphs._state.graphs._graphs.values())
    print(f"{num_graphs} graphs captured")
    assert num_graphs > 2
    assert first == again == token_ids(eager.generate(requests, sampling))


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_a_plain_forward(name: str) -> None:
    model, requests = make_model(name, torch.float32), make_requests(30)
    sampling = dataclasses.replace(SAMPLED, temperature=0.8)
    worst = largest_difference(
        model, requests, make_engine(model).generate(requests, sampling), sampling
    )
    print(f"{name}: log-probs within {worst:.1e} of a plain forward")
    assert worst < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_in_16_bits_log_probs_are_as_near_the_exact_ones_as_those_of_a_plain_forward(
    name: str,
) -> None:
    model, requests = make_model(name, torch.bfloat16), make_requests(30)
    sampling = dataclasses.replace(SAMPLED, temperature=0.8)
    completions = make_engine(model).generate(requests, sampling)
    exact = copy.deepcopy(model).float()
    errors: dict[str, list[torch.Tensor]] = {"ours": [], "plain": []}
    for request, completion in zip(requests, completions, strict=True):
        right = forward_log_probs(exact, request, completion, sampling)
        errors["ours"].append(torch.tensor(completion.log_probs) - right)
        errors["plain"].append(forward_log_probs(model, request, completion, sampling) - right)
    ours, plain = (float(torch.cat(one).abs().mean()) for one in errors.values())
    print(f"{name}: mean error {ours:.4f}, of a plain forward in 16 bits {plain:.4f}")
    assert ours < 1.5 * plain


def test_mixed_lengths_in_a_batch_equal_one_by_one() -> None:
    model, requests = make_model(), make_requests(60)
    stops = tuple(range(0, 5000, 40))
    sampling = dataclasses.replace(SAMPLED, ignore_eos=False, stop_token_ids=stops)
    together = make_engine(model).generate(requests, sampling)
    engine = make_engine(model)
    alone = [engine.generate([request], sampling)[0] for request in requests]
    num_equal = sum(
        one.token_ids.tolist() == other.token_ids.tolist()
        for one, other in zip(together, alone, strict=True)
    )
    print(
        f"{num_equal} of {len(requests)} equal; lengths {sorted(len(one.token_ids) for one in together)}"
    )
    assert {one.finish_reason for one in together} == {"stop", "length"}
    # In float32 matrix products of other shapes may round a tie the other way, rarely.
    assert num_equal >= len(requests) - 1


def test_samples_of_one_prompt_share_its_prefill_and_differ() -> None:
    model = make_model()
    requests = [Request(list(range(50)), sample_seed(0, "p", index), 20) for index in range(40)]
    completions = make_engine(model).generate(requests, SAMPLED)
    assert len(set(map(tuple, token_ids(completions)))) == 40
    assert largest_difference(model, requests, completions, SAMPLED) < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_weights_change_under_the_graphs(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine, requests = make_engine(make_model(name, seed=1)), make_requests(20)
    engine.generate(requests, SAMPLED)
    standing = engine._state
    worst = check_weight_updates(
        engine, make_model(name, seed=2), requests, SAMPLED, tolerance=1e-3
    )
    print(f"{name}: after updates log-probs within {worst:.1e} of the trainer's")
    assert engine._state is standing


def test_graphs_outlive_a_sleep_that_gives_the_cache_back() -> None:
    engine, requests = make_engine(make_model(dtype=torch.bfloat16)), make_requests()
    before = token_ids(engine.generate(requests, SAMPLED))
    standing, cache = engine._state, engine._cache
    assert cache is not None
    cache_bytes = cache.num_slots * cache.shape.slot_bytes(cache.length)
    del cache
    held = torch.cuda.memory_allocated()
    engine.sleep()
    given_back = held - torch.cuda.memory_allocated()
    print(
        f"sleep gave back {given_back / 2**20:.1f} MiB of a cache of {cache_bytes / 2**20:.1f} MiB"
    )
    assert given_back >= 0.99 * cache_bytes
    others = torch.randn(cache_bytes // 4, device="cuda")  # where the cache was
    engine.wake()
    assert token_ids(engine.generate(requests, SAMPLED)) == before
    assert engine._state is standing
    assert others.isfinite().all()
