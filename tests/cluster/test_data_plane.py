"""Where data goes: from the workers that made it to those that read it, and to nobody else."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from roles_for_tests import Shelf, size_of

from rolepool.cluster import Cluster, RoleProxy
from rolepool.errors import DataError, WorkerError
from rolepool.protocol import DataProto, DataProtoFuture
from rolepool.protocol.columns import same_value

MIB = 2**20
KIB = 2**10
WIDE = 4096
"""Numbers in a row of a column: 32 KiB, so that a few rows are too many to travel in a header."""


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    for name in ("one", "two", "three"):
        shared_cluster.groups[name].add_role(name, Shelf)
    return shared_cluster


def role_of(cluster: Cluster, pool: str) -> RoleProxy:
    return cluster.groups[pool].role(pool)


@pytest.fixture(scope="module")
def one(cluster: Cluster) -> RoleProxy:
    return role_of(cluster, "one")


@pytest.fixture(scope="module")
def two(cluster: Cluster) -> RoleProxy:
    return role_of(cluster, "two")


@pytest.fixture(scope="module")
def three(cluster: Cluster) -> RoleProxy:
    return role_of(cluster, "three")


def ids(num_rows: int) -> DataProto:
    return DataProto.from_dict({"id": torch.arange(num_rows)})


class Traffic:
    """Bytes that the driver gave to Ray and got from it, and the results of ranks whose stored
    columns it fetched."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_fetches = 0


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    counted = Traffic()
    put, get = ray.put, ray.get

    def counted_put(value: Any, **options: Any) -> Any:
        counted.num_bytes += size_of(value)
        return put(value, **options)

    def counted_get(refs: Any, **options: Any) -> Any:
        values = get(refs, **options)
        counted.num_bytes += size_of(values)
        # Stored columns are a dict; a reply without its columns is bytes.
        counted.num_fetches += sum(isinstance(value, dict) for value in values)
        return values

    # These two functions of Ray are the only ways of data between the driver and Ray.
    monkeypatch.setattr(ray, "put", counted_put)
    monkeypatch.setattr(ray, "get", counted_get)
    return counted


# The driver


def test_a_chain_of_futures_moves_no_data_through_the_driver(
    one: RoleProxy, two: RoleProxy, three: RoleProxy, traffic: Traffic
) -> None:
    three.add_one(
        two.add_one(one.make(ids(8), 16).select(["a"]))
    ).get()  # whatever is loaded once is loaded now
    gc.collect()
    before, traffic.num_bytes, traffic.num_fetches = psutil.Process().memory_full_info().uss, 0, 0

    made = two.make(ids(48), 64 * KIB // 8 * 4)  # 3 columns of 12 MiB
    tensors = made.select(["a", "b", "c"])
    chained = three.add_one(one.add_one(tensors))
    order = np.random.default_rng(0).permutation(48)
    chained = two.add_one(
        chained.reorder(order).union(DataProto.from_dict({"small": torch.zeros(48)}))
    )
    assert len(chained) == 48

    assert traffic.num_fetches == 0
    assert traffic.num_bytes < 64 * KIB, (
        f"{traffic.num_bytes} bytes of headers went through the driver"
    )
    growth = psutil.Process().memory_full_info().uss - before
    assert growth < 4 * MIB, f"the driver grew by {growth / MIB:.1f} MiB for a batch of 36 MiB"

    result = chained.get(keys=["b"])
    assert traffic.num_fetches == 2, "what each of two ranks stored"
    assert set(result.batch.keys()) == {"b"}
    assert torch.equal(result.batch["b"][:, 0], 3 - torch.as_tensor(order).double())


def test_the_length_of_a_future_is_read_from_its_header(two: RoleProxy, traffic: Traffic) -> None:
    made = two.make(ids(10), WIDE)
    assert len(made) == 10
    assert traffic.num_fetches == 0 and traffic.num_bytes < 16 * KIB


def test_a_batch_of_the_drivers_is_written_once_and_with_the_keys_that_are_read_only(
    two: RoleProxy, three: RoleProxy, traffic: Traffic
) -> None:
    wide = torch.ones(6, WIDE, dtype=torch.float64)  # 192 KiB
    batch = DataProto.from_dict(
        {"id": torch.arange(6), "a": wide, "b": wide, "c": wide}, {"text": list("abcdef")}
    )
    two.read_a(batch)
    assert 192 * KIB < traffic.num_bytes < 220 * KIB
    traffic.num_bytes = 0
    assert all(seen["keys"] == ["a"] for seen in three.read_a_of_all_rows(batch))
    assert 192 * KIB < traffic.num_bytes < 220 * KIB, "one copy for three ranks"


# Consumers


def test_consumers_fetch_only_the_keys_that_their_method_reads(
    two: RoleProxy, one: RoleProxy
) -> None:
    made = two.make(ids(6), WIDE)
    made.spans()
    one.start_to_count()
    (seen,) = one.read_a(made)
    assert seen["keys"] == ["a", "id"]
    assert len(one.fetched_sizes()[0]) == 2, "one object of each producer"

    one.start_to_count()
    (seen,) = one.read_a(made.select(["a", "text"]))
    assert seen["keys"] == ["a"], "what both the future and the method allow"

    one.start_to_count()
    (seen,) = one.read_all(made)
    assert seen["keys"] == ["a", "b", "c", "id", "text"]
    assert len(one.fetched_sizes()[0]) == 2

    one.start_to_count()
    one.unchanged(made.select(["id", "text"])).spans()
    assert one.fetched_sizes() == [[]], "these travel in headers"


def test_what_a_method_reads_may_depend_on_the_arguments_of_its_role(
    cluster: Cluster, one: RoleProxy
) -> None:
    batch = one.make(ids(4), 2).get()
    for key in ("b", "c"):
        role = cluster.groups["one"].add_role(f"fond_of_{key}", Shelf, favourite=key)
        assert role.read_favourite(batch) == [[key]]
    assert one.read_favourite(batch) == [["a"]]


@pytest.mark.parametrize("is_future", [False, True])
def test_a_batch_may_be_joined_with_one_that_has_no_key_that_is_read(
    one: RoleProxy, two: RoleProxy, three: RoleProxy, is_future: bool
) -> None:
    made = two.make(ids(6), WIDE).select(["a", "id"])
    other = (
        one.make(ids(6), 2).select(["b", "text"])
        if is_future
        else DataProto.from_dict({}, {"note": list("abcdef")})
    )
    joined = made.union(other)
    assert sorted(joined.get(keys=["id"]).batch.keys()) == ["id"]
    assert [seen["rows"] for seen in three.read_a(joined)] == [[0, 1], [2, 3], [4, 5]]
    assert [seen["rows"] for seen in three.read_a(joined.reorder([5, 3, 0, 4, 2, 1]))] == [
        [5, 3],
        [0, 4],
        [2, 1],
    ]
    assert joined.reorder([5, 3, 0, 4, 2, 1]).get(keys=["id"]).batch["id"].tolist() == [
        5,
        3,
        0,
        4,
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("producer", "consumer", "objects_of_ranks"),
    [
        ("two", "one", [2]),
        ("one", "two", [1, 1]),
        ("two", "three", [1, 2, 1]),
        ("three", "two", [2, 2]),
        ("three", "three", [1, 1, 1]),
    ],
)
def test_consumers_fetch_only_what_holds_their_rows(
    cluster: Cluster, producer: str, consumer: str, objects_of_ranks: list[int]
) -> None:
    made = role_of(cluster, producer).make(ids(6), WIDE)
    made.spans()
    reader = role_of(cluster, consumer)
    reader.start_to_count()
    seen = reader.read_a(made)
    fetched = [[size for size in sizes if size > KIB] for sizes in reader.fetched_sizes()]
    size = 6 // reader.world_size
    assert [of_rank["rows"] for of_rank in seen] == [
        list(range(rank * size, (rank + 1) * size)) for rank in range(reader.world_size)
    ]
    assert [len(sizes) for sizes in fetched] == objects_of_ranks


def test_permuted_rows_are_fetched_from_the_ranks_that_hold_them(
    two: RoleProxy, three: RoleProxy
) -> None:
    made = two.make(ids(6), WIDE)
    made.spans()
    three.start_to_count()
    seen = three.read_a(made.reorder([5, 3, 0, 4, 2, 1]))
    assert [of_rank["rows"] for of_rank in seen] == [[5, 3], [0, 4], [2, 1]]
    assert [len([size for size in sizes if size > KIB]) for sizes in three.fetched_sizes()] == [
        1,
        2,
        1,
    ]


def test_a_pool_that_is_not_asked_fetches_nothing(
    one: RoleProxy, two: RoleProxy, three: RoleProxy
) -> None:
    for role in (one, two, three):
        role.start_to_count()
    two.add_one(two.make(ids(6), WIDE).select(["a"])).spans()
    assert one.fetched_sizes() == [[]]
    assert three.fetched_sizes() == [[], [], []]


# Operations on futures


def some_batch(rng: random.Random, num_rows: int) -> DataProto:
    """Columns of many kinds; wide ones are stored as objects, narrow ones travel in headers."""
    width = rng.choice([3, 20_000])
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    return DataProto.from_dict(
        {
            "wide": torch.rand(num_rows, width, generator=generator),
            "ids": torch.randint(100, (num_rows,), generator=generator),
            "half": torch.rand(num_rows, 5, generator=generator).to(torch.bfloat16),
            "flag": torch.rand(num_rows, generator=generator) > 0.5,
        },
        {
            "text": [f"text {rng.randrange(1000)}" for _ in range(num_rows)],
            "scores": np.asarray([rng.random() for _ in range(num_rows)]),
        },
        {"step": 1},
    )


def columns_of(batch: DataProto) -> dict[str, Any]:
    return {**({} if batch.batch is None else dict(batch.batch.items())), **batch.non_tensor_batch}


def with_only(batch: DataProto, keys: list[str]) -> DataProto:
    return batch.select(
        [key for key in batch.batch.keys() if key in keys],  # noqa: SIM118
        [key for key in batch.non_tensor_batch if key in keys],
    )


def change_both(
    future: DataProtoFuture, batch: DataProto, rng: random.Random, produce: Any
) -> tuple[DataProtoFuture, DataProto, str]:
    """The same operation on a future and on the batch it stands for."""
    operation = rng.choice(["select", "union", "union of a future", "reorder", "permute", "chunk"])
    keys = list(columns_of(batch))
    if operation == "select":
        chosen = rng.sample(keys, rng.randint(1, len(keys)))
        return future.select(chosen), with_only(batch, chosen), f"select {chosen}"
    if operation.startswith("union"):
        other = with_only(
            some_batch(rng, len(batch)), rng.sample(["wide", "ids", "flag", "text", "scores"], 3)
        )
        if rng.random() < 0.5 and "ids" in other.batch:
            other.rename("ids", f"ids {rng.randrange(100)}")
        kept = with_only(batch, [key for key in keys if key not in columns_of(other)])
        joined = kept.union(with_only(other, list(columns_of(other))))
        return future.union(produce(other) if "future" in operation else other), joined, operation
    if operation == "reorder":
        order = (
            [rng.randrange(len(batch)) for _ in range(rng.randint(0, 2 * len(batch)))]
            if len(batch)
            else []
        )
        return future.reorder(order), batch[order], f"reorder {order}"
    if operation == "permute":
        order = rng.sample(range(len(batch)), len(batch))
        return future.reorder(np.asarray(order, dtype=np.int64)), batch[order], f"permute {order}"
    chunks = rng.choice([n for n in range(1, len(batch) + 1) if len(batch) % n == 0] or [1])
    chosen_chunk = rng.randrange(chunks)
    return (
        future.chunk(chunks)[chosen_chunk],
        batch.chunk(chunks)[chosen_chunk],
        f"chunk {chosen_chunk} of {chunks}",
    )


@pytest.mark.parametrize("seed", range(4))
def test_operations_on_futures_give_what_they_give_on_batches(cluster: Cluster, seed: int) -> None:
    rng = random.Random(seed)

    def produce(batch: DataProto) -> DataProtoFuture:
        future = role_of(cluster, rng.choice(["one", "two", "three"])).unchanged(batch)
        assert isinstance(future, DataProtoFuture)
        return future

    for case in range(20):
        parts = [
            some_batch(random.Random(f"{seed} {case}"), rng.choice([0, 1, 2, 5, 6, 12]))
            for _ in range(1)
        ]
        if rng.random() < 0.3:
            parts += [parts[0][: rng.randint(0, len(parts[0]))] for _ in range(rng.randint(1, 2))]
        futures = [produce(part) for part in parts]
        future = futures[0] if len(parts) == 1 else DataProtoFuture.concat(futures)
        batch = parts[0] if len(parts) == 1 else DataProto.concat(parts)
        steps = [f"{len(parts)} parts of {[len(part) for part in parts]} rows"]
        for _ in range(rng.randint(0, 4)):
            future, batch, step = change_both(future, batch, rng, produce)
            steps.append(step)
        where = f"seed {seed}, case {case}: {steps}"

        assert len(future) == len(batch), where
        if rng.random() < 0.5:
            future = role_of(cluster, rng.choice(["one", "two", "three"])).unchanged(future)
        received = future.get()
        assert same_value(columns_of(received), columns_of(batch)), where
        assert received.meta_info == batch.meta_info, where
        some = rng.sample(list(columns_of(batch)), 1)
        assert same_value(columns_of(future.get(keys=some)), columns_of(with_only(batch, some))), (
            where
        )


def test_operations_leave_the_future_they_are_called_on_as_it_was(two: RoleProxy) -> None:
    made = two.make(ids(4), 2)
    (
        made.select(["a"]),
        made.reorder([3, 2, 1, 0]),
        made.union(DataProto.from_dict({"id": torch.zeros(4)})),
    )
    made.chunk(2), DataProtoFuture.concat([made, made])
    result = made.get()
    assert result.batch["id"].tolist() == [0, 1, 2, 3]
    assert set(columns_of(result)) == {"id", "a", "b", "c", "text"}


def test_operations_that_cannot_be_say_why(two: RoleProxy, one: RoleProxy) -> None:
    made = two.make(ids(4), 2)
    with pytest.raises(DataError, match="rows 4 to 4 were requested, but the batch has 4 rows"):
        made.reorder([4]).get()
    with pytest.raises(DataError, match="4 rows cannot be split into 3 equal parts"):
        made.chunk(3)
    with pytest.raises(DataError, match="different numbers of rows"):
        made.union(ids(5)).get()
    with pytest.raises(DataError, match="only futures as calls returned them"):
        DataProtoFuture.concat([made.select(["a"]), made])
    with pytest.raises(
        WorkerError, match=r"different numbers of rows: \[4, 5\]; in one rank 0 \(one\.read_all"
    ):
        one.read_all(made.union(ids(5)))


# Memory


@pytest.mark.parametrize("width", [3, WIDE], ids=["in the header", "as objects"])
class TestAWriteIsSeenByTheWriterOnly:
    def test_when_workers_write_to_what_they_received(
        self, one: RoleProxy, two: RoleProxy, three: RoleProxy, cluster: Cluster, width: int
    ) -> None:
        made = two.make(ids(6), width)
        expected = columns_of(made.get())
        in_driver = made.get()
        assert two.overwrite(made) == [3, 3], "by the ranks that made it"
        assert three.overwrite(made) == [2, 2, 2], "by another pool"
        assert same_value(columns_of(in_driver), expected), "the driver's earlier read"
        assert same_value(columns_of(made.get()), expected), "a later read of the driver"
        for role in (one, two, three):
            assert same_value(columns_of(role.unchanged(made).get()), expected), (
                f"a later call on {role}"
            )

    def test_when_the_driver_writes_to_what_it_received(
        self, one: RoleProxy, two: RoleProxy, width: int
    ) -> None:
        made = two.make(ids(6), width)
        first = made.get()
        expected = {key: value.clone() for key, value in first.batch.items()}
        for tensor in first.batch.values():
            tensor.fill_(77)
        first.non_tensor_batch["text"][:] = "spoiled"
        again = made.get()
        assert same_value(dict(again.batch.items()), expected)
        assert again.non_tensor_batch["text"].tolist() == [f"row {i}" for i in range(6)]
        assert same_value(dict(one.unchanged(made).get().batch.items()), expected)

    def test_when_the_producer_writes_to_what_it_returned(self, two: RoleProxy, width: int) -> None:
        made = two.make(ids(6), width)
        two.spoil_what_was_made()
        assert made.get().batch["a"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]

    def test_when_the_driver_writes_to_what_it_gave(self, two: RoleProxy, width: int) -> None:
        batch = DataProto.from_dict({"a": torch.arange(6.0)[:, None].repeat(1, width)})
        future = two.unchanged(batch)
        batch.batch["a"].fill_(77)
        assert future.get().batch["a"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]

    def test_when_all_ranks_got_the_same_batch(
        self, three: RoleProxy, two: RoleProxy, width: int
    ) -> None:
        batch = DataProto.from_dict({"a": torch.full((6, width), 9.0)})
        assert three.overwrite_all_rows(batch) == [[0.0], [1.0], [2.0]]
        assert (batch.batch["a"] == 9).all()
        made = two.unchanged(batch)
        assert three.overwrite_all_rows(made) == [[0.0], [1.0], [2.0]], "the same with a future"
        assert (made.get().batch["a"] == 9).all()


def test_roles_of_one_process_do_not_see_each_others_writes(
    cluster: Cluster, two: RoleProxy
) -> None:
    neighbour = cluster.groups["two"].add_role("neighbour", Shelf)
    made = two.make(ids(6), WIDE)
    assert neighbour.overwrite(made) == [3, 3]
    assert [seen["rows"] for seen in two.read_all(made)] == [[0, 1, 2], [3, 4, 5]]


# Futures of other things


def test_a_future_of_any_value_is_handed_on_as_what_get_would_return(
    one: RoleProxy, three: RoleProxy
) -> None:
    number, numbers = one.one_number(5), three.rank_and()
    assert one.rank_and(number, numbers).get() == [(0, 5, [(0,), (1,), (2,)])]
    assert three.own_entry([number, one.rank_and(number), 7]).get() == [
        (0, 5),
        (1, [(0, 5)]),
        (2, 7),
    ]
    assert one.rank_and(three.texts(ids(5))).get() == [(0, [f"row {i}" for i in range(5)])], (
        "lists are joined"
    )


def test_batches_of_every_rank_are_handed_on_in_a_list(one: RoleProxy, three: RoleProxy) -> None:
    ((_, batches),) = one.rank_and(three.own_batch()).get()
    assert [batch.batch["rank"].tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2]]
    assert [batch.batch["rank"].tolist() for batch in three.own_batch().get()] == [
        [0, 0],
        [1, 1],
        [2, 2],
    ]


def test_a_future_that_turns_out_not_to_be_a_batch_cannot_be_cut(
    two: RoleProxy, three: RoleProxy
) -> None:
    texts = two.texts(ids(5))
    with pytest.raises(
        WorkerError, match=r"two rank 0 \(two\.texts, .*returned a list; it must .*; in three rank "
    ):
        three.read_all(texts)
    assert texts.get() == [f"row {i}" for i in range(5)]
    with pytest.raises(
        DataError, match=r"two rank 0 \(two\.texts, .*returned a list; it must return a DataProto"
    ):
        texts.select(["a"]).get()
