"""A role is one thing: its row in the table. Nobody else asks which role it is."""

from __future__ import annotations

import ast
import copy
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolepool.config import Config, load_config
from rolepool.config.functions import import_object
from rolepool.config.model_keys import CriticConfig
from rolepool.config.schema import ROLE_SETTINGS, all_keys, all_sections
from rolepool.errors import ConfigError
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import advise, find_problems
from rolepool.placement.estimate import estimate_memory
from rolepool.placement.roles import (
    OPERATIONS,
    ROLE_SPECS,
    MicroBatchKeys,
    Operation,
    Role,
    RoleSpec,
    key_name,
    operation_of,
    register_role,
    trained_roles,
)
from rolepool.protocol.worker import registered_methods

ALLOWED = {
    "placement/role_spec.py": "names for several roles",
    "trainer/build.py": "actor and rollout exchange weights, and a reward without a model is a rule",
}
NAMES = {*ROLE_SPECS, Role.ActorRollout}


def branches_on_roles(tree: ast.AST) -> Iterator[int]:
    """Lines that name a role in a comparison, a `match`, or as the keys of a table.

    Operations and columns of data have names of roles too, so a table counts only if all its keys
    are such names.
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
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Role"
    )


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
    [
        "role is Role.Actor",
        "name == 'critic'",
        "x = {Role.Critic: 1}",
        "role in (Role.Actor, Role.Critic)",
    ],
)
def test_the_walk_finds_such_a_branch(code: str) -> None:
    assert list(branches_on_roles(ast.parse(code))) == [1]


def test_every_role_has_a_row_whose_keys_and_methods_exist() -> None:
    for role, spec in ROLE_SPECS.items():
        worker_class = import_object(role, spec.worker)
        assert worker_class.role == role == spec.name
        assert {spec.section, spec.model, spec.fsdp or spec.model} <= all_sections()
        keys = [
            key
            for _, batched in spec.batched
            for key in (batched.rows, batched.tokens, batched.by_tokens)
        ]
        named = [
            *keys,
            f"{spec.model}.path",
            spec.tensor_parallel,
            spec.max_length,
            spec.memory_key or None,
        ]
        named.append(spec.checkpoints_to_keep)
        assert {key for key in named if key is not None} <= {*all_keys()}
        assert {operation.method for operation in spec.operations} <= {
            *registered_methods(worker_class)
        }
    assert len({operation.color for operation in OPERATIONS.values()}) == len(OPERATIONS)


def test_why_a_role_is_not_used_follows_the_config() -> None:
    unused = {
        role: spec.why_unused(load_config([], []).config) for role, spec in ROLE_SPECS.items()
    }
    assert {role for role, reason in unused.items() if reason} == {Role.RefPolicy, Role.RewardModel}


def test_a_key_of_the_table_prints_its_name_and_reads_its_value_also_as_a_copy() -> None:
    name = ROLE_SPECS[Role.Rollout].tensor_parallel
    assert name is not None
    config = load_config([], [f"{name}=2", "trainer.n_gpus_per_node=2"]).config
    assert f"{name}" == "actor_rollout_ref.rollout.tensor_model_parallel_size"
    assert config.at(name) == config.at(copy.copy(name)) == 2


def test_a_call_belongs_to_the_first_operation_of_its_role_that_has_the_method() -> None:
    assert operation_of(Role.Rollout, "generate_sequences") == "gen"
    assert operation_of(Role.Rollout, "take_weights_here") == "update_weights"
    assert operation_of(Role.Critic, "update_critic") == "update_critic"
    assert operation_of(Role.Critic, "a_method_of_a_user") == "a_method_of_a_user"


MYPY_SNIPPET = """
from rolepool.placement.role_spec import WorkerName
from rolepool.placement.roles import RoleSpec, key_name
from rolepool.roles.actor_critic import Critic


def name_all(critic: WorkerName[Critic], spec: RoleSpec) -> None:
"""
NAMES_IN_ROWS = {
    "key_name(lambda config: config.critic.ppo_epochs)": None,
    "key_name(lambda config: config.critic.ppo_epoch)": 'has no attribute "ppo_epoch"',
    "critic.method(lambda worker: worker.update_critic)": None,
    "critic.method(lambda worker: worker.update_actor)": 'has no attribute "update_actor"',
    "RoleSpec('a', 'b', spec.section, spec.model, (), max_length=spec.fsdp)": "incompatible type",
}


def test_a_wrong_key_or_method_in_a_row_is_an_error_of_mypy(
    tmp_path: Path, root: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    file = tmp_path / "snippet.py"
    lines = "".join(f"    {line}\n" for line in NAMES_IN_ROWS)
    file.write_text(MYPY_SNIPPET + lines, encoding="utf-8")
    options = ["--config-file", root / "pyproject.toml", "--cache-dir", root / ".mypy_cache"]
    said = python("-m", "mypy", *map(str, options), str(file)).stdout.splitlines()
    first = MYPY_SNIPPET.count("\n") + 1
    for line, (code, error) in enumerate(NAMES_IN_ROWS.items(), start=first):
        errors = [text for text in said if f"snippet.py:{line}: error" in text]
        assert len(errors) == (error is not None), (code, said)
        assert error is None or error in errors[0]


# A role that is added


def judge_spec(*, is_text: bool) -> RoleSpec:
    """The row of a second critic. Its keys are written as functions that read them, or as texts."""

    def key(read: Callable[[Config], Any]) -> Any:
        name = key_name(read)
        return str(name) if is_text else name

    tokens = key(lambda config: config.roles.judge.ppo_max_token_len_per_gpu)
    by_tokens = key(lambda config: config.roles.judge.use_dynamic_bsz)
    return RoleSpec(
        name="judge",
        worker="rolepool.roles.actor_critic:Critic",
        settings=CriticConfig,
        section=key(lambda config: config.roles.judge),
        model=key(lambda config: config.roles.judge.model),
        fsdp=key(lambda config: config.roles.judge.model.fsdp_config),
        has_scalar_head=True,
        operations=(
            Operation(
                "judge",
                "compute_values",
                micro_batch=MicroBatchKeys(
                    key(lambda config: config.roles.judge.forward_micro_batch_size_per_gpu),
                    tokens,
                    by_tokens,
                ),
            ),
            Operation(
                "update_judge",
                "update_critic",
                micro_batch=MicroBatchKeys(
                    key(lambda config: config.roles.judge.ppo_micro_batch_size_per_gpu),
                    tokens,
                    by_tokens,
                ),
                trains=True,
            ),
        ),
    )


@pytest.fixture(params=[False, True], ids=["keys as functions", "keys as texts"])
def judge(request: pytest.FixtureRequest) -> Iterator[Role]:
    """A second critic, added for one test."""
    tables: list[dict[Any, Any]] = [ROLE_SPECS, OPERATIONS, ROLE_SETTINGS]
    before = [dict(table) for table in tables]
    register_role(judge_spec(is_text=request.param))
    yield Role("judge")
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)
    all_keys.cache_clear()
    all_sections.cache_clear()


def test_an_added_role_has_keys_a_pool_memory_and_advice_like_a_built_in_one(
    judge: Role, root: Path
) -> None:
    shapes = root / "recipes" / "shapes" / "deepseek-llm-7b-chat"
    words = [
        f"actor_rollout_ref.model.path={shapes}",
        f"roles.judge.model.path={shapes}",
        "data.train_batch_size=64",
    ]
    sizes = ["actor_rollout_ref.actor.ppo_mini_batch_size=64", "roles.judge.ppo_mini_batch_size=12"]
    alone = (
        "algorithm.adv_estimator=grpo"  # without another critic, whose keys would be advised first
    )
    config = load_config([], [*words, *sizes, alone, "trainer.n_gpus_per_node=8"]).config
    plan = build_plan(config)
    assert plan.roles[judge] == plan.roles[Role.Actor] and judge in trained_roles()
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    (problem,) = find_problems(config, plan)
    assert problem.startswith("roles.judge.ppo_mini_batch_size=12: ")
    estimate = estimate_memory(config, plan, 30 * 2**30)
    assert estimate.pools["global_pool"].roles[judge].optimizer > 0
    advice = [one.override for one in advise(config, plan, estimate, 30 * 2**30, build_plan)]
    assert any(
        "roles.judge.model.fsdp_config.optimizer_offload=true" in override for override in advice
    ), advice


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("roles.judge.grad_clip=-1", "roles.judge.grad_clip=-1: must be a number, greater than 0"),
        (
            "roles.judge.grad_clop=1",
            "roles.judge.grad_clop=1: unknown key; did you mean roles.judge.grad_clip?",
        ),
        (
            "roles.jugde.grad_clip=1",
            "roles.jugde.grad_clip=1: unknown key; did you mean roles.judge.grad_clip?",
        ),
        ("roles.judge=1", "roles.judge=1: is a section; set one of its keys, such as "),
    ],
)
def test_the_keys_of_an_added_role_are_checked_like_others(
    judge: Role, override: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_config([], [override])


def test_a_name_is_registered_once(judge: Role) -> None:
    for name in (judge, "critic", "gen"):
        with pytest.raises(
            ConfigError, match=f"the name {name} is already used; choose another name"
        ):
            register_role(replace(ROLE_SPECS[judge], name=name))
