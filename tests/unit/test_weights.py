"""Receipts, and the weights that a source gives: one wrong bit is found and named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rolepool.models.training import FrozenModel
from rolepool.models.weights import WeightSource
from rolepool.placement import ParallelDims
from rolepool.rollout.engine import StreamedEngine
from rolepool.rollout.tensor_parallel import Shard
from rolepool.rollout.transformers_engine import TransformersEngine
from rolepool.rollout.vllm_client import VllmClient
from rolepool.rollout.vllm_engine import VllmEngine, start_vllm
from rolepool.weights.digests import digests_of
from rolepool.weights.receipts import Receipt, WeightsDifferError, check_receipt
from tiny_models import make_model, write_model
from vllm_pythons import substitute_python

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def with_flipped_bit(tensor: Tensor, bit: int = 0) -> Tensor:
    """A copy that differs in one bit of its bytes."""
    flat = tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
    flat[bit // 8] ^= 1 << (bit % 8)
    return flat.view(tensor.dtype).view(tensor.shape)


# Receipts


def receipt(version: int = 3, **tensors: Tensor) -> Receipt:
    return Receipt(version, digests_of(tensors.items()))


@pytest.mark.parametrize(
    ("got", "complaint"),
    [
        (
            {"norm": torch.ones(4), "head": torch.zeros(2)},
            r"norm has digest \w{16}, and \w{16} was sent",
        ),
        ({"norm": torch.zeros(4)}, "head did not arrive"),
        (
            {"norm": torch.zeros(4).bfloat16(), "head": torch.zeros(2)},
            r"norm is bfloat16 \[4\], and float32 \[4\] was sent",
        ),
        (
            {"norm": torch.zeros(4), "head": torch.zeros(2), "more": torch.zeros(1)},
            "more arrived, and was not sent",
        ),
    ],
    ids=["value", "missing", "dtype", "unknown"],
)
def test_a_difference_is_one_line_that_names_the_tensor(
    got: dict[str, Tensor], complaint: str
) -> None:
    sent = receipt(norm=torch.zeros(4), head=torch.zeros(2))
    with pytest.raises(WeightsDifferError, match=complaint) as caught:
        check_receipt(sent, receipt(**got), "rollout_pool rank 1")
    (line,) = caught.value.problems
    assert line.startswith("weights of version 3 changed on their way to rollout_pool rank 1: ")


def test_other_versions_differ_and_no_receipt_or_shared_weights_do_not() -> None:
    sent = receipt(norm=torch.zeros(4))
    check_receipt(sent, receipt(norm=torch.zeros(4)), "rank 0")
    check_receipt(sent, None, "rank 0")
    check_receipt(sent, Receipt(3, is_shared=True), "rank 0")
    with pytest.raises(WeightsDifferError, match=r"rank 0 has version 2 .* version 3 was sent"):
        check_receipt(sent, receipt(2, norm=torch.zeros(4)), "rank 0")


# From a source to an engine


def source_of(model: Any, dtype: torch.dtype | None = None) -> WeightSource:
    return WeightSource(FrozenModel(model, device="cpu", dims=ParallelDims(), offload=False), dtype)


def deliver(
    source: WeightSource, engine: StreamedEngine, damaged: str | None = None
) -> tuple[Receipt, Receipt | None]:
    """Send all weights as whole tensors, and return both receipts. One bit of the tensor with the
    name `damaged` flips on its way."""
    with source.open() as tensors:
        sent = {name: tensor.clone() for name, tensor in tensors}
    digests = digests_of(sent.items())
    if damaged is not None:
        sent[damaged] = with_flipped_bit(sent[damaged], bit=77)
    got = engine.update_weights(sent.items(), 1)
    return Receipt(1, digests), got


def test_the_specs_of_a_source_are_those_of_its_tensors() -> None:
    source = source_of(make_model("qwen2"), torch.bfloat16)
    with source.open() as tensors:
        found = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    assert [tuple(spec)[:3] for spec in source.specs()] == found
    assert {spec.dtype for spec in source.specs()} == {torch.bfloat16}
    with source.open([Q_PROJ]) as tensors:
        assert [name for name, _ in tensors] == [Q_PROJ]


@pytest.mark.parametrize("engine_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sent_dtype", [None, torch.bfloat16], ids=str)
def test_both_sides_hash_what_travels_whatever_dtypes_they_have(
    sent_dtype: torch.dtype | None, engine_dtype: torch.dtype
) -> None:
    source = source_of(make_model("qwen2", seed=1), sent_dtype)
    engine = TransformersEngine(make_model("qwen2").to(engine_dtype), 4)
    sent, got = deliver(source, engine)
    assert got is not None
    check_receipt(sent, got, "the engine")
    dtype = "float32" if sent_dtype is None else "bfloat16"
    assert {digest.dtype for digest in got.digests.values()} == {dtype}
    with pytest.raises(WeightsDifferError, match=Q_PROJ):
        check_receipt(*deliver(source, engine, damaged=Q_PROJ), "the engine")


def test_of_tied_weights_one_name_is_sent_and_compared() -> None:
    model = make_model("qwen2", tie_word_embeddings=True, seed=1)
    engine = TransformersEngine(make_model("qwen2", tie_word_embeddings=True), 4)
    sent, got = deliver(source_of(model), engine)
    assert "lm_head.weight" not in sent.digests
    check_receipt(sent, got, "the engine")
    assert torch.equal(engine.model.lm_head.weight, model.model.embed_tokens.weight)
    embedding = "model.embed_tokens.weight"
    with pytest.raises(WeightsDifferError, match=f"{embedding} has digest"):
        check_receipt(*deliver(source_of(model), engine, damaged=embedding), "the engine")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_rank_hashes_what_arrived_before_it_takes_its_part(rank: int) -> None:
    """Also a bit of the other rank's part is found."""
    model = make_model("qwen2")
    engine = StreamedEngine(model)
    engine.shard = Shard(model.config, 2, rank)
    engine.shard.keep_own_part(model)
    source = source_of(make_model("qwen2", seed=1))
    sent, got = deliver(source, engine)
    check_receipt(sent, got, f"rank {rank}")
    assert engine.model.get_parameter(Q_PROJ).shape != sent.digests[Q_PROJ].shape
    with pytest.raises(WeightsDifferError, match=Q_PROJ):
        check_receipt(*deliver(source, engine, damaged=Q_PROJ), f"rank {rank}")


def test_an_engine_says_what_is_in_its_model_and_not_what_it_was_given() -> None:
    """A copy that goes wrong is found, too."""

    class Broken(torch.nn.Parameter):
        """A parameter into which nothing can be copied, and which does not say so."""

        def copy_(self, *_: Any, **__: Any) -> Broken:  # type: ignore[override]
            return self

    engine = TransformersEngine(make_model("qwen2"), 4)
    attention = engine.model.model.layers[0].self_attn
    attention.q_proj.weight = Broken(attention.q_proj.weight.data)
    sent, got = deliver(source_of(make_model("qwen2", seed=1)), engine)
    with pytest.raises(WeightsDifferError, match=Q_PROJ):
        check_receipt(sent, got, "the engine")


def test_an_engine_with_shared_weights_says_so_and_hashes_nothing() -> None:
    engine = TransformersEngine(make_model("qwen2"), 4, shared_weights=True)
    assert engine.update_weights((), 5) == Receipt(5, {}, is_shared=True)


def test_the_receipt_of_the_engines_page_is_accepted(root: Path) -> None:
    page = (root / "docs" / "engines.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from rolepool\.weights.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # it is our own page
    members = {"update_weights": names["update_weights"], "digests": None, "version": 0}
    engine: Any = type("UsersEngine", (), members)()
    engine.model = make_model("qwen2").requires_grad_(False)
    source = source_of(make_model("qwen2", seed=1))
    for _ in range(2):
        sent, got = deliver(source, engine)
        assert got is not None
        assert engine.version == 1
        check_receipt(sent, got, "the engine")
    with pytest.raises(WeightsDifferError, match=Q_PROJ):
        check_receipt(*deliver(source, engine, damaged=Q_PROJ), "the engine")


# vLLM


class DamagingClient:
    """A client of vLLM that flips a bit of the file with new weights before vLLM reads it."""

    def __init__(self, client: VllmClient, bit: int | None) -> None:
        self._client = client
        self._bit = bit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def ask(self, name: str, *arguments: Any) -> Any:
        if name == "update" and self._bit is not None:
            file = Path(arguments[0])
            content = bytearray(file.read_bytes())
            content[-1 - self._bit // 8] ^= 1 << (self._bit % 8)  # the header is at the beginning
            file.write_bytes(bytes(content))
        return self._client.ask(name, *arguments)


def test_the_process_of_vllm_hashes_what_it_reads(tmp_path: Path) -> None:
    arguments = {
        "model": write_model(tmp_path / "model", "qwen2"),
        "dtype": "float32",
        "enable_sleep_mode": True,
    }
    client: Any = DamagingClient(start_vllm(substitute_python(tmp_path), arguments), bit=None)
    engine = VllmEngine(client, make_model("qwen2"))
    source = source_of(make_model("qwen2", seed=1))
    try:
        sent, got = deliver(source, engine)
        check_receipt(sent, got, "the engine")
        client._bit = 3
        with pytest.raises(WeightsDifferError) as caught:
            deliver(source, engine)
        (line,) = caught.value.problems
        start = "weights changed on their way to the process of vLLM: "
        assert line.startswith(start)
        name = line.removeprefix(start).split()[0]
        assert name in sent.digests
        assert f"{name} has digest " in line
        with pytest.raises(Exception, match="failed halfway"):
            engine.raise_if_not_ready()
    finally:
        engine.close()
