"""The table of roles: models with a job.

Owns which roles and operations there are, and what is asked about them. `built_in_roles` has the
rows of the built-in roles; `register_role` adds a role of your own (docs/extending.md). The worker
classes are in `rolepool.roles`; this module imports none of them, so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolepool.config import Config
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.config.schema import add_role_keys
from rolepool.config.schema import key_name as key_name
from rolepool.errors import ConfigError, PlacementError
from rolepool.placement.built_in_roles import BUILT_IN_OPERATIONS, BUILT_IN_ROLES
from rolepool.placement.role_spec import COMBINED_ROLES as COMBINED_ROLES
from rolepool.placement.role_spec import MicroBatchKeys as MicroBatchKeys
from rolepool.placement.role_spec import Operation as Operation
from rolepool.placement.role_spec import Role as Role
from rolepool.placement.role_spec import RoleSpec as RoleSpec

ROLE_SPECS = {Role(spec.name): spec for spec in BUILT_IN_ROLES}
OPERATIONS = dict(BUILT_IN_OPERATIONS)
"""By name, in the order of a step, which is also the order of legends. A test compares it with the
step itself. Operations of added roles come last."""


def register_role(spec: RoleSpec) -> None:
    """Add a role: all that is derived from the table then works for it, and its keys are
    `roles.NAME.*`."""
    operations = {operation.name: operation for operation in spec.operations}
    used_names = {*ROLE_SPECS, *COMBINED_ROLES, *OPERATIONS}
    for name in [spec.name, *operations]:
        if name in used_names:
            raise ConfigError(
                f"register_role: the name {name} is already used; choose another name"
            )
    add_role_keys(spec.name, spec.settings)
    ROLE_SPECS[Role(spec.name)] = spec
    OPERATIONS.update(operations)


def operation_of(role: Role, method: str) -> str:
    """The name of the operation to which a call of this method belongs: the first one of the role
    that has the method; else the method itself is an operation."""
    for operation in ROLE_SPECS[role].operations:
        if method in (operation.method, *operation.other_methods):
            return operation.name
    return method


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
