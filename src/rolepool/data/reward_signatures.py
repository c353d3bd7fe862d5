"""How a reward function is called: with one response or with lists of a whole batch.

Owns how the kind of a function follows from its parameters, what the arguments of each kind are,
and what is said about a function that cannot be called like that. Does not know processes or
scores.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from rolepool.config import show
from rolepool.errors import ConfigError

UserFunction = Callable[..., Any]
"""A function of the user. What it returns is checked when it has been called."""
INPUTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of a function for one response."""


class ResponseRow(NamedTuple):
    """One response, and what a reward function can get with it."""

    name: str
    """The place of its prompt in the files, for error messages."""
    inputs: dict[str, Any]
    """The arguments of a function for one response, by the names in INPUTS."""
    prompt: object = ""
    """A chat or a plain string."""


class Style(Enum):
    """With which arguments a function is called. The names of its parameters say which style it
    has."""

    RESPONSE = "f(data_source, solution_str, ground_truth, extra_info=None)"
    """One response; returns its score."""
    COMPLETIONS = "f(prompts, completions, **kwargs)"
    """All responses of a batch, with each column of the data as a list, as functions for TRL are
    written; returns a list of scores. A response is a text, or a list with one message if the
    prompt is a chat."""
    SOLUTION_STRS = "f(data_sources, solution_strs, ground_truths, extra_infos)"
    """All responses of a batch, as functions for verl's batch manager are written; returns a list
    of scores."""


OWN_LISTS = {
    Style.COMPLETIONS: ("prompts", "completions"),
    Style.SOLUTION_STRS: tuple(f"{name}s" for name in INPUTS),
}
"""The arguments that every call of a function for batches has."""


def style_of(function: UserFunction) -> Style:
    """How this function wants to be called."""
    return style_of_names(_parameters(function))


def style_of_names(names: Collection[str]) -> Style:
    """How a function with these parameters wants to be called. It takes whole batches if one of
    them has a name of a list."""
    if "completions" in names or "prompts" in names:
        return Style.COMPLETIONS
    if "solution_strs" in names:
        return Style.SOLUTION_STRS
    return Style.RESPONSE


def is_async(function: UserFunction) -> bool:
    """Whether the function is written with `async def`. It may also be an object with such a method
    `__call__`."""
    if inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(type(function).__call__)


def arguments_of(
    style: Style,
    rows: Sequence[ResponseRow],
    answer_key: str | None = None,
) -> dict[str, object]:
    """The arguments of one call. `answer_key` is the name of the column with the ground truth."""
    if style is Style.RESPONSE:
        (row,) = rows
        return row.inputs
    lists: dict[str, list[Any]] = {}
    for name in INPUTS:
        lists[name] = [row.inputs[name] for row in rows]
    if style is Style.SOLUTION_STRS:
        return {f"{name}s": values for name, values in lists.items()}
    return _with_columns(rows, lists, answer_key)


def _with_columns(
    rows: Sequence[ResponseRow],
    lists: dict[str, list[Any]],
    answer_key: str | None,
) -> dict[str, object]:
    """The arguments of style COMPLETIONS. A column that some rows do not have has None there."""
    extras = [extra or {} for extra in lists["extra_info"]]
    # The names of all rows, in the order in which they come.
    names: dict[object, None] = {}
    for extra in extras:
        names.update(dict.fromkeys(extra))
    columns: dict[str, object] = {}
    for name in names:
        columns[str(name)] = [extra.get(name) for extra in extras]
    arguments = {
        "prompts": [row.prompt for row in rows],
        "completions": [_completion(row) for row in rows],
        "data_source": lists["data_source"],
        "ground_truth": lists["ground_truth"],
    }
    if answer_key is not None:
        arguments[answer_key] = lists["ground_truth"]
    return {**columns, **arguments}


def _completion(row: ResponseRow) -> object:
    """The response in the form of its prompt."""
    text = row.inputs["solution_str"]
    if isinstance(row.prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def check_signature(
    function: UserFunction,
    name: str,
    setting: str,
    kwargs: Mapping[str, object],
) -> None:
    """Raise ConfigError if the function cannot be called in its style with these further arguments,
    which the key `custom_reward_function.reward_kwargs` sets. `setting` is the key of the function
    and its value."""
    if not _has_signature(function):  # builtins and C functions
        return
    parameters = _parameters(function)
    style = style_of(function)
    always = INPUTS if style is Style.RESPONSE else OWN_LISTS[style]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument, value in kwargs.items():
        if argument in always:
            reason = "every call sets it"
        elif argument not in parameters and not takes_all:
            reason = f"{name} does not take it"
        else:
            continue
        key = f"custom_reward_function.reward_kwargs.{argument}={show(value)}"
        raise ConfigError(f"{key}: {reason} ({setting}); remove it, or rename the argument")
    call = style.value.replace("f(", f"{name}(", 1)
    missing = [argument for argument in always if argument not in parameters]
    if not takes_all and (missing or style is Style.COMPLETIONS):
        extra = ", ".join(missing) or "the columns of the data"
        fix = f"add **kwargs to its parameters, because it is called as {call}"
        raise ConfigError(f"{setting}: {name} does not take {extra}; {fix}")
    # A further parameter is a column, which is looked for in the rows.
    if style is Style.COMPLETIONS:
        return
    for parameter in required_parameters(function):
        if parameter not in always and parameter not in kwargs:
            fix = f"give {parameter} a default, or set custom_reward_function.reward_kwargs.{parameter}"
            raise ConfigError(
                f"{setting}: {name} needs {parameter}, but it is called as {call}; {fix}"
            )
    # Signature.bind does not tell: Python 3.13 puts such an argument into **kwargs, which a call
    # does not do.
    for argument, declared in parameters.items():
        has_no_keyword = declared.kind is declared.POSITIONAL_ONLY
        if has_no_keyword and (declared.default is declared.empty or not takes_all):
            reason = f"its parameter {argument} is positional only; remove the / after it"
            raise ConfigError(f"{setting}: cannot be called as {call}: {reason}")


def required_parameters(function: UserFunction) -> list[str]:
    """The names of the parameters that have no default."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required: list[str] = []
    for name, parameter in _parameters(function).items():
        if parameter.kind not in variable and parameter.default is parameter.empty:
            required.append(name)
    return required


def _has_signature(function: UserFunction) -> bool:
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        return False
    return True


def _parameters(function: UserFunction) -> Mapping[str, inspect.Parameter]:
    """The parameters by name; none if Python cannot tell, as for some functions written in C."""
    if _has_signature(function):
        return inspect.signature(function).parameters
    return {}
