"""The way that weights take from the actor to the rollout, which follows from the plan.

Owns the choice. How a way works is the business of `rolepool.weights`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum

from rolepool.config import Config
from rolepool.config.functions import ENGINES, ENGINES_WITH_A_PROCESS
from rolepool.placement.plan import Plan, Slot
from rolepool.placement.roles import Role

SEVERAL_RANKS_PER_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Set to 1, it lets several ranks of an NCCL from 2.30 on use one GPU. Others refuse."""


class WeightWay(Enum):
    """How weights travel. The values are what `plan` prints."""

    SAME_PROCESS = "inside of each process"
    PROCESS_GROUP = "through a process group"
    SHARED_MEMORY = "through shared memory"


def weight_way(
    config: Config, plan: Plan, *, on_gpus: bool, environment: Mapping[str, str] = os.environ
) -> WeightWay:
    """The way between the pools of actor and rollout. The search for placements looks at single
    pools; a role that such a plan does not have counts as one in another pool."""
    if plan.roles.get(Role.Actor) == plan.roles.get(Role.Rollout):
        return WeightWay.SAME_PROCESS
    # An engine of the user's gets a stream of whole tensors, because that is its interface.
    if config.actor_rollout_ref.rollout.engine not in ENGINES:
        return WeightWay.SHARED_MEMORY
    if on_gpus and config.actor_rollout_ref.rollout.weights == "auto":
        # Nobody has seen a rank die in a transfer through NCCL, so the user must ask for it.
        return WeightWay.SHARED_MEMORY
    if on_gpus and _share_a_gpu(plan) and environment.get(SEVERAL_RANKS_PER_GPU) != "1":
        return WeightWay.SHARED_MEMORY
    return WeightWay.PROCESS_GROUP


def sends_changes(config: Config, way: WeightWay) -> bool:
    """Whether only the values that changed travel."""
    keys = config.actor_rollout_ref.rollout
    if way is not WeightWay.PROCESS_GROUP or keys.engine in ENGINES_WITH_A_PROCESS:
        return False
    return keys.weights == "delta"


def _share_a_gpu(plan: Plan) -> bool:
    """Whether two ranks of actor and rollout have the same GPU, which NCCL refuses."""
    slots: list[Slot] = []
    for role in (Role.Actor, Role.Rollout):
        if role in plan.roles:
            slots += plan.pool_of(role).slots
    return len(set(slots)) < len(slots)
