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
from rolepool.data.reward_signatures import UserFunction, check_signature
from rolepool.data.rewards import RewardFunction, WeightedRewards
from rolepool.data.rules import RULES, Rule, Score, call_rule, rule_for
from rolepool.errors import ConfigError, explained

PYTHON_FUNCTION = "(a Python function)"
"""Written for `custom_reward_function.path` in the config of a run if a Python program has given
the function."""


def score_by_rule(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: dict[str, object] | None = None,
    rule: Rule | None = None,
    **_: object,
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
    kwargs: Mapping[str, object] = MappingProxyType({})
    """Further arguments: `custom_reward_function.reward_kwargs`."""
    answer_key: str | None = None
    """The column with the ground truth, which a function for batches also gets under this name."""
    is_one_of_several: bool = False
    """Whether it may return None for responses that others score, if it is a function for
    batches."""

    def checked(self) -> Self:
        """The same. Raises ConfigError if the file cannot be compiled or does not contain the name.
        Does not run the file."""
        problem = f"{self.setting}: cannot be imported"
        with explained(problem, "give a Python file", SyntaxError, ValueError):
            text = self.file.read_text(encoding="utf-8", errors="replace")
            table = symtable.symtable(text, str(self.file), "exec")
        is_defined = self.name in table.get_identifiers()
        # It may also come from a module from which everything is imported.
        if is_defined or "import *" in text:
            return self
        symbols = table.get_symbols()
        defined = [symbol.get_name() for symbol in symbols if symbol.is_namespace()]
        names = ", ".join(defined) or "no function"
        place = f"{self.file}, which defines {names}"
        raise ConfigError(f"{self.setting}: {self.name} is not defined in {place}")

    def load(self) -> RewardFunction:
        """Run the file. Raises ConfigError if the function cannot be called like a reward
        function."""
        module = ModuleType(f"rolepool_custom_reward_{self.file.stem}")
        module.__file__ = str(self.file)
        sys.modules[module.__name__] = module  # dataclasses and pickle look for the module there
        try:
            # dont_inherit: a `from __future__` import of this module must not hold for the user's
            # code.
            source = self.file.read_bytes()
            code = compile(source, str(self.file), "exec", dont_inherit=True)
            exec(code, vars(module))
        except (Exception, SystemExit) as error:
            reason = traceback.format_exception_only(error)[-1].strip()
            raise ConfigError(f"{self.setting}: cannot be imported: {reason}") from error
        function = self.with_kwargs(vars(module).get(self.name))
        return RewardFunction(
            function=function,
            name=f"{self.setting}: {self.name}",
            file=self.file,
            answer_key=self.answer_key,
            is_one_of_several=self.is_one_of_several,
        )

    def with_kwargs(self, function: Any) -> UserFunction:
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
            file=file,
            name=custom.name,
            setting=setting,
            kwargs=custom.reward_kwargs,
            answer_key=config.data.answer_key,
        )
        return {custom.name: users.checked().load}
    functions: dict[str, Callable[[], RewardFunction]] = {}
    for entry in config.reward.functions:
        text = entry.function
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
            rule = partial(score_by_rule, rule=RULES[text])
            functions[name] = partial(RewardFunction, rule, f"rule {text}")
            continue
        users = FunctionInFile(
            file=Path(path).expanduser().absolute(),
            name=name,
            setting=setting,
            answer_key=config.data.answer_key,
            is_one_of_several=len(config.reward.functions) > 1,
        )
        functions[name] = users.checked().load
    return functions


def load_reward_function(
    config: Config, function: UserFunction | None = None
) -> RewardFunction | WeightedRewards:
    """The function that a Python program has given, or the functions of the config, or the built-in
    rules for data sources if there is neither."""
    custom = config.custom_reward_function
    entries = config.reward.functions
    if function is not None:
        file = Path("unknown file")
        if inspect.isfunction(function):
            file = Path(function.__code__.co_filename)
        setting = f"reward={custom.name}"
        users = FunctionInFile(
            file=file,
            name=custom.name,
            setting=setting,
            kwargs=custom.reward_kwargs,
        )
        bound = users.with_kwargs(function)
        return RewardFunction(bound, setting, file, config.data.answer_key)
    functions = {name: load() for name, load in functions_of(config).items()}
    if entries:
        parts: list[tuple[str, float, RewardFunction]] = []
        for entry, (name, loaded) in zip(entries, functions.items(), strict=True):
            parts.append((name, entry.weight, loaded))
        return WeightedRewards(parts)
    return functions.get(custom.name) or RewardFunction(score_by_rule, "built-in reward")
