"""The memory estimate: parameters against public figures, the formulas by hand, and what each
setting does to them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from rolepool.config import load_config
from rolepool.config.model_files import ModelShape, ShapeUnknown, read_shape
from rolepool.models.training import model_utilization
from rolepool.placement import ParallelDims, Role, build_plan
from rolepool.placement.estimate import (
    GIB,
    LOGITS_AT_ONCE,
    MOST_TOKENS,
    PROCESS_OVERHEAD_BYTES,
    USABLE,
    HeldModel,
    MemoryEstimate,
    PoolMemory,
    RoleMemory,
    estimate_memory,
    generation_memory,
    held_model,
    peak_by_role,
    snapshot_bytes,
)
from rolepool.placement.parallel import dims_of

ROOT = Path(__file__).parent.parent.parent
DEEPSEEK = f"actor_rollout_ref.model.path={ROOT / 'recipes/shapes/deepseek-llm-7b-chat'}"
QWEN = f"actor_rollout_ref.model.path={ROOT / 'recipes/shapes/qwen2.5-0.5b'}"

QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

TINY = ModelShape(
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    vocab_size=32,
    tied_embeddings=False,
    attention_bias=False,
)


def write_model(folder: Path, content: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
    )
    return str(folder)


def estimate(overrides: str, gpu_memory: float | None = None) -> MemoryEstimate:
    config = load_config(overrides=["trainer.n_gpus_per_node=8", *overrides.split()]).config
    return estimate_memory(
        config, build_plan(config), None if gpu_memory is None else int(gpu_memory * GIB)
    )


def of_role(role: Role, overrides: str, gpu_memory: float | None = None) -> RoleMemory:
    (found,) = [
        pool.roles[role]
        for pool in estimate(overrides, gpu_memory).pools.values()
        if role in pool.roles
    ]
    return found


def least_of(role: Role, overrides: str) -> RoleMemory:
    """With the smallest micro-batches, and activations recomputed."""
    return of_role(role, overrides, gpu_memory=0)


# Parameters


@pytest.mark.parametrize(
    ("model", "num_params"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("deepseek-llm-7b-chat", 6_910_365_696),
        (QWEN_1_5B, 1_543_714_304),
        (LLAMA_2_7B, 6_738_415_616),
        (MIXTRAL_8X7B, 46_702_792_704),
    ],
    ids=["qwen2.5-0.5b", "deepseek-llm-7b", "qwen2.5-1.5b", "llama-2-7b", "mixtral-8x7b"],
)
def test_parameters_are_counted_as_published(
    tmp_path: Path, model: str | dict[str, Any], num_params: int
) -> None:
    folder = (
        str(ROOT / "recipes" / "shapes" / model)
        if isinstance(model, str)
        else write_model(tmp_path, model)
    )
    assert read_shape(folder).num_params == num_params


def test_a_tiny_model_is_counted_by_hand() -> None:
    attention, mlp, norms = 8 * (8 + 4 + 4 + 8), 3 * 8 * 16, 2 * 8
    assert TINY.layer_params == attention + mlp + norms == 592
    assert TINY.embedding_params == 32 * 8
    assert TINY.num_params == 2 * 592 + 256 + 8 + 256
    assert TINY.num_scalar_head_params == 1448 + 8


def test_all_experts_are_kept_and_only_the_active_ones_compute(tmp_path: Path) -> None:
    sparse = read_shape(write_model(tmp_path / "moe", MIXTRAL_8X7B))
    dense = read_shape(
        write_model(
            tmp_path / "dense", {**MIXTRAL_8X7B, "num_local_experts": 1, "num_experts_per_tok": 1}
        )
    )
    assert (sparse.num_experts, sparse.num_active_experts) == (8, 2)
    assert sparse.layer_params - dense.layer_params == 7 * 3 * 4096 * 14336 + 8 * 4096
    one, two = (
        HeldModel(shape, 1, 1, packed=True).layer_activation_bytes for shape in (dense, sparse)
    )
    assert two - one == 2 * 3 * 14336


def test_experts_of_their_own_width_are_counted_with_it(tmp_path: Path) -> None:
    qwen3 = {
        **MIXTRAL_8X7B,
        "num_local_experts": None,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "head_dim": 128,
    }
    shape = read_shape(write_model(tmp_path, qwen3))
    assert (shape.num_experts, shape.intermediate_size, shape.head_dim) == (128, 768, 128)


# Formulas by hand


GATHERED = 2 * (1704 - 2 * 592 + 2 * 592)
"""Of a tiny language model, in 16 bits: embedding, head and last norm, and two layers."""


def trained(
    num_tokens: int = 10,
    num_logit_tokens: int = 5,
    num_shards: int = 4,
    recomputes: bool = True,
    *,
    accumulates: bool = True,
) -> RoleMemory:
    share = Fraction(num_logit_tokens, num_tokens)
    held = HeldModel(TINY, 1704, num_shards, logit_share=share, packed=True, trained=True)
    return held.training(num_tokens, recomputes=recomputes, accumulates=accumulates)


def scoring(num_logit_tokens: int, num_shards: int) -> RoleMemory:
    return HeldModel(TINY, 1704, num_shards, logit_share=Fraction(num_logit_tokens, 10)).scoring(10)


def test_a_trained_role_is_weights_gradients_and_two_optimizer_states_in_32_bits() -> None:
    memory = trained(num_tokens=1000)
    assert HeldModel(TINY, 1704, num_shards=4).gathered_bytes == GATHERED
    packed, padded = (
        HeldModel(TINY, 1704, 4, packed=packed).layer_activation_bytes for packed in (True, False)
    )
    assert packed == 2 * (4 * 8 + 2 * 8 + 2 * 4 + 3 * 16) == 208
    assert padded == 2 * (8 * 8 + 2 * 8 + 2 * 4 + 4 * 16)
    inputs, last_norm, gradients_of_layer = 2 * 2 * 8, (4 + 2 + 2) * 8, 2 * (2 * 8 + 16)
    # What is outside of the layers, the last layer, its gradients, and the layer before it.
    in_last_layer = 2 * (520 + 3 * 592)
    assert memory == RoleMemory(
        weights=4 * 1704 // 4 + in_last_layer,
        gradients=1704,
        optimizer=2 * 1704,
        activations=1000 * (inputs + last_norm + 208 + gradients_of_layer),
        logits=2 * 256,
        idle=1704 + 2 * 1704,
    ), "the last layer's backward pass, with the head's gradient there"
    assert memory.working == sum((1704 + in_last_layer, 1704, 3408, 1000 * 368, 512))


def test_an_update_takes_what_its_worst_moment_does() -> None:
    many_logits = trained(num_logit_tokens=100)
    of_head = 100 * 32 * 2 + 256 * 4 + 100 * 8 * (2 + 2)
    assert (many_logits.activations, many_logits.logits) == (10 * (2 * 2 * 8 + 64), of_head)
    assert many_logits.weights == 1704 + 2 * (520 + 592), "and the last layer is gathered already"


def with_large_vocabulary(num_shards: int, *, accumulates: bool) -> RoleMemory:
    """An update of a scalar model with one token. Its peak is at the gradients of the embedding."""
    shape = TINY.model_copy(update={"vocab_size": 1000})
    held = HeldModel(shape, shape.num_scalar_head_params, num_shards, trained=True)
    return held.training(1, recomputes=True, accumulates=accumulates)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_the_embeddings_gradient_exists_in_16_bits_and_in_32(num_shards: int) -> None:
    outside, layers = 1000 * 8 + 2 * 8, 2 * 592
    first, second = (
        with_large_vocabulary(num_shards, accumulates=again) for again in (False, True)
    )
    assert first.weights == second.weights == 4 * (outside + layers) // num_shards
    assert first.gradients == 4 * layers // num_shards + (2 + 4) * outside
    assert second.gradients == 4 * (outside + layers) // num_shards + (2 + 4) * outside


def test_what_is_whole_on_one_gpu_is_copied_and_not_gathered() -> None:
    kept, recomputed = (
        trained(num_tokens=1000, num_shards=1, recomputes=again) for again in (False, True)
    )
    gradients = 4 * 592
    assert kept.weights == 4 * 1704 + 2 * 2 * 592 + gradients, "a copy of each layer"
    assert recomputed.weights == 4 * 1704 + 2 * 592 + gradients
    frozen = scoring(num_logit_tokens=0, num_shards=1)
    assert frozen.weights == frozen.idle == 2 * 1704


def test_gradients_of_earlier_passes_count_where_there_are_several() -> None:
    assert trained(num_tokens=1000, accumulates=True).gradients == 1704
    assert trained(num_tokens=1000, accumulates=False, recomputes=False).gradients == 0, (
        "not yet there at the peak"
    )
    first_layer = trained(num_tokens=40, accumulates=False, num_shards=1, num_logit_tokens=0)
    assert first_layer.gradients == 4 * 2 * 592, (
        "of all layers, when the backward pass has come to the first"
    )
    assert first_layer.activations == 40 * (208 + 64)
    assert first_layer.weights == 4 * 1704 + (2 + 4) * 592, "only its copy is still there"


def test_a_mini_batch_that_one_pass_holds_is_not_accumulated() -> None:
    keys = "actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.ppo_mini_batch_size=64"
    limit = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    without = (
        "actor_rollout_ref.model.enable_gradient_checkpointing=false trainer.n_gpus_per_node=1"
    )
    one, more, two = (
        of_role(Role.Actor, f"{QWEN} {keys} {without} {limit}={rows * 1024}")
        for rows in (64, 128, 32)
    )
    assert one == more, "there are no more tokens than the mini-batch's"
    assert (one.gradients, two.gradients) == (0, 4 * 494_032_768)
    assert one.activations == 2 * two.activations


def test_a_scoring_role_is_16_bit_weights_and_one_forward_pass() -> None:
    memory = scoring(num_logit_tokens=0, num_shards=2)
    assert memory == RoleMemory(
        weights=1704 + GATHERED, activations=10 * 2 * (2 * 8 + 3 * 16), idle=1704
    )
    with_logits = scoring(num_logit_tokens=20, num_shards=2)
    assert (with_logits.activations, with_logits.logits) == (2 * (10 + 20) * 8, 2 * 20 * 32), (
        "after the layers"
    )


def test_a_sharded_model_with_few_tokens_needs_most_when_its_weights_are_gathered() -> None:
    """The embedding and the first layer, and the buffers that they were gathered into."""
    held = HeldModel(TINY, 1704, num_shards=2)
    assert held.scoring(1) == RoleMemory(weights=1704 + 2 * 2 * (520 + 592), idle=1704)


def generating(num_sequences: int, cache_bytes: int | None, num_ranks: int) -> RoleMemory:
    """A rollout of the tiny model with prompts of 2 tokens and responses of 8, which has these
    bytes for its cache."""
    keys = {"data.max_prompt_length": 2, "data.max_response_length": 8}
    keys["actor_rollout_ref.rollout.tensor_model_parallel_size"] = num_ranks
    config = load_config(overrides=[f"{key}={value}" for key, value in keys.items()]).config
    weights = 2 * (520 + 1184 // num_ranks)
    room = (
        None if cache_bytes is None else weights + 2 * cache_bytes
    )  # gpu_memory_utilization is 0.5
    return generation_memory(
        config,
        TINY,
        dims_of(config, Role.Rollout, 8),
        num_sequences,
        None if room is None else GIB,
        room,
    )


def test_a_rollout_is_16_bit_weights_and_the_cache_of_all_its_sequences() -> None:
    """Logits stay with the CUDA graph of a decode step, which tensor-parallel ranks do not have."""
    weights = 2 * (520 + 1184 // 2)  # embedding, head and last norm whole, half of the layers
    logits = 3 * 32 * 2
    prefill = 6 * 2 * (2 * 8 + (2 * 8 + 2 * 4 + 4 * 16) // 2)
    assert generating(num_sequences=3, cache_bytes=None, num_ranks=2) == RoleMemory(
        weights=weights,
        kv_cache=3 * 10 * 32,
        activations=prefill,
        logits=logits,
        idle=weights,
    )
    alone = generating(num_sequences=3, cache_bytes=None, num_ranks=1)
    assert alone.idle == 2 * 1704 + logits


@pytest.mark.parametrize(("room", "cache"), [(1000, 1000), (10_000, 10 * 10 * 32), (0, 10 * 32)])
def test_the_cache_uses_the_room_that_it_has_and_holds_at_least_one_sequence(
    room: int, cache: int
) -> None:
    assert generating(num_sequences=10, cache_bytes=room, num_ranks=1).kv_cache == cache


def test_a_pools_peak_is_one_role_that_computes_while_the_others_are_idle() -> None:
    actor, critic = RoleMemory(weights=100, gradients=50, idle=30), RoleMemory(weights=80, idle=60)
    peaks = peak_by_role({Role.Actor: actor, Role.Critic: critic})
    assert peaks == {
        Role.Actor: 150 + 60 + PROCESS_OVERHEAD_BYTES,
        Role.Critic: 80 + 30 + PROCESS_OVERHEAD_BYTES,
    }


@pytest.mark.parametrize(("limit", "excess"), [(None, 0), (81, 0), (80, 0), (79, 1)])
def test_a_pool_does_not_fit_if_its_peak_is_over_the_limit(limit: int | None, excess: int) -> None:
    pool = PoolMemory({}, peak=80, peak_role=Role.Critic, least=80, limit=limit)
    assert pool.excess == MemoryEstimate({"pool": pool}, {}, {}).excess == excess


# What each setting does


def test_more_shards_hold_less_each() -> None:
    eight, four = (
        least_of(Role.Actor, DEEPSEEK),
        least_of(Role.Actor, f"{DEEPSEEK} trainer.n_gpus_per_node=4"),
    )
    assert four.optimizer == 2 * eight.optimizer == 2 * 4 * 6_910_365_696 // 4
    # What is not divided is the same: gradients outside of the layers before ranks add them up.
    whole = [memory.gradients - memory.optimizer // 2 for memory in (eight, four)]
    assert whole == [6 * (2 * 102400 * 4096 + 4096)] * 2
    assert four.activations == eight.activations


def test_a_sharding_group_smaller_than_the_pool_holds_more() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    assert (
        of_role(Role.Actor, f"{DEEPSEEK} {key}=2").optimizer
        == 4 * of_role(Role.Actor, f"{DEEPSEEK} {key}=-1").optimizer
    )


@pytest.mark.parametrize(
    ("overrides", "num_states"),
    [
        ("trainer.n_gpus_per_node=4", 2),
        (
            "trainer.nnodes=2 trainer.n_gpus_per_node=2",
            2,
        ),  # a half of its own and a half of the other node, twice
        (
            "trainer.nnodes=4 trainer.n_gpus_per_node=1",
            1.5,
        ),  # two quarters twice, and the rest to load it
        (
            "trainer.nnodes=2 trainer.n_gpus_per_node=2 actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
            2,
        ),
        ("trainer.n_gpus_per_node=4 trainer.snapshot_freq=-1", 0),
    ],
    ids=["one node", "two nodes", "four nodes", "replicas", "none are taken"],
)
def test_a_node_keeps_two_snapshots_of_its_shards_and_of_its_neighbours(
    overrides: str, num_states: float
) -> None:
    keys = f"{QWEN} trainer.device=cpu algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 {overrides}"
    config = load_config(overrides=keys.split()).config
    assert snapshot_bytes(config, build_plan(config)) == num_states * 12 * 494_032_768


def test_a_role_is_sharded_over_its_own_pool() -> None:
    split = f"{DEEPSEEK} placement.strategy=split placement.split.actor_gpus_per_node=6"
    params = read_shape(str(ROOT / "recipes/shapes/deepseek-llm-7b-chat"))
    assert of_role(Role.Actor, split).optimizer == 8 * params.num_params // 6
    assert of_role(Role.Critic, split).optimizer == 8 * params.num_scalar_head_params // 2


@pytest.mark.parametrize(
    ("role", "section"),
    [
        (Role.Actor, "actor_rollout_ref.actor.fsdp_config"),
        (Role.Critic, "critic.model.fsdp_config"),
    ],
)
def test_offload_empties_the_gpu_while_the_role_is_idle(role: Role, section: str) -> None:
    before = of_role(role, DEEPSEEK)
    without_optimizer = of_role(role, f"{DEEPSEEK} {section}.optimizer_offload=true")
    without_both = of_role(
        role, f"{DEEPSEEK} {section}.optimizer_offload=true {section}.param_offload=true"
    )
    assert without_optimizer.idle == before.idle - before.optimizer
    assert without_both.idle == 0
    assert before.working == without_optimizer.working == without_both.working


def test_an_offloaded_reference_takes_nothing_while_it_is_idle() -> None:
    with_reference = f"{DEEPSEEK} actor_rollout_ref.actor.use_kl_loss=true"
    assert of_role(Role.RefPolicy, with_reference).idle == 2 * 6_910_365_696 // 8
    assert (
        of_role(
            Role.RefPolicy, f"{with_reference} actor_rollout_ref.ref.fsdp_config.param_offload=true"
        ).idle
        == 0
    )


def test_checkpointing_keeps_every_layers_input_instead_of_its_activations() -> None:
    kept, recomputed = (
        trained(num_tokens=1000, num_logit_tokens=1000, recomputes=again) for again in (False, True)
    )
    assert kept.activations == 1000 * (2 * 208 + 64)
    assert recomputed.activations == 1000 * (2 * 2 * 8 + 64 + 208 + 2 * (2 * 8 + 16)), (
        "one layer is recomputed"
    )
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    assert (
        least_of(Role.Actor, f"{DEEPSEEK} {key}=false").activations
        > 5 * least_of(Role.Actor, DEEPSEEK).activations
    )


def test_activations_and_logits_grow_with_the_micro_batch_and_logits_only_up_to_a_bound() -> None:
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    one, two, three, eight = (least_of(Role.Actor, f"{QWEN} {key}={rows}") for rows in (1, 2, 3, 8))
    of_head, of_token = 151936 * 896, 151936 * 2 + 896 * (2 + 2)
    assert 3 * two.activations == 2 * three.activations
    assert least_of(Role.Actor, QWEN) == one
    assert one.logits == (4 + 2) * of_head + 512 * 896 * (2 + 2), (
        "the head's gradient in 16 bits takes more than so few logits"
    )
    assert (two.logits, three.logits) == (
        2 * 512 * of_token + 4 * of_head,
        3 * 512 * of_token + 4 * of_head,
    )
    assert eight.logits == 2 * LOGITS_AT_ONCE + 4 * of_head + 8 * 512 * 896 * (2 + 2)


def test_dynamic_batches_are_counted_by_their_tokens() -> None:
    actor = "actor_rollout_ref.actor"
    dynamic = f"{DEEPSEEK} {actor}.use_dynamic_bsz=true {actor}.ppo_max_token_len_per_gpu=4096"
    fixed = f"{DEEPSEEK} actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    assert of_role(Role.Actor, dynamic) == of_role(Role.Actor, fixed)


def test_a_critic_has_no_logits() -> None:
    assert of_role(Role.Critic, DEEPSEEK).logits == 0


def test_tensor_parallelism_cuts_the_rollouts_weights() -> None:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    one, four = (
        of_role(Role.Rollout, f"{DEEPSEEK} {key}=1"),
        of_role(Role.Rollout, f"{DEEPSEEK} {key}=4"),
    )
    layers = 6_910_365_696 - 2 * 102_400 * 4096 - 4096
    assert (one.weights, four.weights) == (2 * 6_910_365_696, 2 * (6_910_365_696 - layers * 3 // 4))
    assert four.kv_cache == one.kv_cache, "four ranks share four times the sequences"


def test_utilization_caps_the_rollout_in_its_pools_share_of_the_gpu() -> None:
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    tensor_parallel = "actor_rollout_ref.rollout.tensor_model_parallel_size=8"
    uncapped = of_role(Role.Rollout, f"{DEEPSEEK} {tensor_parallel} {key}=0.2")
    away = " ".join(
        f"{section}.{part}_offload=true"
        for section in ("actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config")
        for part in ("param", "optimizer")
    )
    capped = of_role(Role.Rollout, f"{DEEPSEEK} {tensor_parallel} {key}=0.2 {away}", gpu_memory=80)
    assert (
        capped.weights + capped.kv_cache
        == int(80 * GIB * 0.2)
        < uncapped.weights + uncapped.kv_cache
    )
    shared = f"{DEEPSEEK} {tensor_parallel} {key}=0.2 {away} placement.strategy=split placement.split.share=0.5"
    halved = of_role(Role.Rollout, shared, gpu_memory=80)
    assert halved.weights + halved.kv_cache == int(40 * GIB * 0.2)


def test_the_cache_also_leaves_room_in_what_the_idle_roles_leave_free() -> None:
    keys = f"{DEEPSEEK} actor_rollout_ref.rollout.tensor_model_parallel_size=8"
    (pool,) = estimate(keys, gpu_memory=80).pools.values()
    others = sum(memory.idle for role, memory in pool.roles.items() if role != Role.Rollout)
    rollout = pool.roles[Role.Rollout]
    assert rollout.kv_cache == int(
        0.5 * (80 * GIB - PROCESS_OVERHEAD_BYTES - others - rollout.weights)
    )


def test_a_cache_that_is_not_freed_stays_while_others_work() -> None:
    key = "actor_rollout_ref.rollout.free_cache_engine"
    freed, kept = (
        of_role(Role.Rollout, f"{QWEN} {key}=true"),
        of_role(Role.Rollout, f"{QWEN} {key}=false"),
    )
    assert kept.idle - freed.idle == kept.kv_cache > 0


def test_a_pool_is_measured_against_its_share_of_the_gpu() -> None:
    shared = estimate(f"{QWEN} placement.strategy=split placement.split.share=0.25", gpu_memory=80)
    assert {pool.limit for pool in shared.pools.values()} == {20 * GIB}
    assert {pool.limit for pool in estimate(QWEN, gpu_memory=80).pools.values()} == {80 * GIB}


def test_every_role_has_its_own_model() -> None:
    overrides = (
        f"{DEEPSEEK} critic.model.path={ROOT}/recipes/shapes/qwen2.5-0.5b "
        f"reward_model.enable=true reward_model.model.path={ROOT}/recipes/shapes/qwen2.5-0.5b"
    )
    qwen = read_shape(f"{ROOT}/recipes/shapes/qwen2.5-0.5b")
    assert of_role(Role.Critic, overrides).optimizer == 8 * qwen.num_scalar_head_params // 8
    assert of_role(Role.RewardModel, overrides).idle == 2 * qwen.num_scalar_head_params // 8
    assert of_role(Role.Actor, overrides).optimizer == 8 * 6_910_365_696 // 8


def test_entries_of_the_models_config_may_be_replaced() -> None:
    key = "actor_rollout_ref.model.override_config.num_hidden_layers"
    before, after = of_role(Role.Rollout, QWEN), of_role(Role.Rollout, f"{QWEN} {key}=12")
    assert after.weights < before.weights
    assert after.kv_cache == before.kv_cache // 2


# What is chosen from the GPU's memory

LONG = (
    f"{QWEN} trainer.n_gpus_per_node=1 data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
    "data.max_prompt_length=512 data.max_response_length=512"
)
GPUS = (11, 16.5, 17, 17.1, 17.2, 17.3, 18, 24, 40, 140)


def test_an_open_micro_batch_is_as_large_as_fits_and_the_pool_stays_within_its_gpu() -> None:
    estimates = [estimate(LONG, gpu_memory) for gpu_memory in GPUS]
    sizes = [one.micro_batches["update_actor"].tokens for one in estimates]
    assert (
        sizes == sorted(sizes)
        and sizes[0] == 1024
        and sizes[-1] == MOST_TOKENS
        and len(set(sizes)) > 3
    )
    for one, gpu_memory in zip(estimates, GPUS, strict=True):
        (pool,) = one.pools.values()
        assert pool.least <= pool.peak <= max(pool.least, gpu_memory * GIB)
        assert all(size.is_chosen and size.rows is None for size in one.micro_batches.values())
    assert estimates[0].pools["global_pool"].peak == estimates[0].pools["global_pool"].least


def test_activations_are_kept_if_there_is_room_and_recomputed_otherwise() -> None:
    small, large = estimate(LONG, 24), estimate(LONG, 140)
    assert small.micro_batches["update_actor"].recomputes is True
    assert large.micro_batches["update_actor"].recomputes is False
    assert large.micro_batches["old_log_prob"].recomputes is None, "no backward pass"
    padded = estimate(f"{LONG} actor_rollout_ref.model.use_remove_padding=false", 140)
    assert padded.micro_batches["update_actor"].recomputes is True, "only measured with packed rows"
    off = estimate(f"{LONG} actor_rollout_ref.model.enable_gradient_checkpointing=false", 24)
    assert off.micro_batches["update_actor"].recomputes is False, "the user said so"


def test_a_chosen_micro_batch_leaves_a_part_of_the_room_free() -> None:
    config = load_config(overrides=LONG.split()).config
    (pool,) = estimate(LONG, 20).pools.values()
    held = held_model(config, Role.Actor, ParallelDims())
    others = sum(memory.idle for role, memory in pool.roles.items() if role != Role.Actor)
    room = 20 * GIB - PROCESS_OVERHEAD_BYTES - others - held.loaded.working
    assert pool.roles[Role.Actor].working - held.loaded.working <= USABLE * room


def test_a_size_that_the_user_wrote_is_never_changed() -> None:
    actor = "actor_rollout_ref.actor"
    rows = estimate(f"{LONG} {actor}.ppo_micro_batch_size_per_gpu=32", 11).micro_batches[
        "update_actor"
    ]
    assert (rows.rows, rows.is_chosen) == (32, False)
    keys = f"{actor}.use_dynamic_bsz=true {actor}.ppo_max_token_len_per_gpu=30000"
    tokens = estimate(f"{LONG} {keys}", 11).micro_batches["update_actor"]
    assert (tokens.rows, tokens.tokens, tokens.is_chosen) == (None, 30_000, False)
    assert tokens.most_rows(64, 1024) == 22, "64 full rows in 3 micro-batches, not 29 + 29 + 6"


def test_a_row_that_is_longer_than_a_micro_batch_is_one_of_its_own() -> None:
    long = estimate(f"{LONG} data.max_response_length=30000", 140).micro_batches["update_actor"]
    assert long.tokens == 30_512 and long.most_rows(64, 30_512) == 1


def test_an_unknown_model_has_the_sizes_that_its_keys_set() -> None:
    chosen = estimate(
        "actor_rollout_ref.model.path=no/such-model critic.use_dynamic_bsz=true", 80
    ).micro_batches
    assert (
        chosen["update_actor"].tokens == MOST_TOKENS and chosen["update_actor"].recomputes is True
    )
    assert chosen["values"].tokens == 32_768


def test_the_plan_shows_what_is_chosen_and_the_least_that_would_do(
    rolepool: Callable[..., Any],
) -> None:
    words = LONG.split()
    shown = unwrapped(rolepool("plan", *words, "--gpu-memory", "140").out)
    assert (
        "micro-batches: update_actor, update_critic: up to 16,384 tokens (chosen), activations kept"
        in shown
    )
    memory = json.loads(rolepool("plan", *words, "--gpu-memory", "140", "--json").out)["memory"]
    pool = memory["pools"]["global_pool"]
    fits = rf"{pool['peak_bytes'] / GIB:.1f} of 140.0 GiB, fits\s+\(least {pool['least_bytes'] / GIB:.1f}\)"
    assert re.search(fits, shown)
    assert memory["micro_batches"]["update_actor"] == {
        "rows": None,
        "tokens": 16_384,
        "is_chosen": True,
        "recomputes": False,
    }
    assert (
        "the GPU's memory is not known" in rolepool("plan", *words).out
        or "GiB, fits" in rolepool("plan", *words).out
    )


# Models that cannot be run


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "gemma2"},
            "cannot run model_type gemma2; it runs llama, mistral, qwen2, qwen3",
        ),
        (
            {"rope_scaling": {"type": "dynamic"}},
            "cannot run rotary embeddings of type dynamic; it runs default, ",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "cannot run rotary embeddings of type longrope",
        ),
    ],
)
def test_a_model_that_the_native_engine_cannot_run_is_refused_by_the_plan(
    tmp_path: Path, rolepool: Callable[..., Any], changes: dict[str, Any], reason: str
) -> None:
    folder = write_model(tmp_path, {**LLAMA_2_7B, **changes})
    padded = "actor_rollout_ref.model.use_remove_padding=false"
    outcome = rolepool("plan", f"actor_rollout_ref.model.path={folder}", padded)
    assert outcome.code == 2
    (line,) = (line for line in outcome.err.splitlines() if not line.startswith("warning: "))
    assert line.startswith(
        f"error: actor_rollout_ref.model.path={folder}: the native rollout engine {reason}"
    )
    assert line.endswith("; set actor_rollout_ref.rollout.name=transformers")


def test_heads_that_tensor_parallelism_does_not_divide_are_refused_by_the_plan(
    rolepool: Callable[..., Any],
) -> None:
    outcome = rolepool("plan", QWEN, "actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    assert outcome.code == 2
    assert "tensor_model_parallel_size=4: cannot split the model's 14 heads" in outcome.err
    assert "use 1 or 2" in outcome.err


# Finding the model


def test_a_model_is_found_by_its_hub_id_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rolepool: Callable[..., Any]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshots = tmp_path / "hub" / "models--meta-llama--Llama-2-7b-hf" / "snapshots"
    old = write_model(snapshots / "newer_name", {**LLAMA_2_7B, "num_hidden_layers": 1})
    os.utime(f"{old}/config.json", (0, 0))
    write_model(snapshots / "a_name", LLAMA_2_7B)
    assert read_shape("meta-llama/Llama-2-7b-hf").num_params == 6_738_415_616
    outcome = rolepool(
        "plan", "actor_rollout_ref.model.path=meta-llama/Llama-2-7b-hf", "--gpu-memory", "80"
    )
    assert outcome.code == 0
    assert "memory unknown" not in outcome.out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("not json", "cannot be read"),
        ("[1]", "is not a JSON object"),
        ({}, "hidden_size=None must be an integer over 0"),
        ({**LLAMA_2_7B, "vocab_size": None}, "vocab_size=None must be an integer over 0"),
        ({**LLAMA_2_7B, "hidden_size": "wide"}, "hidden_size=wide must be an integer over 0"),
        ({**LLAMA_2_7B, "hidden_size": -4096}, "hidden_size=-4096 must be an integer over 0"),
        ({**LLAMA_2_7B, "hidden_size": 10**400}, "must be an integer over 0"),
        ({**LLAMA_2_7B, "hidden_size": float("inf")}, "hidden_size=inf must be an integer over 0"),
        (
            {**LLAMA_2_7B, "num_attention_heads": 0},
            "num_attention_heads=None must be an integer over 0",
        ),
        (
            {**LLAMA_2_7B, "num_hidden_layers": True},
            "num_hidden_layers=True must be an integer over 0",
        ),
    ],
)
def test_a_config_that_describes_no_decoder_is_unknown_with_the_reason(
    tmp_path: Path, content: Any, reason: str
) -> None:
    with pytest.raises(ShapeUnknown, match=re.escape(reason)):
        read_shape(write_model(tmp_path, content))


@pytest.mark.parametrize(
    "path", ["no/such-model", "/", "~nobody/model", "a" * 5000, "a\0b", "", "../..", "**"]
)
def test_a_model_that_is_not_on_disk_is_unknown_and_the_plan_is_fine(
    rolepool: Callable[..., Any], path: str
) -> None:
    outcome = rolepool(
        "plan", f"actor_rollout_ref.model.path={path}", "--gpu-memory", "80", "--strict"
    )
    assert outcome.code == 0
    assert re.search(r"^A +global_pool .* memory unknown$", outcome.out, flags=re.MULTILINE)
    assert "memory unknown: actor, rollout, critic: " in outcome.out


def test_a_pool_with_one_unknown_model_is_unknown_and_the_others_are_not(
    rolepool: Callable[..., Any],
) -> None:
    split = (
        "trainer.n_gpus_per_node=8",
        "placement.strategy=split",
        "critic.model.path=no/such-model",
        "--gpu-memory",
        "80",
    )
    memory = json.loads(rolepool("plan", QWEN, *split, "--json").out)["memory"]
    assert list(memory["pools"]) == ["actor_rollout_ref_pool"]
    assert memory["unknown"] == {"critic": "no/such-model is not on disk, and plan never downloads"}


# Verdict and advice


def test_what_does_not_fit_is_a_warning(rolepool: Callable[..., Any]) -> None:
    outcome = rolepool("plan", DEEPSEEK, "--gpu-memory", "24")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "GiB, does not fit" in outcome.out
    assert re.search(
        r"warning: global_pool does not fit by \d+\.\d GiB while \w+ computes \(an estimate; ",
        unwrapped(outcome.out),
    )


def test_what_does_not_fit_is_refused_with_strict(rolepool: Callable[..., Any]) -> None:
    assert rolepool("plan", DEEPSEEK, "--gpu-memory", "24", "--strict").code == 2
    assert rolepool("plan", DEEPSEEK, "--gpu-memory", "200", "--strict").code == 0


def test_on_cpu_slots_no_gpu_memory_is_asked_for(rolepool: Callable[..., Any]) -> None:
    outcome = rolepool("plan", DEEPSEEK, "trainer.device=cpu", "--gpu-memory", "1", "--strict")
    assert outcome.code == 0
    assert "host memory" in outcome.out


def unwrapped(text: str) -> str:
    """A plan's text with the lines that were too long for 80 columns in one piece."""
    return re.sub(r" *\n {4,}", " ", text)


def excess(outcome: Any) -> int:
    pools = json.loads(outcome.out)["memory"]["pools"].values()
    return max([0, *(pool["peak_bytes"] - pool["limit_bytes"] for pool in pools)])


@pytest.mark.parametrize(
    "arguments",
    [
        (DEEPSEEK, "--gpu-memory", "24"),
        (DEEPSEEK, "--gpu-memory", "60", "placement.strategy=split", "trainer.n_gpus_per_node=4"),
        (DEEPSEEK, "--gpu-memory", "40", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"),
        (DEEPSEEK, "--gpu-memory", "30", "actor_rollout_ref.model.enable_gradient_checkpointing=false",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"),
        (DEEPSEEK, "--gpu-memory", "40", "actor_rollout_ref.rollout.free_cache_engine=false"),
        (DEEPSEEK, "--gpu-memory", "20", "--inventory", "8,8,4", "data.train_batch_size=1000",
         "actor_rollout_ref.actor.ppo_mini_batch_size=100", "actor_rollout_ref.actor.use_kl_loss=true"),
        ("recipes/deepseek7b_split.yaml", DEEPSEEK, "--gpu-memory", "40"),
        ("recipes/qwen0.5b_h200.yaml", QWEN, "--gpu-memory", "12"),
    ],
)  # fmt: skip
def test_every_piece_of_advice_applied_gives_what_it_says(
    rolepool: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    before = rolepool("plan", *arguments, "--json")
    advice = json.loads(before.out)["advice"]
    assert advice, "an example without advice shows nothing"
    assert excess(before) > 0
    shown = unwrapped(rolepool("plan", *arguments).out)
    printed = re.findall(r"^  try (.*?) +(fits|still .* GiB too much)$", shown, re.MULTILINE)
    assert [override for override, _ in printed] == [item["override"] for item in advice]
    for item, (override, effect) in zip(advice, printed, strict=True):
        after = rolepool("plan", *arguments, *override.split(), "--json")
        assert after.code == 0
        assert excess(after) == item["excess_bytes"] < excess(before)
        left = excess(after) / GIB
        assert effect == (f"still {left:.1f} GiB too much" if left else "fits")
        assert (rolepool("plan", *arguments, *override.split(), "--strict").code == 0) == (
            effect == "fits"
        )


def test_advice_never_hides_what_does_not_fit_behind_an_unknown_model(
    rolepool: Callable[..., Any],
) -> None:
    split = (
        "trainer.n_gpus_per_node=8",
        "placement.strategy=split",
        "critic.model.path=no/such-model",
        "--gpu-memory",
        "24",
        "--json",
    )
    outcome = rolepool("plan", DEEPSEEK, *split)
    assert excess(outcome) > 0
    assert not [
        item for item in json.loads(outcome.out)["advice"] if "standard" in item["override"]
    ]


def test_where_nothing_helps_the_plan_says_so(rolepool: Callable[..., Any]) -> None:
    alone = (
        "trainer.n_gpus_per_node=1",
        "placement.strategy=split",
        "placement.split.share=0.5",
        "--gpu-memory",
        "20",
    )
    outcome = rolepool("plan", DEEPSEEK, *alone)
    assert outcome.code == 0
    assert "  no change that was tried helps; use more GPUs or a smaller model" in outcome.out


def test_what_fits_gets_no_advice(rolepool: Callable[..., Any]) -> None:
    outcome = rolepool("plan", QWEN, "--gpu-memory", "80")
    assert "try " not in outcome.out
    assert "warning" not in outcome.out


# Use of a GPU's arithmetic


def test_the_operations_of_an_update_are_counted_by_hand() -> None:
    lengths = torch.tensor([3, 5])
    used = model_utilization(TINY, lengths, 2.0, "NVIDIA H200")
    assert used == pytest.approx((6 * 1704 * 8 + 6 * 2 * 8 * (9 + 25)) / (2.0 * 989e12))


def test_a_gpu_is_known_by_a_word_of_its_name() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H20")
    h200, *others = (model_utilization(TINY, torch.tensor([3]), 1.0, name) for name in names)
    assert h200 is not None
    assert [other and h200 / other for other in others] == pytest.approx([1, 312 / 989, 148 / 989])
    assert model_utilization(TINY, torch.tensor([3]), 1.0, "Some GPU") is None
    assert model_utilization(TINY, torch.tensor([3]), 1.0, "") is None, "a CPU has no name"
