"""Rewards from rules: built-in rules, chosen by a row's `data_source`, or a function from the user's own file.

Owns the inputs and outputs of such a function and the wording of its errors. Every process that scores loads the
function itself, from the config section.

Does not know tokens: its input is the text of the responses.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rolepool.config.run_keys import CustomRewardFunctionConfig
from rolepool.errors import ConfigError, DataError, RolepoolError
from rolepool.protocol import DataProto

Rule = Callable[[str, Any], float]
"""A built-in rule: takes the response and the ground truth, returns the score."""


class RewardError(RolepoolError):
    """A reward function failed on a row, or did not return a score."""


class Scored(NamedTuple):
    """The score of one response, and other numbers to log."""

    score: float
    numbers: dict[str, float]


# --- the built-in rules -------------------------------------------------------------------------------------------


def exact_match(solution_str: str, ground_truth: Any) -> float:
    """1 if the response is the ground truth, or is in the list of ground truths; surrounding white space is ignored."""
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return float(solution_str.strip() in [str(answer).strip() for answer in accepted])


def position_match(solution_str: str, ground_truth: Any) -> float:
    """The fraction of words that are correct and in the correct place; missing and extra words count as wrong."""
    given, wanted = solution_str.split(), str(ground_truth).split()
    num_right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return num_right / max(len(given), len(wanted), 1)


_FINAL_ANSWER = re.compile(r"####\s*([-+]?[$€£¥]?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
_TAIL_CHARACTERS = 300  # the answer is at the end; searching all of it would only take longer


def extract_final_answer(solution_str: str) -> Decimal | None:
    """The last number after `####`, without thousands separators and currency signs; None if there is none."""
    found = _FINAL_ANSWER.findall(solution_str[-_TAIL_CHARACTERS:])
    return _as_decimal(found[-1]) if found else None


def gsm8k(solution_str: str, ground_truth: Any) -> float:
    """1 if the final answer is the same number as the ground truth."""
    wanted = _as_decimal(str(ground_truth))
    if wanted is None:
        raise DataError(f"reward_model.ground_truth is {ground_truth!r}; the rule gsm8k needs a number")
    return float(extract_final_answer(solution_str) == wanted)


def _as_decimal(text: str) -> Decimal | None:
    try:
        number = Decimal(re.sub(r"[\s,$€£¥]", "", text))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


RULES = {"exact_match": exact_match, "position_match": position_match, "gsm8k": gsm8k, "openai/gsm8k": gsm8k}


def rule_for(data_source: str) -> Rule:
    """The rule for a data source. `exact_match/my_set` uses `exact_match`; its scores are reported separately."""
    rule = RULES.get(data_source) or RULES.get(data_source.split("/")[0])
    if rule is None:
        raise DataError(
            f"there is no built-in reward for data_source {data_source!r}; use {', '.join(RULES)} "
            "(or NAME/anything), or set custom_reward_function.path to a Python file with compute_score"
        )
    return rule


def score_by_data_source(data_source: str, solution_str: str, ground_truth: Any, **_: Any) -> float:
    """The built-in rules, called in the same way as a user's function."""
    return rule_for(data_source)(solution_str, ground_truth)


# --- one function for both kinds ----------------------------------------------------------------------------------


class RewardFunction:
    """Scores one response. The user's function is called as `compute_score(data_source=..., solution_str=..., ...)`."""

    def __init__(self, function: Callable[..., Any], name: str, file: Path | None = None) -> None:
        self._function = function
        self._file = file
        self.name = name
        """Its name in error messages; a user's function includes the key and the file."""

    def score(self, row: str, **inputs: Any) -> Scored:
        """The score of one response. `row` names its row in error messages; `inputs` are those of `compute_score`."""
        try:
            result = self._function(**inputs)
        except Exception as error:
            raise RewardError(f"{self.name}: {self._describe(error)}, for {row}") from error
        try:
            return _as_scored(result)
        except (TypeError, ValueError) as error:
            raise RewardError(f"{self.name}: {error}, for {row}") from error

    def _describe(self, error: Exception) -> str:
        """The error, with the last line of the user's file in its traceback."""
        if self._file is None:
            return str(error)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._file)]
        where = f" at {self._file.name}:{lines[-1]}" if lines else ""
        return f"{type(error).__name__}{where}: {' '.join(str(error).split())}"


def load_reward_function(custom: CustomRewardFunctionConfig, given: Callable[..., Any] | None = None) -> RewardFunction:
    """The function that a Python program has given, or the one that `custom_reward_function` names, or the built-in
    rules if there is neither."""
    if given is not None:
        file = Path(given.__code__.co_filename if inspect.isfunction(given) else "unknown file")
        _check_call(given, f"reward={custom.name}", file)
        return RewardFunction(given, f"reward={custom.name}", file)
    if custom.path is None:
        return RewardFunction(score_by_data_source, "built-in reward")
    file = Path(custom.path).expanduser().absolute()
    if not file.is_file():
        raise ConfigError(f"custom_reward_function.path={file}: there is no such file; give a Python file")
    module = ModuleType("rolepool_custom_reward")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and pickle look for the module there
    try:
        # Without dont_inherit, the `from __future__` imports of this module would also hold for the user's code.
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), vars(module))
    except Exception as error:
        reason = traceback.format_exception_only(error)[-1].strip()
        raise ConfigError(f"custom_reward_function.path={file}: cannot be imported: {reason}") from error
    function, key = vars(module).get(custom.name), f"custom_reward_function.name={custom.name}"
    if function is None:
        defined = ", ".join(name for name, _ in inspect.getmembers(module, inspect.isfunction))
        raise ConfigError(f"{key}: is not defined in {file}, which defines {defined or 'no function'}")
    _check_call(function, key, file)
    return RewardFunction(function, f"custom_reward_function.path={file}: {custom.name}", file)


def _check_call(function: Callable[..., Any], key: str, file: Path) -> None:
    """Raise ConfigError if the function cannot be called as a reward function."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{key}: is async in {file}; write it as a plain function")
    with suppress(ValueError):  # builtins and C functions have no signature
        try:
            inspect.signature(function).bind(data_source="", solution_str="", ground_truth="", extra_info={})
        except TypeError as error:
            wanted = f"{key.partition('=')[2]}(data_source, solution_str, ground_truth, extra_info=None)"
            raise ConfigError(f"{key}: cannot be called as {wanted} in {file}: {error}") from error


def score_batch(function: RewardFunction, batch: DataProto, responses: Sequence[str]) -> list[Scored]:
    """The scores of the responses to a batch, which has the columns of `prompts.batch_of`."""
    names = ("data_source", "reward_model", "extra_info", "origin", "uid")
    scored = []
    for response, *row in zip(responses, *(batch.non_tensor_batch[name] for name in names), strict=True):
        data_source, reward_model, extra_info, origin, uid = row
        inputs = {
            "data_source": data_source,
            "ground_truth": reward_model.get("ground_truth"),
            "extra_info": extra_info,
        }
        scored.append(function.score(f"{origin} (uid {uid})", solution_str=response, **inputs))
    return scored


def _as_scored(result: Any) -> Scored:
    """The score and the other numbers; entries of a dict that are not numbers (such as texts) are not logged."""
    if not isinstance(result, Mapping):
        return Scored(_as_number("the score", result), {})
    if "score" not in result:
        raise ValueError(f"returned a dict without 'score'; it has {', '.join(map(str, result))}")
    logged = {str(key): value for key, value in result.items() if key == "score" or _is_number(value)}
    numbers = {key: _as_number(key, value) for key, value in logged.items()}
    return Scored(numbers.pop("score"), numbers)


def _is_number(value: Any) -> bool:
    """Also true for scalars of numpy and torch, which have no dimensions."""
    return isinstance(value, Real) or (getattr(value, "ndim", None) == 0 and not isinstance(value, str))


def _as_number(name: str, value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"{name} is {type(value).__name__} {value!r:.60}, not a number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{name} is {number}; it must be finite")
    return number
