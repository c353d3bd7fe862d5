"""Ranks that hold one copy of the weights between them say what one rank with all of them says."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.multiprocessing import start_processes
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine_contract import ROUNDING, check_weight_updates
from rolepool.config.model_files import why_not_parallel
from rolepool.errors import ConfigError, DataError, RolepoolError
from rolepool.rollout import Completion, NativeEngine, Request, Sampling, sample_seed
from rolepool.rollout.tensor_parallel import Shard, TensorParallel
from same_tokens import noise_on_logits, token_ids

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3, tied": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama, one kv head, all biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
}
NUM_RANKS = 2
NOISE = 1e-12
"""Of logits in float64, whose rounding is 1e-14. Rounded to float32, as they are sampled from,
nearly all are equal."""
GREEDY = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    do_sample=False,
    max_new_tokens=8,
    ignore_eos=True,
    stop_token_ids=(),
)
SAMPLED = dataclasses.replace(
    GREEDY, do_sample=True, ignore_eos=False, stop_token_ids=(3, 14, 25, 36, 47, 58)
)
REQUESTS = [
    Request([(7 * index + place) % 61 for place in range(1 + index * 3)], sample_seed(0, index, 0))
    for index in range(5)
]


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """In float64, so that no two tokens are so close that the order of a sum decides between
    them."""
    torch.manual_seed(seed)
    model_class, config_class, settings = MODELS[name]
    model = model_class(config_class(**{**SIZES, **settings, **changes}))
    for (
        parameter
    ) in model.parameters():  # biases and norms away from where they start, so that they matter
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


def make_engine(model: Any, **settings: Any) -> NativeEngine:
    return NativeEngine(model, max_num_seqs=3, max_num_batched_tokens=16, **settings)


def make_part(name: str, size: int, rank: int, seed: int = 0) -> tuple[Any, Shard]:
    model = make_model(name, seed)
    shard = Shard(model.config, size, rank)
    shard.keep_own_part(model)
    return model, shard


# Cutting


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (8, 2), (12, 4), (12, 6), (6, 3)]
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("name", MODELS)
def test_parts_are_views_that_make_up_the_whole(
    heads: int, kv_heads: int, size: int, name: str
) -> None:
    model = make_model(
        name, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=24, head_dim=4
    )
    if heads % size or (kv_heads % size and size % kv_heads):
        with pytest.raises(ConfigError, match=f"tensor_model_parallel_size={size}: cannot split"):
            Shard(model.config, size, 0)
        return
    shards = [Shard(model.config, size, rank) for rank in range(size)]
    for weight_name, whole in model.state_dict().items():
        parts = [shard.part(weight_name, whole) for shard in shards]
        for shard, part in zip(shards, parts, strict=True):
            assert shard.whole_shape(weight_name, part.shape) == whole.shape
        module = weight_name.split(".")[-2]
        if module in ("q_proj", "gate_proj", "up_proj"):
            assert torch.equal(torch.cat(parts), whole)
        elif module in ("k_proj", "v_proj"):
            assert all(part.shape[0] == max(kv_heads // size, 1) * 4 for part in parts)
            assert torch.equal(torch.cat(parts[:: max(1, size // kv_heads)]), whole)
            # Rank r's queries are those that look at its keys and values.
            for rank, part in enumerate(parts):
                for query_head in range(rank * heads // size, (rank + 1) * heads // size):
                    seen = whole.unflatten(0, (kv_heads, 4))[query_head * kv_heads // heads]
                    assert any(torch.equal(seen, held) for held in part.unflatten(0, (-1, 4)))
        elif module in ("o_proj", "down_proj") and whole.dim() == 2:
            assert torch.equal(torch.cat(parts, dim=1), whole)
        elif module in ("o_proj", "down_proj"):
            assert torch.equal(torch.stack(parts).sum(0), whole)
        else:
            assert all(part is whole for part in parts)


def test_a_cut_model_keeps_nothing_of_the_rest() -> None:
    whole = sum(
        parameter.untyped_storage().nbytes() for parameter in make_model("qwen2").parameters()
    )
    model, _ = make_part("qwen2", 2, 1)
    held = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
    kept = sum(parameter.untyped_storage().nbytes() for parameter in held.values())
    uncut = sum(p.nbytes for name, p in model.named_parameters() if "proj" not in name)
    assert kept == uncut + (whole - uncut) / 2


@pytest.mark.parametrize(
    ("counts", "size", "fits"),
    [((4, 2, 48), 3, "1 or 2 or 4"), ((28, 4, 18944), 8, "1 or 2 or 4"), ((8, 8, 30), 4, "1 or 2")],
)
def test_a_size_that_does_not_fit_is_refused_with_those_that_do(
    counts: tuple[int, int, int], size: int, fits: str
) -> None:
    problem = why_not_parallel(*counts, size)
    assert problem is not None
    assert problem.startswith(f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: ")
    assert problem.endswith(f"; use {fits}")


def test_a_model_with_any_number_of_heads_is_answered_at_once() -> None:
    heads = 2**31 - 1  # this took minutes
    began_s = time.monotonic()
    assert why_not_parallel(heads, 2, 4864, 1) is None
    problem = why_not_parallel(heads * 3, 3, heads * 3, 7)
    assert problem is not None and problem.endswith("; use 1 or 3")
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize("change", [1, -1])
def test_a_weight_of_another_whole_shape_is_refused_though_a_part_could_be_cut(change: int) -> None:
    model, shard = make_part("qwen2", 2, 0)
    engine = make_engine(model, shard=shard)
    name = "model.layers.0.self_attn.q_proj.weight"
    named = {**make_model("qwen2").state_dict(), name: torch.zeros(32 + change, 32)}
    with pytest.raises(
        DataError, match=rf"q_proj\.weight has shape \[{32 + change}, 32\], the model's \[32, 32\]"
    ):
        engine.update_weights(named.items(), 1)


# Two processes


@dataclasses.dataclass
class Said:
    """What one rank did with one model."""

    greedy: list[Completion]
    sampled: list[Completion]
    worst_after_update: float


def say(model: Any, trainer: Any, **settings: Any) -> Said:
    """With noise of more than float64's rounding, which is the same on two ranks, and another on
    one."""
    engine = make_engine(model, **settings)
    with noise_on_logits(NOISE, seed=engine.parallel.size):
        return Said(
            engine.generate(REQUESTS, GREEDY),
            engine.generate(REQUESTS, SAMPLED),
            check_weight_updates(engine, trainer, REQUESTS, SAMPLED),
        )


def run_rank(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    parallel = TensorParallel.over_neighbours(NUM_RANKS)
    said: dict[str, Any] = {}
    for name in MODELS:
        model, shard = make_part(name, NUM_RANKS, rank)
        said[name] = say(model, make_model(name, seed=1), shard=shard, parallel=parallel)
    # Numbers that no two orders of adding agree on, as far apart as float32 goes.
    partial = torch.randn(
        10_000, generator=torch.Generator().manual_seed(rank)
    ) * 10.0 ** torch.arange(-5, 5).repeat(1000)
    said["sum"] = parallel.sum(partial)
    said["first"] = parallel.first(torch.tensor([rank]))
    # Ranks with room for 2 and for 3 slots.
    model, shard = make_part("qwen2", NUM_RANKS, rank)
    slot_bytes = 2 * 2 * 1 * 8 * (len(REQUESTS[-1].token_ids) + GREEDY.max_new_tokens) * 8
    engine = make_engine(
        model, shard=shard, parallel=parallel, cache_bytes=lambda: (2 + rank) * slot_bytes
    )
    said["small cache"] = engine.generate(REQUESTS, SAMPLED)
    assert engine._cache is not None
    said["num_slots"] = engine._cache.num_slots
    try:
        make_engine(
            model, shard=shard, parallel=parallel, cache_bytes=lambda: rank * slot_bytes
        ).generate(REQUESTS, SAMPLED)
    except RolepoolError as error:
        said["no room"] = str(error)
    torch.save(said, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes said, both at once."""
    folder = tmp_path_factory.mktemp("ranks")
    imported = [
        f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")
    ]
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [*imported, "rolepool.rollout"]
    )
    start_processes(run_rank, (str(folder),), NUM_RANKS, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def alone() -> Callable[[str], Said]:
    said = {name: say(make_model(name), make_model(name, seed=1)) for name in MODELS}
    return lambda name: said[name]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_two_ranks_generate_what_one_does(
    name: str, how: str, ranks: list[dict[str, Any]], alone: Callable[[str], Said]
) -> None:
    expected: list[Completion] = getattr(alone(name), how)
    assert len({len(one) for one in token_ids(expected)}) > 1 or how == "greedy"
    for said in ranks:
        got: list[Completion] = getattr(said[name], how)
        assert token_ids(got) == token_ids(expected)
        for one, other in zip(got, expected, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_agree_to_the_last_bit(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (said[name] for said in ranks)
    assert first.greedy == second.greedy
    assert first.sampled == second.sampled


@pytest.mark.parametrize("name", MODELS)
def test_after_an_update_two_ranks_agree_with_the_trainer(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    assert all(said[name].worst_after_update < ROUNDING for said in ranks)


def test_a_sum_over_ranks_is_the_same_to_the_last_bit(ranks: list[dict[str, Any]]) -> None:
    sums: list[Tensor] = [said["sum"] for said in ranks]
    assert torch.equal(*sums)
    assert [said["first"].tolist() for said in ranks] == [[0], [0]]


def test_the_rank_with_the_least_room_decides_for_all(
    ranks: list[dict[str, Any]], alone: Callable[[str], Said]
) -> None:
    assert [said["num_slots"] for said in ranks] == [2, 2]
    for said in ranks:
        assert token_ids(said["small cache"]) == token_ids(alone("qwen2").sampled)
        assert "may use 0 bytes" in said["no room"]
