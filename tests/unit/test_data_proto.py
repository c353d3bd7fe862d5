"""DataProto does what users of verl's protocol expect, and says which keys and sizes are wrong when
it cannot."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rolepool.errors import DataError
from rolepool.protocol import (
    DataProto,
    DataProtoItem,
    collate_fn,
    encode,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from rolepool.protocol.batching import pad_rows
from rolepool.protocol.columns import (
    flat_values,
    is_ragged,
    pad_ragged,
    ragged,
    rows_of_responses,
    same_value,
    split_tokens,
    unpad,
)

settings.register_profile("few", max_examples=40, deadline=None)
settings.load_profile("few")


def batch(num_rows: int = 6, **meta_info: Any) -> DataProto:
    """Dense, bf16 and jagged tensors, objects and numbers; every column says which row it is."""
    lengths = torch.arange(num_rows) % 4
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.repeat_interleave(torch.arange(num_rows), lengths)
    return DataProto.from_dict(
        tensors={
            "x": torch.arange(num_rows * 2).reshape(num_rows, 2),
            "half": torch.arange(num_rows, dtype=torch.bfloat16),
            "jagged": torch.nested.nested_tensor_from_jagged(values, offsets),
        },
        non_tensors={
            "names": [f"row {i}" for i in range(num_rows)],
            "scores": np.arange(num_rows) * 1.5,
        },
        meta_info=meta_info,
    )


def assert_same(a: DataProto, b: DataProto) -> None:
    assert len(a) == len(b)
    assert (a.batch is None) == (b.batch is None)
    assert same_value(
        dict(a.batch.items()) if a.batch is not None else None,
        dict(b.batch.items()) if b.batch is not None else None,
    )
    assert same_value(a.non_tensor_batch, b.non_tensor_batch)
    assert same_value(a.meta_info, b.meta_info)


def rows_in(data: DataProto) -> list[int]:
    """Which rows of `batch()` these are, after checking that all columns agree."""
    rows = [int(name.split()[1]) for name in data.non_tensor_batch["names"]]
    assert data.batch["x"][:, 0].tolist() == [2 * row for row in rows]
    assert data.batch["half"].tolist() == rows
    assert [part.tolist() for part in data.batch["jagged"].unbind()] == [
        [row] * (row % 4) for row in rows
    ]
    assert data.non_tensor_batch["scores"].tolist() == [1.5 * row for row in rows]
    assert data.batch.batch_size == torch.Size([len(rows)])
    return rows


# --- making -------------------------------------------------------------------------------------------------------


def test_lists_become_object_arrays_with_one_entry_per_row_even_when_they_have_one_length() -> None:
    data = DataProto.from_dict(non_tensors={"prompts": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["prompts"].shape == (2,)
    assert data.non_tensor_batch["prompts"].dtype == object
    assert data.batch is None
    assert len(data) == 2


def test_a_single_dict_is_sorted_into_tensors_and_arrays() -> None:
    data = DataProto.from_single_dict(
        {"x": torch.zeros(2), "n": np.array(["a", "b"], dtype=object)}, {"k": 1}
    )
    assert list(data.batch.keys()) == ["x"]
    assert list(data.non_tensor_batch) == ["n"]
    assert data.meta_info == {"k": 1}


def test_several_batch_dimensions_are_kept_when_rows_are_taken() -> None:
    data = DataProto.from_dict(
        {"x": torch.zeros(4, 3, 5), "y": torch.zeros(4, 3)}, num_batch_dims=2
    )
    assert data.batch.batch_size == (4, 3)
    assert data[1:3].batch.batch_size == (2, 3)
    assert data[0].batch.batch_size == (3,)
    assert DataProto.concat(data.chunk(2)).batch.batch_size == (4, 3)


def test_a_tensordict_keeps_objects_and_meta_info_both_ways() -> None:
    data = batch(5, step=3, note={"a": [1]})
    data.non_tensor_batch["scores"] = data.non_tensor_batch["scores"].astype(object)
    for part in (data, data[:0]):
        assert_same(DataProto.from_tensordict(part.to_tensordict()), part)
    with pytest.raises(DataError, match=r"\['x'\]"):
        batch(2, x=1).to_tensordict()


def test_a_tensordict_with_objects_is_split_into_the_parts() -> None:
    source = TensorDict(
        {"x": torch.zeros(2), "s": NonTensorStack("a", "b"), "m": "for all"}, batch_size=[2]
    )
    data = DataProto.from_tensordict(source, meta_info={"k": 1})
    assert list(data.non_tensor_batch["s"]) == ["a", "b"]
    assert data.meta_info == {"m": "for all", "k": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(4)}),
            r"'a': \(3,\), 'b': \(4,\)",
        ),
        (lambda: DataProto.from_dict({"a": torch.zeros(())}), r"'a': \(\)"),
        (lambda: DataProto.from_dict({"a": [1, 2]}), r"batch\['a'\] is a list"),
        (
            lambda: DataProto.from_dict({"a": torch.zeros(3)}, {"n": [1]}),
            r"non_tensor_batch\['n'\] has 1 rows.* 3",
        ),
        (
            lambda: DataProto.from_dict(non_tensors={"m": [1], "n": [1, 2]}),
            r"'n'\] has 2 rows, not 1: .*'m'",
        ),
        (
            lambda: DataProto.from_dict({"a": torch.zeros(3)}, {"n": [1]}, num_batch_dims=2),
            r"\['n'\]",
        ),
        (lambda: DataProto.from_single_dict({"a": "text"}), "'a': 'str'"),
        (lambda: DataProto(batch={"a": 1}), "batch is a dict"),
        (lambda: DataProto(non_tensor_batch={"n": [1, 2]}), "'n'.* is a list"),
        (
            lambda: DataProto.from_dict(
                {"n": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}
            ),
            "jagged",
        ),
        (
            lambda: DataProto.from_tensordict(TensorDict({"a": {"b": torch.ones(1)}}, [1])),
            "flatten_keys",
        ),
    ],
)
def test_a_batch_that_cannot_be_is_refused_with_its_keys_and_sizes(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


# --- rows ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 7), st.data())
def test_indexing_selects_the_rows_that_torch_would(num_rows: int, draw: st.DataObject) -> None:
    data = batch(num_rows)
    everything = torch.arange(num_rows)
    bound = st.one_of(st.none(), st.integers(-9, 9))
    piece = slice(draw.draw(bound), draw.draw(bound), draw.draw(st.sampled_from([None, 1, 2, 3])))
    assert rows_in(data[piece]) == everything[piece].tolist()
    assert rows_in(data.slice(piece.start, piece.stop, piece.step)) == everything[piece].tolist()

    mask = draw.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    for form in (mask, np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool)):
        assert rows_in(data[form]) == everything[torch.tensor(mask, dtype=torch.bool)].tolist()

    if num_rows:
        numbers = draw.draw(st.lists(st.integers(-num_rows, num_rows - 1), max_size=9))
        for form in (
            numbers,
            np.array(numbers, dtype=np.int32),
            torch.tensor(numbers, dtype=torch.int64),
        ):
            assert (
                rows_in(data.select_idxs(form))
                == everything[torch.tensor(numbers, dtype=torch.int64)].tolist()
            )


def test_an_int_gives_an_item_and_iteration_gives_all_of_them() -> None:
    data = batch(6, step=1)
    for index in (4, -2, np.int64(4), torch.tensor(4)):
        item = data[index]
        assert isinstance(item, DataProtoItem)
        assert item.batch["x"].tolist() == [8, 9]
        assert item.non_tensor_batch["names"] == "row 4"
        assert item.meta_info == {"step": 1}
    assert data[3].batch["jagged"].tolist() == [3, 3, 3]
    assert [item.non_tensor_batch["names"] for item in data] == [f"row {i}" for i in range(6)]


def test_reversed_and_strided_slices_work() -> None:
    assert rows_in(batch(6)[::-1]) == [5, 4, 3, 2, 1, 0]
    assert rows_in(batch(6)[5:1:-2]) == [5, 3]


@pytest.mark.parametrize("index", [6, -7, [0, 6], [True] * 5, [[0, 1]], [0.5], "x", None], ids=str)
def test_rows_that_are_not_there_are_refused(index: Any) -> None:
    with pytest.raises(DataError, match=r"6 rows|selected by"):
        batch(6)[index]


def test_a_row_number_beyond_the_batch_is_an_index_error_too() -> None:
    with pytest.raises(IndexError):
        batch(2)[2]


@given(st.integers(1, 5), st.integers(0, 4))
def test_chunks_concatenated_are_the_batch(num_chunks: int, chunk_size: int) -> None:
    data = batch(num_chunks * chunk_size, step=1)
    chunks = data.chunk(num_chunks)
    assert [len(chunk) for chunk in chunks] == [chunk_size] * num_chunks
    assert_same(DataProto.concat(chunks), data)


@given(st.integers(0, 9), st.integers(1, 4))
def test_with_padding_enabled_chunks_differ_by_at_most_one_row(
    num_rows: int, num_chunks: int
) -> None:
    data = batch(num_rows)
    data.meta_info |= DataProto.from_dict(auto_padding=True).meta_info
    sizes = [len(chunk) for chunk in data.chunk(num_chunks)]
    assert len(sizes) == num_chunks
    assert max(sizes) - min(sizes) <= 1
    assert rows_in(DataProto.concat(data.chunk(num_chunks))) == list(range(num_rows))


@given(st.integers(1, 9), st.integers(1, 4))
def test_splits_have_the_asked_size_except_the_last(num_rows: int, split_size: int) -> None:
    parts = batch(num_rows).split(split_size)
    assert all(len(part) == split_size for part in parts[:-1])
    assert rows_in(DataProto.concat(parts)) == list(range(num_rows))


@given(st.integers(0, 5), st.integers(0, 4))
def test_repeat_interleaves_rows_or_repeats_the_batch(num_rows: int, times: int) -> None:
    data = batch(num_rows)
    assert rows_in(data.repeat(times, interleave=True)) == [
        row for row in range(num_rows) for _ in range(times)
    ]
    assert rows_in(data.repeat(times, interleave=False)) == list(range(num_rows)) * times


def test_every_row_can_be_repeated_its_own_number_of_times() -> None:
    for counts in ([2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])):
        assert rows_in(batch(3).sample_level_repeat(counts)) == [0, 0, 2]
    with pytest.raises(DataError, match="3 counts"):
        batch(3).sample_level_repeat([1, 2])


def test_reorder_changes_the_batch_itself_and_takes_permutations_only() -> None:
    data = batch(4)
    data.reorder(torch.tensor([2, 0, 3, 1]))
    assert rows_in(data) == [2, 0, 3, 1]
    for wrong in ([0, 1, 2], [0, 0, 1, 2]):
        with pytest.raises(DataError, match="every one of 4 rows once"):
            data.reorder(wrong)


def test_slices_share_memory_and_gathered_rows_do_not() -> None:
    data = batch(6)
    data[2:4].batch["x"][0] = -1
    assert data.batch["x"][2].tolist() == [-1, -1]
    data[[3]].batch["x"][0] = -2
    assert data.batch["x"][3].tolist() == [6, 7]


def test_adding_keys_to_a_part_leaves_the_whole_alone() -> None:
    data = batch(6, step=1)
    for part in (data[:3], data.select(), data.chunk(2)[0], copy.copy(data), data[[0]]):
        part.batch["new"] = torch.zeros(len(part))
        part.non_tensor_batch["new"] = np.zeros(len(part))
        part.meta_info["new"] = 1
        part.pop(batch_keys=["x"])
    assert sorted(data.batch.keys()) == ["half", "jagged", "x"]
    assert data.meta_info == {"step": 1}


def test_jagged_columns_with_the_same_lengths_stay_combinable_through_all_row_operations() -> None:
    data = batch(6)
    data.batch["other"] = data.batch["jagged"] * 10
    for part in (
        data[1:4],
        data[[3, 1, 1]],
        DataProto.concat(data.chunk(2)),
        data.repeat(2),
        pad_rows(data, 2),
    ):
        part.batch["jagged"] + part.batch["other"]


def test_concat_names_the_keys_that_differ() -> None:
    with pytest.raises(DataError, match=r"batches 0 and 1 .*\['a'\].*\['b'\]"):
        DataProto.concat(
            [DataProto.from_dict({"a": torch.ones(1)}), DataProto.from_dict({"b": torch.ones(1)})]
        )
    with pytest.raises(
        DataError, match=r"'a' cannot be concatenated: float32\[1, 2\].*float32\[1, 3\]"
    ):
        DataProto.concat([DataProto.from_dict({"a": torch.ones(1, n)}) for n in (2, 3)])
    with pytest.raises(DataError, match="empty"):
        DataProto.concat([])


def test_concat_gathers_the_metrics_of_the_ranks_and_refuses_other_differences() -> None:
    parts = [DataProto(meta_info={"metrics": {"loss": rank}, "step": 1}) for rank in range(2)]
    assert DataProto.concat(parts).meta_info == {"metrics": {"loss": [0, 1]}, "step": 1}
    parts[1].meta_info["step"] = 2
    with pytest.raises(DataError, match=r"'step' is in both .*: 1, 2"):
        DataProto.concat(parts)


def test_chunk_and_split_say_what_does_not_divide() -> None:
    with pytest.raises(DataError, match=r"7 rows .* 2 equal parts"):
        batch(7).chunk(2)
    with pytest.raises(DataError, match="parts of 0 rows"):
        batch(7).split(0)


# --- keys ---------------------------------------------------------------------------------------------------------


def test_select_takes_all_of_a_part_by_default_and_nothing_for_an_empty_list() -> None:
    data = batch(4, step=1, other=2)
    selected = data.select(batch_keys=["x"], non_tensor_batch_keys=[], meta_info_keys=["step"])
    assert list(selected.batch.keys()) == ["x"]
    assert selected.non_tensor_batch == {}
    assert selected.meta_info == {"step": 1}
    assert len(data.select(batch_keys=[], non_tensor_batch_keys=[])) == 4
    data.select(deepcopy=True).batch["x"].zero_()
    assert rows_in(data) == [0, 1, 2, 3]


def test_pop_moves_keys_out_of_the_batch() -> None:
    data = batch(4, step=1)
    popped = data.pop(batch_keys=["x"], non_tensor_batch_keys=["names"], meta_info_keys=["step"])
    assert list(popped.batch.keys()) == ["x"]
    assert list(popped.non_tensor_batch) == ["names"]
    assert popped.meta_info == {"step": 1}
    assert sorted(data.batch.keys()) == ["half", "jagged"]
    assert list(data.non_tensor_batch) == ["scores"]
    assert len(data.pop(non_tensor_batch_keys=["scores"])) == 4


def test_a_missing_key_is_named_and_nothing_is_taken() -> None:
    data = batch(4)
    for operation in (data.select, data.pop):
        with pytest.raises(
            DataError, match=r"batch has no keys \['y'\]; it has \['half', 'jagged', 'x'\]"
        ):
            operation(batch_keys=["x", "y"])
    assert rows_in(data) == [0, 1, 2, 3]


def test_rename_changes_the_batch_and_can_swap() -> None:
    data = batch(2)
    assert data.rename("x", "y") is data
    assert torch.equal(data.rename(["y", "names"], ["x", "labels"]).batch["x"], batch(2).batch["x"])
    assert list(data.rename("labels", "names").non_tensor_batch) == ["scores", "names"]
    data.rename(["x", "half"], ["half", "x"])
    assert data.batch["x"].dtype == torch.bfloat16
    with pytest.raises(DataError, match=r"renamed to \['jagged'\]"):
        data.rename("x", "jagged")
    with pytest.raises(DataError, match=r"no keys \['nothing'\]"):
        data.rename("nothing", "y")
    with pytest.raises(DataError, match=r"\['x'\] cannot be renamed to \['a', 'b'\]"):
        data.rename("x", ["a", "b"])


def test_union_adds_columns_and_accepts_equal_ones() -> None:
    data = batch(4, step=1)
    other = batch(4, step=1, more=2).union(DataProto.from_dict({"y": torch.full((4,), torch.nan)}))
    assert data.union(other) is data
    assert sorted(data.batch.keys()) == ["half", "jagged", "x", "y"]
    assert data.meta_info == {"step": 1, "more": 2}
    data.union(copy.deepcopy(data))
    only_objects = DataProto.from_dict(non_tensors={"n": list("abcd")})
    assert sorted(only_objects.union(data).batch.keys()) == ["half", "jagged", "x", "y"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataProto.from_dict({"x": torch.zeros(4, 2, dtype=torch.int64)}), "'x' is in both"),
        (DataProto.from_dict({"x": torch.zeros(4, 3)}), r"int64\[4, 2\].*float32\[4, 3\]"),
        (DataProto.from_dict({"y": torch.zeros(5)}), r"4 rows .* 5 \(\['y'\]\)"),
        (DataProto.from_dict({"y": torch.zeros(4)}, {"names": list("abcd")}), "'names' is in both"),
        (
            DataProto.from_dict({"y": torch.zeros(4)}, meta_info={"step": 2}),
            "'step' is in both .*: 1, 2",
        ),
    ],
)
def test_a_union_of_what_disagrees_is_refused_and_changes_nothing(
    other: DataProto, message: str
) -> None:
    data = batch(4, step=1)
    with pytest.raises(DataError, match=message):
        data.union(other)
    assert_same(data, batch(4, step=1))


def test_union_functions_change_and_return_their_first_argument() -> None:
    first = TensorDict({"a": torch.ones(2)}, [2])
    assert union_tensor_dict(first, TensorDict({"b": torch.ones(2)}, [2])) is first
    assert sorted(first.keys()) == ["a", "b"]
    with pytest.raises(DataError, match=r"\[2\] .*'a', 'b'.* \[3\]"):
        union_tensor_dict(first, TensorDict({"b": torch.ones(3)}, [3]))
    arrays = {"a": np.array([np.nan, 1])}
    assert union_numpy_dict(arrays, {"a": np.array([np.nan, 1]), "b": np.zeros(2)}) is arrays
    assert sorted(arrays) == ["a", "b"]


# --- padding, folding, iterating ----------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(1, 9))
def test_padding_and_unpadding_is_the_identity(num_rows: int, divisor: int) -> None:
    data = batch(num_rows, step=1, metrics={"loss": 1.0})
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert pad_size < divisor
    assert rows_in(padded) == [i % num_rows for i in range(num_rows + pad_size)]
    assert_same(unpad_dataproto(padded, pad_size), data)


def test_an_empty_batch_needs_no_padding_to_any_divisor() -> None:
    data = batch(3)[:0]
    assert pad_dataproto_to_divisor(data, 4) == (data, 0)
    for pad in (data.padding, lambda num_rows: pad_rows(data, num_rows)):
        with pytest.raises(DataError, match="1 rows of padding cannot be appended to 0 rows"):
            pad(1)
    with pytest.raises(DataError, match=r"4 rows of padding .* 3 rows"):
        unpad_dataproto(batch(3), 4)


def test_padding_appends_the_first_or_the_last_row_in_place() -> None:
    for candidate, row in (("first", 0), ("last", 2), ("", 2)):
        data = batch(3)
        data.padding(2, padding_candidate=candidate)
        assert rows_in(data) == [0, 1, 2, row, row]
    data = batch(3)
    data.padding(1)
    assert rows_in(data) == [0, 1, 2, 2]
    with pytest.raises(DataError, match="'middle'"):
        data.padding(1, padding_candidate="middle")


def test_padding_rows_have_zero_masks_and_weights_but_can_be_attended_to() -> None:
    data = batch(3)
    data.batch["response_mask"] = torch.ones(3, 4, dtype=torch.int64)
    data.batch["attention_mask"] = torch.ones(3, 4, dtype=torch.bool)
    data.batch["loss_mask"] = data.batch["jagged"] * 0 + 1
    data.batch["position_ids"] = torch.arange(4).expand(3, 4)
    data.non_tensor_batch["row_weights"] = np.ones(3)
    padded = pad_rows(data[[1, 0, 2]], 2)
    assert rows_in(padded) == [1, 0, 2, 1, 1]
    assert padded.batch["response_mask"].sum(1).tolist() == [4, 4, 4, 0, 0]
    assert padded.batch["attention_mask"].all()
    assert [row.tolist() for row in padded.batch["loss_mask"].unbind()] == [
        [1],
        [],
        [1, 1],
        [0],
        [0],
    ]
    assert torch.equal(padded.batch["position_ids"][-1], torch.arange(4))
    assert padded.non_tensor_batch["row_weights"].tolist() == [1, 1, 1, 0, 0]
    assert padded.batch["is_padding"].tolist() == [False] * 3 + [True] * 2
    assert data.batch["response_mask"].all(), "the source keeps its masks"
    real = unpad_dataproto(padded, 2)
    assert not real.pop("is_padding").batch["is_padding"].any()
    assert_same(real, data[[1, 0, 2]])
    assert pad_rows(pad_rows(data, 1), 1).batch["is_padding"].tolist() == [False] * 3 + [True] * 2
    assert len(pad_rows(DataProto.from_dict(non_tensors={"n": [1]}), 2)) == 3


def test_a_masked_mean_over_padded_rows_is_that_of_the_real_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    data = DataProto.from_dict(
        {"loss": torch.randn(5, 7, generator=generator), "loss_mask": torch.ones(5, 7)}
    )

    def mean(rows: DataProto) -> torch.Tensor:
        return (rows.batch["loss"] * rows.batch["loss_mask"]).double().sum() / rows.batch[
            "loss_mask"
        ].sum()

    assert mean(pad_rows(data, 3)) == mean(data)


def test_auto_padding_is_asked_for_per_batch_or_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not batch(3).is_padding_enabled()
    data = DataProto.from_dict({"x": torch.zeros(3)}, auto_padding=True)
    assert data.is_padding_enabled()
    assert data[:2].is_padding_enabled()
    monkeypatch.setattr(DataProto, "auto_padding", True)
    assert batch(3).is_padding_enabled()


def test_folding_and_unfolding_is_the_identity() -> None:
    data = batch(6).select(batch_keys=["x", "half"])
    folded = fold_batch_dim(data, 3)
    assert len(folded) == 3
    assert folded.batch["x"].shape == (3, 2, 2)
    assert folded.non_tensor_batch["names"].shape == (3, 2)
    assert_same(unfold_batch_dim(folded), data)
    with pytest.raises(DataError, match="6 rows cannot be folded into 4"):
        fold_batch_dim(data, 4)
    with pytest.raises(DataError, match="'jagged': 'ragged int64"):
        fold_batch_dim(batch(6), 3)
    with pytest.raises(DataError, match="'half'"):
        unfold_batch_dim(data, 2)


def test_items_collate_into_the_batch_they_came_from() -> None:
    data = batch(6)
    data.non_tensor_batch["scores"] = data.non_tensor_batch["scores"].astype(object)
    assert_same(collate_fn(list(data)), data)
    assert rows_in(collate_fn([data[5], data[5]])) == [5, 5]
    rows = [DataProto.from_dict({"a": torch.ones(1, n)})[0] for n in (1, 2)]
    with pytest.raises(
        DataError, match=r"'a' cannot be concatenated: float32\[1, 1\].*float32\[1, 2\]"
    ):
        collate_fn(rows)


def test_the_iterator_gives_every_row_once_per_epoch_in_an_order_the_seed_decides() -> None:
    data = batch(6, step=1)
    assert [rows_in(part) for part in data.make_iterator(3, epochs=2)] == [[0, 1, 2], [3, 4, 5]] * 2

    def order(seed: int) -> list[int]:
        parts = list(
            data.make_iterator(2, epochs=2, seed=seed, dataloader_kwargs={"shuffle": True})
        )
        assert all(part.meta_info == {"step": 1} for part in parts)
        return [row for part in parts for row in rows_in(part)]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)[:6]) == sorted(order(1)[6:]) == list(range(6))
    with pytest.raises(DataError, match=r"6 rows .* mini-batches of 4"):
        data.make_iterator(4, epochs=1)


# --- the whole ----------------------------------------------------------------------------------------------------


def test_batches_without_tensors_without_rows_or_without_anything_work() -> None:
    objects = DataProto.from_dict(non_tensors={"n": list("abcd")})
    assert list(DataProto.concat(objects.chunk(2)).non_tensor_batch["n"]) == list("abcd")
    assert list(objects.repeat(2)[::2].non_tensor_batch["n"]) == list("abcd")
    assert objects[1].non_tensor_batch == {"n": "b"}
    nothing = DataProto(meta_info={"k": 1})
    assert len(nothing) == 0
    assert len(nothing.chunk(3)) == 3
    assert nothing.to("cpu").select().meta_info == {"k": 1}
    empty = batch(4)[:0]
    assert rows_in(DataProto.concat([empty, batch(4), empty.repeat(2)])) == [0, 1, 2, 3]
    assert [rows_in(chunk) for chunk in empty.chunk(2)] == [[], []]
    assert list(empty) == []


def test_copies_are_shallow_or_deep_as_asked() -> None:
    data = batch(3, note=[1])
    copy.copy(data).batch["half"][0] = 9
    assert data.batch["half"][0] == 9
    deep = copy.deepcopy(data)
    deep.batch["half"][0] = 0
    deep.meta_info["note"].append(2)
    assert data.batch["half"][0] == 9
    assert data.meta_info == {"note": [1]}


def test_moving_changes_the_batch_and_returns_it() -> None:
    data = batch(3)
    assert data.to("cpu") is data
    assert rows_in(data) == [0, 1, 2]


def test_the_size_is_reported_with_its_prefix() -> None:
    data = DataProto.from_dict({"x": torch.zeros(1024, 256), "j": batch(1024).batch["jagged"]})
    assert (
        data.print_size("rollouts")
        == "rollouts, 1024 rows, batch 1.01 MiB, non_tensor_batch 0.00 MiB"
    )


def test_a_consistency_check_finds_what_was_put_in_by_hand() -> None:
    data = batch(3)
    data.non_tensor_batch["short"] = np.zeros(2)
    with pytest.raises(DataError, match=r"'short'.* 2 rows.* 3"):
        data.check_consistency()


# --- disk ---------------------------------------------------------------------------------------------------------


def test_a_saved_batch_loads_as_it_was(tmp_path: Path) -> None:
    data = batch(5, step=1)
    columns = {
        "fp8": torch.ones(5, 2).to(torch.float8_e5m2),
        "view": data.batch["x"][:, 1],
        "same": data.batch["x"],
        "empty": torch.zeros(5, 0),
    }
    data.union(DataProto.from_dict(columns))
    data.non_tensor_batch["mixed"] = np.array(
        [None, 1.5, "\u00fc", [1, {"k": [0, 1]}], {"nan": math.nan}], dtype=object
    )
    data.non_tensor_batch["flags"] = np.array([True, False, True, True, False])
    data.meta_info |= {"nested": {"list": [1, "two", None]}, "big": 2**100}
    for saved in (data, data[:0], data[1:3]):
        path = tmp_path / "new folder" / "batch.safetensors"
        saved.save_to_disk(path)
        loaded = DataProto.load_from_disk(path)
        assert_same(loaded, saved)
        loaded.batch["x"].zero_()
        assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_numbers_of_numpy_and_tuples_are_saved_as_json_has_them(tmp_path: Path) -> None:
    DataProto(
        meta_info={"numbers": (np.float32(0.5), np.int64(3)), "array": np.arange(2)}
    ).save_to_disk(tmp_path / "b")
    assert DataProto.load_from_disk(tmp_path / "b").meta_info == {
        "numbers": [0.5, 3],
        "array": [0, 1],
    }


@pytest.mark.parametrize(
    "data",
    [DataProto(), DataProto(meta_info={"a": 1}), DataProto.from_dict(non_tensors={"n": [1]})],
)
def test_a_batch_without_tensors_can_be_saved(data: DataProto, tmp_path: Path) -> None:
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(str(tmp_path / "batch")), data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataProto.from_dict(non_tensors={"images": [1, object()]}),
            r"non_tensor_batch\['images'\] cannot be written as JSON: it contains a builtins.object",
        ),
        (
            DataProto(meta_info={"a": {"b": [1, {2}]}}),
            r"meta_info\['a'\] .* contains a builtins.set",
        ),
        (
            DataProto(meta_info={"raw": b"bytes"}),
            r"meta_info\['raw'\] .* contains a builtins.bytes",
        ),
    ],
)
def test_what_json_cannot_hold_is_named_and_no_file_is_written(
    data: DataProto, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        data.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="missing is not a file that save_to_disk wrote: No such file"
    ):
        DataProto.load_from_disk(tmp_path / "missing")
    (tmp_path / "junk").write_bytes(b"not a batch at all")
    with pytest.raises(DataError, match="junk is not a file"):
        DataProto.load_from_disk(tmp_path / "junk")


def test_tensors_count_as_equal_by_value_with_nan_and_signed_zero() -> None:
    assert same_value(torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, -0.0]))
    assert not same_value(torch.tensor([1.0]), torch.tensor([1]))
    assert not same_value(torch.tensor([1.0]), torch.tensor([2.0]))


# --- ragged columns -----------------------------------------------------------------------------------------------


def tokens(**more: torch.Tensor) -> DataProto:
    """Prompts 1 2, 3 and 4 5 6 with responses 7, 8 9 10 and none."""
    ids = ragged(torch.tensor([1, 2, 7, 3, 8, 9, 10, 4, 5, 6]), torch.tensor([3, 4, 3]))
    return DataProto.from_dict(
        {"input_ids": ids, "num_prompt_tokens": torch.tensor([2, 1, 3]), **more}
    )


def test_padded_columns_are_those_that_code_for_padded_batches_reads() -> None:
    log_probs = ragged(torch.tensor([0.5, 1.5, 2.5, 3.5]), torch.tensor([1, 3, 0]))
    data = tokens(old_log_probs=log_probs, score=torch.arange(3))
    padded = data.to_padded(pad_token_id=99).batch
    assert padded["prompts"].tolist() == [[99, 1, 2], [99, 99, 3], [4, 5, 6]]
    assert padded["responses"].tolist() == [[7, 99, 99], [8, 9, 10], [99, 99, 99]]
    assert torch.equal(
        padded["input_ids"], torch.cat([padded["prompts"], padded["responses"]], dim=1)
    )
    assert padded["response_mask"].tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert padded["attention_mask"].tolist() == [
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0],
    ]
    assert padded["position_ids"].tolist() == [
        [0, 0, 1, 2, 2, 2],
        [0, 0, 0, 1, 2, 3],
        [0, 1, 2, 2, 2, 2],
    ]
    assert padded["old_log_probs"].tolist() == [[0.5, 0, 0], [1.5, 2.5, 3.5], [0, 0, 0]]
    assert padded["score"].tolist() == [0, 1, 2]
    wide = data.to_padded(prompt_width=4, response_width=5).batch
    assert (wide["prompts"].shape, wide["responses"].shape, wide["old_log_probs"].shape) == (
        (3, 4),
        (3, 5),
        (3, 5),
    )
    assert is_ragged(data.batch["input_ids"]), "the batch itself stays as it is"


def test_the_mask_of_several_turns_stays_in_the_padded_form() -> None:
    """The policy sampled the first and the last token of the second response; a tool wrote the one
    between them."""
    mask = ragged(torch.tensor([True, True, False, True]), torch.tensor([1, 3, 0]))
    padded = tokens(response_mask=mask).to_padded(response_width=4).batch
    assert padded["response_mask"].tolist() == [[1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert padded["response_mask"].dtype == torch.int64
    assert padded["attention_mask"].tolist()[1] == [0, 0, 1, 1, 1, 1, 0]
    dense = torch.tensor([[1, 0, 0], [0, 0, 1], [0, 0, 0]])
    assert torch.equal(tokens(response_mask=dense).to_padded().batch["response_mask"], dense)


def test_a_batch_without_ragged_columns_is_its_own_padded_form() -> None:
    data = DataProto.from_dict({"input_ids": torch.ones(2, 3)}, non_tensors={"names": ["a", "b"]})
    assert_same(data.to_padded(), data)


@pytest.mark.parametrize("side", ["left", "right"])
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), more=st.integers(0, 3))
def test_padding_puts_every_row_at_the_side_that_is_asked_for(
    side: Any, lengths: list[int], more: int
) -> None:
    column = ragged(torch.arange(sum(lengths)) + 1, torch.tensor(lengths))
    width = max(lengths) + more
    padded = pad_ragged(column, width, side=side)
    assert padded.shape == (len(lengths), width)
    for row, expected in zip(padded.tolist(), column.unbind(), strict=True):
        zeros = [0] * (width - len(expected))
        assert row == (
            [*expected.tolist(), *zeros] if side == "right" else [*zeros, *expected.tolist()]
        )
    if side == "right":
        assert same_value(unpad(padded, torch.tensor(lengths)), column)


def test_a_row_that_is_wider_than_asked_for_is_refused() -> None:
    with pytest.raises(DataError, match="a row of 3 tokens cannot be padded to 2"):
        tokens().to_padded(prompt_width=2)


def test_slices_of_ragged_columns_share_memory() -> None:
    data = tokens()
    flat_values(data[1:].batch["input_ids"]).fill_(0)
    assert flat_values(data.batch["input_ids"]).tolist() == [1, 2, 7, 0, 0, 0, 0, 0, 0, 0]


def test_prompts_and_responses_are_split_at_the_number_of_prompt_tokens() -> None:
    prompts, _ = split_tokens(tokens().batch)
    assert [row.tolist() for row in prompts.unbind()] == [[1, 2], [3], [4, 5, 6]]
    assert [row.tolist() for row in rows_of_responses(tokens().batch)] == [[7], [8, 9, 10], []]


def test_nested_tensors_that_vary_in_another_dimension_are_refused() -> None:
    rows = torch.nested.nested_tensor([torch.ones(3, 2), torch.zeros(1, 2)], layout=torch.jagged)
    assert is_ragged(rows)
    with pytest.raises(DataError, match=r"'n'.*layout=torch\.jagged, untransposed"):
        DataProto.from_dict({"n": rows.transpose(1, 2)})


# --- values that contain themselves -------------------------------------------------------------------------------


def array_inside_itself(*others: Any) -> Any:
    array = np.fromiter([None, *others], object)
    array[0] = array
    return array


def test_a_batch_with_an_array_inside_itself_is_printed_and_sent() -> None:
    data = DataProto.from_dict({"x": torch.arange(2)}, {"loop": array_inside_itself("end")})
    assert "'loop': 'object[2]'" in repr(data)
    assert "loop: ndarray(2,) (object)" in data.get_data_info()
    loop = encode(data).decode().non_tensor_batch["loop"]
    assert loop[0] is loop and loop is not data.non_tensor_batch["loop"], (
        "the copy is inside of itself, too"
    )
    assert loop[1] == "end"


def test_what_cannot_be_written_because_it_contains_itself_is_named(tmp_path: Path) -> None:
    data = DataProto.from_dict(non_tensors={"loop": array_inside_itself()}, meta_info={})
    with pytest.raises(DataError, match=r"non_tensor_batch\['loop'\] .*Circular reference"):
        data.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


# --- what a batch has ---------------------------------------------------------------------------------------------


def test_the_keys_are_listed_with_shapes_and_types() -> None:
    lines = batch(3, step=7, metrics={"loss": [1.0]}).get_data_info().splitlines()
    assert re.fullmatch(r"  jagged: \(3, j\d+\) \(torch\.int64\) cpu", lines.pop(3))
    assert lines == [
        *("batch", "  x: (3, 2) (torch.int64) cpu", "  half: (3,) (torch.bfloat16) cpu"),
        *("non_tensor_batch", "  names: ndarray(3,) (object)", "  scores: ndarray(3,) (float64)"),
        *("meta_info", "  step: int", "  metrics: dict"),
    ]
    assert DataProto().get_data_info() == "batch\nnon_tensor_batch\nmeta_info"


def test_parts_that_are_none_are_empty() -> None:
    data = DataProto(batch=None, non_tensor_batch=None, meta_info=None)  # type: ignore[arg-type]
    assert (len(data), data.non_tensor_batch, data.meta_info) == (0, {}, {})
    data.union(DataProto(TensorDict({"x": torch.arange(3)}, [3]), None, None))  # type: ignore[arg-type]
    assert data[1].batch["x"] == 1


def test_columns_that_cannot_be_split_into_chunks_are_named() -> None:
    for key, n_split in (("x", 3), ("half", 2), ("jagged", 2), ("names", 2)):
        with pytest.raises(
            DataError, match=rf"unfold_column_chunks splits .* that {n_split} divides; '{key}' is"
        ):
            batch().unfold_column_chunks(n_split, [key])
    with pytest.raises(DataError, match=r"no keys \['y'\]"):
        batch().unfold_column_chunks(2, ["y"])
