"""The way that weights take follows from the plan, and `plan` says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolepool.config import Config, load_config
from rolepool.errors import ConfigError
from rolepool.placement import build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import estimate_memory
from rolepool.placement.roles import Role
from rolepool.placement.transfers import transfer_in_words
from rolepool.placement.weight_ways import (
    SEVERAL_RANKS_PER_GPU,
    WeightWay,
    sends_changes,
    weight_way,
)

ROOT = Path(__file__).parents[2]
NAME = "actor_rollout_ref.rollout.name"
WEIGHTS = "actor_rollout_ref.rollout.weights"
APART = [
    "trainer.n_gpus_per_node=4",
    "trainer.device=cuda",
    "placement.strategy=custom",
    "placement.pools.train=[2]",
    "placement.pools.generate=[2]",
    *(f"placement.roles.{role}=train" for role in ("actor", "critic", "ref")),
    "placement.roles.rollout=generate",
    f"actor_rollout_ref.model.path={ROOT / 'recipes/shapes/qwen2.5-0.5b'}",
]
ON_SHARED_GPUS = [
    "placement.pools.train={per_node: [2], share: 0.5}",
    "placement.pools.generate={per_node: [2], share: 0.5}",
    "trainer.n_gpus_per_node=2",
]
FULL = f"{WEIGHTS}=full"
SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
TOGETHER = ["trainer.n_gpus_per_node=2", "trainer.device=cuda"]


def config_of(*keys: str) -> Config:
    return load_config([], list(keys)).config


def test_changes_between_pools_that_share_a_gpu_are_refused() -> None:
    keys = [*APART, *ON_SHARED_GPUS]
    refused = config_of(*keys, f"{WEIGHTS}=delta")
    (problem,) = find_problems(refused, build_plan(refused))
    assert problem.startswith(f"{WEIGHTS}=delta: actor and rollout share a GPU")
    assert problem.endswith("use auto, or give the rollout GPUs of its own")
    config = config_of(*keys)
    assert not find_problems(config, build_plan(config))


@pytest.mark.parametrize(
    ("keys", "environment", "expected"),
    [
        (TOGETHER, {}, WeightWay.SAME_PROCESS),
        (APART, {}, WeightWay.SHARED_MEMORY),
        ([*APART, FULL], {}, WeightWay.PROCESS_GROUP),
        ([*APART, f"{WEIGHTS}=delta"], {}, WeightWay.PROCESS_GROUP),
        ([*APART, FULL, f"{NAME}=transformers"], {}, WeightWay.PROCESS_GROUP),
        ([*APART, FULL, f"{NAME}=vllm"], {}, WeightWay.PROCESS_GROUP),
        ([*APART, FULL, f"{NAME}=json:loads"], {}, WeightWay.SHARED_MEMORY),
        ([*APART, FULL, *ON_SHARED_GPUS], {}, WeightWay.SHARED_MEMORY),
        ([*APART, FULL, *ON_SHARED_GPUS], {SEVERAL_RANKS_PER_GPU: "0"}, WeightWay.SHARED_MEMORY),
        ([*APART, FULL, *ON_SHARED_GPUS], {SEVERAL_RANKS_PER_GPU: "1"}, WeightWay.PROCESS_GROUP),
    ],
)
def test_the_way_of_weights(
    keys: list[str], environment: dict[str, str], expected: WeightWay
) -> None:
    config = config_of(*keys)
    plan = build_plan(config)
    assert weight_way(config, plan, on_gpus=True, environment=environment) is expected


def test_cpu_slots_can_always_use_a_process_group() -> None:
    config = config_of(*APART, *ON_SHARED_GPUS, "trainer.device=cpu")
    plan = build_plan(config)
    way = weight_way(config, plan, on_gpus=False, environment={})
    assert way is WeightWay.PROCESS_GROUP


@pytest.mark.parametrize("value", ["auto", "full", "delta"])
def test_changes_are_sent_if_the_key_says_so(value: str) -> None:
    config = config_of(*APART, f"{WEIGHTS}={value}")
    assert sends_changes(config, WeightWay.PROCESS_GROUP) is (value == "delta")
    assert not sends_changes(config, WeightWay.SHARED_MEMORY)


def test_an_engine_that_cannot_take_changes_is_refused() -> None:
    for name in ("vllm", "json:loads"):
        line = rf"{WEIGHTS}=delta: {NAME}={name} takes all weights in every step; use auto"
        with pytest.raises(ConfigError, match=line):
            config_of(*APART, f"{NAME}={name}", f"{WEIGHTS}=delta")
    config = config_of(*APART, f"{NAME}=vllm")
    assert not sends_changes(config, WeightWay.PROCESS_GROUP)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (TOGETHER, None),
        (
            [*APART, f"{WEIGHTS}=full"],
            # Both ranks have all of 494 million weights.
            "through a process group (NCCL), 1.8 GiB per step to 2 ranks, about 24.7 ms "
            "(assumed speed)",
        ),
        (APART, "through shared memory, 1.8 GiB per step to 2 ranks, about 1.98 s (assumed speed)"),
        (
            [*APART, f"{WEIGHTS}=delta"],
            "through a process group (NCCL), only values that changed: at most 1.8 GiB per step to "
            "2 ranks, at most 24.7 ms (assumed speed)",
        ),
        (
            [*APART, f"{NAME}=json:loads"],
            "through shared memory, 1.8 GiB per step to 2 ranks, about 1.98 s (assumed speed)",
        ),
        (
            [*APART, "trainer.device=cpu"],
            "through a process group (gloo), 3.7 GiB per step to 2 ranks, about 4.94 s "
            "(assumed speed)",
        ),
        (
            [*APART, FULL, "actor_rollout_ref.model.path=no/such-model"],
            "through a process group (NCCL)",
        ),
    ],
)
def test_plan_says_how_weights_travel(keys: list[str], expected: str | None) -> None:
    config = config_of(*keys)
    assert transfer_in_words(config, build_plan(config)) == expected


def test_tensor_parallel_ranks_get_less() -> None:
    whole, halves = (config_of(*APART, f"{WEIGHTS}=delta", f"{SIZE}={size}") for size in (1, 2))
    amounts = []
    for config in (whole, halves):
        words = transfer_in_words(config, build_plan(config))
        assert words is not None
        amounts.append(float(words.split("at most ")[1].split(" GiB")[0]))
    # The embedding, which is a quarter of this model, is on both ranks.
    assert 0.5 < amounts[1] / amounts[0] < 0.7


def test_the_memory_of_the_actor_has_the_copy_of_what_it_sent() -> None:
    estimates = []
    for value in ("full", "delta"):
        config = config_of(*APART, f"{WEIGHTS}={value}")
        estimates.append(estimate_memory(config, build_plan(config), None))
    full, delta = (estimate.pools["train"].roles for estimate in estimates)
    # 494 million weights of 2 bytes, divided over two ranks.
    for name in ("weights", "idle", "working"):
        more = getattr(delta[Role.Actor], name) - getattr(full[Role.Actor], name)
        assert more == 494_032_768 * 2 // 2
    assert delta[Role.Critic] == full[Role.Critic]
