"""The roles: models with a job.

Owns their names. What they do is in `rolepool.roles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


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


def single_roles(mapping: Mapping[Role, str]) -> tuple[dict[Role, str], list[str]]:
    """The mapping with `actor_rollout` taken apart, in the order of `Role`; and a line for each role placed twice."""
    placed: dict[Role, list[tuple[Role, str]]] = {}
    for written, pool in mapping.items():
        for role in Role(written).parts:
            placed.setdefault(role, []).append((Role(written), pool))
    twice = [
        f"role {role} is placed twice: "
        + " and ".join(f"placement.roles.{written}={pool}" for written, pool in places)
        + "; set one of them only"
        for role, places in placed.items()
        if len(places) > 1
    ]
    return {role: placed[role][0][1] for role in Role if role in placed}, twice
