"""One step of PPO or ReMax, written as a list of calls that return futures.

The order of calls is the whole schedule. Calls on one pool run in the order in which they are made
here, and pools run at the same time. A call that is given a future waits for it in the worker, not
here, so calls overlap if the placement allows it. Nothing here asks for the placement. `plan` runs
this code on paper, so it imports neither torch nor ray.

A step has two phases: the first generates and scores responses, the second learns from them.
`rolepool.trainer.pipeline` says when each of them runs.

Owns the interface between a step and the roles, too: `Roles`, with the methods of each role and
what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.config.model_keys import ActorConfig, CriticConfig
from rolepool.models.micro_batches import rank_order
from rolepool.placement.built_in_roles import UPDATE_WEIGHTS
from rolepool.placement.roles import Role, trained_roles
from rolepool.seeds import derive_seed
from rolepool.trainer.recorder import CallRecorder, RecordedRole, by_operation, with_own_names

if TYPE_CHECKING:
    from rolepool.cluster import WorkerGroup
    from rolepool.protocol import CallFuture, DataProto, DataProtoFuture
    from rolepool.roles.rollout import Purpose
    from rolepool.trainer.advantages import Estimated, Estimator

    Batch = DataProto | DataProtoFuture

FirstResult = TypeVar("FirstResult")
"""What the first phase of a step hands to the second."""


@dataclass(frozen=True)
class Step(Generic[FirstResult]):
    """The two phases of a step. Between them, what the first one returns waits in the queue of the
    pipeline. Both return when their last call is queued, not when it has ended."""

    generate: Callable[[Config, Roles, DataProto, int], FirstResult]
    """Gets the config, the roles, the prompts and the number of the step."""
    learn: Callable[[Config, Roles, Estimator, FirstResult], StepCalls]
    """Gets the config, the roles, the estimator of advantages and what `generate` has returned."""
    has_two_phases: bool = True
    """False if the second phase makes all calls."""

    def __call__(
        self, config: Config, roles: Roles, estimator: Estimator, prompts: DataProto, number: int
    ) -> StepCalls:
        """Both phases, one after the other."""
        generated = self.generate(config, roles, prompts, number)
        return self.learn(config, roles, estimator, generated)


@dataclass(frozen=True)
class Generated:
    """The calls of the first phase. They may still run."""

    number: int
    prompts: DataProto
    rollouts: DataProtoFuture
    scores: DataProtoFuture
    baselines: DataProtoFuture | None = None
    """The score of the greedy response to each prompt, if the algorithm needs it."""
    calls: Mapping[str, Sequence[CallFuture]] = field(default_factory=dict)
    """Calls that the step names itself. All others have the names of the table of roles."""


@dataclass(frozen=True)
class StepCalls:
    """A step's calls by operation, and what was estimated between them."""

    number: int
    calls: Mapping[str, Sequence[CallFuture]]
    estimated: Estimated
    scored: DataProtoFuture
    """`entropy_sums` of the policy that generated, if the actor computed its old log-probs;
    `rollout_log_probs` and `old_log_probs` if they are compared."""
    generation: DataProtoFuture
    """The responses."""

    @property
    def last_number(self) -> int:
        """The number of the call that was queued last."""
        return max(number for number, _, _ in self._numbered())

    def first_after(self, number: int) -> tuple[str, CallFuture]:
        """The operation and the call that was queued first after the call with this number. If
        that is the last call of the step before, this step began with it."""
        later = [noted for noted in self._numbered() if noted[0] > number]
        _, operation, future = min(later, key=lambda noted: noted[0])
        return operation, future

    def _numbered(self) -> Iterator[tuple[int, str, CallFuture]]:
        """Each call with its number and its operation. Numbers grow in the order in which calls
        are queued."""
        for operation, futures in self.calls.items():
            for future in futures:
                yield min(call.number for call in future.calls), operation, future


# The first phase


def generate(config: Config, roles: Roles, prompts: DataProto, number: int) -> Generated:
    """Generate a response to each prompt, and score it."""
    rollouts = roles.rollout.generate_sequences(prompts)
    scores = roles.reward.compute_scores(rollouts.union(prompts))
    return Generated(number, prompts, rollouts, scores)


def generate_with_baselines(
    config: Config, roles: Roles, prompts: DataProto, number: int
) -> Generated:
    """The first phase of ReMax, whose baseline is the score of the greedy response to each
    prompt."""
    rollouts = roles.rollout.generate_sequences(prompts)
    scores = roles.reward.compute_scores(rollouts.union(prompts))
    # The samples of a prompt are next to each other.
    num_samples = config.actor_rollout_ref.rollout.n
    once = prompts[::num_samples]
    with roles.calls_named("baseline"):
        greedy = roles.rollout.generate_sequences(once, purpose="baseline")
        baselines = roles.reward.compute_scores(greedy.union(once))
    return Generated(number, prompts, rollouts, scores, baselines)


# The second phase


def learn_from(
    config: Config, roles: Roles, estimator: Estimator, generated: Generated
) -> StepCalls:
    """Estimate advantages and update. All algorithms share this phase."""
    number = generated.number
    rollouts = generated.rollouts
    values = roles.critic.compute_values(rollouts) if roles.critic else None
    old = old_log_probs(config, roles, rollouts)
    ref = roles.ref.compute_ref_log_prob(rollouts) if roles.ref else None

    compared: list[DataProtoFuture | None] = []
    if config.algorithm.use_kl_in_reward:
        compared = [old, ref]
    elif config.algorithm.rollout_correction.corrects_before_update:
        compared = [old]
    # The driver waits here.
    estimated = estimator.estimate(
        generated.prompts,
        rollouts,
        generated.scores,
        generated.baselines,
        values,
        *compared,
    )
    batch = rollouts.union(estimated.batch)
    lengths = estimated.lengths

    if roles.critic and values is not None:
        of_critic = batch.union(values)
        num_ranks = roles.critic.dp_size
        orders = update_orders(config, config.critic, lengths, num_ranks, number)
        for order, is_last in orders:
            roles.critic.update_critic(of_critic.reorder(order), ends_step=is_last)

    if number > config.trainer.critic_warmup:
        keys = config.actor_rollout_ref.actor
        of_actor = batch.union(old)
        if ref is not None and keys.use_kl_loss:
            of_actor = of_actor.union(ref)
        num_ranks = roles.actor.dp_size
        orders = update_orders(config, keys, lengths, num_ranks, number)
        for order, is_last in orders:
            roles.actor.update_actor(of_actor.reorder(order), ends_step=is_last)
        roles.sync_weights(number)

    columns: list[str] = []
    if not config.bypasses_old_log_prob:
        columns.append("entropy_sums")
        if config.actor_rollout_ref.rollout.calculate_log_probs:
            columns += ["rollout_log_probs", "old_log_probs"]
    noted = with_own_names(roles.recorder.take(), generated.calls)
    return StepCalls(
        number,
        calls=by_operation(noted),
        estimated=estimated,
        scored=rollouts.union(old).select(columns),
        generation=rollouts,
    )


def old_log_probs(config: Config, roles: Roles, rollouts: DataProtoFuture) -> DataProtoFuture:
    """Log-probs under the policy that generated: those of the actor, or those that the engine has
    returned with the responses."""
    if config.bypasses_old_log_prob:
        return rollouts.select(["old_log_probs"])
    return roles.actor.compute_log_prob(rollouts)


ppo_step = Step(generate, learn_from)
remax_step = Step(generate_with_baselines, learn_from)


# Steps that a user writes as one function


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
    """The part of a step after scoring, with which a step of your own ends. `calls` are calls that
    were made before it and that do not have the names of the table of roles, by their names."""
    generated = Generated(number, prompts, rollouts, scores, baselines, calls or {})
    return learn_from(config, roles, estimator, generated)


def in_one_function(
    function: Callable[[Config, Roles, Estimator, DataProto, int], StepCalls],
) -> Step[tuple[DataProto, int]]:
    """A step whose calls are all made by one function. It cannot be divided, so its first phase
    makes no call, and the second makes all of them."""

    def keep(
        config: Config, roles: Roles, prompts: DataProto, number: int
    ) -> tuple[DataProto, int]:
        return prompts, number

    def make_all_calls(
        config: Config, roles: Roles, estimator: Estimator, kept: tuple[DataProto, int]
    ) -> StepCalls:
        return function(config, roles, estimator, *kept)

    return Step(keep, make_all_calls, has_two_phases=False)


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
    rows_per_mini_batch = config.rows_of_mini_batch(keys)
    last_epoch = keys.ppo_epochs - 1
    for epoch in range(keys.ppo_epochs):
        rows = np.arange(len(lengths))
        if keys.shuffle:
            seed = derive_seed(config.trainer.seed, "shuffle", step, epoch)
            generator = np.random.default_rng(seed)
            rows = generator.permutation(rows)
        in_order = [lengths[int(row)] for row in rows]
        order = rank_order(
            in_order,
            rows_per_mini_batch,
            num_ranks,
            balance=config.trainer.balance_batch,
        )
        yield rows[order], epoch == last_epoch


# The calls of each role, with their types. The worker classes in `rolepool.roles` implement them.


class RolloutCalls(Protocol):
    def generate_sequences(self, prompts: Batch, purpose: Purpose = "train") -> DataProtoFuture:
        """A response to each prompt."""


class WeightCalls(Protocol):
    """How the actor's weights get to the rollout."""

    @property
    def needs_send(self) -> bool:
        """Whether the rollout keeps its weights until the next `send`, whatever the actor does."""

    def send(self, version: int) -> list[CallFuture]:
        """Queue the transfer of the actor's weights to the rollout. Later responses carry this
        version."""

    def check(self) -> None:
        """Wait for the last transfer, and raise an error if the rollout has other weights than
        those that were sent."""


class CheckedRollout:
    """The rollout. It generates only with weights that were compared with the actor's."""

    def __init__(self, rollout: RolloutCalls, weights: WeightCalls) -> None:
        self._rollout = rollout
        self._weights = weights

    def generate_sequences(self, prompts: Batch, purpose: Purpose = "train") -> DataProtoFuture:
        self._weights.check()
        return self._rollout.generate_sequences(prompts, purpose=purpose)

    def __getattr__(self, name: str) -> Any:
        """What else a step of the user calls, such as a method of a worker class of its own."""
        return getattr(self._rollout, name)


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

    def take_snapshot(
        self,
        folder: Sequence[str],
        number: Sequence[int],
        next_folder: Sequence[str | None],
    ) -> CallFuture:
        """Copy the state to shared memory. Here, too, there is a folder for each rank, and one in
        which the memory of the next snapshot is allocated."""


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

    def __init__(self, calls: Mapping[str, Any], weights: WeightCalls) -> None:
        """`calls` has a proxy for each role of the run. Its methods are those of the role's class,
        which mypy cannot see; here they get their types."""
        self._weights = weights
        self.recorder = CallRecorder()
        """Notes the calls of a step."""
        self.before_new_weights: Callable[[], None] | None = None
        """Queues what must still be generated with the weights that the rollout has."""
        recorded: dict[str, Any] = {}
        for name, proxy in calls.items():
            recorded[name] = RecordedRole(self.recorder, Role(name), proxy)

        self.by_name: Mapping[str, Any] = recorded
        """All roles of the run by name, also those that were added with `register_role`."""
        self.actor: ActorCalls = recorded[Role.Actor]
        self.rollout: RolloutCalls = CheckedRollout(recorded[Role.Rollout], weights)
        self.reward: RewardCalls = recorded[Role.RewardModel]
        self.critic: CriticCalls | None = recorded.get(Role.Critic)
        self.ref: ReferenceCalls | None = recorded.get(Role.RefPolicy)

        self.trained: dict[str, TrainedCalls] = {}
        """The roles whose models are saved. Their calls belong to no step."""
        for role in trained_roles():
            if role in calls:
                self.trained[role] = calls[role]

    @property
    def can_generate_behind_updates(self) -> bool:
        """Whether a generation that is queued behind updates of the actor still uses the weights
        before these updates."""
        return self._weights.needs_send

    def sync_weights(self, version: int) -> list[CallFuture]:
        """Queue the transfer of the actor's weights to the rollout."""
        if self.before_new_weights is not None:
            self.before_new_weights()
        calls = self._weights.send(version)
        for call in calls:
            self.recorder.note(UPDATE_WEIGHTS, call)
        return calls

    def calls_named(self, operation: str) -> AbstractContextManager[None]:
        """Calls that are made inside of this context belong to this operation, whatever the table
        of roles says."""
        return self.recorder.named(operation)
