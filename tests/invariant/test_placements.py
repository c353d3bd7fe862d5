"""Placement does not change the mathematics: the same run under every placement.

In float64 with live sampling everything is the same. In float32 sums in another order round
otherwise, and a uniform number that falls between two roundings samples another token, a tie; so
there every placement trains on the rollouts of one rank, and rows with a tie are counted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from rolepool.cluster import Cluster, RoleProxy
from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.data.prompts import PromptLoader, PromptSet
from rolepool.data.tokenizer import load_tokenizer
from rolepool.placement import build_plan
from rolepool.placement.checks import find_problems
from rolepool.protocol import DataProto, DataProtoFuture
from rolepool.protocol.columns import flat_values
from rolepool.trainer.advantages import Estimator, describe, repeated
from rolepool.trainer.build import build_roles
from rolepool.trainer.paper import step_of
from rolepool.weights.rows import assembled

NUM_STEPS = 3
TOLERANCE = 1e-9
MEMORY = "perf/cpu_memory_used_gb"
"""Differs from run to run, because other programs use memory, too."""
LOSS_TOLERANCE_FLOAT32 = 1e-4

CUSTOM = ["placement.strategy=custom"]
PLACEMENTS = {
    "standard, 1 rank": ["trainer.n_gpus_per_node=1"],
    "standard, 2 ranks": ["trainer.n_gpus_per_node=2"],
    "standard, 4 ranks, by tokens": [
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",
        "critic.ppo_max_token_len_per_gpu=40",
    ],
    "split, 1 and 1": ["trainer.n_gpus_per_node=2", "placement.strategy=split"],
    "split, 2 and 1, padded": [
        "trainer.n_gpus_per_node=3",
        "placement.strategy=split",
        "actor_rollout_ref.model.use_remove_padding=false",
    ],
    "rollout alone": [
        *CUSTOM,
        "trainer.n_gpus_per_node=3",
        "placement.pools.train=[2]",
        "placement.pools.generate=[1]",
        *(f"placement.roles.{role}=train" for role in ("actor", "critic", "ref")),
        "placement.roles.rollout=generate",
    ],
    "rollout alone, tensor parallel, from replicas of shards": [
        *CUSTOM,
        "trainer.n_gpus_per_node=6",
        "placement.pools.train=[4]",
        "placement.pools.generate=[2]",
        *(f"placement.roles.{role}=train" for role in ("actor", "critic", "ref")),
        "placement.roles.rollout=generate",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ],
    "all apart": [
        *CUSTOM,
        "trainer.n_gpus_per_node=4",
        *(f"placement.pools.{role}_pool=[1]" for role in ("actor", "rollout", "critic", "ref")),
        *(f"placement.roles.{role}={role}_pool" for role in ("actor", "rollout", "critic", "ref")),
    ],
}


@dataclass(frozen=True)
class Course:
    """What a run did: what it sampled, advantages and metrics of each step, and the weights after
    the last."""

    sampled: list[DataProto]
    advantages: list[torch.Tensor]
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]

    def rows_that_differ(self, other: Course) -> int:
        pairs = zip(self.sampled, other.sampled, strict=True)
        responses = [
            [one.to_padded(response_width=4).batch["responses"] for one in pair] for pair in pairs
        ]
        return sum(int((mine != theirs).any(dim=1).sum()) for mine, theirs in responses)


@dataclass
class WatchedRollout:
    """Samples, keeps what was sampled, and hands on what the replayed run sampled in its place,
    where there is one."""

    rollout: RoleProxy
    replayed: Course | None
    sampled: list[DataProtoFuture] = field(default_factory=list)

    def generate_sequences(self, prompts: DataProto, purpose: str = "train") -> DataProtoFuture:
        if purpose != "train":  # the greedy responses of ReMax
            greedy: DataProtoFuture = self.rollout.generate_sequences(prompts, purpose=purpose)
            return greedy
        self.sampled.append(self.rollout.generate_sequences(prompts))
        if self.replayed is None:
            return self.sampled[-1]
        return self.sampled[-1].union(self.replayed.sampled[len(self.sampled) - 1])


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=7,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={
            "worker_process_setup_hook": "exact_norms.use_exact_norms",
            "env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)},  # where that module is
        },
    )
    yield
    ray.shutdown()


def run(
    demo: Demo,
    placement: list[str],
    dtype: torch.dtype = torch.float64,
    replayed: Course | None = None,
) -> Course:
    loaded = load_config(
        [],
        [
            f"actor_rollout_ref.model.path={demo.model}",
            f"data.train_files={demo.train_file}",
            "data.train_batch_size=16",
            "data.max_prompt_length=8",
            "data.max_response_length=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.001",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "algorithm.use_kl_in_reward=true",
            "critic.optim.lr=1e-3",
            "actor_rollout_ref.rollout.n=2",
            "trainer.device=cpu",
            *placement,
        ],
    )
    config, plan = loaded.config, build_plan(loaded.config)
    assert find_problems(config, plan) == []
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    loader = PromptLoader(
        PromptSet("train", config, tokenizer), config.data.train_batch_size, seed=1
    )
    estimator = Estimator(config)
    course = Course([], [], [], {})
    with Cluster(plan) as cluster:
        roles = build_roles(cluster, config, 10, dtype)
        watched = WatchedRollout(roles.rollout, replayed)
        roles.rollout = watched  # type: ignore[assignment]
        for number in range(1, NUM_STEPS + 1):
            prompts = repeated(loader.next_batch(), 2)
            step = step_of(config)(config, roles, estimator, prompts, number)
            course.sampled.append(watched.sampled[-1].get().select(deepcopy=True))
            course.advantages.append(flat_values(step.estimated.batch.batch["advantages"]))
            updates = [
                call.get()[0]
                for name in ("update_critic", "update_actor")
                for call in step.calls.get(name, ())
            ]
            course.metrics.append(
                {
                    **step.estimated.metrics,
                    **describe(step.estimated, step.scored.get()),
                    **{
                        f"{i}/{key}": v
                        for i, row in enumerate(updates)
                        for key, v in row.items()
                        if key != MEMORY
                    },
                }
            )
        weights = roles.actor.weights_to_send().get()
        course.weights.update(assembled(roles.actor.export_rows(weights).get()))
    return course


@pytest.fixture(scope="module")
def one_rank(demo: Demo) -> Course:
    return run(demo, PLACEMENTS["standard, 1 rank"])


IN_EVERY_RUN = ("rollout alone",)
"""The others take as long again; `-m slow` runs them."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in PLACEMENTS
        if name != "standard, 1 rank"
    ],
)
def test_a_run_is_the_same_under_every_placement(name: str, demo: Demo, one_rank: Course) -> None:
    assert_same(one_rank, run(demo, PLACEMENTS[name]))


@pytest.mark.slow
def test_a_run_is_the_same_where_the_critics_update_does_not_wait_for_log_probs(demo: Demo) -> None:
    without_penalty = "algorithm.use_kl_in_reward=false"
    in_order, apart = (
        run(demo, [*PLACEMENTS[name], without_penalty])
        for name in ("standard, 1 rank", "split, 1 and 1")
    )
    assert_same(in_order, apart)


def assert_same(one_rank: Course, other: Course) -> None:
    num_different = one_rank.rows_that_differ(other)
    assert num_different == 0, f"{num_different} sampled rows differ"
    for mine, theirs in zip(one_rank.advantages, other.advantages, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=TOLERANCE, atol=TOLERANCE)
    for mine, theirs in zip(one_rank.metrics, other.metrics, strict=True):
        assert mine.keys() == theirs.keys()
        wrong = {
            k: (mine[k], theirs[k])
            for k in mine
            if not np.isclose(mine[k], theirs[k], rtol=1e-9, atol=1e-9)
        }
        assert wrong == {}
    for key, weight in one_rank.weights.items():
        torch.testing.assert_close(other.weights[key], weight, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_runs_that_are_compared_do_learn_something(one_rank: Course, demo: Demo) -> None:
    first = load_file(Path(demo.model) / "model.safetensors")
    moved = [float((one_rank.weights[key] - first[key].double()).abs().max()) for key in first]
    assert min(moved) > 1e-5


@pytest.fixture(scope="module")
def one_rank_float32(demo: Demo) -> Course:
    return run(demo, PLACEMENTS["standard, 1 rank"], torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name != "standard, 1 rank"])
def test_losses_of_the_same_rollouts_are_the_same_in_float32(
    name: str, demo: Demo, one_rank_float32: Course
) -> None:
    other = run(demo, PLACEMENTS[name], torch.float32, replayed=one_rank_float32)
    num_rows, num_different = sum(map(len, other.sampled)), one_rank_float32.rows_that_differ(other)
    ties = f"{num_different} of {num_rows} rows were sampled differently"
    losses = [key for key in one_rank_float32.metrics[0] if key.endswith("_loss")]
    assert {key.split("/", 1)[1] for key in losses} == {
        "actor/pg_loss",
        "actor/kl_loss",
        "critic/vf_loss",
    }
    apart = {
        (step, key): abs(mine[key] - theirs[key])
        for step, (mine, theirs) in enumerate(
            zip(one_rank_float32.metrics, other.metrics, strict=True), start=1
        )
        for key in losses
    }
    assert max(apart.values()) < LOSS_TOLERANCE_FLOAT32, f"{ties}; losses differ by {apart}"
    assert num_different < num_rows / 20, ties
