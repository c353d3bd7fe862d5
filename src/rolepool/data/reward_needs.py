"""What the reward needs of each row: a ground truth, and columns that a function for batches names.

Owns how that is seen in the text of a user's function, which does not run here, and what is said
about a row that does not have it. What a rule needs is in `rules`.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rolepool.config import Config
from rolepool.data.reward_signatures import OWN_LISTS, Style, UserFunction, style_of_names
from rolepool.data.rules import RULES

TRUTH = "ground_truth"
ANSWER_NAMES = (
    "answer",
    "answers",
    "ground_truth",
    "final_answer",
    "correct_answer",
    "expected_answer",
    "solution",
    "solutions",
    "target",
    "targets",
    "label",
    "labels",
    "gold",
    "expected",
    "reference",
    "output",
    "response",
    "completion",
)
"""Names that columns with answers often have, the most usual ones first."""


class Need(NamedTuple):
    """What one function of the user needs."""

    function: str
    truth: bool
    """Whether it uses the ground truth without a look whether it is None, and its parameter for
    that has no default."""
    columns: tuple[str, ...] = ()
    """The columns that it has parameters for."""


def needs_of(config: Config, function: UserFunction | None = None) -> list[Need]:
    """What the user's functions need, if they score. `function` is one of a Python program. A
    function whose text cannot be read needs nothing."""
    custom = config.custom_reward_function
    entries = config.reward.functions
    if config.reward_model.enable or config.environment.name is not None:
        return []
    if function is not None:
        # There may be no text, as for a function of a C library.
        with suppress(OSError, TypeError, SyntaxError):
            text = textwrap.dedent(inspect.getsource(function))
            return _needs(text, function.__name__, config, custom.reward_kwargs)
        return []
    if custom.path is not None:
        text = _text_of(custom.path)
        return _needs(text, custom.name, config, custom.reward_kwargs)
    needs: list[Need] = []
    for entry in entries:
        if entry.function in RULES:
            continue
        path, _, name = entry.function.rpartition(":")
        text = _text_of(path)
        needs += _needs(text, name, config, {})
    return needs


def missing(need: Need, used: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a row lacks of what a function needs, as the name of the column and the reason; None if
    it lacks nothing. `used` has the columns that training uses."""
    if need.truth and used["reward_model"].get(TRUTH) is None:
        return TRUTH, f"{need.function} needs it"
    for name in need.columns:
        if name not in used["extra_info"]:
            return name, f"{need.function} has a parameter with this name"
    return None


def likely_answer(row: Mapping[str, object], prompt_key: str) -> str | None:
    """The name of the column that looks like the answer."""
    plain_names: dict[str, str] = {}
    for name in row:
        if name != prompt_key:
            plain_name = re.sub(r"[\W_]+", "_", name.lower())
            plain_names[plain_name] = name
    for name in ANSWER_NAMES:
        if name in plain_names:
            return plain_names[name]
    for plain_name, name in plain_names.items():
        if re.search("answer|solution|truth", plain_name):
            return name
    return None


def _text_of(path: str) -> str:
    """The text of a file; "" if it cannot be read, which is reported when the file is looked
    for."""
    with suppress(OSError, ValueError):
        return Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
    return ""


def _needs(
    text: str,
    name: str,
    config: Config,
    kwargs: Mapping[str, object],
) -> list[Need]:
    """What the function of this name needs, if the text defines it."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return []
    for statement in reversed(statements):  # the last definition is the one that counts
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if statement.name == name:
            return [_need_of(statement, config, kwargs)]
    return []


def _need_of(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    config: Config,
    kwargs: Mapping[str, object],
) -> Need:
    arguments = function.args
    all_arguments = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    all_names = [argument.arg for argument in all_arguments]
    style = style_of_names(all_names)
    required = [name for name in _required(arguments) if name not in kwargs]
    truth_names = {TRUTH, f"{TRUTH}s"}
    if config.data.answer_key is not None:
        truth_names.add(config.data.answer_key)
    used_names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            used_names.add(node.id)
    needed_names = truth_names & used_names & set(required)
    truth = any(not _is_asked_for(name, function) for name in needed_names)
    columns: tuple[str, ...] = ()
    if style is Style.COMPLETIONS:
        always_there = {*OWN_LISTS[style], *truth_names, "data_source"}
        columns = tuple(name for name in required if name not in always_there)
    return Need(function.name, truth, columns)


def _is_asked_for(name: str, function: ast.AST) -> bool:
    """Whether the function looks whether this argument is None, so that it can do without: `name is
    None`, `not name`, `if name`, `name or other`."""

    def is_it(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == name

    for node in ast.walk(function):
        match node:
            case ast.Compare(left=left, comparators=[ast.Constant(value=None)]) if is_it(left):
                return True
            case ast.UnaryOp(op=ast.Not(), operand=operand) if is_it(operand):
                return True
            case ast.If(test=test) | ast.IfExp(test=test) if is_it(test):
                return True
            case ast.BoolOp(values=values) if any(map(is_it, values)):
                return True
    return False


def _required(arguments: ast.arguments) -> list[str]:
    """The names of the arguments without a default."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    # Defaults belong to the last ones.
    num_required = len(positional) - len(arguments.defaults)
    required = positional[:num_required]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is None:
            required.append(argument.arg)
    return required
