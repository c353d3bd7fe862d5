"""The roles: models with a job.

Owns their names, and finding the pool of one. What they do is in `rolepool.roles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rolepool.errors import PlacementError


class Role(StrEnum):
    """A model with a job. `ActorRollout` is short for actor and rollout in one place."""

    Actor = "actor"
    Rollout = "rollout"
    RefPolicy = "ref"
    Critic = "critic"
    RewardModel = "reward_model"
    ActorRollout = "actor_rollout"

    @property
    def parts(self) -> tuple[Role, ...]:
        """The single roles this name stands for."""
        return (Role.Actor, Role.Rollout) if self is Role.ActorRollout else (self,)


def home_of(role: Role, roles: Mapping[Role, str]) -> str:
    """The name of a role's pool; of `actor_rollout`, where both parts live together."""
    names = {roles.get(part) for part in Role(role).parts}
    name = names.pop()
    if names or name is None:
        raise PlacementError(f"role {Role(role)} has no pool of its own; placed are {', '.join(roles)}")
    return name
