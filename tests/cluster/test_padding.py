"""Batches that the ranks do not divide: padded for the call, and nobody who reads the result can
tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from roles_for_tests import Counter

from rolepool.cluster import Cluster, RoleProxy
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.columns import same_value

SIZES = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
"""None, fewer than ranks, as many, and every remainder."""
NUM_RANKS = 3


@pytest.fixture(scope="module")
def counter(shared_cluster: Cluster) -> RoleProxy:
    return shared_cluster.groups["three"].add_role("counter", Counter)


def batch_of(num_rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(num_rows)
    return DataProto.from_dict(
        {
            "x": torch.arange(num_rows),
            "response_mask": torch.rand(num_rows, 4, generator=generator) > 0.3,
            "attention_mask": torch.ones(num_rows, 4, dtype=torch.int64),
            "loss_weights": torch.full((num_rows,), 0.5),
            "reward": torch.rand(num_rows, 4, dtype=torch.float64, generator=generator),
        },
        {"text": [f"row {i}" for i in range(num_rows)]},
        {"step": 7},
    )


def call(method: Any, *args: Any, as_future: bool) -> Any:
    return method(*args, blocking=False).get() if as_future else method(*args)


@pytest.mark.parametrize("as_future", [False, True], ids=["blocking", "future"])
@pytest.mark.parametrize("num_rows", SIZES)
class TestTheResultHasTheRowsOfTheBatch:
    def test_when_it_is_a_batch(self, counter: RoleProxy, num_rows: int, as_future: bool) -> None:
        result = call(counter.as_batch, batch_of(num_rows), as_future=as_future)
        assert len(result) == num_rows
        assert result.batch["y"].tolist() == [100 + i for i in range(num_rows)]
        assert result.non_tensor_batch["text"].tolist() == [f"row {i}" for i in range(num_rows)]
        assert set(result.batch.keys()) == {"y"}, "and no column that marks padding"

    def test_when_it_is_the_batch_itself(
        self, counter: RoleProxy, num_rows: int, as_future: bool
    ) -> None:
        result = call(counter.unchanged, batch_of(num_rows), as_future=as_future)
        expected = batch_of(num_rows)
        assert same_value(dict(result.batch.items()), dict(expected.batch.items()))
        assert same_value(result.non_tensor_batch, expected.non_tensor_batch)
        assert result.meta_info == {"step": 7}

    def test_when_it_is_a_list(self, counter: RoleProxy, num_rows: int, as_future: bool) -> None:
        result = call(counter.as_list, batch_of(num_rows), as_future=as_future)
        assert result == [f"row {i}!" for i in range(num_rows)]

    def test_when_it_is_a_tensor_of_each_rank(
        self, counter: RoleProxy, num_rows: int, as_future: bool
    ) -> None:
        result = call(counter.as_tensor, batch_of(num_rows), as_future=as_future)
        assert len(result) == NUM_RANKS
        assert torch.cat(result).tolist() == [100 + i for i in range(num_rows)]

    def test_when_there_are_several_rows_for_each(
        self, counter: RoleProxy, num_rows: int, as_future: bool
    ) -> None:
        for times in (1, 2, 4):
            result = call(counter.repeated, batch_of(num_rows), times, as_future=as_future)
            assert result.batch["x"].tolist() == [i for i in range(num_rows) for _ in range(times)]
            assert "is_padding" not in result.batch
            items = call(counter.repeated_list, batch_of(num_rows), times, as_future=as_future)
            assert items == [f"row {i} {time}" for i in range(num_rows) for time in range(times)]


@pytest.mark.parametrize("num_rows", SIZES)
def test_sums_over_a_mask_that_all_ranks_add_up_are_those_of_the_real_rows(
    counter: RoleProxy, num_rows: int
) -> None:
    batch = batch_of(num_rows)
    mask = batch.batch["response_mask"].double()
    sums = counter.masked_sums(batch)
    assert len(sums) == NUM_RANKS
    for of_rank in sums:
        assert of_rank["tokens"] == mask.sum().item()
        assert of_rank["reward"] == pytest.approx(
            (mask * batch.batch["reward"]).sum().item(), rel=1e-12
        )
        assert of_rank["weight"] == 0.5 * num_rows


@pytest.mark.parametrize("num_rows", SIZES[1:])
def test_a_gradient_over_all_ranks_is_that_of_the_real_rows(
    counter: RoleProxy, num_rows: int
) -> None:
    batch, weights = batch_of(num_rows), [0.1, 0.2, 0.3, 0.4]
    mask, difference = (
        batch.batch["response_mask"].double(),
        torch.tensor(weights) - batch.batch["reward"],
    )
    expected = (mask * 2 * difference).sum(0) / mask.sum()
    metrics = counter.update(batch, weights).meta_info["metrics"]
    assert metrics["grad"] == [pytest.approx(expected.tolist(), rel=1e-6)] * NUM_RANKS


def test_every_rank_gets_equally_many_rows_and_padding_rows_are_marked(counter: RoleProxy) -> None:
    counter.as_batch(batch_of(4))
    received = counter.what_was_received()
    assert [rank["x"] for rank in received] == [[0, 1], [2, 3], [0, 0]]
    assert [rank.get("is_padding") for rank in received] == [None, None, [True, True]]
    assert received[2]["text"] == ["row 0", "row 0"], (
        "copies of a real row, so that a forward pass is an ordinary one"
    )
    assert received[2]["response_mask"] == [[False] * 4] * 2
    assert received[2]["loss_weights"] == [0.0, 0.0]
    assert received[2]["attention_mask"] == [[1] * 4] * 2, (
        "a row that attends to nothing would give NaN"
    )

    counter.as_batch(batch_of(5))
    received = counter.what_was_received()
    assert [rank["x"] for rank in received] == [[0, 1], [2, 3], [4, 4]]
    assert received[2]["is_padding"] == [False, True]
    assert received[2]["response_mask"] == [
        batch_of(5).batch["response_mask"][4].tolist(),
        [False] * 4,
    ]


def test_the_callers_batch_is_as_it_was(counter: RoleProxy) -> None:
    batch = batch_of(5)
    counter.unchanged(batch)
    assert same_value(dict(batch.batch.items()), dict(batch_of(5).batch.items()))


def test_a_future_that_the_ranks_do_not_divide_is_padded_where_it_is_consumed(
    counter: RoleProxy,
) -> None:
    for num_rows in SIZES:
        rows = counter.repeated(batch_of(num_rows), 2, blocking=False)
        chosen = rows.reorder(list(range(2 * num_rows))[::-1][: num_rows + 1])
        expected = [i for i in range(num_rows) for _ in range(2)]
        assert counter.as_batch(rows).batch["y"].tolist() == [100 + i for i in expected]
        assert counter.as_batch(chosen).batch["y"].tolist() == [
            100 + i for i in expected[::-1][: num_rows + 1]
        ]
        mask = batch_of(num_rows).batch["response_mask"].sum().item()
        assert counter.masked_sums(rows)[0]["tokens"] == 2 * mask


def test_a_padded_call_hands_on_its_real_rows_only(counter: RoleProxy) -> None:
    for num_rows in SIZES:
        passed_on = batch_of(num_rows)
        for _ in range(3):
            passed_on = counter.unchanged(passed_on, blocking=False)
        assert len(passed_on) == num_rows
        assert same_value(
            dict(passed_on.get().batch.items()), dict(batch_of(num_rows).batch.items())
        )


def test_a_metric_that_is_a_list_is_not_taken_for_rows(counter: RoleProxy) -> None:
    results = {num_rows: counter.metric_vector(batch_of(num_rows)) for num_rows in SIZES}
    assert results == {
        num_rows: [[float(rank), 0.5] for rank in range(NUM_RANKS)] for num_rows in SIZES
    }


def test_a_tuple_of_two_results_is_not_taken_for_rows(counter: RoleProxy) -> None:
    results = {num_rows: counter.loss_and_count(batch_of(num_rows)) for num_rows in SIZES}
    assert results == {
        num_rows: [(float(rank), 0.5) for rank in range(NUM_RANKS)] for num_rows in SIZES
    }


@pytest.mark.parametrize("num_rows", [1, 6, 7])
def test_ragged_rows_go_through_ranks_in_another_order_and_spans_count_their_tokens(
    counter: RoleProxy, num_rows: int
) -> None:
    lengths = torch.arange(num_rows) % 4 + 1
    values = torch.repeat_interleave(torch.arange(num_rows), lengths)
    batch = DataProto.from_dict({"input_ids": ragged(values, lengths), "x": torch.arange(num_rows)})
    sent = counter.unchanged(batch, blocking=False)
    order = list(range(num_rows))[::-1]
    again = counter.unchanged(sent.reorder(order), blocking=False)
    assert [row.tolist() for row in again.get().batch["input_ids"].unbind()] == [
        [i] * (i % 4 + 1) for i in order
    ]
    num_padding = -num_rows % NUM_RANKS
    for spans in (sent.spans(), again.spans()):
        num_tokens = sum(span.num_tokens for span in spans)
        assert sum(span.num_rows for span in spans) == num_rows + num_padding
        if num_padding == 0:
            assert num_tokens == len(values)
            assert sum(span.num_bytes for span in spans) == values.nbytes + 8 * num_rows
        assert num_tokens >= len(values) + num_padding, "a padding row is a copy of a real one"
