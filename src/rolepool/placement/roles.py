"""The roles: models with a job.

Owns their names, the table of what each role is (its model, its operations and the keys that bound them), and finding
the pool of a role. The classes that do the work are in `rolepool.roles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class MicroBatchKeys:
    """The keys that bound one micro-batch of an operation."""

    rows: str
    """A number of sequences, or null."""
    tokens: str
    """A number of tokens, in force if `by_tokens` is true."""
    by_tokens: str


@dataclass(frozen=True)
class Operation:
    """Something that a role does in a step with every row."""

    name: str
    """In timings, spans and legends."""
    method: str
    """Of the role's worker class."""
    micro_batch: MicroBatchKeys
    trains: bool = False


@dataclass(frozen=True)
class RoleSpec:
    """What a role is, as far as no process is needed to say it."""

    model: str
    """The section that names its model."""
    operations: tuple[Operation, ...] = ()
    keys: str = ""
    """The section with the mini-batch size of a role that is trained."""
    fsdp: str | None = None
    """The section that says what is sharded and offloaded."""
    has_scalar_head: bool = False
    can_pack: bool = True
    """Whether `use_remove_padding` of its model is in force."""

    @property
    def is_trained(self) -> bool:
        return any(operation.trains for operation in self.operations)


_ACTOR, _REF, _POLICY = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"

ROLE_SPECS: dict[Role, RoleSpec] = {
    Role.Actor: RoleSpec(
        model=_POLICY,
        keys=_ACTOR,
        fsdp=f"{_ACTOR}.fsdp_config",
        operations=(
            Operation(
                "old_log_prob",
                "compute_log_prob",
                MicroBatchKeys(
                    rows="actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
                    tokens=f"{_ACTOR}.ppo_max_token_len_per_gpu",
                    by_tokens=f"{_ACTOR}.use_dynamic_bsz",
                ),
            ),
            Operation(
                "update_actor",
                "update_actor",
                MicroBatchKeys(
                    rows=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
                    tokens=f"{_ACTOR}.ppo_max_token_len_per_gpu",
                    by_tokens=f"{_ACTOR}.use_dynamic_bsz",
                ),
                trains=True,
            ),
        ),
    ),
    Role.Rollout: RoleSpec(model=_POLICY),
    Role.RefPolicy: RoleSpec(
        model=_POLICY,
        fsdp=f"{_REF}.fsdp_config",
        operations=(
            Operation(
                "ref",
                "compute_ref_log_prob",
                MicroBatchKeys(
                    rows=f"{_REF}.log_prob_micro_batch_size_per_gpu",
                    tokens=f"{_REF}.log_prob_max_token_len_per_gpu",
                    by_tokens=f"{_REF}.log_prob_use_dynamic_bsz",
                ),
            ),
        ),
    ),
    Role.Critic: RoleSpec(
        model="critic.model",
        keys="critic",
        fsdp="critic.model.fsdp_config",
        has_scalar_head=True,
        operations=(
            Operation(
                "values",
                "compute_values",
                MicroBatchKeys(
                    rows="critic.forward_micro_batch_size_per_gpu",
                    tokens="critic.ppo_max_token_len_per_gpu",
                    by_tokens="critic.use_dynamic_bsz",
                ),
            ),
            Operation(
                "update_critic",
                "update_critic",
                MicroBatchKeys(
                    rows="critic.ppo_micro_batch_size_per_gpu",
                    tokens="critic.ppo_max_token_len_per_gpu",
                    by_tokens="critic.use_dynamic_bsz",
                ),
                trains=True,
            ),
        ),
    ),
    Role.RewardModel: RoleSpec(
        model="reward_model.model",
        has_scalar_head=True,
        can_pack=False,
        operations=(
            Operation(
                "reward",
                "compute_scores",
                MicroBatchKeys(
                    rows="reward_model.micro_batch_size_per_gpu",
                    tokens="critic.ppo_max_token_len_per_gpu",
                    by_tokens="reward_model.use_dynamic_bsz",
                ),
            ),
        ),
    ),
}


def home_of(role: Role, roles: Mapping[Role, str]) -> str:
    """The name of a role's pool; of `actor_rollout`, where both parts live together."""
    names = {roles.get(part) for part in Role(role).parts}
    name = names.pop()
    if names or name is None:
        raise PlacementError(f"role {Role(role)} has no pool of its own; placed are {', '.join(roles)}")
    return name
