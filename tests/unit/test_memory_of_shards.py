"""The memory estimate of sharded roles compared with what FSDP2 allocates for one rank of several.

The ranks and the tensors are fake (see `fake_ranks`), the code that allocates is real: FSDP2,
transformers and `TrainedModel.step`. Models have the widths of real ones and few layers, because
each layer repeats the same operations.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_ranks import FakeRun, peaks

TOLERANCE = 0.01
"""Shards are rounded up, and a few small tensors are not counted."""

ACTOR = FakeRun("qwen2.5-0.5b", num_layers=4, role="actor")
CRITIC = replace(ACTOR, role="critic")


@pytest.mark.parametrize(
    "run",
    [
        replace(ACTOR, num_ranks=2, num_shards=2),
        replace(ACTOR, num_ranks=4, num_shards=4, num_micro_batches=2),
        replace(ACTOR, num_ranks=4, num_shards=2, num_micro_batches=2),
        replace(ACTOR, shape="qwen2.5-1.5b", num_ranks=4, num_shards=4, num_micro_batches=2),
        replace(ACTOR, num_layers=24, num_ranks=4, num_shards=4, num_micro_batches=2),
        replace(CRITIC, num_ranks=2, num_shards=2),
        replace(CRITIC, num_ranks=4, num_shards=4, num_micro_batches=2),
        replace(CRITIC, num_ranks=8, num_shards=8),
        replace(CRITIC, num_ranks=4, num_shards=2),
        replace(CRITIC, shape="qwen3-1.7b", num_ranks=4, num_shards=4),
        replace(ACTOR, shape="deepseek-llm-7b-chat", num_ranks=8, num_shards=8),
    ],
    ids=lambda run: (
        f"{run.shape}-{run.role}-{run.num_shards}-of-{run.num_ranks}-x{run.num_micro_batches}"
    ),
)
def test_weights_gradients_and_buffers_of_an_update_are_what_fsdp2_allocates(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few tokens almost everything is weights and what is exchanged of them."""
    measured = peaks(run, monkeypatch)
    assert run.planned_update == pytest.approx(measured["update"], rel=TOLERANCE)
    assert run.held.scoring(run.num_tokens).working == pytest.approx(
        measured["score"], rel=TOLERANCE
    )
    assert run.held.loaded.idle == pytest.approx(measured["idle"], rel=TOLERANCE)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_activations_of_a_sharded_model_are_those_of_a_whole_one(
    role: str, num_shards: int, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3,500 tokens have as many logits as exist at a time: with more, the plan's bound is higher than
    what is allocated, because pieces have equal sizes."""
    run = replace(
        ACTOR,
        role=role,
        num_ranks=num_shards,
        num_shards=num_shards,
        num_tokens=3500,
        num_micro_batches=2,
        recomputes=recomputes,
    )
    measured = peaks(run, monkeypatch)
    assert run.planned_update == pytest.approx(measured["update"], rel=0.03)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("recomputes", [False, True])
def test_one_gpu_allocates_what_the_plan_says_for_it(
    recomputes: bool, num_micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(
        ACTOR, num_tokens=2048, recomputes=recomputes, num_micro_batches=num_micro_batches
    )
    measured = peaks(run, monkeypatch)
    assert run.planned_update == pytest.approx(measured["update"], rel=0.03)


@pytest.mark.parametrize("num_shards", [2, 4])
def test_a_sharded_reference_gathers_what_the_plan_says(
    num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(ACTOR, role="ref", num_ranks=num_shards, num_shards=num_shards)
    measured = peaks(run, monkeypatch)
    assert run.held.scoring(run.num_tokens).working == pytest.approx(
        measured["score"], rel=TOLERANCE
    )
    assert run.held.loaded.idle == pytest.approx(measured["idle"], rel=TOLERANCE)
