"""A role is one thing: its row in the table. Nobody else asks which role it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolepool.config import load_config
from rolepool.config.functions import import_object
from rolepool.config.schema import all_keys, all_sections
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, Role
from rolepool.protocol.worker import registered_methods

ALLOWED = {
    "placement/roles.py": "the table",
    "trainer/build.py": "actor and rollout exchange weights, and a reward without a model is a rule",
}
NAMES = {*ROLE_SPECS, Role.ActorRollout}


def branches_on_roles(tree: ast.AST) -> Iterator[int]:
    """Lines that name a role in a comparison, a `match`, or as the keys of a table.

    Operations and columns of data have names of roles too, so a table counts only if all its keys are such names.
    """
    for node in ast.walk(tree):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Dict):
            named = [names_a_role(key) for key in node.keys if key is not None]
            parts = list(node.keys) if named and all(named) else []
        if any(names_a_role(part) for part in parts if part is not None):
            yield node.lineno  # type: ignore[attr-defined]


def names_a_role(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(names_a_role(item) for item in node.elts)
    if isinstance(node, ast.Constant):
        return node.value in NAMES
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Role"


def test_nobody_else_branches_on_a_roles_name(root: Path) -> None:
    package = root / "src" / "rolepool"
    found = [
        f"{file.relative_to(package)}:{line}"
        for file in sorted(package.rglob("*.py"))
        if str(file.relative_to(package)) not in ALLOWED
        for line in branches_on_roles(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    ["role is Role.Actor", "name == 'critic'", "x = {Role.Critic: 1}", "role in (Role.Actor, Role.Critic)"],
)
def test_the_walk_finds_such_a_branch(code: str) -> None:
    assert list(branches_on_roles(ast.parse(code))) == [1]


def test_every_role_has_a_row_whose_keys_and_methods_exist() -> None:
    for role, spec in ROLE_SPECS.items():
        worker_class = import_object(role, spec.worker)
        assert worker_class.role == role == spec.name
        assert {spec.section, spec.model, spec.fsdp or spec.model} <= all_sections()
        keys = [key for _, batched in spec.batched for key in (batched.rows, batched.tokens, batched.by_tokens)]
        named = [*keys, f"{spec.model}.path", spec.tensor_parallel, spec.max_length, spec.memory_key or None]
        named.append(spec.checkpoints_to_keep)
        assert {key for key in named if key is not None} <= {*all_keys()}
        assert {operation.method for operation in spec.operations} <= {*registered_methods(worker_class)}
    assert len({operation.color for operation in OPERATIONS.values()}) == len(OPERATIONS)


def test_why_a_role_is_not_used_follows_the_config() -> None:
    unused = {role: spec.why_unused(load_config([], []).config) for role, spec in ROLE_SPECS.items()}
    assert {role for role, reason in unused.items() if reason} == {Role.RefPolicy, Role.RewardModel}
