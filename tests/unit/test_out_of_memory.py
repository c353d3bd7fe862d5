"""What is said and done about memory: errors that name it, micro-batches that fit, keys that
help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rolepool.cluster.calls import Share
from rolepool.config import Config, load_config
from rolepool.config.model_keys import FsdpConfig, RefFsdpConfig
from rolepool.models.ranks import PartSums
from rolepool.placement import ParallelDims
from rolepool.placement.checks import roomier_divisions
from rolepool.placement.estimate import MOST_TOKENS, MicroBatch
from rolepool.placement.roles import MicroBatchKeys, Role
from rolepool.protocol import DataProto, pad_ragged, ragged
from rolepool.protocol.out_of_memory import (
    explain_out_of_memory,
    free_bytes,
    is_out_of_memory,
    wanted_bytes,
)
from rolepool.protocol.worker import Worker, WorkerContext, made_in
from rolepool.roles.actor_critic import Actor, Reference
from rolepool.roles.micro_batches import MicroBatches
from rolepool.roles.model_role import offloads
from rolepool.roles.rollout import Rollout
from rolepool.roles.setups import ActorSetup, RolloutSetup, Setup, TrainingSetup
from rolepool.roles.trained_role import TrainedRole

GIB = 2**30


def error_of(action: Callable[[], object]) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def in_place_of_cuda() -> object:
    """The words of torch's CUDA allocator, which this machine may not have."""
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is "
        "free. Process 4711 has 77.90 GiB memory in use."
    )


# Errors


@pytest.mark.parametrize(
    ("action", "wanted"),
    [
        (lambda: torch.empty(2**50), 2**52),
        (lambda: np.empty(2**57), 2**60),
        (lambda: bytearray(2**62), None),
        (in_place_of_cuda, int(2.5 * GIB)),
    ],
    ids=["torch on a CPU", "numpy", "Python", "torch on a GPU"],
)
def test_an_error_of_any_allocator_is_recognized_with_what_it_wanted(
    action: Callable[[], object], wanted: int | None
) -> None:
    error = error_of(action)
    assert is_out_of_memory(error)
    assert wanted_bytes(error) == wanted


def test_other_errors_are_not_taken_for_it() -> None:
    for action in (
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: torch.empty(-1),
        lambda: {}["memory"],
    ):
        assert not is_out_of_memory(error_of(action))


def test_the_lines_say_who_wanted_what_and_what_to_change() -> None:
    error = error_of(in_place_of_cuda)
    first, second = explain_out_of_memory("a rank", error, "cpu", ["a.b=2", "c.d=true"])
    assert first.startswith("a rank is out of memory: it asked for 2.5 GiB, and ")
    assert first.endswith(" are free in host memory")
    assert (
        second == "try a.b=2 or c.d=true; more advice is in docs/troubleshooting.md, under Memory"
    )
    unknown, no_advice = explain_out_of_memory("a rank", MemoryError(), "cpu", [])
    assert "it asked for more memory, and" in unknown
    assert no_advice == "advice is in docs/troubleshooting.md, under Memory"


def test_what_is_free_in_host_memory_is_what_the_system_can_give() -> None:
    assert free_bytes("cpu") == pytest.approx(
        psutil.virtual_memory().available, rel=0.2
    )  # others come and go


# MicroBatches

KEYS = MicroBatchKeys("a.rows", "a.tokens", "a.by_tokens")


def micro_batches_of(
    *,
    rows: int | None = None,
    tokens: int = MOST_TOKENS,
    is_chosen: bool = False,
    packed: bool = True,
    width: int = 8,
) -> MicroBatches:
    return MicroBatches(
        MicroBatch(KEYS, rows, tokens, is_chosen, recomputes=None),
        PartSums(ParallelDims(), "cpu"),
        packed,
        width,
    )


def test_rows_of_open_size_go_through_in_micro_batches_of_about_one_size() -> None:
    assert [len(rows) for rows in micro_batches_of(is_chosen=True).split([1024] * 40)] == [
        14,
        13,
        13,
    ]
    assert [len(rows) for rows in micro_batches_of(is_chosen=True).split([1024] * 3)] == [3], (
        "no more than there are"
    )


def test_packed_rows_count_as_their_tokens_and_padded_ones_as_the_longest() -> None:
    lengths = [10, 70, 10, 10, 10, 10, 10, 10]
    assert len(micro_batches_of(tokens=140).split(lengths)) == 1
    assert len(micro_batches_of(tokens=140, packed=False).split(lengths)) == 4


@pytest.mark.parametrize(("total", "parts"), [(7, 3), (8, 3), (1, 4), (12, 4)])
def test_every_rank_makes_as_many_micro_batches_of_a_number_of_rows(total: int, parts: int) -> None:
    for rows_per_pass in (1, 2, 3):
        counts = set()
        for index in range(parts):
            counts.add(
                len(
                    micro_batches_of(rows=rows_per_pass).split(
                        [4] * Share(total, parts, index).size
                    )
                )
            )
        assert len(counts) == 1


# Keys


def test_the_smaller_pass_offered_is_half_of_the_one_that_was_set_or_chosen() -> None:
    assert micro_batches_of(rows=8).smaller() == ["a.rows=4"]
    assert micro_batches_of(rows=1).smaller() == []
    chosen = micro_batches_of(is_chosen=True)
    assert chosen.smaller() == [], "nothing was chosen yet"
    chosen.split([8] * 12)
    assert chosen.smaller() == ["a.rows=6"]
    chosen.split([8] * 9)
    assert chosen.smaller() == ["a.rows=3"], (
        "a mini-batch must be an integer number of micro-batches"
    )


def test_the_smaller_pass_by_tokens_still_holds_a_row() -> None:
    for width, offered in ((30, ["a.tokens=50"]), (80, ["a.tokens=80"]), (100, [])):
        assert micro_batches_of(tokens=100, width=width).smaller() == offered


def test_what_is_not_offloaded_yet_is_offered_on_a_gpu() -> None:
    assert offloads("a", FsdpConfig(), "cuda") == [
        "a.optimizer_offload=true",
        "a.param_offload=true",
    ]
    assert offloads("a", FsdpConfig(param_offload=True), "cuda") == ["a.optimizer_offload=true"]
    assert offloads("a", RefFsdpConfig(), "cuda") == ["a.param_offload=true"]
    assert offloads("a", FsdpConfig(), "cpu") == []


SPLIT, ACTOR_GPUS = "placement.strategy=split", "placement.split.actor_gpus_per_node"


@pytest.mark.parametrize(
    ("role", "placement", "offered"),
    [
        (Role.Actor, SPLIT, [f"{SPLIT} {ACTOR_GPUS}=5"]),
        (Role.Critic, SPLIT, []),
        (Role.Critic, f"{SPLIT} {ACTOR_GPUS}=7", [f"{SPLIT} {ACTOR_GPUS}=5"]),
        (Role.Critic, "placement.strategy=standard", [f"{SPLIT} {ACTOR_GPUS}=5"]),
    ],
)
def test_another_division_is_offered_where_the_estimate_says_it_takes_less(
    root: Path, role: Role, placement: str, offered: list[str]
) -> None:
    words = [
        f"actor_rollout_ref.model.path={root / 'recipes/shapes/deepseek-llm-7b-chat'}",
        "trainer.n_gpus_per_node=8",
        "data.train_batch_size=840",
        "actor_rollout_ref.actor.ppo_mini_batch_size=840",
    ]
    assert roomier_divisions(load_config([], [*words, *placement.split()]).config, role) == offered


# Roles


@pytest.fixture(scope="module")
def config(model: Path) -> Callable[..., Config]:
    def load(*overrides: str) -> Config:
        words = [
            f"actor_rollout_ref.model.path={model}",
            "data.train_batch_size=8",
            "trainer.n_gpus_per_node=2",
        ]
        sizes = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.max_prompt_length=4"]
        return load_config([], [*words, *sizes, "data.max_response_length=4", *overrides]).config

    return load


def rows(num_rows: int) -> DataProto:
    ids = ragged(torch.full((num_rows * 8,), 5), torch.full((num_rows,), 8))
    return DataProto.from_dict({"input_ids": ids, "num_prompt_tokens": torch.full((num_rows,), 4)})


def test_a_role_offers_its_own_keys_and_what_the_roles_beside_it_could_put_away(
    config: Callable[..., Config],
) -> None:
    keys = config("actor_rollout_ref.rollout.free_cache_engine=false")
    siblings: dict[str, Worker] = {}
    with made_in(WorkerContext(role="actor", local_world_size=2), siblings):
        siblings["actor"] = Actor(keys, ActorSetup(num_training_steps=1))
    with made_in(WorkerContext(role="rollout", local_world_size=2), siblings):
        siblings["rollout"] = Rollout(keys, RolloutSetup(stop_token_ids=(1,)))
    actor, rollout = siblings["actor"], siblings["rollout"]
    assert isinstance(actor, Actor)
    actor.compute_log_prob(rows(8))
    cache = "actor_rollout_ref.rollout.free_cache_engine=true"
    assert actor.less_memory("compute_log_prob") == [
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        cache,
    ]
    assert actor.less_memory("__init__") == [cache]
    assert rollout.less_memory("generate_sequences") == [
        "actor_rollout_ref.rollout.max_num_seqs=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ]


REF_OFFLOAD = "actor_rollout_ref.ref.fsdp_config.param_offload"


def test_the_reference_may_wait_in_host_memory(config: Callable[..., Config]) -> None:
    here, away = (
        Reference(config(f"{REF_OFFLOAD}={offload}"), Setup()).compute_ref_log_prob(rows(4))
        for offload in ("false", "true")
    )
    torch.testing.assert_close(
        pad_ragged(here.batch["ref_log_prob"]), pad_ragged(away.batch["ref_log_prob"])
    )


def test_an_update_without_finite_gradients_is_skipped_and_counted(
    config: Callable[..., Config],
) -> None:
    model = torch.nn.Linear(4, 1)
    before = model.weight.detach().clone()

    class Linear(TrainedRole):
        role = Role.Critic
        scale = float("nan")

        def loss_of(
            self, rows: Any, columns: Mapping[str, Tensor], counts: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return model(columns["response_mask"].float()).sum() * self.scale, {}

    role = Linear(
        config("critic.optim.lr=1.0", "critic.model.enable_gradient_checkpointing=false"),
        TrainingSetup(),
    )
    role.train(model, num_training_steps=1)
    metrics = role.update(rows(4), ends_step=True)
    assert np.isnan(metrics["critic/grad_norm"])
    assert (metrics["critic/updates"], metrics["critic/skipped_updates"]) == (0, 1)
    assert torch.equal(model.weight, before)
    role.scale = 1.0
    metrics = role.update(rows(4), ends_step=True)
    assert metrics["critic/grad_norm"] > 0
    assert (metrics["critic/updates"], metrics["critic/skipped_updates"]) == (1, 0)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(("checkpointing", "num_runs"), [("false", 1), ("true", 2)])
def test_activations_are_kept_or_made_again(
    config: Callable[..., Config], checkpointing: str, num_runs: int
) -> None:
    class Trained(TrainedRole):
        role = Role.Critic

        def loss_of(
            self, rows: Any, columns: Mapping[str, Tensor], counts: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return self.trained.model(
                input_ids=torch.arange(4)[None], use_cache=False
            ).logits.square().mean(), {}

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3))  # type: ignore[no-untyped-call]
    role = Trained(
        config(f"critic.model.enable_gradient_checkpointing={checkpointing}"), TrainingSetup()
    )
    role.train(model, num_training_steps=1)
    runs: list[str] = []
    model.get_submodule("model.layers.1").register_forward_pre_hook(lambda *_: runs.append("again"))
    for _ in range(2):
        runs.clear()
        role.update(rows(4), ends_step=True)
        assert len(runs) == num_runs
