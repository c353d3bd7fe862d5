"""Which operations of a PPO step can run at the same time under a placement.

Owns the step's data dependencies as a table. Two operations overlap when neither needs the other's result and they run
in different pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from rolepool.placement.roles import Role

CPU = "cpu"
"""Where a rule reward runs: beside all pools."""

SCORING = ("reward", "values", "old_log_prob", "ref")
"""All need the rollouts and nothing of each other."""

AFTER_CRITIC_UPDATE = ("update_actor", "update_weights", "next_gen")
"""What the critic's update need not be waited for: nothing needs it until the next step's values."""


def places_of_operations(roles: Mapping[Role, str]) -> dict[str, frozenset[str]]:
    """The pools each operation keeps busy, for the operations that this set of roles has."""
    actor, rollout = roles.get(Role.Actor), roles.get(Role.Rollout)
    places: dict[str, set[str | None]] = {
        "gen": {rollout},
        "reward": {roles.get(Role.RewardModel, CPU)},
        "values": {roles.get(Role.Critic)},
        "old_log_prob": {actor},
        "ref": {roles.get(Role.RefPolicy)},
        "update_critic": {roles.get(Role.Critic)},
        "update_actor": {actor},
        "update_weights": {actor, rollout},
        "next_gen": {rollout},
    }
    return {
        operation: frozenset(pool for pool in pools if pool is not None)
        for operation, pools in places.items()
        if None not in pools
    }


def overlapping_operations(roles: Mapping[Role, str]) -> tuple[tuple[str, str], ...]:
    """All pairs of operations that may run at the same time."""
    places = places_of_operations(roles)
    candidates = [*combinations(SCORING, 2), *(("update_critic", operation) for operation in AFTER_CRITIC_UPDATE)]
    return tuple(
        (one, other)
        for one, other in candidates
        if one in places and other in places and places[one].isdisjoint(places[other])
    )
