"""The roles: models with a job.

Owns their names, what each role is (its class, its model, its operations and the keys that limit
them), and finding the pool of a role. The table of the built-in roles is `roles.yaml`;
`register_role` adds a role of your own (docs/extending.md). The built-in classes are in
`rolepool.roles`; this module imports none of them, so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic_core import CoreSchema, core_schema

from rolepool.config import Config
from rolepool.config.base import Section, read_table
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.config.schema import add_role_keys
from rolepool.errors import ConfigError, PlacementError


class Role(str):
    """The name of a role. The attributes are verl's names.

    `ActorRollout` and `ActorRolloutRef` mean several roles in one pool. `Env` and `TeacherModel`
    are not built in: they can be used after `register_role` has added roles with these names.
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


Role.Actor = Role("actor")
Role.Rollout = Role("rollout")
Role.RefPolicy = Role("ref")
Role.Critic = Role("critic")
Role.RewardModel = Role("reward_model")
Role.ActorRollout = Role("actor_rollout")
Role.ActorRolloutRef = Role("actor_rollout_ref")
Role.Env = Role("env")
Role.TeacherModel = Role("teacher")


@dataclass(frozen=True)
class MicroBatchKeys:
    """The keys that limit one micro-batch of an operation."""

    rows: str
    """A number of sequences, or null."""
    tokens: str
    """A number of tokens, used if `by_tokens` is true."""
    by_tokens: str


@dataclass(frozen=True)
class Operation:
    """A kind of work in a step (or around it), under one name in timings, spans, plots and
    legends."""

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
    """Whether that is per response token, because it generates them; otherwise per token of prompt
    and response."""


@dataclass(frozen=True)
class RoleSpec:
    """What a role is, as far as it can be said without starting a process."""

    name: str
    worker: str
    """Its worker class as `module:Class`. It is imported when roles are built, and called with a
    `Config` and its `setup_type` (`rolepool.roles.setups`)."""
    section: str
    """The section with the keys of its own work, such as the mini-batch size of a role that is
    trained."""
    model: str
    """The section that names its model, in the key `path`."""
    operations: tuple[Operation, ...]
    settings: type[Section] = Section
    """The keys of an added role, which become `roles.NAME.*`; the empty `Section` if it has
    none."""
    why_unused: Callable[[Config], str | None] = lambda config: None
    """Why a run with this config does not need the role; None if it needs it."""
    rule_worker: str | None = None
    """The class that does the role's first operation on CPU processes if the role is not used; None
    if nobody does."""
    fsdp: str | None = None
    """The section that says what is sharded and offloaded."""
    tensor_parallel: str | None = None
    """The key for the number of ranks that hold one copy of the model together; None if there is
    one rank per copy."""
    max_length: str | None = None
    """The key for the largest number of tokens that the role reads of a row; None if it reads
    all."""
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
        batched: list[tuple[Operation, MicroBatchKeys]] = []
        for operation in self.operations:
            if operation.micro_batch is not None:
                batched.append((operation, operation.micro_batch))
        return batched


class RoleTable(BaseModel, extra="forbid"):
    """The content of `roles.yaml`."""

    roles: tuple[RoleSpec, ...]
    driver: tuple[Operation, ...]
    """Work of the driver, which belongs to no role."""
    step: tuple[str, ...]
    """Names of operations, in the order of a step."""
    combined: dict[Role, tuple[Role, ...]]
    """Names for several roles in one pool."""


def _why_unused(name: str, config: Config) -> str | None:
    """Why a run does not need one of the built-in roles."""
    if name == Role.RefPolicy and not config.uses_reference:
        return "no KL term is used (actor.use_kl_loss, algorithm.use_kl_in_reward)"
    if name == Role.Critic and not config.uses_critic:
        return f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic"
    if name == Role.RewardModel and not config.reward_model.enable:
        return "the reward is a rule (reward_model.enable=false)"
    return None


_TABLE = read_table(Path(__file__).with_suffix(".yaml"), RoleTable)
COMBINED_ROLES = _TABLE.combined


def _built_in_specs() -> dict[Role, RoleSpec]:
    specs: dict[Role, RoleSpec] = {}
    for spec in _TABLE.roles:
        specs[Role(spec.name)] = replace(spec, why_unused=partial(_why_unused, spec.name))
    return specs


def _operations_in_order() -> dict[str, Operation]:
    """The operations of a step in its order, and then the others in the order of the table."""
    by_name: dict[str, Operation] = {}
    for spec in _TABLE.roles:
        by_name.update({operation.name: operation for operation in spec.operations})
    by_name.update({operation.name: operation for operation in _TABLE.driver})
    return {name: by_name[name] for name in dict.fromkeys((*_TABLE.step, *by_name))}


ROLE_SPECS = _built_in_specs()
OPERATIONS = _operations_in_order()
"""By name, in the order of a step, which is also the order of legends. A test compares it with the
step itself. Operations of added roles come last."""
FIRST_OPERATION = _TABLE.step[0]
"""The name of the operation that begins a step: the generation of its responses. Whoever asks where
a step begins compares with this name, so that only the table knows it."""


def register_role(spec: RoleSpec) -> None:
    """Add a role: all that is derived from the table then works for it, and its keys are
    `roles.NAME.*`."""
    for name in [spec.name, *(operation.name for operation in spec.operations)]:
        if name in {*ROLE_SPECS, *COMBINED_ROLES, *OPERATIONS}:
            raise ConfigError(
                f"register_role: the name {name} is already used; choose another name"
            )
    add_role_keys(spec.name, spec.settings)
    ROLE_SPECS[Role(spec.name)] = spec
    OPERATIONS.update({operation.name: operation for operation in spec.operations})


def trained_roles() -> list[Role]:
    """The roles with weights that are updated, saved and resumed."""
    return [role for role, spec in ROLE_SPECS.items() if spec.is_trained]


def needed_roles(config: Config) -> tuple[list[Role], dict[Role, str]]:
    """The roles that a run needs, in order, and why each other role is not used."""
    needed: list[Role] = []
    unused: dict[Role, str] = {}
    for role, spec in ROLE_SPECS.items():
        reason = spec.why_unused(config)
        if reason is None:
            needed.append(role)
        else:
            unused[role] = reason
    return needed, unused


def model_of(config: Config, role: Role) -> tuple[str | None, Mapping[str, Any]]:
    """The path of a role's model, and the entries of its config.json that are replaced."""
    model = config.at(ROLE_SPECS[role].model)
    if isinstance(model, PolicyModelConfig):
        return model.path, model.override_config
    return model.path, {}


def longest_row(config: Config, role: Role) -> int:
    """Tokens of the longest row that a role reads."""
    whole = config.tokens_of_longest_row
    key = ROLE_SPECS[role].max_length
    if key is not None:
        return min(whole, config.at(key) or whole)
    return whole


def home_of(role: Role, roles: Mapping[Role, str]) -> str:
    """The name of a role's pool. A name for several roles has one if all of them are in the same
    pool."""
    names = {roles.get(part) for part in Role(role).parts}
    name = names.pop()
    if names or name is None:
        raise PlacementError(
            f"role {role} has no pool of its own; the roles with a pool are {', '.join(roles)}"
        )
    return name
