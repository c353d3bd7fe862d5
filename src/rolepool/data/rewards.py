"""Rewards from functions: built-in rules, functions from the user's own files, or a weighted sum of both.

Owns the inputs and outputs of such a function and the wording of its errors. Every process that scores loads the
function itself, from the config section. Imports no torch, because `rolepool.data.files` uses it before training.

Does not know tokens: its input is the text of the responses.
"""

import inspect
import math
import symtable
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Protocol, Self

from rolepool.config import Config, show
from rolepool.config.model_keys import RewardKwargsConfig
from rolepool.data.rules import RULES, Rule, Score, rule_for
from rolepool.errors import ConfigError, RolepoolError, explained

PYTHON_FUNCTION = "(a Python function)"
"""Written for `custom_reward_function.path` in the config of a run if a Python program has given the function."""

SCORED_COLUMNS = ("data_source", "reward_model", "extra_info", "origin", "uid")
"""The columns that `score_batch` reads."""
NUMBERS, PRED = "reward_numbers", "pred"
"""The columns of scored rows with the other numbers of each response, as a dict, and with its answer or None."""


class RewardError(RolepoolError):
    """A reward function failed on a row, or did not return a score."""


class SampleError(RewardError):
    """A reward function raised an error on a row, or was too slow. `on_error=zero` gives such a row score 0."""


class Scored(NamedTuple):
    """The score of one response, and other numbers to log."""

    score: float
    numbers: dict[str, float]
    pred: str | None = None
    """The answer in the response, for majority votes in validation; None if the function does not return it."""


def score_by_rule(data_source: str, solution_str: str, ground_truth: Any, rule: Rule | None = None, **_: Any) -> Score:
    """A built-in rule, called in the same way as a user's function; None uses the rule for the data source."""
    return (rule or rule_for(data_source))(solution_str, ground_truth)


# --- one function for both kinds ----------------------------------------------------------------------------------


Row = tuple[str, dict[str, Any]]
"""The name of a row in error messages, and the inputs of `compute_score`."""


class Reward(Protocol):
    """Scores responses: a function in this process, or a process with it."""

    def score_rows(self, rows: Sequence[Row]) -> list[Scored]: ...


class RewardFunction:
    """One function. The user's function is called as `compute_score(data_source=..., solution_str=..., ...)`."""

    def __init__(self, function: Callable[..., Any], name: str, file: Path | None = None) -> None:
        self._function, self._file = function, file
        self.name, self.is_users = name, file is not None
        """Its name in error messages, which includes the key and the file of a user's function, and whether it runs
        code of the user."""

    def score_rows(self, rows: Sequence[Row]) -> list[Scored]:
        """The scores of the rows, one after another."""
        return [self.score(name, **inputs) for name, inputs in rows]

    def score(self, row: str, **inputs: Any) -> Scored:
        """The score of one response. `row` names its row in error messages; `inputs` are those of `compute_score`."""
        try:
            result = self._function(**inputs)
        except BaseException as error:  # also sys.exit(), which must not end the process silently
            raise SampleError(f"{self.name}: {self._describe(error)}, for {row}") from error
        try:
            return _as_scored(result)
        except (TypeError, ValueError) as error:
            raise RewardError(f"{self.name}: {error}, for {row}") from error

    def _describe(self, error: BaseException) -> str:
        """The error, with the last line of the user's file in its traceback."""
        if self._file is None:
            return str(error)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._file)]
        where = f" at {self._file.name}:{lines[-1]}" if lines else ""
        return f"{type(error).__name__}{where}: {' '.join(str(error).split())}"


class WeightedRewards(RewardFunction):
    """The weighted sum of several functions. The score of each is logged under its name."""

    def __init__(self, parts: Sequence[tuple[str, float, RewardFunction]]) -> None:
        self._parts, self.name = parts, "reward.functions"
        self.is_users = any(function.is_users for _, _, function in parts)

    def score(self, row: str, **inputs: Any) -> Scored:
        """The sum for one response. Other numbers of a function are logged below its name. The answer is that of the
        first function that returns one."""
        total, numbers, pred = 0.0, dict[str, float](), None
        for name, weight, function in self._parts:
            scored = function.score(row, **inputs)
            total += weight * scored.score
            numbers[name] = scored.score
            numbers |= {f"{name}/{other}": value for other, value in scored.numbers.items()}
            pred = scored.pred if pred is None else pred
        return Scored(total, numbers, pred)


INPUTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of every reward function."""


class FunctionInFile(NamedTuple):
    """A function in a Python file of the user. `setting` is how error messages name the key and its value."""

    file: Path
    name: str
    setting: str
    kwargs: Mapping[str, Any] = MappingProxyType({})
    """Further arguments: `custom_reward_function.reward_kwargs`."""

    def checked(self) -> Self:
        """The same. Raises ConfigError if the file cannot be compiled or does not contain the name. Does not run the
        file."""
        with explained(f"{self.setting}: cannot be imported", "give a Python file", SyntaxError, ValueError):
            text = self.file.read_text(encoding="utf-8", errors="replace")
            table = symtable.symtable(text, str(self.file), "exec")
        if self.name not in table.get_identifiers() and "import *" not in text:
            defined = ", ".join(symbol.get_name() for symbol in table.get_symbols() if symbol.is_namespace())
            place = f"{self.file}, which defines {defined or 'no function'}"
            raise ConfigError(f"{self.setting}: {self.name} is not defined in {place}")
        return self

    def load(self) -> RewardFunction:
        """Run the file. Raises ConfigError if the function cannot be called like a reward function."""
        module = ModuleType(f"rolepool_custom_reward_{self.file.stem}")
        module.__file__ = str(self.file)
        sys.modules[module.__name__] = module  # dataclasses and pickle look for the module there
        try:
            # dont_inherit: a `from __future__` import of this module must not hold for the user's code.
            exec(compile(self.file.read_bytes(), str(self.file), "exec", dont_inherit=True), vars(module))
        except (Exception, SystemExit) as error:
            reason = traceback.format_exception_only(error)[-1].strip()
            raise ConfigError(f"{self.setting}: cannot be imported: {reason}") from error
        function = self.with_kwargs(vars(module).get(self.name))
        return RewardFunction(function, f"{self.setting}: {self.name}", self.file)

    def with_kwargs(self, function: Any) -> Callable[..., Any]:
        """The function with its further arguments. Raises ConfigError if it cannot be called like a reward function."""
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"{self.setting}: {self.name} is not a plain function in {self.file}; write it as one")
        with suppress(ValueError):  # builtins and C functions have no signature
            signature = inspect.signature(function)
            takes_all = any(one.kind == one.VAR_KEYWORD for one in signature.parameters.values())
            for name, value in self.kwargs.items():
                if name in INPUTS or (name not in signature.parameters and not takes_all):
                    reason = "every call sets it" if name in INPUTS else f"{self.name} in {self.file} does not take it"
                    key = f"custom_reward_function.reward_kwargs.{name}={show(value)}"
                    raise ConfigError(f"{key}: {reason}; remove it, or rename the argument")
            try:
                signature.bind(**dict.fromkeys(INPUTS), **self.kwargs)
            except TypeError as error:
                call = f"{self.name}(data_source, solution_str, ground_truth, extra_info=None)"
                raise ConfigError(f"{self.setting}: cannot be called as {call}: {error}") from error
        return partial(function, **self.kwargs)


def functions_of(config: Config) -> dict[str, Callable[[], RewardFunction]]:
    """What loads the rules and the functions of the user, by the names under which scores are logged. Raises
    ConfigError if a rule does not exist or a file of the user has no such function. Does not run the files."""
    custom = config.custom_reward_function
    if custom.path is not None:  # then there are no other functions
        file = Path(custom.path).expanduser().absolute()
        setting = f"custom_reward_function.path={file}"
        return {custom.name: FunctionInFile(file, custom.name, setting, custom.reward_kwargs).checked().load}
    functions: dict[str, Callable[[], RewardFunction]] = {}
    for text in (entry.function for entry in config.reward.functions):
        setting = f"reward.functions={text}"
        path, _, name = text.rpartition(":")
        if text not in RULES and not path.endswith(".py"):
            raise ConfigError(f"{setting}: is not a rule; use {', '.join(RULES)}, or your own FILE.py:FUNCTION")
        if name in functions:
            raise ConfigError(f"{setting}: there are two functions with the name {name}; rename one")
        if text in RULES:
            functions[name] = partial(RewardFunction, partial(score_by_rule, rule=RULES[text]), f"rule {text}")
        else:
            functions[name] = FunctionInFile(Path(path).expanduser().absolute(), name, setting).checked().load
    return functions


def load_reward_function(config: Config, given: Callable[..., Any] | None = None) -> RewardFunction:
    """The function that a Python program has given, or the functions of the config, or the built-in rules for data
    sources if there is neither."""
    custom, entries = config.custom_reward_function, config.reward.functions
    if given is not None:
        file = Path(given.__code__.co_filename if inspect.isfunction(given) else "unknown file")
        setting = f"reward={custom.name}"
        function = FunctionInFile(file, custom.name, setting, custom.reward_kwargs).with_kwargs(given)
        return RewardFunction(function, setting, file)
    functions = {name: load() for name, load in functions_of(config).items()}
    if entries:
        weights = [entry.weight for entry in entries]
        return WeightedRewards(list(zip(functions, weights, functions.values(), strict=True)))
    return functions.get(custom.name) or RewardFunction(score_by_rule, "built-in reward")


def score_batch(reward: Reward, columns: Mapping[str, Iterable[Any]], responses: Sequence[str]) -> list[Scored]:
    """The scores of the responses to a batch, which has the columns of `prompts.batch_of`."""
    rows: list[Row] = []
    named = (columns[name] for name in SCORED_COLUMNS)
    for response, data_source, reward_model, extra_info, origin, uid in zip(responses, *named, strict=True):
        inputs = (data_source, response, reward_model.get("ground_truth"), extra_info)
        rows.append((f"{origin} (uid {uid})", dict(zip(INPUTS, inputs, strict=True))))
    return reward.score_rows(rows)


def with_overlong_penalty(scored: Scored, num_tokens: int, keys: RewardKwargsConfig) -> Scored:
    """The score with DAPO's penalty, a negative number, for a response with this number of tokens. It grows linearly
    over the last `len` tokens before `max_resp_len`, up to `penalty_factor`, and further after that."""
    buffer = keys.overlong_buffer_cfg
    num_free_tokens = keys.max_resp_len - buffer.len
    penalty = min((num_free_tokens - num_tokens) / buffer.len * buffer.penalty_factor, 0.0)
    logged = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if buffer.log else {}
    return Scored(scored.score + penalty, scored.numbers | logged, scored.pred)


def _as_scored(result: Any) -> Scored:
    """The score, the other numbers, and `pred`; other entries of a dict that are not numbers are not logged."""
    if not isinstance(result, Mapping):
        return Scored(_as_number("the score", result), {})
    if "score" not in result:
        raise ValueError(f"returned a dict without 'score'; it has {', '.join(map(str, result))}")
    logged = {str(key): value for key, value in result.items() if key == "score" or _is_number(value)}
    numbers = {key: _as_number(key, value) for key, value in logged.items()}
    pred = numbers.get("pred", result.get("pred"))
    return Scored(numbers.pop("score"), numbers, None if pred is None else str(pred))


def _is_number(value: Any) -> bool:
    """Also true for scalars of numpy and torch, which have no dimensions."""
    return isinstance(value, Real) or (getattr(value, "ndim", None) == 0 and not isinstance(value, str))


def _as_number(name: str, value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"{name} is {type(value).__name__} {value!r:.60}, not a number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{name} is {number}; it must be finite")
    return number
