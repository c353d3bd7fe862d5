"""The calls that a step makes, with their types: the methods of each role, and what they return.

Owns the interface between a step and the roles. The worker classes in `rolepool.roles` implement it. A step calls them
through the proxies of a cluster or, for `plan`, on paper. Imports neither torch nor ray when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rolepool.placement.roles import Role, trained_roles

if TYPE_CHECKING:
    from rolepool.cluster import WorkerGroup
    from rolepool.protocol import CallFuture, DataProto, DataProtoFuture
    from rolepool.roles.rollout import Purpose

    Batch = DataProto | DataProtoFuture


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
    @property
    def group(self) -> WorkerGroup:
        """The processes of the role's pool."""

    @property
    def dp_size(self) -> int:
        """The number of parts that a batch is split into."""

    def save_checkpoint(self, folder: str) -> CallFuture: ...

    def load_checkpoint(self, folder: str) -> CallFuture: ...


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
    """The roles of a run. A built-in role that the run does not use is None. Every call returns a future."""

    def __init__(self, calls: Mapping[str, Any], sync_weights: Callable[[int], list[CallFuture]]) -> None:
        """`calls` has a proxy for each role of the run. Its methods are those of the role's class, which mypy cannot
        see; here they get their types."""
        self.by_name: Mapping[str, Any] = calls
        """All roles of the run by name, also those that were added with `register_role`."""
        self.actor: ActorCalls = calls[Role.Actor]
        self.rollout: RolloutCalls = calls[Role.Rollout]
        self.reward: RewardCalls = calls[Role.RewardModel]
        self.critic: CriticCalls | None = calls.get(Role.Critic)
        self.ref: ReferenceCalls | None = calls.get(Role.RefPolicy)
        self.trained: dict[str, TrainedCalls] = {role: calls[role] for role in trained_roles() if role in calls}
        """The roles whose models are saved."""
        self.sync_weights = sync_weights
        """Queues the transfer of the actor's weights to the rollout. Later responses carry this version."""
