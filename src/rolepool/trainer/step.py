"""One PPO step: straight-line futures.

The order of calls is the whole schedule. Calls on one pool run in the order they are made here, pools run side by
side, and a future handed to a call is waited for there: what can overlap under a placement, does. Nothing here asks
which placement it runs under.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.config.model_keys import Actor, Critic
from rolepool.models.micro_batches import rank_order
from rolepool.protocol import CallFuture, DataProto, DataProtoFuture
from rolepool.protocol.worker import derive_seed
from rolepool.trainer.advantages import Estimated, Estimator
from rolepool.trainer.build import Roles


@dataclass(frozen=True)
class StepCalls:
    """A step's calls by the name of their timing, and what was estimated in between."""

    number: int
    calls: dict[str, list[CallFuture]]
    estimated: Estimated
    scored: DataProtoFuture
    """`entropy_sums` of the policy that generated; `rollout_log_probs` and `old_log_probs` if they are compared."""


def ppo_step(config: Config, roles: Roles, estimator: Estimator, prompts: DataProto, number: int) -> StepCalls:
    """Generate, score, estimate advantages, update. Returns when the last call is queued, not when it has ended."""
    rollouts: DataProtoFuture = roles.rollout.generate_sequences(prompts)
    scores = roles.reward.compute_scores(rollouts.union(prompts))
    greedy = baselines = None
    if estimator.needs_baselines:
        once = prompts[:: config.actor_rollout_ref.rollout.n]  # the samples of a prompt stand side by side
        greedy = roles.rollout.generate_sequences(once, purpose="baseline")
        baselines = roles.reward.compute_scores(greedy.union(once))
    values = roles.critic.compute_values(rollouts) if roles.critic else None
    old = roles.actor.compute_log_prob(rollouts)
    ref = roles.ref.compute_ref_log_prob(rollouts) if roles.ref else None

    estimated = estimator.estimate(prompts, rollouts, scores, values, old, ref, baselines)  # the driver waits here
    batch = rollouts.union(estimated.batch)
    critic_updates, actor_updates, synced = [], [], []
    if roles.critic and values is not None:
        for order, is_last in update_orders(config, config.critic, estimated.lengths, roles.critic.dp_size, number):
            critic_updates.append(roles.critic.update_critic(batch.union(values).reorder(order), ends_step=is_last))
    if number > config.trainer.critic_warmup:
        actor_keys, scored = config.actor_rollout_ref.actor, batch.union(old)
        if ref is not None and actor_keys.use_kl_loss:
            scored = scored.union(ref)
        for order, is_last in update_orders(config, actor_keys, estimated.lengths, roles.actor.dp_size, number):
            actor_updates.append(roles.actor.update_actor(scored.reorder(order), ends_step=is_last))
        synced = roles.sync_weights(number)

    calls: dict[str, Sequence[CallFuture | None]] = {
        "gen": [rollouts],
        "baseline": [greedy, baselines],
        "reward": [scores],
        "values": [values],
        "old_log_prob": [old],
        "ref": [ref],
        "update_critic": critic_updates,
        "update_actor": actor_updates,
        "update_weights": synced,
    }
    made = {name: [call for call in calls_made if call is not None] for name, calls_made in calls.items()}
    compared = ("rollout_log_probs", "old_log_probs") if config.actor_rollout_ref.rollout.calculate_log_probs else ()
    return StepCalls(number, made, estimated, rollouts.union(old).select(["entropy_sums", *compared]))


def update_orders(
    config: Config, keys: Actor | Critic, lengths: Sequence[int], num_ranks: int, step: int
) -> Iterator[tuple[npt.NDArray[np.int64], bool]]:
    """For each epoch which rows each rank updates on, as an order of rows, and whether it is the last.

    A mini-batch is a set of rows that depends on seed and step only; balancing over ranks happens inside it.
    """
    rows_per_mini_batch = keys.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    for epoch in range(keys.ppo_epochs):
        rows = np.arange(len(lengths))
        if keys.shuffle:
            rows = np.random.default_rng(derive_seed(config.trainer.seed, "shuffle", step, epoch)).permutation(rows)
        order = rank_order(
            [lengths[int(row)] for row in rows], rows_per_mini_batch, num_ranks, balance=config.trainer.balance_batch
        )
        yield rows[order], epoch == keys.ppo_epochs - 1
