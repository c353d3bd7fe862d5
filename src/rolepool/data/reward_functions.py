"""Loads reward functions: built-in rules, and functions from the user's own files.

Every process that scores loads the function itself, from the config section. Imports no torch,
because `rolepool.data.files` uses it before training.
"""

import inspect
import symtable
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Self

from rolepool.config import Config
from rolepool.data.reward_signatures import check_signature
from rolepool.data.rewards import RewardFunction, WeightedRewards
from rolepool.data.rules import RULES, Rule, Score, call_rule, rule_for
from rolepool.errors import ConfigError, explained

PYTHON_FUNCTION = "(a Python function)"
"""Written for `custom_reward_function.path` in the config of a run if a Python program has given
the function."""


def score_by_rule(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    rule: Rule | None = None,
    **_: Any,
) -> Score:
    """A built-in rule, called in the same way as a user's function; None uses the rule for the data
    source."""
    rule = rule or rule_for(data_source)
    return call_rule(rule, solution_str, ground_truth, extra_info)


class FunctionInFile(NamedTuple):
    """A function in a Python file of the user. `setting` is how error messages name the key and its
    value."""

    file: Path
    name: str
    setting: str
    kwargs: Mapping[str, Any] = MappingProxyType({})
    """Further arguments: `custom_reward_function.reward_kwargs`."""
    answer_key: str | None = None
    """The column with the ground truth, which a function for batches also gets under this name."""
    is_one_of_several: bool = False
    """Whether it may return None for responses that others score, if it is a function for
    batches."""

    def checked(self) -> Self:
        """The same. Raises ConfigError if the file cannot be compiled or does not contain the name.
        Does not run the file."""
        with explained(
            f"{self.setting}: cannot be imported", "give a Python file", SyntaxError, ValueError
        ):
            text = self.file.read_text(encoding="utf-8", errors="replace")
            table = symtable.symtable(text, str(self.file), "exec")
        if self.name not in table.get_identifiers() and "import *" not in text:
            defined = ", ".join(
                symbol.get_name() for symbol in table.get_symbols() if symbol.is_namespace()
            )
            place = f"{self.file}, which defines {defined or 'no function'}"
            raise ConfigError(f"{self.setting}: {self.name} is not defined in {place}")
        return self

    def load(self) -> RewardFunction:
        """Run the file. Raises ConfigError if the function cannot be called like a reward
        function."""
        module = ModuleType(f"rolepool_custom_reward_{self.file.stem}")
        module.__file__ = str(self.file)
        sys.modules[module.__name__] = module  # dataclasses and pickle look for the module there
        try:
            # dont_inherit: a `from __future__` import of this module must not hold for the user's
            # code.
            exec(
                compile(self.file.read_bytes(), str(self.file), "exec", dont_inherit=True),
                vars(module),
            )
        except (Exception, SystemExit) as error:
            reason = traceback.format_exception_only(error)[-1].strip()
            raise ConfigError(f"{self.setting}: cannot be imported: {reason}") from error
        function = self.with_kwargs(vars(module).get(self.name))
        name = f"{self.setting}: {self.name}"
        return RewardFunction(function, name, self.file, self.answer_key, self.is_one_of_several)

    def with_kwargs(self, function: Any) -> Callable[..., Any]:
        """The function with its further arguments. Raises ConfigError if it cannot be called like a
        reward function."""
        if not callable(function):
            raise ConfigError(
                f"{self.setting}: {self.name} is not a function in {self.file}; write it as one"
            )
        check_signature(function, self.name, self.setting, self.kwargs)
        return partial(function, **self.kwargs) if self.kwargs else function


def functions_of(config: Config) -> dict[str, Callable[[], RewardFunction]]:
    """What loads the rules and the functions of the user, by the names under which scores are
    logged. Raises ConfigError if a rule does not exist or a file of the user has no such function.
    Does not run the files."""
    custom = config.custom_reward_function
    if custom.path is not None:  # then there are no other functions
        file = Path(custom.path).expanduser().absolute()
        setting = f"custom_reward_function.path={file}"
        users = FunctionInFile(
            file, custom.name, setting, custom.reward_kwargs, config.data.answer_key
        )
        return {custom.name: users.checked().load}
    functions: dict[str, Callable[[], RewardFunction]] = {}
    for text in (entry.function for entry in config.reward.functions):
        setting = f"reward.functions={text}"
        path, _, name = text.rpartition(":")
        if text not in RULES and not path.endswith(".py"):
            raise ConfigError(
                f"{setting}: is not a rule; use {', '.join(RULES)}, or your own FILE.py:FUNCTION"
            )
        if name in functions:
            raise ConfigError(
                f"{setting}: there are two functions with the name {name}; rename one"
            )
        if text in RULES:
            functions[name] = partial(
                RewardFunction, partial(score_by_rule, rule=RULES[text]), f"rule {text}"
            )
        else:
            file = Path(path).expanduser().absolute()
            is_one_of_several = len(config.reward.functions) > 1
            users = FunctionInFile(
                file, name, setting, {}, config.data.answer_key, is_one_of_several
            )
            functions[name] = users.checked().load
    return functions


def load_reward_function(
    config: Config, given: Callable[..., Any] | None = None
) -> RewardFunction | WeightedRewards:
    """The function that a Python program has given, or the functions of the config, or the built-in
    rules for data sources if there is neither."""
    custom = config.custom_reward_function
    entries = config.reward.functions
    if given is not None:
        file = Path(given.__code__.co_filename if inspect.isfunction(given) else "unknown file")
        setting = f"reward={custom.name}"
        function = FunctionInFile(file, custom.name, setting, custom.reward_kwargs).with_kwargs(
            given
        )
        return RewardFunction(function, setting, file, config.data.answer_key)
    functions = {name: load() for name, load in functions_of(config).items()}
    if entries:
        weights = [entry.weight for entry in entries]
        return WeightedRewards(list(zip(functions, weights, functions.values(), strict=True)))
    return functions.get(custom.name) or RewardFunction(score_by_rule, "built-in reward")
