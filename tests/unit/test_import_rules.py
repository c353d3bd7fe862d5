"""Imports point one way, as the architecture says; and what must answer at once imports nothing
heavy."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "rolepool"
HEAVY = ("torch", "ray", "transformers", "matplotlib")

# The order of docs/architecture.md: each part may import those of earlier lines.
ORDER = [
    {"errors", "files", "quick_imports", "reading", "seeds", "units"},
    {"config"},
    {"placement"},
    {"metrics"},
    {"protocol"},
    {"algorithm"},
    {"data", "models"},
    {"weights"},
    {"rollout"},
    {"roles"},
    {"trainer"},
    {"planning"},
    {"api"},
    {"cli"},
]
MAY_IMPORT = {
    part: set().union(*ORDER[:level]) for level, parts in enumerate(ORDER) for part in parts
}
MAY_IMPORT["cluster"] = {
    "errors",
    "files",
    "quick_imports",
    "reading",
    "seeds",
    "units",
    "config",
    "placement",
    "metrics",
    "protocol",
}
MAY_IMPORT["planner"] = {"errors", "units", "config", "placement", "metrics"}
MAY_IMPORT["report"] = {
    "errors",
    "files",
    "reading",
    "units",
    "config",
    "placement",
    "metrics",
    "planner",
}
MAY_IMPORT["command_line"] = {"errors", "config"}
MAY_IMPORT["terminal"] = {"errors", "command_line"}
for part in ("placement", "report", "trainer", "cli"):
    MAY_IMPORT[part] |= {"terminal"}
MAY_IMPORT["trainer"] |= {"cluster", "command_line", "planner", "report"}
MAY_IMPORT["api"] |= {"report"}
MAY_IMPORT["cli"] |= {"cluster", "command_line", "planner", "report"}

ONLY_FOR_MYPY = {"placement/built_in_roles.py"}
"""Files whose imports under `if TYPE_CHECKING` may point the other way: the table of roles names
methods of the worker classes, and mypy checks these names."""

WITHOUT_TORCH = {
    "errors",
    "files",
    "seeds",
    "config",
    "placement",
    "metrics",
    "command_line",
    "planner",
    "report",
}
WITHOUT_TORCH |= {"quick_imports", "reading", "terminal", "units"}
WITH_RAY = {"cluster"}


class Import(NamedTuple):
    """One import statement: where it stands, and the dotted module it names."""

    part: str
    place: str
    module: str


def imports_of(package: Path) -> Iterator[Import]:
    """Every import of every file, also those inside functions, `if TYPE_CHECKING` (except those
    of `ONLY_FOR_MYPY`) and `import_module("...")`."""
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package)
        part = inside.parts[0].removesuffix(".py")
        here = [package.name, *inside.parts[:-1]]
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if str(inside) in ONLY_FOR_MYPY:
            tree.body = [node for node in tree.body if not is_only_for_mypy(node)]
        for node in ast.walk(tree):
            for module in modules_named(node, here):
                yield Import(part, f"{inside}:{node.lineno}", module)  # type: ignore[attr-defined]


def is_only_for_mypy(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def modules_named(node: ast.AST, here: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = here[: len(here) - node.level + 1] if node.level else []
        module = ".".join([*base, *(node.module.split(".") if node.module else [])])
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if name in ("import_module", "__import__"):
            return [str(node.args[0].value)]
    return []


def violations(package: Path) -> list[str]:
    """One line for each import that points the wrong way."""
    found: list[str] = []
    for part, place, module in imports_of(package):
        top, *below = module.split(".")
        if part.startswith("__"):
            continue
        if part not in MAY_IMPORT:
            found.append(f"{place}: {part} has no place in the order of parts")
        elif top == "ray" and part not in WITH_RAY:
            found.append(f"{place}: {part} imports ray")
        elif top == "torch" and part in WITHOUT_TORCH:
            found.append(f"{place}: {part} imports torch")
        elif top == package.name and below and below[0] != part and not below[0].startswith("__"):
            target = below[0]
            if target not in MAY_IMPORT:
                found.append(
                    f"{place}: {target} is imported through the package and not from where it lives"
                )
            elif target not in MAY_IMPORT[part]:
                found.append(f"{place}: {part} imports {target}")
    return list(dict.fromkeys(found))


def cycles(package: Path) -> list[tuple[str, ...]]:
    """Parts that import each other, directly or over others."""
    graph: dict[str, set[str]] = {}
    for part, _, module in imports_of(package):
        top, *below = module.split(".")
        if top == package.name and below and below[0] != part and not part.startswith("__"):
            graph.setdefault(part, set()).add(below[0])
    found: set[tuple[str, ...]] = set()

    def walk(part: str, path: tuple[str, ...]) -> None:
        if part in path:
            loop = path[path.index(part) :]
            first = loop.index(min(loop))
            found.add(loop[first:] + loop[:first])
            return
        for target in graph.get(part, ()):
            walk(target, (*path, part))

    for part in graph:
        walk(part, ())
    return sorted(found)


@pytest.fixture
def package(root: Path) -> Path:
    return root / "src" / PACKAGE


# The package


def test_imports_point_one_way(package: Path) -> None:
    assert violations(package) == []


def test_no_parts_import_each_other_in_a_circle(package: Path) -> None:
    assert cycles(package) == []


def test_the_walk_sees_the_package(package: Path) -> None:
    """A walk that found nothing would pass, too."""
    seen = {
        (part, module.split(".")[1])
        for part, _, module in imports_of(package)
        if module.startswith(f"{PACKAGE}.")
    }
    assert {("cli", "placement"), ("placement", "config"), ("config", "errors")} <= seen


@pytest.mark.parametrize("file", ["cli.py", "command_line.py", "trainer/main_ppo.py"])
def test_the_command_line_imports_nothing_heavy_at_its_top(package: Path, file: str) -> None:
    tree = ast.parse((package / file).read_text(encoding="utf-8"))
    at_the_top = [module for node in tree.body for module in modules_named(node, [PACKAGE])]
    ours = {
        ".".join(module.split(".")[:2]) for module in at_the_top if module.startswith(f"{PACKAGE}.")
    }
    assert ours <= {
        f"{PACKAGE}.{name}" for name in ("__version__", "command_line", "errors", "quick_imports")
    }


# The checker itself


def tree_of(folder: Path, files: dict[str, str]) -> Path:
    package = folder / PACKAGE
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "config/a.py",
            "from rolepool.placement import Plan",
            "config/a.py:1: config imports placement",
        ),
        (
            "config/a.py",
            "from ..placement.plan import Plan",
            "config/a.py:1: config imports placement",
        ),
        ("config/a.py", "from .. import placement", "config/a.py:1: config imports placement"),
        (
            "errors.py",
            "import rolepool.config.schema as schema",
            "errors.py:1: errors imports config",
        ),
        (
            "placement/a.py",
            "def f():\n    import torch.nn",
            "placement/a.py:2: placement imports torch",
        ),
        (
            "metrics/b/c.py",
            "if TYPE_CHECKING:\n    from torch import Tensor",
            "metrics/b/c.py:2: metrics imports torch",
        ),
        ("planner/a.py", "import torch", "planner/a.py:1: planner imports torch"),
        ("planner/a.py", "import ray", "planner/a.py:1: planner imports ray"),
        (
            "planner/a.py",
            "from rolepool.report.run import ReadRun",
            "planner/a.py:1: planner imports report",
        ),
        (
            "planner/a.py",
            "from rolepool.trainer.paper import x",
            "planner/a.py:1: planner imports trainer",
        ),
        ("protocol/a.py", "import ray", "protocol/a.py:1: protocol imports ray"),
        ("trainer/a.py", "from ray.util import x", "trainer/a.py:1: trainer imports ray"),
        ("cli.py", "import ray", "cli.py:1: cli imports ray"),
        ("protocol/a.py", "import_module('ray')", "protocol/a.py:1: protocol imports ray"),
        (
            "roles/a.py",
            "from rolepool.cluster import WorkerGroup",
            "roles/a.py:1: roles imports cluster",
        ),
        (
            "cluster/a.py",
            "from rolepool.roles import Actor",
            "cluster/a.py:1: cluster imports roles",
        ),
        (
            "report/a.py",
            "from rolepool.protocol import DataProto",
            "report/a.py:1: report imports protocol",
        ),
        (
            "report/a.py",
            "from rolepool.trainer.build import x",
            "report/a.py:1: report imports trainer",
        ),
        ("report/a.py", "def f():\n    import torch", "report/a.py:2: report imports torch"),
        ("report/a.py", "import ray", "report/a.py:1: report imports ray"),
        (
            "metrics/a.py",
            "from rolepool.report.run import ReadRun",
            "metrics/a.py:1: metrics imports report",
        ),
        ("data/a.py", "from rolepool.models import load", "data/a.py:1: data imports models"),
        ("trainer/a.py", "from rolepool import cli", "trainer/a.py:1: trainer imports cli"),
        (
            "roles/a.py",
            "from rolepool import Role",
            "roles/a.py:1: Role is imported through the package and not from where",
        ),
        ("helpers/a.py", "import os", "helpers/a.py:1: helpers has no place in the order of parts"),
    ],
)
def test_the_checker_finds_an_import_that_points_the_wrong_way(
    tmp_path: Path, file: str, text: str, expected: str
) -> None:
    (found,) = violations(tree_of(tmp_path, {"errors.py": "", file: text}))
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "cluster/a.py",
            "import ray, torch\nfrom rolepool.protocol import DataProto\nfrom .b import c",
        ),
        (
            "trainer/a.py",
            "from rolepool.cluster import WorkerGroup\nfrom rolepool.roles.actor_critic import Actor",
        ),
        ("report/a.py", "from rolepool.planner.search import search"),
        (
            "cli.py",
            "from rolepool import __version__\ndef f():\n    from rolepool.planner import search",
        ),
        (
            "protocol/a.py",
            "import torch\nfrom rolepool.errors import DataError\nfrom . import b\nfrom .b import c",
        ),
        ("__init__.py", "from rolepool.cluster import WorkerGroup"),
        ("models/a.py", "import torch, transformers\nimport arrays.ray"),
    ],
)
def test_the_checker_lets_right_imports_through(tmp_path: Path, file: str, text: str) -> None:
    package = tree_of(tmp_path, {file: text})
    assert violations(package) == []
    assert cycles(package) == []


def test_the_checker_finds_circles_over_several_parts(tmp_path: Path) -> None:
    package = tree_of(
        tmp_path,
        {
            "data/a.py": "from rolepool.models import x",
            "models/a.py": "from rolepool.algorithm import x",
            "algorithm/a.py": "def f():\n    from rolepool.data.a import x",
            "roles/a.py": "from rolepool.data import x",
        },
    )
    assert cycles(package) == [("algorithm", "data", "models")]


# What is really imported


def modules_after(
    python: Callable[..., subprocess.CompletedProcess[str]], statement: str
) -> set[str]:
    ended = python(
        "-c", f"import sys, json\n{statement}\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    )
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "--help"],
        ["plan"],
        [
            "plan",
            "recipes/deepseek7b_split.yaml",
            "actor_rollout_ref.model.path=recipes/shapes/deepseek-llm-7b-chat",
        ],
        [
            "plan",
            "actor_rollout_ref.model.path=recipes/shapes/deepseek-llm-7b-chat",
            "--gpu-memory",
            "20",
        ],
        ["plan", "actor_rollout_ref.model.path=no/such-model", "--json", "--inventory", "8,8,4"],
        ["plan", "trainer.n_gpus_per_node=3"],
        ["plan", "trainer.nodes=2"],
        ["plan", "placement.strategy=split", "trainer.n_gpus_per_node=1"],
        ["plan", "nowhere.yaml"],
        ["report", "nowhere"],
        ["watch", "nowhere", "--once"],
        ["trace", "nowhere"],
        ["serve", "nowhere"],
        ["plan", "--nope"],
        ["config"],
        ["config", "trainer.nnodes"],
        ["config", "trainer.nodes"],
        ["train", "--help"],
        ["train", "trainer.nodes=2"],
        ["compare", "nowhere", "nothing"],
        ["plot", "nowhere.log"],
        ["predict", "nowhere", "--search"],
        ["nope"],
    ],
    ids=" ".join,
)
def test_what_must_answer_at_once_imports_nothing_heavy(
    python: Callable[..., subprocess.CompletedProcess[str]], arguments: list[str]
) -> None:
    modules = modules_after(
        python, f"from rolepool.cli import main\nassert main({arguments!r}) in (0, 2)"
    )
    assert modules.isdisjoint(HEAVY)


def test_help_imports_no_pydantic_either(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert "pydantic" not in modules_after(
        python, "from rolepool.cli import main\nmain(['--help'])"
    )


def test_the_package_and_its_placement_names_import_nothing_heavy(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    modules = modules_after(python, "from rolepool import Role, ResourcePool, ResourcePoolManager")
    assert modules.isdisjoint(HEAVY)


@pytest.mark.parametrize("part", ["metrics", "planner", "report"])
def test_measuring_and_reporting_import_neither_what_trains_nor_what_plots(
    python: Callable[..., subprocess.CompletedProcess[str]], package: Path, part: str
) -> None:
    """matplotlib takes longer to import than a table to print: functions that plot import it."""
    files = (package / part).glob("*.py")
    names = [f"{PACKAGE}.{part}.{file.stem}" for file in files if file.stem != "__init__"]
    modules = modules_after(python, f"import {', '.join(names)}")
    assert set(names) <= modules
    assert modules.isdisjoint({*HEAVY, "matplotlib"})


def test_a_heavy_import_would_be_seen(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("", encoding="utf-8")
    assert "torch" in modules_after(python, f"sys.path.insert(0, {str(tmp_path)!r})\nimport torch")
