"""One PPO step: straight-line futures.

The order of calls is the whole schedule. Calls on one pool run in the order they are made here, pools run side by
side, and a future handed to a call is waited for there: what can overlap under a placement, does. Nothing here asks
which placement it runs under. `plan` runs this same code on paper, so it imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.config.model_keys import ActorConfig, CriticConfig
from rolepool.models.micro_batches import rank_order
from rolepool.seeds import derive_seed
from rolepool.trainer.calls import Roles

if TYPE_CHECKING:
    from rolepool.protocol import CallFuture, DataProto, DataProtoFuture
    from rolepool.trainer.advantages import Estimated


class EstimatesAdvantages(Protocol):
    def estimate(
        self,
        prompts: DataProto,
        rollouts: DataProtoFuture,
        scores: DataProtoFuture,
        values: DataProtoFuture | None,
        log_probs: Sequence[DataProtoFuture],
        baselines: DataProtoFuture | None,
    ) -> Estimated:
        """Wait for all of these, and estimate advantages from them."""


@dataclass(frozen=True)
class StepCalls:
    """A step's calls by operation, and what was estimated in between."""

    number: int
    calls: dict[str, list[CallFuture]]
    estimated: Estimated
    scored: DataProtoFuture
    """`entropy_sums` of the policy that generated; `rollout_log_probs` and `old_log_probs` if they are compared."""


def ppo_step(
    config: Config, roles: Roles, estimator: EstimatesAdvantages, prompts: DataProto, number: int
) -> StepCalls:
    """Generate, score, estimate advantages, update. Returns when the last call is queued, not when it has ended."""
    rollouts = roles.rollout.generate_sequences(prompts)
    scores = roles.reward.compute_scores(rollouts.union(prompts))
    return learn(config, roles, estimator, prompts, number, rollouts, scores)


def learn(
    config: Config,
    roles: Roles,
    estimator: EstimatesAdvantages,
    prompts: DataProto,
    number: int,
    rollouts: DataProtoFuture,
    scores: DataProtoFuture,
    baselines: DataProtoFuture | None = None,
) -> StepCalls:
    """The part of a step after generation, which all algorithms share."""
    values = roles.critic.compute_values(rollouts) if roles.critic else None
    old = roles.actor.compute_log_prob(rollouts)
    ref = roles.ref.compute_ref_log_prob(rollouts) if roles.ref else None

    log_probs = [old] if ref is None else [old, ref]
    in_reward = log_probs if config.algorithm.use_kl_in_reward else []
    estimated = estimator.estimate(prompts, rollouts, scores, values, in_reward, baselines)  # the driver waits here
    batch = rollouts.union(estimated.batch)
    critic_updates: list[CallFuture] = []
    actor_updates: list[CallFuture] = []
    synced: list[CallFuture] = []
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

    calls: dict[str, list[CallFuture]] = {
        "gen": [rollouts],
        "reward": [scores],
        "values": [] if values is None else [values],
        "old_log_prob": [old],
        "ref": [] if ref is None else [ref],
        "update_critic": critic_updates,
        "update_actor": actor_updates,
        "update_weights": synced,
    }
    compared = ("rollout_log_probs", "old_log_probs") if config.actor_rollout_ref.rollout.calculate_log_probs else ()
    return StepCalls(number, calls, estimated, rollouts.union(old).select(["entropy_sums", *compared]))


def update_orders(
    config: Config, keys: ActorConfig | CriticConfig, lengths: Sequence[int], num_ranks: int, step: int
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
