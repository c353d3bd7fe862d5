"""The native engine says what `transformers.generate` says, in any order, batch and chunking."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import tiny_models
from engine_contract import ROUNDING, check_weight_updates, forward_logits, largest_difference
from rolepool.errors import ConfigError, DataError, RolepoolError
from rolepool.rollout import Engine, NativeEngine, Request, Sampling, sample_seed
from same_tokens import assert_same_completions, assert_same_tokens, token_ids

VOCAB = tiny_models.SIZES["vocab_size"]
SIZES = {**tiny_models.SIZES, "initializer_range": 0.5, "tie_word_embeddings": False}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, tied, biased": (
        LlamaForCausalLM,
        LlamaConfig,
        {"tie_word_embeddings": True, "attention_bias": True},
    ),
    "llama, one head each": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama, one kv head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama, scaled rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral, window": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2, window in one layer": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}
GREEDY = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    do_sample=False,
    max_new_tokens=20,
    ignore_eos=True,
    stop_token_ids=(),
)
SAMPLED = dataclasses.replace(GREEDY, do_sample=True)


pytestmark = pytest.mark.usefixtures("noise")


def make_model(name: str = "llama", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model_class, config_class, settings = MODELS[name]
    model = model_class(config_class(**{**SIZES, **settings, **changes}))
    for (
        parameter
    ) in model.parameters():  # norms and biases away from where they start, so that they matter
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_engine(model: Any, **settings: Any) -> NativeEngine:
    return NativeEngine(model, **{"max_num_seqs": 4, "max_num_batched_tokens": 23, **settings})


def make_requests(count: int = 11, max_new: Sequence[int | None] = (None,)) -> list[Request]:
    numbers = random.Random(0)
    lengths = [1, 2, 60] + [numbers.randint(1, 30) for _ in range(count - 3)]
    return [
        Request(
            [numbers.randrange(VOCAB) for _ in range(length)],
            sample_seed(0, index, 0),
            max_new[index % len(max_new)],
        )
        for index, length in enumerate(lengths[:count])
    ]


def generated_by_transformers(
    model: Any, request: Request, max_new: int, **settings: Any
) -> list[int]:
    ids = torch.tensor([list(request.token_ids)])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new, **options
    )
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_equals_transformers_token_for_token(name: str) -> None:
    model, requests = make_model(name), make_requests(max_new=(20, 1, 7, 33))
    completions = make_engine(model).generate(requests, GREEDY)
    expected = [
        generated_by_transformers(model, request, request.max_new_tokens or 0)
        for request in requests
    ]
    assert_same_tokens(model, requests, GREEDY, token_ids(completions), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}], ids=["plain", "filtered"]
)
def test_log_probs_are_those_of_a_plain_forward(name: str, settings: dict[str, Any]) -> None:
    model, requests = make_model(name), make_requests(max_new=(20, 1, 7, 33))
    sampling = dataclasses.replace(SAMPLED, **settings)
    completions = make_engine(model).generate(requests, sampling)
    assert largest_difference(model, requests, completions, sampling) < ROUNDING


@pytest.mark.parametrize(("num_slots", "num_tokens"), [(1, 1), (3, 5), (100, 10_000)])
def test_slots_and_chunks_do_not_change_what_is_said(num_slots: int, num_tokens: int) -> None:
    model, requests = make_model("qwen2"), make_requests()
    expected = make_engine(model).generate(requests, SAMPLED)
    engine = make_engine(model, max_num_seqs=num_slots, max_num_batched_tokens=num_tokens)
    assert_same_completions(model, requests, SAMPLED, engine.generate(requests, SAMPLED), expected)


def test_a_sample_is_the_same_in_any_company_and_order() -> None:
    model, requests = make_model(), make_requests(max_new=(20, 5, 9))
    engine = make_engine(model)
    together = engine.generate(requests, SAMPLED)
    backwards = engine.generate(requests[::-1], SAMPLED)
    alone = [engine.generate([request], SAMPLED)[0] for request in requests]
    assert_same_completions(model, requests, SAMPLED, backwards[::-1], together)
    assert_same_completions(model, requests, SAMPLED, alone, together)


def test_samples_of_one_prompt_differ_by_their_seeds_only() -> None:
    model, prompt = make_model(), [5, 6, 7]
    engine, requests = (
        make_engine(model),
        [Request(prompt, sample_seed(0, "p", index)) for index in range(6)],
    )
    first, again = (engine.generate(requests, SAMPLED) for _ in range(2))
    assert_same_completions(model, requests, SAMPLED, again, first)
    assert len(set(map(tuple, token_ids(first)))) == 6


def test_sampled_tokens_follow_the_models_distribution() -> None:
    """Second tokens, so that the cache takes part, against the exact marginal over all first
    tokens."""
    model, prompt, count = make_model(vocab_size=11, initializer_range=0.3), [1, 2, 3], 8000
    sampling = dataclasses.replace(SAMPLED, max_new_tokens=2, temperature=1.3)
    requests = [Request(prompt, sample_seed(0, "p", index)) for index in range(count)]
    engine = make_engine(model, max_num_seqs=1000, max_num_batched_tokens=8192)
    completions = engine.generate(requests, sampling)
    with torch.no_grad():
        first = (model(torch.tensor([prompt])).logits[0, -1] / 1.3).softmax(-1)
        second = (
            model(torch.tensor([[*prompt, token] for token in range(11)])).logits[:, -1] / 1.3
        ).softmax(-1)
    expected = (first[:, None] * second * count).double()
    counts = torch.zeros(11, 11, dtype=torch.float64)
    for completion in completions:
        counts[tuple(completion.token_ids.tolist())] += 1
    cells = expected >= 5
    rest = expected[~cells].sum()
    chi_square = ((counts - expected)[cells] ** 2 / expected[cells]).sum() + (
        counts[~cells].sum() - rest
    ) ** 2 / rest
    freedom = int(cells.sum())
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_a_stop_token_ends_a_response_and_belongs_to_it() -> None:
    model, requests = make_model(), make_requests()
    free = make_engine(model).generate(requests, GREEDY)
    stops = (free[0].token_ids[3], free[4].token_ids[6])
    stopped = make_engine(model).generate(
        requests, dataclasses.replace(GREEDY, ignore_eos=False, stop_token_ids=stops)
    )
    ends = [
        next((place + 1 for place, token in enumerate(one) if token in stops), None)
        for one in token_ids(free)
    ]
    cut = [one[:end] for one, end in zip(token_ids(free), ends, strict=True)]
    by_transformers = [
        generated_by_transformers(model, one, 20, eos_token_id=list(stops)) for one in requests
    ]
    for expected in (cut, by_transformers):
        assert_same_tokens(model, requests, GREEDY, token_ids(stopped), expected)
    for one in stopped:
        assert one.finish_reason == ("stop" if one.token_ids[-1] in stops else "length")
        assert len(one.log_probs) == len(one.token_ids)
    assert {one.finish_reason for one in stopped} == {"stop", "length"}


def test_ignoring_the_end_goes_on_past_stop_tokens() -> None:
    model, requests = make_model(), make_requests()
    free = make_engine(model).generate(requests, GREEDY)
    stops = (free[0].token_ids[3],)
    ignoring = make_engine(model).generate(
        requests, dataclasses.replace(GREEDY, stop_token_ids=stops)
    )
    assert_same_completions(model, requests, GREEDY, ignoring, free)
    assert {one.finish_reason for one in ignoring} == {"length"}


def test_a_stop_token_in_the_last_place_counts_as_a_stop() -> None:
    model, request = make_model(), make_requests()[3]
    likeliest = (
        forward_logits(model, request, [0])[0].topk(2).indices.tolist()
    )  # two, as rounding may exchange them
    sampling = dataclasses.replace(
        GREEDY, ignore_eos=False, stop_token_ids=tuple(likeliest), max_new_tokens=1
    )
    completion = make_engine(model).generate([request], sampling)[0]
    assert completion.token_ids[0] in likeliest and len(completion.token_ids) == 1
    assert completion.finish_reason == "stop"


def test_one_new_token_needs_no_decode_step() -> None:
    model, requests = make_model(), make_requests()
    completions = make_engine(model).generate(
        requests, dataclasses.replace(GREEDY, max_new_tokens=1)
    )
    expected = [generated_by_transformers(model, request, 1) for request in requests]
    assert_same_tokens(model, requests, GREEDY, token_ids(completions), expected)


def test_stretched_rotary_embeddings_are_used_to_their_end() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    }
    model, request = make_model(rope_parameters=rope), Request([1, 2, 3] * 40, 0, 40)
    completions = make_engine(model).generate([request], GREEDY)
    expected = generated_by_transformers(model, request, 40)
    assert_same_tokens(model, [request], GREEDY, token_ids(completions), [expected])


def test_no_requests_no_completions() -> None:
    assert make_engine(make_model()).generate([], GREEDY) == []


def test_the_last_position_can_be_used_and_no_later_one() -> None:
    engine = make_engine(make_model())
    assert len(engine.generate([Request([1] * 100, 0, 28)], GREEDY)[0].token_ids) == 28
    with pytest.raises(
        DataError,
        match=r"request 1: a prompt of 100 and 29 new tokens are more than the 128 positions",
    ):
        engine.generate([Request([1], 0), Request([1] * 100, 0, 29)], GREEDY)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (Request([], 0), "request 0: the prompt must have tokens, with ids in 0..96"),
        (Request([1, VOCAB], 0), "request 0: the prompt must have tokens, with ids in 0..96"),
        (Request([-1], 0), "request 0: the prompt must have tokens, with ids in 0..96"),
        (Request([1], 0, 0), "request 0: max_new_tokens=0"),
    ],
)
def test_requests_that_cannot_be_run_are_refused_by_name(request_: Request, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        make_engine(make_model()).generate([request_], GREEDY)


def test_a_cache_too_small_for_one_sequence_says_what_to_change() -> None:
    with pytest.raises(RolepoolError, match=r"1,000 bytes.*gpu_memory_utilization"):
        make_engine(make_model(), cache_bytes=lambda: 1000).generate([Request([1], 0)], GREEDY)


def test_a_small_cache_runs_fewer_sequences_at_once() -> None:
    model, requests = make_model(), make_requests()
    slot_bytes = 2 * 2 * 2 * 8 * (60 + 20) * 4
    completions = make_engine(model, cache_bytes=lambda: 2 * slot_bytes).generate(requests, GREEDY)
    expected = make_engine(model, max_num_seqs=2).generate(requests, GREEDY)
    assert_same_completions(model, requests, GREEDY, completions, expected)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10))
    with pytest.raises(ConfigError, match=r"cannot run model_type gpt2; it runs llama, mistral"):
        make_engine(model)


def test_rotary_embeddings_that_change_with_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(RolepoolError, match="rotary embeddings of type dynamic"):
        make_engine(make_model(rope_parameters=rope))


def test_a_projection_with_an_adapter_is_refused_by_name() -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    model = make_model()
    model.model.layers[1].self_attn.q_proj = Adapted(32, 32)
    with pytest.raises(RolepoolError, match=r"model.layers.1.self_attn.q_proj is a Adapted"):
        make_engine(model)


def test_every_module_trains_afterwards_that_did_before() -> None:
    model = make_model().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    make_engine(model).generate(make_requests(), GREEDY)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(DataError):
        make_engine(model).generate([Request([], 0)], GREEDY)
    assert [module.training for module in model.modules()] == before


def test_generating_leaves_weights_trainable() -> None:
    model = make_model(attention_dropout=0.5).train()
    engine = make_engine(model, shared_weights=True)
    engine.generate(make_requests(), SAMPLED)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("place", ["model.norm.weight", "model.layers.0.self_attn.v_proj.weight"])
def test_nan_in_the_weights_is_an_error_and_gone_with_the_weights(place: str) -> None:
    model, whole, requests = make_model(), make_model().state_dict(), make_requests()
    engine = make_engine(model)
    expected = engine.generate(requests, SAMPLED)
    engine.update_weights({**whole, place: torch.full_like(whole[place], torch.nan)}.items(), 1)
    with pytest.raises(RolepoolError, match="logits are not finite"):
        engine.generate(requests, SAMPLED)
    engine.update_weights(whole.items(), 0)
    assert_same_completions(model, requests, SAMPLED, engine.generate(requests, SAMPLED), expected)


def test_sleeping_gives_the_cache_back_and_waking_generates_the_same() -> None:
    model, requests = make_model(), make_requests()
    engine = make_engine(model)
    before = engine.generate(requests, SAMPLED)
    engine.sleep()
    assert engine._cache is None
    with pytest.raises(RolepoolError, match="asleep"):
        engine.generate(requests, SAMPLED)
    engine.wake()
    assert_same_completions(model, requests, SAMPLED, engine.generate(requests, SAMPLED), before)


def test_a_model_moved_to_another_type_gets_a_cache_of_that_type() -> None:
    model, requests = make_model(), make_requests()
    engine = make_engine(model)
    engine.generate(requests, GREEDY)
    completions = make_engine(model.double()).generate(requests, GREEDY)
    assert_same_completions(model, requests, GREEDY, engine.generate(requests, GREEDY), completions)


# Weight updates


@pytest.mark.parametrize(
    "name", ["llama", "llama, tied, biased", "qwen2", "qwen3", "mistral, window"]
)
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_after_an_update_the_engine_agrees_with_the_trainer(name: str, sampling: Sampling) -> None:
    engine: Engine = make_engine(make_model(name, seed=1))
    check_weight_updates(engine, make_model(name, seed=2), make_requests(), sampling)


def test_shared_weights_need_no_tensors() -> None:
    model = make_model()
    check_weight_updates(make_engine(model, shared_weights=True), model, make_requests(), SAMPLED)


def test_the_check_of_updates_notices_an_engine_that_keeps_old_weights() -> None:
    class Lazy(NativeEngine):
        def update_weights(self, named_tensors: Any, version: int) -> None:
            if version < 2:
                super().update_weights(named_tensors, version)
            self.version = version

    engine = Lazy(make_model(seed=1), max_num_seqs=4, max_num_batched_tokens=64)
    with pytest.raises(AssertionError, match="log-probs of version 2"):
        check_weight_updates(engine, make_model(seed=2), make_requests(), SAMPLED)


def test_weights_arrive_in_place_and_as_a_stream() -> None:
    model, other = make_model(seed=1), make_model(seed=2)
    engine = make_engine(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    engine.update_weights(
        ((name, tensor.double()) for name, tensor in other.state_dict().items()), 7
    )
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert all(
        torch.equal(one, two)
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert engine.version == 7
    assert engine.generate([Request([1], 0)], GREEDY)[0].weights_version == 7


def test_of_tied_weights_one_name_is_enough() -> None:
    name = "llama, tied, biased"
    engine, other = make_engine(make_model(name, seed=1)), make_model(name, seed=2)
    engine.update_weights(other.named_parameters(), 1)  # names the embedding only
    requests = make_requests()
    assert (
        largest_difference(other, requests, engine.generate(requests, SAMPLED), SAMPLED) < ROUNDING
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda named: named.pop("model.norm.weight"), r"1 of 21 are missing: model\.norm\.weight"),
        (
            lambda named: named.clear(),
            r"21 of 21 are missing: .*embed_tokens\.weight, .* and 16 more",
        ),
        (
            lambda named: named.update({"model.norm.wait": torch.zeros(1)}),
            r"model\.norm\.wait is not a weight of this model$",
        ),
        (
            lambda named: named.update({"model.norm.weight": torch.zeros(31)}),
            r"model\.norm\.weight has shape \[31\], the model's \[32\]",
        ),
    ],
    ids=["missing", "all missing", "unknown", "shape"],
)
def test_weights_that_do_not_fit_are_refused_by_name_until_a_whole_set_comes(
    change: Any, complaint: str
) -> None:
    engine, whole = make_engine(make_model(seed=1)), make_model(seed=2).state_dict()
    broken = dict(whole)
    change(broken)
    with pytest.raises(DataError, match=complaint):
        engine.update_weights(broken.items(), 1)
    assert engine.version == 0
    with pytest.raises(RolepoolError, match="failed halfway"):
        engine.generate([Request([1], 0)], GREEDY)
    engine.update_weights(whole.items(), 2)
    assert engine.generate([Request([1], 0)], GREEDY)[0].weights_version == 2


def test_a_name_that_comes_twice_is_refused() -> None:
    model = make_model()
    named = [*model.state_dict().items(), ("lm_head.weight", model.lm_head.weight)]
    with pytest.raises(DataError, match=r"lm_head\.weight was sent twice"):
        make_engine(model).update_weights(named, 1)
