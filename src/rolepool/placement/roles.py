"""The roles: models with a job.

Owns their names, the table of what each role is (its class, its model, its operations and the keys that limit them),
and finding the pool of a role. `register_role` adds a role of your own (docs/extending.md). The built-in classes are in
`rolepool.roles`; this module imports none of them, so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic_core import CoreSchema, core_schema

from rolepool.config import Config
from rolepool.config.base import Section
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.config.schema import add_role_keys
from rolepool.errors import ConfigError, PlacementError


class Role(str):
    """The name of a role. The attributes are verl's names.

    `ActorRollout` and `ActorRolloutRef` mean several roles in one pool. `Env` and `TeacherModel` are not built in: they
    can be used after `register_role` has added roles with these names.
    """

    __slots__ = ()

    Actor: ClassVar[Role]
    Rollout: ClassVar[Role]
    RefPolicy: ClassVar[Role]
    Critic: ClassVar[Role]
    RewardModel: ClassVar[Role]
    ActorRollout: ClassVar[Role]
    ActorRolloutRef: ClassVar[Role]
    Env: ClassVar[Role]
    TeacherModel: ClassVar[Role]

    @property
    def parts(self) -> tuple[Role, ...]:
        """The single roles that this name stands for."""
        return COMBINED_ROLES.get(self, (self,))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


Role.Actor, Role.Rollout, Role.RefPolicy = Role("actor"), Role("rollout"), Role("ref")
Role.Critic, Role.RewardModel, Role.ActorRollout = Role("critic"), Role("reward_model"), Role("actor_rollout")
Role.ActorRolloutRef, Role.Env, Role.TeacherModel = Role("actor_rollout_ref"), Role("env"), Role("teacher")

COMBINED_ROLES: dict[Role, tuple[Role, ...]] = {
    Role.ActorRollout: (Role.Actor, Role.Rollout),
    Role.ActorRolloutRef: (Role.Actor, Role.Rollout, Role.RefPolicy),
}
"""Names for several roles in one pool."""


@dataclass(frozen=True)
class MicroBatchKeys:
    """The keys that limit one micro-batch of an operation."""

    rows: str
    """A number of sequences, or null."""
    tokens: str
    """A number of tokens, used if `by_tokens` is true."""
    by_tokens: str


WEIGHT_SYNC = ("take_weights_here", "export_weights", "end_of_weights")
"""Methods of the rollout and the actor that send the actor's weights, besides `take_weights`."""


@dataclass(frozen=True)
class Operation:
    """A kind of work in a step (or around it), under one name in timings, spans, plots and legends."""

    name: str
    method: str = ""
    """The method of the role's worker class that does it; empty for work of the driver."""
    other_methods: tuple[str, ...] = field(default=(), kw_only=True)
    """Further methods that belong to it, also of other roles."""
    color: str = ""
    """The colour in plots; an operation without one gets the next free colour."""
    micro_batch: MicroBatchKeys | None = None
    """None if the operation does not run in micro-batches."""
    trains: bool = False
    is_per_token: bool = False
    """Whether its time is also reported per token."""
    generates: bool = False
    """Whether that is per response token, because it generates them; otherwise per token of prompt and response."""


@dataclass(frozen=True)
class RoleSpec:
    """What a role is, as far as it can be said without starting a process."""

    name: str
    worker: str
    """Its worker class as `module:Class`. It is imported when roles are built, and called with a `Config` and a
    `rolepool.roles.model_role.Setup`."""
    section: str
    """The section with the keys of its own work, such as the mini-batch size of a role that is trained."""
    model: str
    """The section that names its model, in the key `path`."""
    operations: tuple[Operation, ...]
    settings: type[Section] = Section
    """The keys of an added role, which become `roles.NAME.*`; the empty `Section` if it has none."""
    why_unused: Callable[[Config], str | None] = lambda config: None
    """Why a run with this config does not need the role; None if it needs it."""
    rule_worker: str | None = None
    """The class that does the role's first operation on CPU processes if the role is not used; None if nobody does."""
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
    """Whether `use_remove_padding` of its model is used."""
    checkpoints_to_keep: str | None = None
    """The key for the number of newest checkpoints to keep; None keeps all."""

    @property
    def is_trained(self) -> bool:
        return any(operation.trains for operation in self.operations)

    @property
    def batched(self) -> list[tuple[Operation, MicroBatchKeys]]:
        """The operations that run in micro-batches, with their keys."""
        return [(operation, operation.micro_batch) for operation in self.operations if operation.micro_batch]


def _needs_no_reference(config: Config) -> str | None:
    return None if config.uses_reference else "no KL term is used (actor.use_kl_loss, algorithm.use_kl_in_reward)"


def _needs_no_critic(config: Config) -> str | None:
    return None if config.uses_critic else f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic"


def _needs_no_reward_model(config: Config) -> str | None:
    return None if config.reward_model.enable else "the reward is a rule (reward_model.enable=false)"


_ACTOR, _REF, _POLICY = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR_TOKENS = (f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ACTOR}.use_dynamic_bsz")
_LOG_PROB_TOKENS = (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", f"{_ROLLOUT}.log_prob_use_dynamic_bsz")
_CRITIC_TOKENS = ("critic.ppo_max_token_len_per_gpu", "critic.use_dynamic_bsz")
_VALUES_TOKENS = ("critic.forward_max_token_len_per_gpu", "critic.use_dynamic_bsz")
_REF_TOKENS = (f"{_REF}.log_prob_max_token_len_per_gpu", f"{_REF}.log_prob_use_dynamic_bsz")
_REWARD_TOKENS = ("reward_model.forward_max_token_len_per_gpu", "reward_model.use_dynamic_bsz")

_OLD_LOG_PROB_BATCH = MicroBatchKeys(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", *_LOG_PROB_TOKENS)
_ACTOR_BATCH = MicroBatchKeys(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", *_ACTOR_TOKENS)
_REF_BATCH = MicroBatchKeys(f"{_REF}.log_prob_micro_batch_size_per_gpu", *_REF_TOKENS)
_VALUES_BATCH = MicroBatchKeys("critic.forward_micro_batch_size_per_gpu", *_VALUES_TOKENS)
_CRITIC_BATCH = MicroBatchKeys("critic.ppo_micro_batch_size_per_gpu", *_CRITIC_TOKENS)
_REWARD_BATCH = MicroBatchKeys("reward_model.micro_batch_size_per_gpu", *_REWARD_TOKENS)

_SPECS = (
    RoleSpec(
        name=Role.Actor,
        worker="rolepool.roles.actor_critic:Actor",
        section=_ACTOR,
        model=_POLICY,
        fsdp=f"{_ACTOR}.fsdp_config",
        checkpoints_to_keep="trainer.max_actor_ckpt_to_keep",
        operations=(
            Operation("old_log_prob", "compute_log_prob", "#56B4E9", _OLD_LOG_PROB_BATCH),
            Operation("update_actor", "update_actor", "#0072B2", _ACTOR_BATCH, trains=True, is_per_token=True),
        ),
    ),
    # After the actor, because it shares the actor's weights if both are in one process.
    RoleSpec(
        name=Role.Rollout,
        worker="rolepool.roles.rollout:Rollout",
        section=_ROLLOUT,
        model=_POLICY,
        tensor_parallel=f"{_ROLLOUT}.tensor_model_parallel_size",
        memory_key=f"{_ROLLOUT}.gpu_memory_utilization",
        operations=(
            Operation("gen", "generate_sequences", "#009E73", is_per_token=True, generates=True),
            Operation("baseline", "generate_sequences", "#80CEB9"),
            Operation("update_weights", "take_weights", "#8C8C8C", other_methods=WEIGHT_SYNC),
        ),
    ),
    RoleSpec(
        name=Role.RefPolicy,
        worker="rolepool.roles.actor_critic:Reference",
        section=_REF,
        model=_POLICY,
        why_unused=_needs_no_reference,
        fsdp=f"{_REF}.fsdp_config",
        operations=(Operation("ref", "compute_ref_log_prob", "#CC79A7", _REF_BATCH, is_per_token=True),),
    ),
    RoleSpec(
        name=Role.Critic,
        worker="rolepool.roles.actor_critic:Critic",
        section="critic",
        model="critic.model",
        why_unused=_needs_no_critic,
        fsdp="critic.model.fsdp_config",
        has_scalar_head=True,
        checkpoints_to_keep="trainer.max_critic_ckpt_to_keep",
        operations=(
            Operation("values", "compute_values", "#E69F00", _VALUES_BATCH, is_per_token=True),
            Operation("update_critic", "update_critic", "#D55E00", _CRITIC_BATCH, trains=True, is_per_token=True),
        ),
    ),
    RoleSpec(
        name=Role.RewardModel,
        worker="rolepool.roles.reward_model:RewardModel",
        rule_worker="rolepool.roles.reward_model:RuleReward",
        section="reward_model",
        model="reward_model.model",
        why_unused=_needs_no_reward_model,
        max_length="reward_model.max_length",
        has_scalar_head=True,
        can_pack=False,
        operations=(Operation("reward", "compute_scores", "#F0E442", _REWARD_BATCH),),
    ),
)
ROLE_SPECS: dict[Role, RoleSpec] = {Role(spec.name): spec for spec in _SPECS}

_DRIVER_OPERATIONS = (
    Operation("adv", color="#595959", is_per_token=True),
    Operation("testing", color="#B3B3B3"),
    Operation("save_checkpoint", color="#D9D9D9"),
)
_BY_NAME = {one.name: one for part in (*(spec.operations for spec in _SPECS), _DRIVER_OPERATIONS) for one in part}
_STEP_ORDER = ("gen", "baseline", "reward", "values", "old_log_prob", "ref", "adv", "update_critic", "update_actor")
OPERATIONS: dict[str, Operation] = {name: _BY_NAME[name] for name in dict.fromkeys((*_STEP_ORDER, *_BY_NAME))}
"""By name, in the order of a step, which is also the order of legends. A test compares it with the step itself.
Operations of added roles come last."""


def register_role(spec: RoleSpec) -> None:
    """Add a role: all that is derived from the table then works for it, and its keys are `roles.NAME.*`."""
    for name in [spec.name, *(operation.name for operation in spec.operations)]:
        if name in {*ROLE_SPECS, *COMBINED_ROLES, *OPERATIONS}:
            raise ConfigError(f"register_role: the name {name} is already used; choose another name")
    add_role_keys(spec.name, spec.settings)
    ROLE_SPECS[Role(spec.name)] = spec
    OPERATIONS.update({operation.name: operation for operation in spec.operations})


def trained_roles() -> list[Role]:
    """The roles with weights that are updated, saved and resumed."""
    return [role for role, spec in ROLE_SPECS.items() if spec.is_trained]


def needed_roles(config: Config) -> tuple[list[Role], dict[Role, str]]:
    """The roles that a run needs, in order, and why each other role is not used."""
    unused = {role: reason for role, spec in ROLE_SPECS.items() if (reason := spec.why_unused(config)) is not None}
    return [role for role in ROLE_SPECS if role not in unused], unused


def model_of(config: Config, role: Role) -> tuple[str | None, Mapping[str, Any]]:
    """The path of a role's model, and the entries of its config.json that are replaced."""
    model = config.at(ROLE_SPECS[role].model)
    return model.path, model.override_config if isinstance(model, PolicyModelConfig) else {}


def longest_row(config: Config, role: Role) -> int:
    """Tokens of the longest row that a role reads."""
    whole = config.data.max_prompt_length + config.data.max_response_length
    key = ROLE_SPECS[role].max_length
    return min(whole, config.at(key) or whole) if key is not None else whole


def home_of(role: Role, roles: Mapping[Role, str]) -> str:
    """The name of a role's pool. A name for several roles has one if all of them are in the same pool."""
    names = {roles.get(part) for part in Role(role).parts}
    name = names.pop()
    if names or name is None:
        raise PlacementError(f"role {role} has no pool of its own; the roles with a pool are {', '.join(roles)}")
    return name
