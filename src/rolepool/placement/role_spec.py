"""What can be said about a role without starting a process: the types of the rows of the table.

Owns the names of the roles, and what a row has. The rows of the built-in roles are in
`built_in_roles`, and the table of all roles is in `roles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from pydantic_core import CoreSchema, core_schema

from rolepool.config import Config
from rolepool.config.base import KeyName, Section, name_read_by
from rolepool.config.model_keys import RefFsdpConfig


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

COMBINED_ROLES = {
    Role.ActorRollout: (Role.Actor, Role.Rollout),
    Role.ActorRolloutRef: (Role.Actor, Role.Rollout, Role.RefPolicy),
}
"""Names for several roles in one pool."""

WorkerClass = TypeVar("WorkerClass")


class WorkerName(str, Generic[WorkerClass]):
    """The name of a worker class as `module:Class`. mypy knows the class, and Python does not
    import it, because it needs torch."""

    __slots__ = ()

    def method(self, read: Callable[[type[WorkerClass]], object]) -> str:
        """The name of a method, from a function such as `lambda critic: critic.compute_values`.
        mypy checks that the class has this method."""
        return name_read_by(read)


@dataclass(frozen=True)
class MicroBatchKeys:
    """The keys that limit one micro-batch of an operation."""

    rows: KeyName[int | None]
    """A number of sequences, or null."""
    tokens: KeyName[int]
    """A number of tokens, used if `by_tokens` is true."""
    by_tokens: KeyName[bool]


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
    is_used: Callable[[Config], bool] = lambda config: True
    """Whether a step with this config may have it."""
    trains: bool = False
    is_per_token: bool = False
    """Whether its time is also reported per token."""
    generates: bool = False
    """Whether that is per response token, because it generates them; otherwise per token of prompt
    and response."""


@dataclass(frozen=True)
class RoleSpec:
    """What a role is, as far as it can be said without starting a process.

    Keys and sections are written as `key_name(lambda config: config.critic.model)`
    (`rolepool.config.schema`), so that mypy can check them. A text such as `"critic.model"` works,
    too.
    """

    name: str
    worker: str
    """Its worker class as `module:Class`. It is imported when roles are built, and called with a
    `Config` and its `setup_type` (`rolepool.roles.setups`)."""
    section: KeyName[Any]
    """The section with the keys of its own work, such as the mini-batch size of a role that is
    trained."""
    model: KeyName[Any]
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
    fsdp: KeyName[RefFsdpConfig] | None = None
    """The section that says what is sharded and offloaded."""
    tensor_parallel: KeyName[int] | None = None
    """The key for the number of ranks that hold one copy of the model together; None if there is
    one rank per copy."""
    max_length: KeyName[int | None] | None = None
    """The key for the largest number of tokens that the role reads of a row; None if it reads
    all."""
    memory_key: str = ""
    """The key that decides most about the memory of a role without micro-batches."""
    has_scalar_head: bool = False
    sends_weights: bool = False
    """Whether its weights go to the rollout after each update."""
    can_pack: bool = True
    """Whether `use_remove_padding` of its model is used."""
    checkpoints_to_keep: KeyName[int | None] | None = None
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

    def batched_in(self, config: Config) -> list[tuple[Operation, MicroBatchKeys]]:
        """Those of them that a step with this config may have."""
        return [(operation, keys) for operation, keys in self.batched if operation.is_used(config)]
