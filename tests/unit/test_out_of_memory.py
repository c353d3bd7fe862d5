"""What is said and done about memory: errors that name it, passes that fit, keys that help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from rolepool.config import Config, load_config
from rolepool.config.model_keys import Fsdp, RefFsdp
from rolepool.data.demo import make_demo
from rolepool.placement.advice import roomier_divisions
from rolepool.placement.memory import HeldModel
from rolepool.placement.models import read_shape
from rolepool.placement.roles import Role
from rolepool.protocol import DataProto
from rolepool.protocol.memory import explain_out_of_memory, free_bytes, is_out_of_memory, show_bytes, wanted_bytes
from rolepool.protocol.remote import Share
from rolepool.protocol.worker import Worker, WorkerContext, made_in
from rolepool.roles.actor import Actor
from rolepool.roles.model_role import offloads
from rolepool.roles.passes import MOST_TOKENS, USABLE, Passes, rows_that_fit, scoring_bytes, training_bytes
from rolepool.roles.ref import Reference
from rolepool.roles.rollout import Rollout
from rolepool.roles.trained import TrainedRole

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
    for action in (lambda: torch.ones(2) @ torch.ones(3), lambda: torch.empty(-1), lambda: {}["memory"]):
        assert not is_out_of_memory(error_of(action))


def test_the_lines_say_who_wanted_what_and_what_to_change() -> None:
    error = error_of(in_place_of_cuda)
    first, second = explain_out_of_memory("a rank", error, "cpu", ["a.b=2", "c.d=true"])
    assert first.startswith("a rank is out of memory: 2.5 GiB wanted, ") and first.endswith(" free in host memory")
    assert second == "try a.b=2 or c.d=true; more in docs/troubleshooting.md, under Memory"
    unknown, no_advice = explain_out_of_memory("a rank", MemoryError(), "cpu", [])
    assert "more memory wanted" in unknown
    assert no_advice == "what to do is in docs/troubleshooting.md, under Memory"


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 * GIB // 2, "1.5 GiB"), (2**70, "1024.0 EiB")],
)
def test_amounts_are_shown_in_the_unit_that_fits(amount: int, shown: str) -> None:
    assert show_bytes(amount) == shown


def test_what_is_free_in_host_memory_is_what_the_system_can_give() -> None:
    assert free_bytes("cpu") == pytest.approx(psutil.virtual_memory().available, rel=0.2)  # others come and go


# Passes

GIBS = (1, 4.75, 5, 5.25, 5.5, 140)
"""Of free memory."""


@pytest.fixture
def qwen(root: Path) -> HeldModel:
    shape = read_shape(str(root / "recipes/shapes/qwen2.5-0.5b"))
    return HeldModel(shape, shape.num_params, num_shards=1, checkpointing=True, logit_share=Fraction(1, 2))


def test_rows_go_through_in_as_few_passes_as_fit_into_what_is_free(qwen: HeldModel) -> None:
    bytes_of_pass = partial(training_bytes, qwen)
    sizes = [rows_that_fit(64, 1024, bytes_of_pass, int(gib * GIB)) for gib in GIBS]
    assert sizes == sorted(sizes) and sizes[0] == 1 and len(set(sizes)) > 3
    assert sizes[-1] == MOST_TOKENS // 1024
    for rows, gib in zip(sizes, GIBS, strict=True):
        assert rows == 1 or bytes_of_pass(rows, 1024) <= USABLE * gib * GIB
        num_passes = -(-64 // rows)
        with_one_less = -(-64 // max(1, num_passes - 1))
        assert rows == sizes[-1] or bytes_of_pass(with_one_less, 1024) > USABLE * gib * GIB
    assert rows_that_fit(256, 384, bytes_of_pass, None) == 37, "7 passes of about one size, not 6 of 42 and one of 4"
    assert rows_that_fit(3, 1024, bytes_of_pass, 140 * GIB) == 3, "no more than there are"
    assert rows_that_fit(3, 2 * MOST_TOKENS, bytes_of_pass, 140 * GIB) == 1, "a row cannot be cut"


def test_activations_are_made_again_only_where_they_cannot_be_kept(
    qwen: HeldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, adam = replace(qwen, packed=True), SimpleNamespace(optimizer=SimpleNamespace(state={"weight": "moments"}))
    kept = training_bytes(replace(held, checkpointing=False), 16, 1024)

    def must(free: float, **of_role: Any) -> bool:
        monkeypatch.setattr("rolepool.roles.trained.free_bytes", lambda device: int(free))
        role = SimpleNamespace(**{"device": "cuda", "held": held, "packed": True, "trained": adam, **of_role})
        return TrainedRole._must_recompute(role, 16 * 1024)  # type: ignore[arg-type]

    assert must(0.99 * kept / USABLE) and not must(1.01 * kept / USABLE)
    assert training_bytes(held, 16, 1024) < 0.7 * kept, "otherwise it would not help"
    before_the_first = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    assert must(1.01 * kept / USABLE, trained=before_the_first), "the optimizer's states are still to come"
    for unknown in ({"device": "cpu"}, {"held": None}, {"packed": False}):
        assert must(1000 * kept, **unknown)


def test_the_memory_of_a_pass_follows_what_it_does(qwen: HeldModel) -> None:
    def training(**changes: Any) -> int:
        return training_bytes(replace(qwen, **changes), 4, 512)

    assert scoring_bytes(qwen, 4, 512) < training() < training(checkpointing=False)
    assert training(logit_share=Fraction(0)) < training()
    assert training(num_shards=8) < training(), "fewer gradients"
    assert training() > training(packed=True), "no mask, and compiled layers"


def test_where_the_size_is_not_chosen_a_cpu_takes_a_fixed_number_of_tokens(qwen: HeldModel) -> None:
    mask = torch.ones(40, 1024, dtype=torch.int64)
    passes = Passes("rows", None, "tokens", None, "cpu", partial(training_bytes, qwen)).cut(mask)
    assert [len(rows) for rows in passes] == [14, 14, 12]


@pytest.mark.parametrize(("total", "parts"), [(7, 3), (8, 3), (1, 4), (12, 4)])
def test_every_rank_makes_as_many_passes_of_a_number_of_rows(total: int, parts: int) -> None:
    for rows_per_pass in (1, 2, 3):
        counts = set()
        for index in range(parts):
            share = Share(total, parts, index)
            mask = torch.ones(share.num_real + share.padding, 4, dtype=torch.int64)
            counts.add(len(Passes("rows", rows_per_pass, "tokens", None, "cpu", lambda rows, width: 0).cut(mask)))
        assert len(counts) == 1


# Keys


def passes_of(**changes: Any) -> Passes:
    settings: dict[str, Any] = {"rows_per_pass": None, "max_tokens": None, **changes}
    return Passes(
        rows_key="a.rows", tokens_key="a.tokens", device="cpu", bytes_of_pass=lambda rows, width: 0, **settings
    )


def test_the_smaller_pass_offered_is_half_of_the_one_that_was_set_or_chosen() -> None:
    assert passes_of(rows_per_pass=8).smaller() == ["a.rows=4"]
    assert passes_of(rows_per_pass=1).smaller() == []
    chosen = passes_of()
    assert chosen.smaller() == [], "nothing was chosen yet"
    chosen.cut(torch.ones(12, 8))
    assert chosen.smaller() == ["a.rows=6"]
    chosen.cut(torch.ones(9, 8))
    assert chosen.smaller() == ["a.rows=3"], "a mini-batch must be a whole number of passes"


def test_the_smaller_pass_by_tokens_still_holds_a_row() -> None:
    by_tokens = passes_of(max_tokens=100)
    by_tokens.cut(torch.ones(4, 30, dtype=torch.int64))
    assert by_tokens.smaller() == ["a.tokens=50"]
    by_tokens.cut(torch.ones(4, 80, dtype=torch.int64))
    assert by_tokens.smaller() == ["a.tokens=80"]
    by_tokens.cut(torch.ones(4, 100, dtype=torch.int64))
    assert by_tokens.smaller() == []


def test_what_is_not_offloaded_yet_is_offered_on_a_gpu() -> None:
    assert offloads("a", Fsdp(), "cuda") == ["a.optimizer_offload=true", "a.param_offload=true"]
    assert offloads("a", Fsdp(param_offload=True), "cuda") == ["a.optimizer_offload=true"]
    assert offloads("a", RefFsdp(), "cuda") == ["a.param_offload=true"]
    assert offloads("a", Fsdp(), "cpu") == []


SPLIT, ACTOR_GPUS = "placement.strategy=split", "placement.split.actor_gpus_per_node"


@pytest.mark.parametrize(
    ("role", "placement", "offered"),
    [
        (Role.Actor, SPLIT, ["placement.strategy=standard"]),
        (Role.Critic, SPLIT, []),
        (Role.Critic, f"{SPLIT} {ACTOR_GPUS}=7", [f"{SPLIT} {ACTOR_GPUS}=6"]),
        (Role.Critic, "placement.strategy=standard", []),
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
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    model = make_demo(tmp_path_factory.mktemp("demo") / "data").model

    def load(*overrides: str) -> Config:
        words = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=8", "trainer.n_gpus_per_node=2"]
        sizes = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.max_prompt_length=4"]
        return load_config([], [*words, *sizes, "data.max_response_length=4", *overrides]).config

    return load


def rows(num_rows: int) -> DataProto:
    mask = torch.ones(num_rows, 8, dtype=torch.int64)
    ids = torch.full_like(mask, 5)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": mask.cumsum(1) - 1,
            "responses": ids[:, 4:],
            "response_mask": mask[:, 4:],
        }
    )


def test_a_role_offers_its_own_keys_and_what_the_roles_beside_it_could_put_away(config: Callable[..., Config]) -> None:
    keys = config("actor_rollout_ref.rollout.free_cache_engine=false")
    siblings: dict[str, Worker] = {}
    for name, make in {"actor": lambda: Actor(keys, 1), "rollout": lambda: Rollout(keys, (1,), 0)}.items():
        with made_in(WorkerContext(role=name, local_world_size=2), siblings):
            siblings[name] = make()
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


def test_the_reference_may_wait_in_host_memory(config: Callable[..., Config]) -> None:
    here, away = (
        Reference(config(f"actor_rollout_ref.ref.fsdp_config.param_offload={offload}")).compute_ref_log_prob(rows(4))
        for offload in ("false", "true")
    )
    torch.testing.assert_close(here.batch["ref_log_prob"], away.batch["ref_log_prob"])


def test_an_update_that_is_left_out_is_a_warning(
    config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    keys = config("critic.optim.lr=1.0", "critic.model.enable_gradient_checkpointing=false").critic
    model = torch.nn.Linear(8, 1)
    before = model.weight.detach().clone()

    class Linear(TrainedRole):
        scale = float("nan")

        def loss_of(self, part: Mapping[str, Tensor], counts: Any) -> tuple[Tensor, dict[str, Tensor]]:
            return model(part["attention_mask"].float()).sum() * self.scale, {}

    role = Linear(config(), Role.Critic, "critic", keys, "critic.model", keys.model)
    role.train(model, keys.model.fsdp_config, num_training_steps=1)
    with caplog.at_level(logging.WARNING, logger="rolepool"):
        assert np.isnan(role.update(rows(4), ends_step=True)["critic/grad_norm"])
    assert [record.getMessage() for record in caplog.records] == [
        "critic: the norm of the gradients is nan, so this optimizer step is left out"
    ]
    assert torch.equal(model.weight, before)
    caplog.clear()
    role.scale = 1.0
    assert role.update(rows(4), ends_step=True)["critic/grad_norm"] > 0
    assert not caplog.records and not torch.equal(model.weight, before)
