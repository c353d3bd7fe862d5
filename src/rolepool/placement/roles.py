"""The roles: models with a job.

Owns their names, the table of what each role is (its model, its operations and the keys that bound them), and finding
the pool of a role. The classes that do the work are in `rolepool.roles`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rolepool.config import Config
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
    """Something that happens once in a step (or around it), under one name in timings, spans, plots and legends."""

    name: str
    color: str
    method: str = ""
    """The method of the role's worker class that does it; empty for work of the driver."""
    micro_batch: MicroBatchKeys | None = None
    """None if the operation does not run in micro-batches."""
    trains: bool = False
    is_per_token: bool = False
    """Whether its time is also reported per token."""


@dataclass(frozen=True)
class RoleSpec:
    """What a role is, as far as no process is needed to say it."""

    section: str
    """The keys of its own work, such as the mini-batch size of a role that is trained."""
    model: str
    """The section that names its model."""
    operations: tuple[Operation, ...]
    why_unused: Callable[[Config], str | None] = lambda config: None
    """Why a run with this config does not need the role; None if it does."""
    fsdp: str | None = None
    """The section that says what is sharded and offloaded."""
    tensor_parallel: str | None = None
    """The key for the number of ranks that hold one copy of the model together; None if there is one rank per copy."""
    max_length: str | None = None
    """The key for the largest number of tokens that the role reads of a row; None if it reads all."""
    memory_key: str = ""
    """The key that decides most about the memory of a role without micro-batches."""
    has_scalar_head: bool = False
    can_pack: bool = True
    """Whether `use_remove_padding` of its model is in force."""

    @property
    def is_trained(self) -> bool:
        return any(operation.trains for operation in self.operations)

    @property
    def batched(self) -> list[tuple[Operation, MicroBatchKeys]]:
        """The operations that run in micro-batches, with their keys."""
        return [(operation, operation.micro_batch) for operation in self.operations if operation.micro_batch]


_ACTOR, _REF, _POLICY = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"


def _needs_no_reference(config: Config) -> str | None:
    return None if config.uses_reference else "no KL term is used (actor.use_kl_loss, algorithm.use_kl_in_reward)"


def _needs_no_critic(config: Config) -> str | None:
    return None if config.uses_critic else f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic"


def _needs_no_reward_model(config: Config) -> str | None:
    return None if config.reward_model.enable else "the reward is a rule (reward_model.enable=false)"


ROLE_SPECS: dict[Role, RoleSpec] = {
    Role.Actor: RoleSpec(
        section=_ACTOR,
        model=_POLICY,
        fsdp=f"{_ACTOR}.fsdp_config",
        operations=(
            Operation(
                "old_log_prob",
                color="#56B4E9",
                method="compute_log_prob",
                micro_batch=MicroBatchKeys(
                    rows=f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
                    tokens=f"{_ACTOR}.ppo_max_token_len_per_gpu",
                    by_tokens=f"{_ACTOR}.use_dynamic_bsz",
                ),
            ),
            Operation(
                "update_actor",
                color="#0072B2",
                method="update_actor",
                micro_batch=MicroBatchKeys(
                    rows=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
                    tokens=f"{_ACTOR}.ppo_max_token_len_per_gpu",
                    by_tokens=f"{_ACTOR}.use_dynamic_bsz",
                ),
                trains=True,
                is_per_token=True,
            ),
        ),
    ),
    Role.Rollout: RoleSpec(
        section=_ROLLOUT,
        model=_POLICY,
        tensor_parallel=f"{_ROLLOUT}.tensor_model_parallel_size",
        memory_key=f"{_ROLLOUT}.gpu_memory_utilization",
        operations=(
            Operation("gen", color="#009E73", method="generate_sequences", is_per_token=True),
            Operation("baseline", color="#80CEB9", method="generate_sequences"),
            Operation("update_weights", color="#8C8C8C", method="take_weights"),
        ),
    ),
    Role.RefPolicy: RoleSpec(
        section=_REF,
        model=_POLICY,
        why_unused=_needs_no_reference,
        fsdp=f"{_REF}.fsdp_config",
        operations=(
            Operation(
                "ref",
                color="#CC79A7",
                method="compute_ref_log_prob",
                micro_batch=MicroBatchKeys(
                    rows=f"{_REF}.log_prob_micro_batch_size_per_gpu",
                    tokens=f"{_REF}.log_prob_max_token_len_per_gpu",
                    by_tokens=f"{_REF}.log_prob_use_dynamic_bsz",
                ),
                is_per_token=True,
            ),
        ),
    ),
    Role.Critic: RoleSpec(
        section="critic",
        model="critic.model",
        why_unused=_needs_no_critic,
        fsdp="critic.model.fsdp_config",
        has_scalar_head=True,
        operations=(
            Operation(
                "values",
                color="#E69F00",
                method="compute_values",
                micro_batch=MicroBatchKeys(
                    rows="critic.forward_micro_batch_size_per_gpu",
                    tokens="critic.ppo_max_token_len_per_gpu",
                    by_tokens="critic.use_dynamic_bsz",
                ),
                is_per_token=True,
            ),
            Operation(
                "update_critic",
                color="#D55E00",
                method="update_critic",
                micro_batch=MicroBatchKeys(
                    rows="critic.ppo_micro_batch_size_per_gpu",
                    tokens="critic.ppo_max_token_len_per_gpu",
                    by_tokens="critic.use_dynamic_bsz",
                ),
                trains=True,
                is_per_token=True,
            ),
        ),
    ),
    Role.RewardModel: RoleSpec(
        section="reward_model",
        model="reward_model.model",
        why_unused=_needs_no_reward_model,
        max_length="reward_model.max_length",
        has_scalar_head=True,
        can_pack=False,
        operations=(
            Operation(
                "reward",
                color="#F0E442",
                method="compute_scores",
                micro_batch=MicroBatchKeys(
                    rows="reward_model.micro_batch_size_per_gpu",
                    tokens="critic.ppo_max_token_len_per_gpu",
                    by_tokens="reward_model.use_dynamic_bsz",
                ),
            ),
        ),
    ),
}

DRIVER_OPERATIONS = (
    Operation("adv", color="#595959", is_per_token=True),
    Operation("testing", color="#B3B3B3"),
    Operation("save_checkpoint", color="#D9D9D9"),
)

_STEP_ORDER = ("gen", "baseline", "reward", "values", "old_log_prob", "ref", "adv", "update_critic", "update_actor")
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in sorted(
        (*(one for spec in ROLE_SPECS.values() for one in spec.operations), *DRIVER_OPERATIONS),
        key=lambda operation: _STEP_ORDER.index(operation.name) if operation.name in _STEP_ORDER else len(_STEP_ORDER),
    )
}
"""By name, in the order of a step, which is also the order of legends. A test compares it with the step itself."""


def trained_roles() -> list[Role]:
    """The roles with weights that are updated, saved and resumed."""
    return [role for role, spec in ROLE_SPECS.items() if spec.is_trained]


def needed_roles(config: Config) -> tuple[list[Role], dict[Role, str]]:
    """The roles that a run needs, in order, and why each other role is not used."""
    unused = {role: reason for role, spec in ROLE_SPECS.items() if (reason := spec.why_unused(config)) is not None}
    return [role for role in ROLE_SPECS if role not in unused], unused


def home_of(role: Role, roles: Mapping[Role, str]) -> str:
    """The name of a role's pool; of `actor_rollout`, where both parts live together."""
    names = {roles.get(part) for part in Role(role).parts}
    name = names.pop()
    if names or name is None:
        raise PlacementError(f"role {Role(role)} has no pool of its own; placed are {', '.join(roles)}")
    return name
