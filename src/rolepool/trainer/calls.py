"""The calls that a step makes, with their types: what each role can be asked, and what comes back.

Owns the interface between a step and the roles. The worker classes in `rolepool.roles` implement it, through the
proxies of a cluster or, for `plan`, on paper. Imports neither torch nor ray when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rolepool.placement.roles import trained_roles

if TYPE_CHECKING:
    from rolepool.cluster import WorkerGroup
    from rolepool.protocol import CallFuture, DataProto, DataProtoFuture

    Batch = DataProto | DataProtoFuture

Purpose = Literal["train", "validate", "baseline"]
"""What responses are for: training samples, validation (`val_kwargs`), or the greedy baseline of ReMax."""


class RolloutCalls(Protocol):
    def generate_sequences(self, prompts: Batch, purpose: Purpose = "train") -> DataProtoFuture:
        """A response to each prompt."""


class RewardCalls(Protocol):
    def compute_scores(self, data: Batch) -> DataProtoFuture:
        """The score of each response."""


class ReferenceCalls(Protocol):
    def compute_ref_log_prob(self, data: Batch) -> DataProtoFuture:
        """Log-probs of response tokens under the first weights."""


class TrainedCalls(Protocol):
    @property
    def group(self) -> WorkerGroup:
        """The processes that the role lives in."""

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


@dataclass(frozen=True)
class Roles:
    """The roles of a run. A role that the run does not need is None. Every call returns a future."""

    actor: ActorCalls
    rollout: RolloutCalls
    reward: RewardCalls
    critic: CriticCalls | None
    ref: ReferenceCalls | None
    sync_weights: Callable[[int], list[CallFuture]]
    """Queue handing the actor's weights to the rollout; what is generated afterwards carries this version."""

    @property
    def trained(self) -> dict[str, TrainedCalls]:
        """The roles whose models are saved."""
        calls = {str(role): getattr(self, role) for role in trained_roles()}
        return {role: one for role, one in calls.items() if one is not None}
