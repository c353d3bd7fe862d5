"""What verl's own CPU tests check about batches, padding, balancing and dispatch holds here, with
other data.

Each test names a behaviour that programs written for verl rely on. If ours differs by intention,
the test says why. Everywhere, wrong input raises a DataError, a ValueError with one line for the
user, and not an AssertionError, because `python -O` removes assertions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rolepool.cluster.calls import (
    Call,
    pack_call,
    resolve_arguments,
    splittable,
    unpack_call,
    without_padding,
)
from rolepool.errors import DataError, PlacementError
from rolepool.models.micro_batches import balanced, num_passes, rank_order
from rolepool.placement import ParallelDims, ResourcePoolManager, Role
from rolepool.protocol import (
    DataProto,
    DataProtoConfig,
    Dispatch,
    Worker,
    encode,
    fold_batch_dim,
    make_nd_compute_dataproto_dispatch_fn,
    pad_dataproto_to_divisor,
    pad_ragged,
    ragged,
    register,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad,
    unpad_dataproto,
)
from rolepool.protocol.columns import same_value
from rolepool.protocol.futures import collect_batches
from rolepool.protocol.worker import WorkerContext, made_in, registered_methods

CITIES = ["Oslo", "Lima", "Pune", "Kyiv", "Bonn", "Rome", "Baku", "Doha", "Nice", "Suva"]


def cities(num_rows: int, **options: Any) -> DataProto:
    """Row i has the number 10 * i and the i-th city."""
    tensors = {"number": 10 * torch.arange(num_rows)}
    return DataProto.from_dict(tensors, {"city": CITIES[:num_rows]}, {"trip": "world"}, **options)


def rows_of(data: DataProto) -> list[int]:
    """The rows of `cities` that the batch has, after checking that tensors, objects and meta_info
    agree."""
    rows = [int(number) // 10 for number in data.batch["number"]]
    assert data.non_tensor_batch["city"].tolist() == [CITIES[row] for row in rows]
    assert data.meta_info["trip"] == "world"
    return rows


# Batches


def test_a_union_takes_what_is_equal_in_value_and_refuses_what_is_not() -> None:
    speed = torch.rand(7, 2)
    one = TensorDict({"speed": speed, "wind": torch.rand(7)}, [7])
    union_tensor_dict(one, TensorDict({"speed": speed.clone(), "rain": torch.rand(7)}, [7]))
    assert set(one.keys()) == {"speed", "wind", "rain"}
    with pytest.raises(DataError, match="'rain' is in both"):
        union_tensor_dict(one, TensorDict({"rain": torch.rand(7) + 1}, [7]))


@pytest.mark.parametrize(
    ("array", "other"),
    [
        (np.arange(12).reshape(2, 3, 2), np.arange(12).reshape(2, 3, 2) + 1),
        (np.array([0.5, np.nan, 2.0]), np.array([np.nan, 0.5, 2.0])),
        (np.array([0.5, np.nan, 2.0]), np.array([0.5, 1.0, 2.0])),
        (
            np.array([math.nan, "nan", None], dtype=object),
            np.array([math.nan, math.nan, None], dtype=object),
        ),
        (
            np.fromiter([1, "two", np.array([3, 4])], object),
            np.fromiter([1, "two", np.array([3, 5])], object),
        ),
    ],
)
def test_a_union_of_arrays_sees_every_dimension_nan_and_nested_arrays(
    array: Any, other: Any
) -> None:
    assert union_numpy_dict({"a": array}, {"a": array.copy(), "b": array}).keys() == {"a", "b"}
    with pytest.raises(DataError, match="'a' is in both"):
        union_numpy_dict({"a": array}, {"a": other})


def array_inside_itself(last: int) -> Any:
    array = np.empty(3, dtype=object)
    array[:] = [array, {"again": [array]}, last]
    return array


def test_a_union_compares_arrays_that_contain_themselves() -> None:
    array = array_inside_itself(last=1)
    assert union_numpy_dict({"a": array}, {"a": array_inside_itself(last=1)})["a"] is array
    with pytest.raises(DataError, match="'a' is in both"):
        union_numpy_dict({"a": array}, {"a": array_inside_itself(last=2)})


def test_the_first_dimensions_of_all_tensors_must_agree() -> None:
    tensors = {"map": torch.zeros(30, 4), "photo": torch.zeros(30, 5, 3)}
    assert DataProto.from_dict(tensors).batch.batch_size == torch.Size([30])
    for num_batch_dims in (2, 3):
        with pytest.raises(
            DataError, match=f"need {num_batch_dims} batch dimensions of equal sizes"
        ):
            DataProto.from_dict(tensors, num_batch_dims=num_batch_dims)


def test_a_batch_has_a_length_with_and_without_tensors() -> None:
    names = np.array(CITIES[:4], dtype=object)
    assert len(DataProto(None, {"city": names}, {"trip": 1})) == 4
    assert len(DataProto(None, {}, {"trip": 1})) == 0
    assert len(DataProto(batch=None, non_tensor_batch=None, meta_info={"trip": 1})) == 0  # type: ignore[arg-type]


def test_mini_batches_depend_on_the_seed_alone_and_all_epochs_have_them() -> None:
    shuffled = {"dataloader_kwargs": {"shuffle": True}}
    runs = [
        [rows_of(part) for part in cities(10).make_iterator(5, 3, seed=1, **shuffled)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 10 * 3 // 5
    assert sorted(runs[0][0] + runs[0][1]) == list(range(10))
    in_order = [rows_of(part) for part in cities(6).make_iterator(2, 2, seed=0)]
    assert in_order == [[0, 1], [2, 3], [4, 5]] * 2


def test_reorder_changes_the_batch_itself() -> None:
    data = cities(5)
    data.reorder(torch.tensor([4, 0, 3, 1, 2]))
    assert rows_of(data) == [4, 0, 3, 1, 2]


def test_chunks_have_one_size_and_concatenated_they_are_the_batch() -> None:
    parts = cities(8).chunk(4)
    assert list(map(rows_of, parts)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows_of(DataProto.concat(parts)) == list(range(8))
    with pytest.raises(DataError, match="8 rows cannot be split into 5 equal parts"):
        cities(8).chunk(5)


@pytest.mark.parametrize(("size", "expected"), [(4, [4, 4, 2]), (10, [10]), (17, [10])])
def test_the_last_split_may_be_smaller(size: int, expected: list[int]) -> None:
    parts = cities(10).split(size)
    assert list(map(len, parts)) == expected
    assert rows_of(DataProto.concat(parts)) == list(range(10))


@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [(9, [3, 2, 2, 2]), (8, [2] * 4), (10, [3, 3, 2, 2]), (4, [1] * 4), (2, [1, 1, 0, 0])],
)
def test_uneven_chunks_differ_by_one_row_and_no_rank_starves(
    num_rows: int, sizes: list[int]
) -> None:
    parts = cities(num_rows, auto_padding=True).chunk(4)
    assert list(map(len, parts)) == sizes
    assert [row for part in parts for row in rows_of(part)] == list(range(num_rows))


def test_metrics_of_ranks_become_lists_and_other_meta_info_must_agree() -> None:
    def part(**meta_info: Any) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info=meta_info)

    several = [{"loss": 1.0}, {"loss": 2.0}]
    joined = DataProto.concat(
        [part(metrics=several, lr=0.1), part(metrics={"loss": 3.0}, lr=0.1), part(seed=3)]
    )
    assert joined.meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0]}, "lr": 0.1, "seed": 3}
    assert DataProto.concat([part(metrics=[]), part(metrics=None)]).meta_info == {}
    with pytest.raises(DataError, match="'lr' is in both batches with different content"):
        DataProto.concat([part(lr=0.1), part(lr=0.2)])


def test_pop_moves_keys_and_select_without_tensors_works() -> None:
    data = cities(3)
    popped = data.pop(batch_keys=["number"], meta_info_keys=["trip"])
    assert (set(popped.batch.keys()), set(popped.meta_info)) == ({"number"}, {"trip"})
    assert (set(data.batch.keys()), data.meta_info) == (set(), {})
    names = DataProto.from_dict(non_tensors={"city": CITIES[:3]})
    assert (
        names.select(non_tensor_batch_keys=["city"]).non_tensor_batch["city"].tolist() == CITIES[:3]
    )
    assert names.pop(non_tensor_batch_keys=["city"]).non_tensor_batch["city"].tolist() == CITIES[:3]
    assert names.non_tensor_batch == {}


def test_a_key_that_is_not_there_is_an_error_in_every_part() -> None:
    """verl ignores such keys of non_tensor_batch and meta_info in `select`. Here a typing error is
    not silent."""
    for part in ("batch_keys", "non_tensor_batch_keys", "meta_info_keys"):
        with pytest.raises(DataError, match=r"has no keys \['typo'\]"):
            cities(2).select(**{part: ["typo"]})


def test_rows_are_repeated_next_to_each_other_or_as_a_whole() -> None:
    assert rows_of(cities(3).repeat(3)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert rows_of(cities(3).repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    for counts in ([2, 0, 3], (2, 0, 3), torch.tensor([2, 0, 3]), np.array([2, 0, 3])):
        assert rows_of(cities(3).sample_level_repeat(counts)) == [0, 0, 2, 2, 2]


def test_columns_are_split_into_rows_and_other_columns_repeated() -> None:
    wide, deep = torch.arange(12).reshape(2, 6), torch.arange(24).reshape(2, 6, 2)
    pairs = np.array([["a", "b", "c"], ["d", "e", "f"]], dtype=object)
    data = DataProto.from_dict(
        {"wide": wide, "deep": deep, "id": torch.tensor([7, 8])}, {"pairs": pairs}, {"n": 1}
    )
    result = data.unfold_column_chunks(3, split_keys=["wide", "deep", "pairs"])
    assert result.batch["wide"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert torch.equal(result.batch["deep"], deep.reshape(6, 2, 2))
    assert result.batch["id"].tolist() == [7, 7, 7, 8, 8, 8]
    assert result.non_tensor_batch["pairs"].tolist() == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]
    assert (len(result), result.meta_info) == (6, {"n": 1})
    assert same_value(data.unfold_column_chunks(2).columns(), data.repeat(2).columns()), (
        "no split_keys: all repeated"
    )


def test_a_list_of_lists_stays_a_column_of_lists() -> None:
    """verl makes a 2-d array of it if all lists have one length, so the type of a column depends on
    the data."""
    data = DataProto.from_dict(non_tensors={"stops": [["a", "b"], ["c", "d"]]})
    assert data.non_tensor_batch["stops"].shape == (2,)
    with pytest.raises(DataError, match=r"'stops' is object\[2\]"):
        data.unfold_column_chunks(2, ["stops"])


def test_folded_rows_are_reordered_as_groups() -> None:
    folded = fold_batch_dim(cities(3).repeat(2), 3)
    assert folded.batch["number"].tolist() == [[0, 0], [10, 10], [20, 20]]
    folded.reorder(torch.tensor([2, 0, 1]))
    assert rows_of(unfold_batch_dim(folded, batch_dims=2)) == [2, 2, 0, 0, 1, 1]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_row_numbers_and_masks_of_every_kind_select_rows(kind: Any) -> None:
    mask = [i % 3 == 1 for i in range(10)]
    for index, rows in (([8, 0, 8], [8, 0, 8]), (mask, [1, 4, 7])):
        selected = cities(10)[kind(index)]
        assert rows_of(selected) == rows
        assert selected.batch.batch_size == torch.Size([len(rows)])
        assert [rows_of(part) for part in selected.chunk(3)] == [[row] for row in rows]
    assert cities(10)[np.int64(4)].non_tensor_batch["city"] == "Bonn"


def test_subclasses_make_batches_of_their_own_type() -> None:
    class Trip(DataProto):
        pass

    assert type(Trip.from_single_dict({"x": torch.zeros(2)}).chunk(2)[0]) is Trip


# TensorDicts and bytes


def test_a_tensordict_keeps_lists_dicts_and_meta_info_both_ways() -> None:
    columns = {
        "scores": [[], [0.5], [0.25, 1.0]],
        "extra": [{"ok": 1.0}, {"ok": 0.0, "why": "late"}, {}],
        "chat": [[{"role": "user", "content": "hi"}], [], [{"role": "user", "content": "bye"}] * 2],
        "city": CITIES[:3],
    }
    data = DataProto.from_dict({"x": torch.arange(3)}, columns, {"step": 4})
    converted = data.to_tensordict()
    assert converted["x"].tolist() == [0, 1, 2]
    assert (converted["city"], converted["step"]) == (CITIES[:3], 4)
    assert list(converted["scores"][2]) == [0.25, 1.0]
    back = DataProto.from_tensordict(converted)
    assert {key: array.tolist() for key, array in back.non_tensor_batch.items()} == columns
    assert (back.batch["x"].tolist(), back.meta_info) == ([0, 1, 2], {"step": 4})


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.bool, torch.bfloat16, torch.float8_e4m3fn]
)
def test_tensors_of_every_type_arrive_as_they_were(dtype: torch.dtype) -> None:
    rows = ragged(torch.arange(5).to(dtype), torch.tensor([2, 0, 3]))
    sent = TensorDict({"dense": torch.arange(12).reshape(3, 4).to(dtype), "ragged": rows}, [3])
    received = encode(DataProto(sent)).decode().batch
    assert received.batch_size == torch.Size([3])
    assert same_value(dict(received.items()), dict(sent.items()))


def test_two_batch_dimensions_and_an_empty_tensordict_arrive_as_they_were() -> None:
    for sent in (TensorDict({"x": torch.rand(4, 2, 3)}, [4, 2]), TensorDict({}, [12])):
        received = encode(DataProto(sent)).decode().batch
        assert received.batch_size == sent.batch_size
        assert same_value(dict(received.items()), dict(sent.items()))


def test_a_saved_batch_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    """verl's file is a pickle, which runs code when it is loaded. Ours is a safetensors file, so it
    needs JSON data."""
    cities(4).save_to_disk(tmp_path / "trip.pt")
    assert rows_of(DataProto.load_from_disk(tmp_path / "trip.pt")) == [0, 1, 2, 3]


def test_three_dimensional_position_ids_are_refused() -> None:
    """verl has them for images, with rows that vary in the last dimension. Here models read text
    only."""
    rows = [torch.arange(length).expand(4, length).contiguous() for length in (4, 5)]
    position_ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(
        DataError, match="batch\\['position_ids'\\] is a NestedTensor; it must be a dense tensor"
    ):
        DataProto(TensorDict({"position_ids": position_ids}, [2]))


# Padding


@pytest.mark.parametrize(
    ("divisor", "rows"),
    [(2, [0, 1, 2, 3, 4, 0]), (5, [0, 1, 2, 3, 4]), (12, [0, 1, 2, 3, 4] * 2 + [0, 1])],
)
def test_a_batch_is_padded_to_a_divisor_with_its_own_rows_from_the_front(
    divisor: int, rows: list[int]
) -> None:
    padded, pad_size = pad_dataproto_to_divisor(cities(5), divisor)
    assert (rows_of(padded), pad_size) == (rows, len(rows) - 5)
    assert rows_of(unpad_dataproto(padded, pad_size)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_rows", range(3, 10))
def test_padding_to_the_ranks_gives_each_of_them_the_same_number_of_rows(num_rows: int) -> None:
    data = cities(num_rows)
    data.padding(-num_rows % 3)
    assert [len(part) for part in data.chunk(3)] == [math.ceil(num_rows / 3)] * 3
    assert rows_of(data)[num_rows:] == [num_rows - 1] * (-num_rows % 3), (
        "the last row, if nothing else is asked for"
    )


def test_auto_padding_is_set_on_the_class_that_verl_sets_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not cities(3).is_padding_enabled()
    assert cities(3, auto_padding=True).is_padding_enabled()
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert cities(3).is_padding_enabled()


def test_padded_tokens_become_ragged_and_padded_again() -> None:
    """verl's functions also shift log-probs by a token. Here a column of response tokens has no
    prompt positions."""
    prompt_lengths, response_lengths = torch.tensor([3, 1, 4]), torch.tensor([2, 5, 1])
    lengths = prompt_lengths + response_lengths
    padded = torch.arange(1, 25).reshape(3, 8) * (torch.arange(8) < lengths[:, None])
    tokens = unpad(padded, lengths)
    assert [len(row) for row in tokens.unbind()] == [5, 6, 5]
    assert torch.equal(pad_ragged(tokens, 8), padded)
    log_probs = ragged(torch.arange(8.0), response_lengths)
    data = DataProto.from_dict(
        {"input_ids": tokens, "num_prompt_tokens": prompt_lengths, "old_log_probs": log_probs}
    ).to_padded(response_width=6)
    assert data.batch["prompts"].tolist() == [[0, 1, 2, 3], [0, 0, 0, 9], [17, 18, 19, 20]]
    assert data.batch["responses"][1].tolist() == [10, 11, 12, 13, 14, 0]
    assert data.batch["response_mask"].sum(1).tolist() == [2, 5, 1]
    assert data.batch["old_log_probs"].tolist() == [
        [0, 1, 0, 0, 0, 0],
        [2, 3, 4, 5, 6, 0],
        [7, 0, 0, 0, 0, 0],
    ]


# Balancing


def test_micro_batches_have_every_row_once_and_can_be_put_back_in_order() -> None:
    lengths = torch.randint(45, 90, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = balanced(lengths, num_passes(lengths, 300))
    order = [row for part in parts for row in part]
    assert sorted(order) == list(range(20))
    data = DataProto.from_dict({"x": torch.arange(20)})
    data.reorder(order)
    data.reorder(np.argsort(order))
    assert data.batch["x"].tolist() == list(range(20))


def test_no_micro_batch_is_over_the_limit_of_tokens() -> None:
    """verl makes ceil(tokens / limit) micro-batches and lets one be over the limit. Ours makes more
    if it must."""
    lengths = [200, 200, 200]
    assert math.ceil(sum(lengths) / 300) == 2
    parts = balanced(lengths, num_passes(lengths, 300))
    assert parts == [[0], [1], [2]]
    assert num_passes([150, 150, 150, 150], 300) == 2, "and as few as verl if they fit"
    assert num_passes([500, 10], 300) == 2, "a longer row is a micro-batch of its own"
    assert num_passes([5] * 4, 300) == 1


def test_ranks_that_need_fewer_micro_batches_make_as_many_as_the_others() -> None:
    ranks = [[90, 80, 70, 60], [40, 30, 20, 10]]
    most = max(num_passes(lengths, 150) for lengths in ranks)
    assert [[len(part) > 0 for part in balanced(lengths, most)] for lengths in ranks] == [
        [True] * most
    ] * 2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_get_equally_many_rows_and_about_equally_many_tokens(num_ranks: int) -> None:
    """verl can also keep all answers to a prompt on one rank. Here the driver computes the
    advantages of all rows, so a rank does not need the other answers to a prompt."""
    lengths = [40 + 15 * (7 * row % 16) for row in range(16)]
    order = rank_order(lengths, 16, num_ranks, balance=True)
    tokens = [sum(lengths[row] for row in part) for part in np.split(order, num_ranks)]
    assert sorted(order.tolist()) == list(range(16))
    assert max(tokens) - min(tokens) <= 0.05 * sum(lengths) / num_ranks


# Dispatch


def at_ranks(num_ranks: int, *args: Any, **kwargs: Any) -> list[tuple[Call, Any]]:
    """What each rank gets of the arguments of a method that splits batches, and its share of the
    batch."""
    values, named = splittable("role.method", args, kwargs)
    found = []
    for rank in range(num_ranks):
        call = Call("role", "method", values, named, 0.0, 1, ())
        packed, objects = pack_call(call, None, num_ranks, rank, in_lists=False)
        direct, stored = zip(*objects, strict=True)
        found.append(resolve_arguments(unpack_call(packed), direct, stored))
    return found


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "sizes"), [(4, 2, [2] * 2), (10, 4, [3] * 4), (1, 4, [1] * 4)]
)
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("as_tensordict", [False, True])
def test_every_rank_gets_equally_many_rows_and_the_result_has_those_of_the_batch(
    num_rows: int, num_ranks: int, sizes: list[int], by_name: bool, as_tensordict: bool
) -> None:
    data = cities(num_rows).to_tensordict() if as_tensordict else cities(num_rows)
    received = at_ranks(num_ranks, data=data) if by_name else at_ranks(num_ranks, data)
    results = []
    for rank, (call, share) in enumerate(received):
        part = call.kwargs["data"] if by_name else call.args[0]
        assert isinstance(part, TensorDict if as_tensordict else DataProto)
        assert len(part) == sizes[rank]
        part = DataProto.from_tensordict(part) if as_tensordict else part
        part.batch["number"] += 1000 * rank
        results.append(without_padding(part, share))
    joined = collect_batches(results)
    size = sizes[0]
    assert joined.batch["number"].tolist() == [
        10 * row + 1000 * (row // size) for row in range(num_rows)
    ]
    assert joined.non_tensor_batch["city"].tolist() == CITIES[:num_rows]


def test_the_results_of_ranks_are_joined_if_they_are_rows() -> None:
    assert rows_of(collect_batches(cities(6).chunk(3))) == list(range(6))
    assert collect_batches([["a"], ["b", "c"]]) == ["a", "b", "c"]
    assert collect_batches([None, None]) is None
    assert collect_batches([0.5, 1.5]) == [0.5, 1.5]


@pytest.mark.parametrize(
    "argument",
    [
        *([1, 2], ("a", "b"), {"number": torch.arange(4)}, torch.arange(4), np.arange(4)),
        *(
            [cities(2), cities(2)],
            {"data": [cities(4)]},
            TensorDict({"temperature": torch.tensor(1.0)}, []),
        ),
    ],
    ids=lambda argument: type(argument).__name__,
)
def test_what_cannot_be_split_is_refused_by_a_method_that_splits(argument: Any) -> None:
    kind = type(argument).__name__
    with pytest.raises(
        DataError, match=f"critic.update: argument data is a {kind}, which cannot be split"
    ):
        splittable("critic.update", (), {"data": argument})


@pytest.mark.parametrize(
    "argument", [{"number": torch.arange(4)}, np.arange(4), [torch.zeros(2)], [[cities(1)]]]
)
def test_rows_beside_a_batch_are_refused_too(argument: Any) -> None:
    with pytest.raises(
        DataError, match=r"critic.update: argument 1 is a .*, which cannot be split"
    ):
        splittable("critic.update", (cities(4), argument), {})


@pytest.mark.parametrize(
    "argument", [3, "text", None, {"top_p": 0.9}, [0.1, 0.2], torch.tensor(0.5), np.float64(2)]
)
def test_settings_beside_a_batch_reach_every_rank(argument: Any) -> None:
    """verl refuses them. Here a method may have arguments that are not rows."""
    for call, _ in at_ranks(2, cities(4), setting=argument):
        assert same_value(call.kwargs["setting"], argument)


def test_a_method_with_a_named_mesh_splits_batches_over_the_data_parallel_ranks() -> None:
    class Engine(Worker):
        def __init__(self, ranks_per_copy: int) -> None:
            super().__init__()
            dp_rank, is_collect = self.rank // ranks_per_copy, self.rank % ranks_per_copy == 0
            self._register_dispatch_collect_info("train", dp_rank=dp_rank, is_collect=is_collect)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
        def forward(self, data: DataProto) -> DataProto:
            return data

    assert registered_methods(Engine)["forward"].dispatch is Dispatch.DP_COMPUTE_PROTO

    def make(tp_size: int, ranks_per_copy: int) -> Sequence[Engine]:
        engines = []
        for rank in range(4):
            with made_in(WorkerContext(rank=rank, dims=ParallelDims.over(4, tp=tp_size))):
                engines.append(Engine(ranks_per_copy))
        return engines

    assert len(make(1, 1)) == len(make(2, 2)) == 4
    with pytest.raises(
        DataError,
        match=r"mesh 'train': .* of rank 1 is \(0, False\), but here it is \(1, True\); set",
    ):
        make(1, 2)


# Roles


def test_one_name_puts_actor_rollout_and_reference_into_a_pool() -> None:
    manager = ResourcePoolManager(
        {"all": [2], "other": [1]}, {Role.ActorRolloutRef: "all", Role.Critic: "other"}
    )
    assert manager.roles == {
        Role.Actor: "all",
        Role.Rollout: "all",
        Role.RefPolicy: "all",
        Role.Critic: "other",
    }
    for role in (Role.ActorRolloutRef, Role.ActorRollout, Role.Rollout):
        assert manager.get_resource_pool(role).world_size == 2


def test_a_reference_has_one_pool() -> None:
    with pytest.raises(PlacementError, match=r"placement\.roles\.ref=b: ref is also placed in a"):
        ResourcePoolManager({"a": [1], "b": [1]}, {Role.ActorRolloutRef: "a", Role.RefPolicy: "b"})


@pytest.mark.parametrize("role", [Role.Env, Role.TeacherModel])
def test_roles_that_are_not_built_in_are_named_with_those_that_are(role: Role) -> None:
    with pytest.raises(
        PlacementError,
        match=rf"there is no role {role}; the roles are actor, .*, actor_rollout_ref",
    ):
        ResourcePoolManager({"a": [1]}, {role: "a"})
