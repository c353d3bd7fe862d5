"""How the ranks of a pool work together on one role.

Owns `ParallelDims`, and which keys set them. Everybody who needs such a number asks the dims of the
role: checks, memory estimate, planner, calls, workers and losses. Knows no processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rolepool.config import Config
from rolepool.errors import PlacementError
from rolepool.placement.roles import ROLE_SPECS, Role, RoleSpec

WHOLE_POOL = -1
"""The value of a key that means all ranks of the pool."""


@dataclass(frozen=True)
class ParallelDims:
    """How the ranks of a pool work together on one role.

    Neighbouring ranks work closest together: rank = (dp_rank * sp + sp_rank) * tp + tp_rank.
    """

    dp: int = 1
    """Data parallelism: the number of parts of a batch."""
    shard: int = 1
    """Ranks over which FSDP divides one copy of the weights."""
    sp: int = 1
    """Ranks that divide the tokens of the same rows. Nothing sets it yet."""
    tp: int = 1
    """Ranks that divide the weights of every layer, and compute the same rows together."""

    @classmethod
    def over(cls, num_ranks: int, *, shard: int = WHOLE_POOL, tp: int = 1) -> Self:
        """The dims of `num_ranks` ranks. Raises PlacementError if they cannot be divided so."""
        num_shards = num_ranks if shard == WHOLE_POOL else shard
        for name, size in (("tensor_parallel", tp), ("shard", num_shards)):
            if size < 1 or num_ranks % size:
                raise PlacementError(f"{name}={size} must divide {num_ranks} processes")
        return cls(dp=num_ranks // tp, shard=num_shards, tp=tp)

    @property
    def world_size(self) -> int:
        return self.dp * self.sp * self.tp

    @property
    def ranks_per_part(self) -> int:
        """Neighbouring ranks that compute the same rows. The first of them returns the result."""
        return self.sp * self.tp

    @property
    def num_replicas(self) -> int:
        """Copies of the weights that FSDP keeps equal."""
        return self.world_size // self.shard

    def dp_rank(self, rank: int) -> int:
        """The number of the part that a rank computes."""
        return rank // self.ranks_per_part

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def returns_result(self, rank: int) -> bool:
        """Whether a rank is the first of those that compute the same rows."""
        return rank % self.ranks_per_part == 0


def shard_key(spec: RoleSpec) -> str | None:
    """The key for the number of shards; None if a role has no such key."""
    if spec.fsdp is not None and spec.is_trained:
        return f"{spec.fsdp}.fsdp_size"
    return None


def dims_of(config: Config, role: Role, num_ranks: int) -> ParallelDims:
    """The dims of a role in a pool of `num_ranks` ranks, as the keys say.

    If a size does not divide the ranks, `checks` refuses the plan. Until then it is used as it is
    written, so that other checks can be made, too.
    """
    spec = ROLE_SPECS[role]
    tp: int = 1
    if spec.tensor_parallel is not None:
        tp = config.at(spec.tensor_parallel)
    dp = max(1, num_ranks // tp)
    if spec.tensor_parallel is not None and not spec.batched:
        # An engine has its own model, which FSDP does not shard.
        return ParallelDims(dp=dp, tp=tp)
    key = shard_key(spec)
    num_shards: int = WHOLE_POOL
    if key is not None:
        num_shards = config.at(key)
    if num_shards == WHOLE_POOL:
        num_shards = num_ranks
    return ParallelDims(dp=dp, shard=num_shards, tp=tp)
