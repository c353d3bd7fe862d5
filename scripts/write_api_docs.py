"""Write docs/api.md from the signatures and docstrings of the public names."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import rolepool
from rolepool import api, errors
from rolepool.data import given
from rolepool.trainer import console

SECTIONS = {
    "Plan, train, read a run": [
        "load_config",
        "plan",
        "train",
        "Run",
        "PlanSummary",
        "LoadedConfig",
        "Config",
    ],
    "Worker groups": [
        *(
            "Cluster",
            "WorkerGroup",
            "Worker",
            "register",
            "Dispatch",
            "Execute",
            "DataProto",
            "DataProtoFuture",
        ),
        *("Role", "ResourcePool", "ResourcePoolManager"),
    ],
    "Functions of your own": ["register_adv_est", "register_policy_loss"],
    "Errors": ["RolepoolError"],
}
INTRODUCTION = """\
# Python API

Generated from the docstrings by `python scripts/write_api_docs.py`; do not edit by hand.

`import rolepool as rp` is fast: torch and Ray are imported by the functions that need them. Methods are shown in
short: `help(rp.DataProto.select)` shows the types of the parameters, and further paragraphs.
[examples/first_curve.ipynb](../examples/first_curve.ipynb) trains with a reward function of its own and compares two
placements. [examples/own_algorithm.py](../examples/own_algorithm.py) is an algorithm of its own on worker groups.

```python
import rolepool as rp


def reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)


run = rp.train(
    config="demo", reward=reward, placement="split", **{"trainer.total_training_steps": 20}
)
print(run.metrics())
run.report()
```
"""
MADE_BY_OTHERS = {
    "WorkerGroup": ["add_role", "role"],
    "DataProtoFuture": None,
    "LoadedConfig": None,
}
"""Classes that no program constructs itself, and which of their methods are shown; None shows
all."""
FOR_THE_TRAINER = {
    "prepare",
    "switch",
    "start_monitors",
    "start_watchdog",
    "measure",
    "gpu_memory_bytes",
}
FOR_THE_TRAINER |= {"num_live_nodes", "from_columns", "columns", "like"}
FOR_THE_TRAINER |= {"uses_critic", "estimator_needs_critic", "uses_reference"}
"""Methods that are public only because other packages of rolepool call them."""
EXPLAINED_ELSEWHERE = {"Dispatch": "[workers.md](workers.md#calls) explains the modes."}
MAX_WIDTH = 100


def markdown() -> str:
    """The page."""
    listed = {name for names in SECTIONS.values() for name in names}
    assert listed == set(rolepool.__all__) - {"__version__"}, (
        "every public name belongs to one section"
    )
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts += [f"## {title}\n", *(describe(name) for name in names)]
    classes = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    kinds = [
        kind
        for kind in classes
        if issubclass(kind, errors.RolepoolError) and kind is not errors.RolepoolError
    ]
    lines = [
        f"- `{kind.__name__}`: {one_paragraph(inspect.getdoc(kind) or '')}\n" for kind in kinds
    ]
    aliases = [
        line
        for module in (api, given, console)
        for line in attributes(parsed(module))
        if line[1:3].istitle()
    ]
    types = [
        f"- {line}\n" for line in aliases if line[1:].startswith(("Source", "Data"))
    ]  # `train` explains the others
    return "\n".join([*parts, "".join(lines), "## Types in the signatures\n", "".join(types)])


def parsed(thing: object) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))  # type: ignore[arg-type]


def describe(name: str) -> str:
    """The entry of one public name."""
    (node,) = parsed(getattr(rolepool, name)).body
    text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    if isinstance(node, ast.FunctionDef):
        return f"### {name}\n\n```python\n{signature(node, name, is_long=True)}\n```\n\n{text}\n"
    assert isinstance(node, ast.ClassDef)
    if name in EXPLAINED_ELSEWHERE:
        return f"### {name}\n\n{text} {EXPLAINED_ELSEWHERE[name]}\n"
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    made = ""
    if "__init__" in methods and name not in MADE_BY_OTHERS:
        made = f"\n```python\n{signature(methods['__init__'], name, is_long=True)}\n```\n"
    shown = MADE_BY_OTHERS.get(name) or [one for one in methods if not one.startswith("_")]
    documented = [
        methods[one]
        for one in shown
        if ast.get_docstring(methods[one]) and one not in FOR_THE_TRAINER
    ]
    members = "".join(
        f"- {member}\n" for member in [*attributes(node), *map(describe_method, documented)]
    )
    return f"### {name}\n{made}\n{text}\n" + (f"\n{members}" if members else "")


def attributes(node: ast.ClassDef | ast.Module) -> Iterator[str]:
    """Attributes that have a docstring below them, and the fields of a dataclass."""
    decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in decorators)
    for one, following in zip(node.body, [*node.body[1:], None], strict=True):
        docstring = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docstring = f": {one_paragraph(str(following.value.value))}"
        is_field = isinstance(one, ast.AnnAssign) and is_dataclass
        if is_field or (isinstance(one, ast.AnnAssign | ast.Assign) and docstring):
            yield f"`{declaration(one)}`{docstring}"


def declaration(one: ast.AnnAssign | ast.Assign) -> str:
    """An attribute with its type and default, without `field(...)`, which says nothing to a
    reader."""
    if isinstance(one, ast.AnnAssign) and isinstance(one.value, ast.Call):
        return f"{ast.unparse(one.target)}: {ast.unparse(one.annotation)}"
    return ast.unparse(one)


def describe_method(node: ast.FunctionDef) -> str:
    """The signature and the first paragraph."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    is_property = decorators & {"property", "cached_property"}
    text = node.name if is_property else signature(node, node.name)
    first, _, _ = (ast.get_docstring(node) or "").partition("\n\n")
    return f"`{text}`: {one_paragraph(first)}"


def signature(node: ast.FunctionDef, name: str, *, is_long: bool = False) -> str:
    """`name(parameters) -> type`, without `self`. If `is_long`, parameters have types, one in a
    line if it is long."""
    result = ""
    if node.returns and node.name != "__init__":
        result = f" -> {ast.unparse(node.returns)}"
    shown = list(parameters(node.args, with_types=is_long))
    line = f"{name}({', '.join(shown)}){result}"
    if not is_long or len(line) <= MAX_WIDTH:
        return line
    return f"{name}(\n    " + ",\n    ".join(shown) + f",\n){result}"


def parameters(arguments: ast.arguments, *, with_types: bool) -> Iterator[str]:
    """Each parameter with its default, and `*` before those that must be named."""

    def show(argument: ast.arg, default: ast.expr | None) -> str:
        if default is None:
            return ast.unparse(argument) if with_types else argument.arg
        if with_types:
            return f"{ast.unparse(argument)} = {ast.unparse(default)}"
        return f"{argument.arg}={ast.unparse(default)}"

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            yield show(argument, default)
    if arguments.vararg is not None:
        yield f"*{show(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield show(argument, default)
    if arguments.kwarg is not None:
        yield f"**{show(arguments.kwarg, None)}"


def one_paragraph(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    file = Path(__file__).parent.parent / "docs" / "api.md"
    file.write_text(markdown(), encoding="utf-8")
    print(f"wrote {file}")
