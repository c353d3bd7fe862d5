"""Routes and transfers through a process group: every engine rank gets what it holds, once, and a
rank that dies or leaves ends the wait of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transfer_ranks import Ranks, held_parts, weight_of

from rolepool.errors import DataError, RolepoolError
from rolepool.protocol.aborting import abort_all
from rolepool.rollout.engine import StreamedEngine
from rolepool.rollout.tensor_parallel import Shard
from rolepool.weights.changes import (
    apply_changes,
    differences,
    encoded_bytes,
    find_changes,
    is_sent_whole,
    places_of_changes,
)
from rolepool.weights.digests import Digest, Digests, sum_of
from rolepool.weights.group import TransferError
from rolepool.weights.messages import as_matrix, part_of
from rolepool.weights.receipts import Receipt, WeightsDifferError, check_parts
from rolepool.weights.regions import Region, whole_region
from rolepool.weights.routes import (
    ALIGNMENT_BYTES,
    Held,
    Layout,
    Piece,
    Trainer,
    Weight,
    cut,
    messages_of,
    own_region,
    rows_in_shard,
)
from rolepool.weights.rows import WeightRows, assembled
from tiny_models import make_model

TRAINERS = (Trainer(1, 1), Trainer(2, 2), Trainer(2, 1), Trainer(4, 2), Trainer(3, 3))
SHAPES = ((), (1,), (7,), (16,), (5, 6), (16, 3), (1, 9), (6, 2, 4), (4, 4))


def make_weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for number, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[f"weight {number}"] = values.to(dtype)
    weights["buffer"] = torch.arange(11 + seed, 18 + seed)
    return weights


def make_layout(weights: Mapping[str, Tensor], trainer: Trainer, engines: Sequence[Held]) -> Layout:
    """All weights except the buffer are sharded."""
    described = []
    for name, tensor in weights.items():
        is_sharded = name != "buffer" and tensor.dim() > 0
        described.append(weight_of(name, tensor, is_sharded=is_sharded))
    return Layout(described, trainer, engines)


def whole_models(weights: Mapping[str, Tensor], count: int) -> list[Held]:
    return [{name: whole_region(tensor.shape) for name, tensor in weights.items()}] * count


def halves(weights: Mapping[str, Tensor]) -> list[Held]:
    """Two ranks that divide rows, columns or nothing, each of a third of the weights."""
    first: dict[str, Region] = {}
    second: dict[str, Region] = {}
    for number, (name, tensor) in enumerate(weights.items()):
        whole = whole_region(tensor.shape)
        axis = number % 3
        first[name] = second[name] = whole
        if axis < 2:
            middle = whole[axis][1] // 2
            intervals = ((0, middle), (middle, whole[axis][1]))
            first[name], second[name] = (
                whole._replace(**{whole._fields[axis]: interval}) for interval in intervals
            )
    return [first, second]


# Routes


@pytest.mark.parametrize("trainer", TRAINERS, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 16])
def test_each_row_has_one_owner_who_has_it_in_his_shard(trainer: Trainer, num_rows: int) -> None:
    """Shards are those of torch.chunk, which FSDP2 uses."""
    weight = Weight("weight", (num_rows, 3), "float32", 4, is_sharded=True)
    chunks = list(torch.arange(num_rows).chunk(trainer.num_shards))
    owned: list[int] = []
    for rank in range(trainer.num_ranks):
        shard_number = rank % trainer.num_shards
        has_rows = shard_number < len(chunks)
        shard = chunks[shard_number] if has_rows else torch.arange(0)
        first, end = rows_in_shard(weight, trainer, rank)
        rows = shard[first:end].tolist()
        assert rows == list(range(*own_region(weight, trainer, rank).rows))
        owned += rows
    assert sorted(owned) == list(range(num_rows))


def test_replicas_share_the_work() -> None:
    weight = Weight("weight", (64, 4), "float32", 4, is_sharded=True)
    layout = Layout([weight], Trainer(4, 2), [{"weight": weight.whole}])
    for sender in range(4):
        (piece,) = layout.pieces(sender, 0, most_bytes=2**20)
        assert piece.num_bytes == 64 * 4 * 4 // 4


@given(data=st.data(), trainer=st.sampled_from(TRAINERS), most_bytes=st.integers(1, 300))
def test_each_held_element_is_sent_once(
    data: st.DataObject, trainer: Trainer, most_bytes: int
) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    whole = whole_region(shape)
    intervals = []
    for _, size in whole:
        first = data.draw(st.integers(0, size))
        intervals.append((first, data.draw(st.integers(first, size))))
    held = Region(*intervals)
    weight = Weight("weight", shape, "float32", 4, data.draw(st.booleans()))
    layout = Layout([weight], trainer, [{"weight": held}])
    counts = torch.zeros(whole.rows[1], whole.columns[1])
    for sender in range(trainer.num_ranks):
        for _, region in layout.pieces(sender, 0, most_bytes):
            part_of(counts, whole, region).add_(1)
    expected = torch.zeros_like(counts)
    part_of(expected, whole, held).fill_(1)
    assert torch.equal(counts, expected)


@given(
    sizes=st.lists(st.integers(0, 100), max_size=20),
    most_bytes=st.integers(ALIGNMENT_BYTES, 150),
)
def test_messages_keep_the_order_and_are_no_longer_than_they_may_be(
    sizes: list[int], most_bytes: int
) -> None:
    pieces: list[Piece] = []
    for number in range(len(sizes)):
        pieces.append(Piece(Weight(str(number), (1,), "uint8", 1, False), Region((0, 1), (0, 1))))
    messages = messages_of(pieces, most_bytes, sizes)
    packed = [one for message in messages for one in message.pieces]
    expected = [(piece, size) for piece, size in zip(pieces, sizes, strict=True) if size]
    assert [(one.piece, one.num_bytes) for one in packed] == expected
    for message in messages:
        assert message.num_bytes <= most_bytes or len(message.pieces) == 1
        ends = [one.start + one.num_bytes for one in message.pieces]
        assert all(one.start % ALIGNMENT_BYTES == 0 for one in message.pieces)
        starts = [one.start for one in message.pieces[1:]]
        assert all(start >= end for start, end in zip(starts, ends, strict=False))
        assert message.num_bytes == ends[-1]


def test_a_long_piece_is_cut_by_rows() -> None:
    weight = Weight("weight", (10, 4), "float32", 4, is_sharded=True)
    pieces = list(cut(Piece(weight, Region((2, 9), (1, 3))), most_bytes=17))
    assert [piece.region.rows for piece in pieces] == [(2, 4), (4, 6), (6, 8), (8, 9)]
    assert {piece.region.columns for piece in pieces} == {(1, 3)}
    # A row is not cut.
    assert len(list(cut(Piece(weight, weight.whole), most_bytes=1))) == 10


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_region_of_a_tensor_parallel_rank_is_its_part(size: int) -> None:
    """Four heads with two key-value heads, so four ranks have two of each part; and a bias of a
    projection whose outputs are summed."""
    model = make_model("qwen2", num_attention_heads=4, num_key_value_heads=2)
    named = dict(model.named_parameters())
    named["model.layers.0.self_attn.o_proj.bias"] = torch.randn(8)
    for rank in range(size):
        shard = Shard(model.config, size, rank)
        for name, whole in named.items():
            region = shard.region(name, whole.shape)
            part = part_of(matrix(whole), whole_region(whole.shape), region)
            if region.num_elements:
                assert torch.equal(part, matrix(shard.part(name, whole)))
            else:
                assert not shard.part(name, whole).any()


def matrix(tensor: Tensor) -> Tensor:
    return as_matrix(tensor.detach())


# Transfers


@contextmanager
def ranks_of(layout: Layout, bucket_bytes: int = 512) -> Iterator[Ranks]:
    ranks = Ranks(layout, bucket_bytes)
    try:
        yield ranks
    finally:
        ranks.close()


def empty_models(layout: Layout, weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    models = []
    for engine in range(len(layout.engines)):
        parts = held_parts(layout, weights, engine)
        models.append({name: torch.zeros_like(part) for name, part in parts.items()})
    return models


@pytest.mark.parametrize("trainer", TRAINERS, ids=str)
@pytest.mark.parametrize("kind", ["two halves", "three copies"])
def test_every_engine_rank_has_its_part_after_each_transfer(trainer: Trainer, kind: str) -> None:
    """With messages of a few bytes, so that there are many of them."""
    weights = make_weights()
    engines = halves(weights) if kind == "two halves" else whole_models(weights, 3)
    layout = make_layout(weights, trainer, engines)
    models = empty_models(layout, weights)
    num_parts = 2 if kind == "two halves" else 1
    with ranks_of(layout) as ranks:
        for seed in range(3):
            weights = make_weights(seed=seed)
            sent, got = ranks.transfer(weights, models)
            for engine, model in enumerate(models):
                for name, part in held_parts(layout, weights, engine).items():
                    assert torch.equal(model[name], part), name
            whole = Receipt(1, sum_of(one.digests for one in sent))
            assert whole.digests.keys() == weights.keys()
            for first in range(0, len(engines), num_parts):
                group = slice(first, first + num_parts)
                receipts = [Receipt(1, digests) for digests in got[group]]
                check_parts(whole, receipts, engines[group], ["a", "b"][:num_parts])


def test_weights_are_cast_before_they_travel_and_the_receipt_is_of_what_travels() -> None:
    """The engine's model has another dtype."""
    weights = {name: one.double() for name, one in make_weights().items() if name != "buffer"}
    layout = make_layout(
        {name: one.bfloat16() for name, one in weights.items()},
        Trainer(2, 2),
        whole_models(weights, 1),
    )
    models = [{name: torch.zeros_like(one, dtype=torch.float32) for name, one in weights.items()}]
    with ranks_of(layout) as ranks:
        sent, got = ranks.transfer(weights, models)
    check_parts(
        Receipt(1, sum_of(one.digests for one in sent)), [Receipt(1, got[0])], layout.engines, ["a"]
    )
    for name, weight in weights.items():
        assert torch.equal(models[0][name], weight.bfloat16().float())
    num_bytes = sum(2 * weight.numel() for weight in weights.values())
    assert num_bytes <= sum(one.num_bytes for one in sent) < num_bytes + 100 * ALIGNMENT_BYTES


@pytest.mark.parametrize("damaged", ["weight 3", "weight 4", "weight 5"])
def test_a_flipped_bit_is_found_and_named_whoever_holds_it(damaged: str) -> None:
    """Rows, columns, or the whole weight."""
    weights = make_weights()
    engines = halves(weights)
    layout = make_layout(weights, Trainer(2, 2), engines)
    models = empty_models(layout, weights)
    with ranks_of(layout) as ranks:
        sent, _ = ranks.transfer(weights, models)
    models[1][damaged].view(-1)[0] += 1
    receipts = [Receipt(1, digests_of_parts(layout, model, i)) for i, model in enumerate(models)]
    whole = Receipt(1, sum_of(one.digests for one in sent))
    is_held_alone = engines[1][damaged] == engines[0][damaged]
    receiver = "rank 1" if is_held_alone else "rank 0 and rank 1"
    with pytest.raises(WeightsDifferError, match=rf"on their way to {receiver}: {damaged} has"):
        check_parts(whole, receipts, engines, ["rank 0", "rank 1"])


def digests_of_parts(layout: Layout, model: Mapping[str, Tensor], engine: int) -> dict[str, Digest]:
    digests = Digests()
    for weight in layout.weights:
        region = layout.engines[engine][weight.name]
        digests.add_part(weight.name, model[weight.name], region, weight.shape)
    return digests.read()


def test_an_engine_takes_parts_as_it_takes_whole_tensors() -> None:
    """Two tensor-parallel ranks with biases, of a model whose embedding is tied to its head."""
    trained = make_model("qwen2", seed=1, tie_word_embeddings=True)
    named = dict(trained.named_parameters())
    engines = []
    for rank in range(2):
        engine = StreamedEngine(make_model("qwen2", tie_word_embeddings=True))
        engine.shard = Shard(trained.config, 2, rank)
        engine.shard.keep_own_part(engine.model)
        engines.append(engine)
    shapes = {name: tuple(one.shape) for name, one in named.items()}
    held = [engine.held_regions(shapes) for engine in engines]
    layout = Layout([weight_of(*item) for item in named.items()], Trainer(2, 2), held)
    weights = {name: one.detach() for name, one in named.items()}
    with ranks_of(layout, 2**16) as ranks:
        receipts = ranks.transfer_to_engines(weights, engines)
    assert [receipt.version for receipt in receipts] == [1, 1]
    for engine in engines:
        assert engine.shard is not None
        for name, weight in weights.items():
            own = engine.model.get_parameter(name)
            assert torch.equal(own, engine.shard.part(name, weight)), name
        engine.raise_if_not_ready()


@pytest.mark.parametrize("trainer", TRAINERS, ids=str)
def test_rows_from_shared_memory_give_an_engine_its_part_or_whole_tensors(trainer: Trainer) -> None:
    """In two calls, as a transfer makes them."""
    model = make_model("qwen2", seed=1)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    exports: list[dict[str, WeightRows]] = []
    digests = []
    for rank in range(trainer.num_ranks):
        exported: dict[str, WeightRows] = {}
        of_rank = Digests()
        for name, weight in weights.items():
            region = own_region(weight_of(name, weight), trainer, rank)
            shape = tuple(weight.shape)
            rows = as_matrix(weight)[slice(*region.rows)]
            if len(rows):
                exported[name] = WeightRows(shape, region.rows[0], rows)
                of_rank.add_part(name, rows, region, shape)
        exports.append(exported)
        digests.append(of_rank.read())
    names = list(weights)
    calls = []
    for some in (names[:5], names[5:]):
        of_call = []
        for exported in exports:
            of_call.append({name: exported[name] for name in some if name in exported})
        calls.append(of_call)
    sent = Receipt(4, sum_of(digests))

    whole = dict(assembled(calls[0])) | dict(assembled(calls[1]))
    assert whole.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(whole[name], weight)

    receipts = []
    held = []
    for rank in range(2):
        engine = StreamedEngine(make_model("qwen2"))
        engine.shard = Shard(model.config, 2, rank)
        engine.shard.keep_own_part(engine.model)
        held.append(engine.held_regions({name: one.shape for name, one in weights.items()}))
        assert engine.take_rows(calls[0], None) is None
        with pytest.raises(RolepoolError, match="failed halfway or has not ended"):
            engine.raise_if_not_ready()
        receipt = engine.take_rows(calls[1], 4)
        assert receipt is not None
        receipts.append(receipt)
        engine.raise_if_not_ready()
        for name, weight in weights.items():
            assert torch.equal(engine.model.get_parameter(name), engine.shard.part(name, weight))
    check_parts(sent, receipts, held, ["a", "b"])
    # A row that one rank did not export is missing.
    engine = StreamedEngine(make_model("qwen2"))
    lost = next(name for name in names[5:] if name in calls[1][0])
    del calls[1][0][lost]
    engine.take_rows(calls[0], None)
    with pytest.raises(DataError, match=f"1 of .* are missing: {lost}"):
        engine.take_rows(calls[1], 4)


def test_an_engine_refuses_weights_that_are_not_its_own() -> None:
    model = make_model("qwen2")
    engine = StreamedEngine(model)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    norm = "model.norm.weight"
    with pytest.raises(DataError, match="strange is not a weight of this model"):
        engine.held_regions({**shapes, "strange": (1,)})
    with pytest.raises(DataError, match=rf"{norm} has shape \[3\], the model's \[\d+\]"):
        engine.held_regions({**shapes, norm: (3,)})
    del shapes[norm]
    with pytest.raises(DataError, match=f"1 of .* missing: {norm}"):
        engine.held_regions(shapes)


# Only what changed


def changed(weights: Mapping[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """A copy in which about this share of the values has other bits. Some of them are equal numbers,
    as 0 and -0, and some are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    copies: dict[str, Tensor] = {}
    for name, weight in weights.items():
        copy = weight.clone()
        is_changed = torch.rand(weight.shape, generator=generator) < share
        copy[is_changed] = -copy[is_changed]
        if copy.is_floating_point() and share:
            copy[torch.rand(weight.shape, generator=generator) < 0.02] = torch.nan
        copies[name] = copy
    return copies


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("trainer", [Trainer(1, 1), Trainer(4, 2)], ids=str)
def test_what_changed_is_enough_to_have_every_bit(trainer: Trainer, dtype: torch.dtype) -> None:
    weights = {
        "rows": torch.randn(64, 40),
        "columns": torch.randn(64, 40),
        "norm": torch.randn(33),
        "zeros": torch.zeros(64, 8),
        "number": torch.randn(()),
    }
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    engines = halves(weights)
    layout = replace(make_layout(weights, trainer, engines), sends_changes=True)
    models = empty_models(layout, weights)
    sizes: list[int] = []
    shares: list[int | None] = []
    with ranks_of(layout, 2**12) as ranks:
        for number, share in enumerate((0.0, 0.0, 0.02, 0.5, 0.02)):
            before = weights
            weights = changed(weights, share, seed=number)
            sent, got = ranks.transfer(weights, models)
            sizes.append(sum(one.num_bytes for one in sent))
            num_changed = [one.num_changed for one in sent]
            shares.append(None if None in num_changed else sum(num_changed))  # type: ignore[arg-type]
            for engine, model in enumerate(models):
                for name, part in held_parts(layout, weights, engine).items():
                    assert torch.equal(bits(model[name]), bits(part)), name
            digests = sum_of(one.digests for one in sent)
            receipts = [Receipt(1, digest) for digest in got]
            check_parts(Receipt(1, digests), receipts, engines, ["a", "b"])
    assert shares[0] is None, "the first transfer compares nothing"
    # The last transfer: what differs from the one before.
    expected = 0
    for name, weight in weights.items():
        rows, old_rows = (as_matrix(one) for one in (weight, before[name]))
        differs = bits(rows).view(rows.numel(), -1) != bits(old_rows).view(rows.numel(), -1)
        expected += int(differs.any(dim=1).sum())
    assert shares[1] == 0
    assert shares[-1] == expected
    assert sum(one.num_values for one in sent) == sum(one.numel() for one in weights.values())
    whole = sizes[0]
    assert sizes[1] == 0
    assert 0 < sizes[2] < whole / 3
    assert whole / 3 < sizes[3] <= whole


@given(data=st.data())
def test_changes_are_written_where_they_were_found(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20)))
    old = torch.randn(shape).bfloat16()
    new = changed({"": old}, data.draw(st.floats(0, 0.4)), seed=1)[""]
    piece = Piece(weight_of("weight", old), whole_region(shape))
    counts, changes = find_changes({piece: (new, differences(new, old))})
    count = counts[piece]
    assert count == int((new.view(torch.int16) != old.view(torch.int16)).sum())
    if piece not in changes:
        assert count == 0 or is_sent_whole(piece, count)
        return
    content = torch.empty(encoded_bytes(piece, count), dtype=torch.uint8)
    assert len(content) <= piece.num_bytes / 2
    torch._foreach_copy_(
        list(places_of_changes(content, count, torch.bfloat16)), list(changes[piece])
    )
    wide = torch.zeros(shape[0], shape[1] + 3, dtype=torch.bfloat16)
    for part in (old.clone(), wide[:, 1:-2].copy_(old)):
        apply_changes(part, places_of_changes(content, count, torch.bfloat16))
        assert torch.equal(bits(part), bits(new))


# Ranks that leave


def test_a_rank_that_fails_ends_the_wait_of_all_others() -> None:
    weights = {"weight": torch.randn(4000, 1000)}
    layout = make_layout(weights, Trainer(2, 2), whole_models(weights, 2))
    models = empty_models(layout, weights)
    broken = {"weight": torch.zeros(1)}
    with ranks_of(layout, 2**20) as ranks:
        start_s = time.monotonic()
        errors = ranks.errors(weights, [models[0], broken])
        assert time.monotonic() - start_s < 10
    kinds = [type(error) for error in errors]
    assert kinds[:3] == [TransferError] * 3
    assert not isinstance(errors[3], TransferError)


def test_a_wait_is_aborted_from_another_thread() -> None:
    """The engine's rank never comes, as if it were stopped."""
    weights = {"weight": torch.randn(4000, 1000)}
    layout = make_layout(weights, Trainer(1, 1), whole_models(weights, 1))
    with ranks_of(layout, 2**20) as ranks:
        threading.Timer(0.5, abort_all, ["a test says so"]).start()
        with pytest.raises(TransferError, match="aborted: a test says so"):
            ranks.senders[0].send(lambda weight: weights[weight.name])
        # And the group cannot be used any more.
        with pytest.raises(TransferError, match="aborted: a test says so"):
            ranks.senders[0].send(lambda weight: weights[weight.name])
