"""One step of PPO or ReMax, written as a list of calls that return futures.

The order of calls is the whole schedule. Calls on one pool run in the order in which they are made
here, and pools run at the same time. A call that is given a future waits for it in the worker, not
here, so calls overlap if the placement allows it. Nothing here asks for the placement. `plan` runs
this code on paper, so it imports neither torch nor ray.

Owns the interface between a step and the roles, too: `Roles`, with the methods of each role and
what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.config.model_keys import ActorConfig, CriticConfig
from rolepool.models.micro_batches import rank_order
from rolepool.placement.roles import FIRST_OPERATION, Role, trained_roles
from rolepool.seeds import derive_seed

if TYPE_CHECKING:
    from rolepool.cluster import WorkerGroup
    from rolepool.protocol import CallFuture, DataProto, DataProtoFuture
    from rolepool.roles.rollout import Purpose
    from rolepool.trainer.advantages import Estimated, Estimator

    Batch = DataProto | DataProtoFuture


@dataclass(frozen=True)
class StepCalls:
    """A step's calls by operation, and what was estimated between them."""

    number: int
    calls: Mapping[str, Sequence[CallFuture]]
    estimated: Estimated
    scored: DataProtoFuture
    """`entropy_sums` of the policy that generated; `rollout_log_probs` and `old_log_probs` if they
    are compared."""

    @property
    def generation(self) -> CallFuture:
        """The call that generated the responses, with which the step began."""
        return self.calls[FIRST_OPERATION][0]


def ppo_step(
    config: Config, roles: Roles, estimator: Estimator, prompts: DataProto, number: int
) -> StepCalls:
    """Generate, score, estimate advantages, update. Returns when the last call is queued, not when
    it has ended."""
    rollouts = roles.rollout.generate_sequences(prompts)
    scores = roles.reward.compute_scores(rollouts.union(prompts))
    return learn(config, roles, estimator, prompts, number, rollouts, scores)


def remax_step(
    config: Config, roles: Roles, estimator: Estimator, prompts: DataProto, number: int
) -> StepCalls:
    """A ReMax step: a PPO step without a critic, whose baseline is the score of the greedy response
    to each prompt."""
    rollouts = roles.rollout.generate_sequences(prompts)
    scores = roles.reward.compute_scores(rollouts.union(prompts))
    once = prompts[
        :: config.actor_rollout_ref.rollout.n
    ]  # the samples of a prompt are next to each other
    greedy = roles.rollout.generate_sequences(once, purpose="baseline")
    baselines = roles.reward.compute_scores(greedy.union(once))
    calls = {"baseline": [greedy, baselines]}
    return learn(config, roles, estimator, prompts, number, rollouts, scores, baselines, calls)


def learn(
    config: Config,
    roles: Roles,
    estimator: Estimator,
    prompts: DataProto,
    number: int,
    rollouts: DataProtoFuture,
    scores: DataProtoFuture,
    baselines: DataProtoFuture | None = None,
    calls: Mapping[str, Sequence[CallFuture]] | None = None,
) -> StepCalls:
    """The part of a step after scoring, which all algorithms share. `calls` are further calls that
    were made before it, by the name of their operation."""
    values = roles.critic.compute_values(rollouts) if roles.critic else None
    old = roles.actor.compute_log_prob(rollouts)
    ref = roles.ref.compute_ref_log_prob(rollouts) if roles.ref else None

    in_reward = (old, ref) if config.algorithm.use_kl_in_reward else ()
    estimated = estimator.estimate(
        prompts, rollouts, scores, baselines, values, *in_reward
    )  # the driver waits here
    batch = rollouts.union(estimated.batch)
    updates: dict[str, list[CallFuture]] = {
        "update_critic": [],
        "update_actor": [],
        "update_weights": [],
    }
    if roles.critic and values is not None:
        for order, is_last in update_orders(
            config, config.critic, estimated.lengths, roles.critic.dp_size, number
        ):
            update = roles.critic.update_critic(
                batch.union(values).reorder(order), ends_step=is_last
            )
            updates["update_critic"].append(update)
    if number > config.trainer.critic_warmup:
        actor_keys, scored = config.actor_rollout_ref.actor, batch.union(old)
        if ref is not None and actor_keys.use_kl_loss:
            scored = scored.union(ref)
        for order, is_last in update_orders(
            config, actor_keys, estimated.lengths, roles.actor.dp_size, number
        ):
            updates["update_actor"].append(
                roles.actor.update_actor(scored.reorder(order), ends_step=is_last)
            )
        updates["update_weights"] = roles.sync_weights(number)

    scoring = {
        FIRST_OPERATION: rollouts,
        "reward": scores,
        "values": values,
        "old_log_prob": old,
        "ref": ref,
    }
    made: dict[str, Sequence[CallFuture]] = {
        name: [call] for name, call in scoring.items() if call is not None
    }
    made.update({**updates, **(calls or {})})
    compared = (
        ("rollout_log_probs", "old_log_probs")
        if config.actor_rollout_ref.rollout.calculate_log_probs
        else ()
    )
    return StepCalls(
        number, made, estimated, rollouts.union(old).select(["entropy_sums", *compared])
    )


def update_orders(
    config: Config,
    keys: ActorConfig | CriticConfig,
    lengths: Sequence[int],
    num_ranks: int,
    step: int,
) -> Iterator[tuple[npt.NDArray[np.int64], bool]]:
    """For each epoch the order of rows, which decides the rows of each rank, and whether it is the
    last epoch.

    The rows of a mini-batch depend only on seed and step; they are balanced over ranks inside the
    mini-batch.
    """
    rows_per_mini_batch = keys.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    for epoch in range(keys.ppo_epochs):
        rows = np.arange(len(lengths))
        if keys.shuffle:
            rows = np.random.default_rng(
                derive_seed(config.trainer.seed, "shuffle", step, epoch)
            ).permutation(rows)
        in_order = [lengths[int(row)] for row in rows]
        order = rank_order(
            in_order, rows_per_mini_batch, num_ranks, balance=config.trainer.balance_batch
        )
        yield rows[order], epoch == keys.ppo_epochs - 1


# The calls of each role, with their types. The worker classes in `rolepool.roles` implement them.


class RolloutCalls(Protocol):
    def generate_sequences(self, prompts: Batch, purpose: Purpose = "train") -> DataProtoFuture:
        """A response to each prompt."""


class RewardCalls(Protocol):
    def compute_scores(self, data: Batch) -> DataProtoFuture:
        """The score of each response."""


class ReferenceCalls(Protocol):
    def compute_ref_log_prob(self, data: Batch) -> DataProtoFuture:
        """Log-probs of response tokens under the weights before training."""


class TrainedCalls(Protocol):
    group: WorkerGroup
    """The processes of the role's pool."""
    dp_size: int
    """The number of parts that a batch is split into."""

    def save_checkpoint(self, folder: str) -> CallFuture: ...

    def load_checkpoint(self, folder: Sequence[str]) -> CallFuture:
        """Load what was saved. There is a folder for each rank, because nodes have different
        ones."""

    def take_snapshot(self, folder: Sequence[str], number: Sequence[int]) -> CallFuture:
        """Copy the state to shared memory. Here, too, there is a folder for each rank."""


class ActorCalls(TrainedCalls, Protocol):
    def compute_log_prob(self, data: Batch) -> DataProtoFuture:
        """Log-probs of response tokens under the current weights, and their entropies."""

    def update_actor(self, data: Batch, ends_step: bool = True) -> CallFuture:
        """One epoch of updates."""


class CriticCalls(TrainedCalls, Protocol):
    def compute_values(self, data: Batch) -> DataProtoFuture:
        """The value of the state before each response token."""

    def update_critic(self, data: Batch, ends_step: bool = True) -> CallFuture:
        """One epoch of updates."""


class Roles:
    """The roles of a run. A built-in role that the run does not use is None. Every call returns a
    future."""

    def __init__(
        self, calls: Mapping[str, Any], sync_weights: Callable[[int], list[CallFuture]]
    ) -> None:
        """`calls` has a proxy for each role of the run. Its methods are those of the role's class,
        which mypy cannot see; here they get their types."""
        self.by_name: Mapping[str, Any] = calls
        """All roles of the run by name, also those that were added with `register_role`."""
        self.actor: ActorCalls = calls[Role.Actor]
        self.rollout: RolloutCalls = calls[Role.Rollout]
        self.reward: RewardCalls = calls[Role.RewardModel]
        self.critic: CriticCalls | None = calls.get(Role.Critic)
        self.ref: ReferenceCalls | None = calls.get(Role.RefPolicy)
        self.trained: dict[str, TrainedCalls] = {
            role: calls[role] for role in trained_roles() if role in calls
        }
        """The roles whose models are saved."""
        self.sync_weights = sync_weights
        """Queues the transfer of the actor's weights to the rollout. Later responses carry this
        version."""
