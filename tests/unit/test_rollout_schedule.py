"""What a GPU needs of the engine, on a CPU: looks every few steps, shared prompts, joined weights,
few step sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_rollout_native import SAMPLED, make_engine, make_model, make_requests
from torch import Tensor

from engine_contract import check_weight_updates, in_turns
from rolepool.rollout import Request, sample_seed
from rolepool.rollout.decoder import Decoder, Piece, join_weights
from rolepool.rollout.kv_cache import CacheShape, DecodeBatch, SlotCache
from rolepool.rollout.step_graphs import bucket_of
from rolepool.rollout.tensor_parallel import Shard, TensorParallel
from same_tokens import assert_same_completions

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("noise")


# Looks every few steps


@pytest.mark.parametrize("interval", [2, 5, 1000])
@pytest.mark.parametrize(
    "stop_token_ids", [(), (3, 14, 25, 36, 47)], ids=["by length", "by stop tokens"]
)
def test_looking_at_rows_every_few_steps_does_not_change_what_is_said(
    interval: int, stop_token_ids: tuple[int, ...]
) -> None:
    model, requests = make_model("qwen2"), make_requests(max_new=(20, 1, 7, 33))
    sampling = dataclasses.replace(SAMPLED, ignore_eos=False, stop_token_ids=stop_token_ids)
    expected = make_engine(model).generate(requests, sampling)
    engine = make_engine(model)
    engine.check_interval = interval
    got = engine.generate(requests, sampling)
    assert_same_completions(model, requests, sampling, got, expected)
    assert len({len(one.token_ids) for one in got}) > 3


# Throughput


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize(
    "stop_token_ids", [(), (3, 14, 25, 36, 47)], ids=["by length", "by stop tokens"]
)
@pytest.mark.parametrize("max_num_seqs", [3, 13, 64])
def test_a_schedule_for_throughput_does_not_change_what_is_said(
    interval: int, stop_token_ids: tuple[int, ...], max_num_seqs: int
) -> None:
    model, requests = make_model("qwen2"), make_requests(30, max_new=(20, 1, 7, 33, 1, 12))
    sampling = dataclasses.replace(SAMPLED, ignore_eos=False, stop_token_ids=stop_token_ids)
    expected = make_engine(model).generate(requests, sampling)
    engine = make_engine(model, max_num_seqs=max_num_seqs)
    engine.check_interval = interval
    engine.for_throughput = True
    got = engine.generate(requests, sampling)
    assert_same_completions(model, requests, sampling, got, expected)


def run_for_throughput(
    stops: tuple[int, ...], num_slots: int
) -> tuple[list[list[int]], dict[int, int]]:
    """The requests that ended in each step of a generation, and the lengths of all."""
    engine = make_engine(make_model("qwen2"), max_num_seqs=num_slots)
    sampling = dataclasses.replace(SAMPLED, ignore_eos=False, stop_token_ids=stops)
    requests = make_requests(60, max_new=tuple(range(1, 31)))
    ended: list[list[int]] = []
    lengths: dict[int, int] = {}
    with engine._running(
        dataclasses.replace(sampling, max_new_tokens=30),
        num_requests=60,
        length=100,
        check_interval=4,
        for_throughput=True,
    ) as generation:
        generation.enqueue(requests, sampling)
        while len(lengths) < len(requests):
            completions = generation.step()
            ended.append([number for number, _ in completions])
            lengths |= {number: len(one.token_ids) for number, one in completions}
    return ended, lengths


@pytest.mark.parametrize("stops", [(), (3, 14)], ids=["by length", "by stop tokens"])
def test_sequences_that_have_ended_stay_until_their_removal_is_of_use(
    stops: tuple[int, ...],
) -> None:
    ended, lengths = run_for_throughput(stops, num_slots=36)
    removals = [len(numbers) for numbers in ended if numbers]
    # Three requests join together, as a twelfth of 36 slots. Then steps get smaller at 32 rows.
    num_waiting = 60 - 36
    while num_waiting > 0:
        assert removals[0] >= min(3, num_waiting)
        num_waiting -= removals.pop(0)
    assert len(removals) <= len({bucket_of(num_rows, 36) for num_rows in range(1, 37)})
    assert bool(stops) == (lengths != {number: 1 + number % 30 for number in range(60)})


def test_requests_that_may_become_longest_start_first() -> None:
    """And those that may become as long as others keep their order."""
    ended, _ = run_for_throughput((), num_slots=2)
    num_new = [1 + number % 30 for numbers in ended for number in numbers]
    starts = [number for numbers in ended for number in numbers]
    assert sorted(starts) == list(range(60))
    # With two slots they end about in the order in which they started.
    assert num_new[:2] == [30, 30]
    assert num_new[-4:] == [2, 2, 1, 1]
    assert starts.index(29) < starts.index(28) < starts.index(0)


def make_rows(
    scattered: bool, num_rows: int = 4, stops: tuple[int, ...] = (9,)
) -> tuple[DecodeBatch, SlotCache]:
    shape = CacheShape(1, 1, 2, torch.float32, CPU)
    return DecodeBatch(num_rows, 5, stops, CPU, scattered), SlotCache(shape, num_rows, 20)


def enter(rows: DecodeBatch, requests: list[int], limits: list[int]) -> list[int]:
    return rows.enter(requests, [3] * len(requests), limits, list(range(len(requests))))


def record(rows: DecodeBatch, *tokens: int) -> None:
    rows.record(
        slice(0, len(tokens)), torch.tensor(tokens), -torch.tensor(tokens, dtype=torch.float32)
    )
    rows.tick()


@pytest.mark.parametrize("scattered", [True, False])
def test_a_row_that_has_ended_takes_no_more_tokens_and_stands_still(scattered: bool) -> None:
    rows, cache = make_rows(scattered)
    enter(rows, [10, 11, 12], [5, 2, 5])
    for tokens in [
        (1, 2, 3),
        (4, 5, 9),
        (6, 7, 8),
        (6, 7, 8),
    ]:  # row 1 ends after two tokens, row 2 by the stop 9
        record(rows, *tokens)
    assert rows.steps[:3].tolist() == [4, 2, 2]
    assert rows.positions[:3].tolist() == [6, 4, 4]
    assert rows.tokens[:3].tolist() == [6, 5, 9]
    (first, first_tokens, first_log_probs), (second, second_tokens, _) = rows.pop_finished(cache)
    assert (first, first_tokens.tolist(), first_log_probs.tolist()) == (11, [2, 5], [-2.0, -5.0])
    assert (second, second_tokens.tolist()) == (12, [3, 9])
    assert rows.num_running == 1
    record(rows, 1)
    ((_, tokens, _),) = rows.pop_finished(cache)
    assert tokens.tolist() == [1, 4, 6, 6, 1]


@pytest.mark.parametrize("scattered", [True, False])
def test_rows_that_leave_are_replaced_by_the_last_ones_and_their_slots_are_given_out_again(
    scattered: bool,
) -> None:
    rows, cache = make_rows(scattered, num_rows=6)
    slots = enter(rows, [0, 1, 2, 3, 4, 5], [1, 5, 5, 1, 5, 5])
    assert slots == [0, 1, 2, 3, 4, 5]
    keys = cache.read(0, slice(0, 6), 3)[0]
    keys.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand_as(keys))  # by the request whose they are
    rows.record(slice(0, 6), torch.arange(20, 26), torch.zeros(6))
    rows.pop_finished(cache)
    assert rows.num_running == 4
    held = rows.slots[:4].tolist()
    assert len(set(held)) == 4
    assert held == ([4, 1, 2, 5] if scattered else [0, 1, 2, 3])
    assert [int(cache.read(0, slice(slot, slot + 1), 3)[0].mean()) for slot in held] == [4, 1, 2, 5]
    assert rows.tokens[:4].tolist() == [24, 21, 22, 25]
    assert rows.positions.tolist() == [3, 3, 3, 3, -1, -1]
    assert sorted(held + enter(rows, [6, 7], [5, 5])) == [0, 1, 2, 3, 4, 5]


def test_slots_begin_at_the_first_again_when_all_rows_have_left() -> None:
    rows, cache = make_rows(scattered=True)
    for _ in range(2):
        assert enter(rows, [0, 1, 2], [1, 1, 1]) == [0, 1, 2]
        rows.record(slice(0, 3), torch.zeros(3, dtype=torch.int64), torch.zeros(3))
        rows.pop_finished(cache)


def test_rows_at_their_limit_are_counted_at_once_and_stopped_ones_a_check_later() -> None:
    rows, cache = make_rows(scattered=True)
    enter(rows, [10, 11, 12, 13], [5, 2, 5, 5])
    # The first tokens are sampled without a step.
    rows.record(slice(0, 4), torch.tensor([1, 2, 3, 4]), torch.zeros(4))
    counts = [rows.count_ended()]
    assert [rows.num_steps_until(number) for number in (1, 2, 4)] == [1, 4, 4]
    for tokens in [(4, 5, 9, 7), (6, 7, 8, 9), (6, 7, 8, 1)]:
        record(rows, *tokens)
        counts.append(rows.count_ended())
    assert counts == [0, 1, 2, 3]
    assert [rows.num_steps_until(number) for number in (1, 2, 4)] == [0, 1, 1]
    assert [request for request, *_ in rows.pop_finished(cache)] == [11, 12, 13]
    assert rows.count_ended() == 0
    record(rows, 1)
    assert rows.count_ended() == 1


# Shared prompts


def test_a_prompt_of_several_samples_is_run_once() -> None:
    num_run: list[int] = []

    class CountingDecoder(Decoder):
        def prefill(self, cache: SlotCache, tokens_t: Tensor, pieces: list[Piece]) -> Tensor:
            num_run.append(len(tokens_t))
            return super().prefill(cache, tokens_t, pieces)

    model, prompts = make_model("qwen2"), [[5, 6, 7], list(range(40)), [8]]
    requests = [
        Request(prompt, sample_seed(0, len(prompt), index))
        for index in range(4)
        for prompt in prompts
    ]
    alone = [
        make_engine(model, max_num_seqs=1).generate([request], SAMPLED)[0] for request in requests
    ]
    engine = make_engine(model, max_num_seqs=12, decoder_type=CountingDecoder)
    together = engine.generate(requests, SAMPLED)
    assert_same_completions(model, requests, SAMPLED, together, alone)
    assert sum(num_run) == sum(map(len, prompts))
    assert max(num_run) <= 23


# Weights side by side


@pytest.mark.parametrize("name", ["llama, tied, biased", "qwen2", "qwen3"])
def test_joined_weights_follow_updates_in_place(name: str) -> None:
    model = make_model(name, seed=1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    join_weights(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    layer, weight = (
        Decoder(model, TensorParallel(), 8).layers[0],
        model.model.layers[0].self_attn.q_proj.weight,
    )
    assert layer.qkv._parts[0][0].data_ptr() == weight.data_ptr()
    check_weight_updates(make_engine(model), make_model(name, seed=2), make_requests(), SAMPLED)


def test_parts_of_a_cut_model_can_be_joined_and_hold_no_more_than_before() -> None:
    model = make_model("qwen2")
    Shard(model.config, 2, 1).keep_own_part(model)
    join_weights(model)
    layer = Decoder(model, TensorParallel(), 8).layers[0]
    attention = model.model.layers[0].self_attn
    ((weight, bias),) = layer.qkv._parts
    assert torch.equal(
        weight,
        torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
    )
    assert bias is not None and len(bias) == len(weight) == (2 + 2 * 1) * 8
    assert weight.untyped_storage().nbytes() == weight.nbytes


def test_weights_that_were_moved_apart_are_copied_on_a_cpu() -> None:
    model = make_model("qwen2")
    join_weights(model)
    model.double()
    ((weight, _),) = Decoder(model, TensorParallel(), 8).layers[0].gate_up._parts
    assert weight.data_ptr() != model.model.layers[0].mlp.gate_proj.weight.data_ptr()
    requests = make_requests()
    expected = make_engine(make_model("qwen2").double()).generate(requests, SAMPLED)
    assert_same_completions(
        model, requests, SAMPLED, make_engine(model).generate(requests, SAMPLED), expected
    )


# Step sizes


def test_steps_have_few_sizes_none_too_small_nor_much_too_large() -> None:
    sizes = [bucket_of(num_rows, 1000) for num_rows in range(1, 1001)]
    assert all(size >= num_rows for num_rows, size in enumerate(sizes, 1))
    assert all(
        size <= max(2 * num_rows - 1, 1) and size - num_rows < 64
        for num_rows, size in enumerate(sizes, 1)
    )
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 30
    assert sizes[-1] == 1000


def test_sizes_of_steps_do_not_depend_on_earlier_calls() -> None:
    """A run that was resumed has not made the larger calls of one that was not, such as a
    validation, and a GPU rounds as the size of a step says."""
    sizes: list[int] = []

    class DecoderAsOnAGpu(Decoder):
        """Accepts rows that are not used, and notes how many rows each step has."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.skips_unused_rows = True

        def decode(
            self,
            cache: SlotCache,
            tokens_b: Tensor,
            positions_b: Tensor,
            slots_b: Tensor,
            length: int,
        ) -> Tensor:
            sizes.append(len(tokens_b))
            is_used = positions_b >= 0  # on a CPU only such rows can be computed
            final = super().decode(
                cache, tokens_b[is_used], positions_b[is_used], slots_b[is_used], length
            )
            return torch.cat([final, final.new_zeros(len(tokens_b) - len(final), final.shape[1])])

    model, few = make_model(), make_requests(5, max_new=(12, 9, 7, 5, 3))
    engine = make_engine(model, max_num_seqs=64, decoder_type=DecoderAsOnAGpu)
    alone = engine.generate(few, SAMPLED)
    sizes_alone = sizes.copy()
    assert set(sizes_alone) == {5, 4, 2, 1}

    engine.generate(make_requests(20), SAMPLED)
    assert max(sizes) == 20
    sizes.clear()
    assert_same_completions(model, few, SAMPLED, engine.generate(few, SAMPLED), alone)
    assert sizes == sizes_alone


# Sessions


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen3"])
@pytest.mark.parametrize("max_num_seqs", [2, 4, 64])
def test_turns_that_join_a_session_at_any_time_say_what_one_call_says(
    name: str, max_num_seqs: int
) -> None:
    """With 2 and 4 rows the cache keeps fewer conversations than there are; one of them changes its
    earlier tokens."""
    model, first = make_model(name), make_requests(max_new=(9, 1, 5, 14))
    engine = make_engine(model, max_num_seqs=max_num_seqs)
    requests, completions = in_turns(engine, first, SAMPLED, max_num_seqs)
    expected = make_engine(model).generate(requests, SAMPLED)
    assert_same_completions(model, requests, SAMPLED, completions, expected)
