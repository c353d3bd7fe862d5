"""After a sync a rollout over two ranks agrees with the actor, whether they share a pool or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from flipping_rollout import FlippingRollout

from rolepool.cluster import Cluster, RoleProxy
from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.data.prompts import PromptLoader, PromptSet
from rolepool.data.tokenizer import load_tokenizer
from rolepool.placement import ParallelDims, build_plan
from rolepool.placement.checks import find_problems
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.columns import flat_values, lengths_of, same_value
from rolepool.roles.actor_critic import Actor
from rolepool.roles.rollout import Rollout
from rolepool.roles.setups import ActorSetup, RolloutSetup
from rolepool.trainer.advantages import Estimator, repeated
from rolepool.trainer.build import build_roles
from rolepool.trainer.step import ppo_step
from rolepool.weights.channels import Channel, ProcessGroup, SameProcess, SharedMemory
from rolepool.weights.receipts import WeightsDifferError

TOLERANCE = 1e-4
PLACEMENTS = {
    "one pool": ["trainer.n_gpus_per_node=2"],
    "two pools": [
        "trainer.n_gpus_per_node=3",
        "placement.strategy=custom",
        "placement.pools.train=[1]",
        "placement.pools.generate=[2]",
        "placement.roles.actor=train",
        "placement.roles.rollout=generate",
    ],
}


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=5,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def settings(folder: Path, placement: list[str]) -> list[str]:
    demo = make_demo(folder)
    return [
        f"actor_rollout_ref.model.path={demo.model}",
        f"data.train_files={demo.train_file}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        *placement,
    ]


def distance(actor: RoleProxy, rollouts: DataProto) -> float:
    """Between the log-probs that rollouts came with and the actor's of the same tokens."""
    scored = actor.compute_log_prob(rollouts, blocking=True)
    of_actor, of_rollout = (
        flat_values(scored.batch["old_log_probs"]),
        flat_values(rollouts.batch["rollout_log_probs"]),
    )
    return float((of_actor - of_rollout).abs().max())


def test_a_sync_inside_a_pool_and_one_across_pools_give_the_actors_weights_to_both_rollouts(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    """The actor is sharded over four ranks; a rollout over pairs of them, and one over the ranks of
    another pool.

    In float64, so that no two tokens are so close that rounding decides between them.
    """
    config = load_config([], settings(tmp_path / "demo", PLACEMENTS["one pool"])).config
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    loader = PromptLoader(
        PromptSet("train", config, tokenizer), config.data.train_batch_size, seed=1
    )
    prompts = repeated(loader.next_batch(), 2)
    train, generate = shared_cluster.groups["four"], shared_cluster.groups["two"]
    setup = ActorSetup(num_training_steps=10, dtype=torch.float64)
    actor = train.add_role("actor", Actor, config, setup, blocking=False)
    setup_of_rollout = RolloutSetup(dtype=torch.float64, stop_token_ids=(1,))
    rollouts = [
        group.add_role(
            "rollout",
            Rollout,
            config,
            setup_of_rollout,
            dims=ParallelDims(dp=size // 2, tp=2),
            blocking=False,
        )
        for group, size in ((train, 4), (generate, 2))
    ]
    old = rollouts[0].generate_sequences(prompts, blocking=True)
    assert distance(actor, old) < TOLERANCE
    scored = actor.compute_log_prob(old, blocking=True)
    log_probs = scored.batch["old_log_probs"]
    advantages = ragged(torch.randn(len(flat_values(log_probs))), lengths_of(log_probs))
    learnable = old.union(
        DataProto.from_dict({"advantages": advantages, "old_log_probs": log_probs})
    )
    actor.update_actor(learnable)
    assert distance(actor, old) > 10 * TOLERANCE, (
        "the update moved too little to tell old weights from new"
    )
    before = rollouts[1].generate_sequences(prompts, blocking=True)
    assert distance(actor, before) > 10 * TOLERANCE
    for channel_class, rollout in zip((SameProcess, ProcessGroup), rollouts, strict=True):
        sync(channel_class, actor, rollout, 1)
    inside, across = (rollout.generate_sequences(prompts, blocking=True) for rollout in rollouts)
    assert distance(actor, inside) < TOLERANCE
    assert distance(actor, across) < TOLERANCE
    assert same_value(inside.batch["input_ids"], across.batch["input_ids"])
    # Only what changes, after another update.
    channel = ProcessGroup(
        actor.with_blocking(False), rollouts[1].with_blocking(False), sends_changes=True
    )
    for version in (2, 3):
        channel.send(version)
        channel.check()
        if version == 2:
            actor.update_actor(learnable)
    after = rollouts[1].generate_sequences(prompts, blocking=True)
    assert distance(actor, after) < TOLERANCE
    assert distance(actor, across) > TOLERANCE
    across = after
    # The same weights on the other way change nothing.
    sync(SharedMemory, actor, rollouts[1], 4)
    again = rollouts[1].generate_sequences(prompts, blocking=True)
    for column in ("input_ids", "rollout_log_probs"):
        assert same_value(across.batch[column], again.batch[column])


def sync(channel_class: type[Channel], actor: RoleProxy, rollout: RoleProxy, version: int) -> None:
    channel = channel_class(actor.with_blocking(False), rollout.with_blocking(False))
    channel.send(version)
    channel.check()


@pytest.mark.parametrize("sends_changes", [False, True])
def test_one_bit_that_flips_in_the_process_group_is_found_and_named(
    shared_cluster: Cluster, tmp_path: Path, sends_changes: bool
) -> None:
    config = load_config([], settings(tmp_path / "demo", PLACEMENTS["two pools"])).config
    train, generate = shared_cluster.groups["one"], shared_cluster.groups["two"]
    name = f"flipping {sends_changes}"
    setup = ActorSetup(num_training_steps=10)
    actor = train.add_role(f"actor of {name}", Actor, config, setup, blocking=False)
    rollout = generate.add_role(
        name,
        FlippingRollout,
        config,
        RolloutSetup(stop_token_ids=(1,)),
        dims=ParallelDims(dp=1, tp=2),
        blocking=False,
    )
    channel = ProcessGroup(
        actor.with_blocking(False), rollout.with_blocking(False), sends_changes=sends_changes
    )
    channel.send(7)
    line = r"weights of version 7 changed on their way to two rank 0: model.embed_tokens.weight has"
    with pytest.raises(WeightsDifferError, match=line):
        channel.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_after_a_sync_two_tensor_parallel_ranks_agree_with_the_actor(
    name: str, tmp_path: Path, one_ray: None
) -> None:
    config = load_config([], settings(tmp_path / "demo", PLACEMENTS[name])).config
    plan = build_plan(config)
    assert find_problems(config, plan) == []
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    loader = PromptLoader(
        PromptSet("train", config, tokenizer), config.data.train_batch_size, seed=1
    )
    with Cluster(plan) as cluster:
        roles = build_roles(cluster, config, 10)
        assert roles.rollout.dims == ParallelDims(dp=1, tp=2)
        step = ppo_step(config, roles, Estimator(config), repeated(loader.next_batch(), 2), 1)
        before = step.calls["gen"][0].get()
        assert distance(roles.actor, before) > 10 * TOLERANCE, (
            "the update moved too little to tell old weights from new"
        )
        after = roles.rollout.generate_sequences(repeated(loader.next_batch(), 2)).get()
        assert len(after) == 16
        assert distance(roles.actor, after) < TOLERANCE


def test_a_size_that_the_models_heads_do_not_allow_is_refused_by_the_plan(tmp_path: Path) -> None:
    placement = [
        *PLACEMENTS["one pool"],
        "+actor_rollout_ref.model.override_config.num_attention_heads=3",
    ]
    config = load_config([], settings(tmp_path / "demo", placement)).config
    (problem,) = find_problems(config, build_plan(config))
    assert "tensor_model_parallel_size=2: cannot split the model's 3 heads" in problem
