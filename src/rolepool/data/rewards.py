"""Rewards from functions: their outputs, and the weighted sum of several.

Owns the inputs and outputs of such a function and the wording of its errors. Imports no torch. How
a function is called is in `reward_signatures`, and how it is loaded in `reward_functions`.

Does not know tokens: its input is the text of the responses.
"""

import math
import traceback
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rolepool.config.model_keys import RewardKwargsConfig
from rolepool.data.reward_signatures import (
    ResponseRow,
    Style,
    UserFunction,
    arguments_of,
    is_async,
    style_of,
)
from rolepool.errors import RolepoolError

SCORED_COLUMNS = ("data_source", "reward_model", "extra_info", "origin", "uid", "raw_prompt")
"""The columns that `score_batch` reads."""
NUMBERS = "reward_numbers"
"""The column of scored rows with the other numbers of each response, as a dict."""
PRED = "pred"
"""The column of scored rows with the answer of each response, or None."""
FAILED = "failed"
"""The number of a response that says whether a function failed for it, which `on_error=zero`
allows."""
SHOWN_CHARACTERS = 200
"""How much of a response an error message shows."""


class RewardError(RolepoolError):
    """A reward function failed on a row, or did not return a score."""


class SampleError(RewardError):
    """A reward function raised an error on a row, or was too slow. `on_error=zero` gives such a row
    score 0."""


class Scored(NamedTuple):
    """The score of one response, and other numbers to log."""

    score: float
    """NaN if one of several functions does not score this response."""
    numbers: dict[str, float]
    pred: str | None = None
    """The answer in the response, for majority votes in validation; None if the function does not
    return it."""


# One function, and the sum of several


class Reward(Protocol):
    """Scores responses: a function in this process, processes with it, or a sum of such."""

    def score_rows(self, rows: Sequence[ResponseRow]) -> list[Scored]: ...


RowsOfCall = Sequence[ResponseRow]
"""The rows of one call of a function: one row, or a whole batch."""
Outcome = list[Scored] | RewardError
"""The scores of the rows of one call, or why it failed."""


class RewardFunction:
    """One function: a built-in rule, or a function of the user, which is called as its style
    says."""

    def __init__(
        self,
        function: UserFunction,
        name: str,
        file: Path | None = None,
        answer_key: str | None = None,
        is_one_of_several: bool = False,
    ) -> None:
        self._function = function
        self._file = file
        self._answer_key = answer_key
        self.name = name
        """Its name in error messages, which includes the key and the file of a user's function."""
        self.is_users = file is not None
        """Whether it runs code of the user."""
        self.style = style_of(function)
        self.is_async = is_async(function)
        self._may_leave_out = is_one_of_several and self.takes_batches

    @property
    def takes_batches(self) -> bool:
        return self.style is not Style.RESPONSE

    def in_processes(self, start: Callable[["RewardFunction"], Reward]) -> Reward:
        """The same, with code of the user in the processes that `start` makes for a function."""
        return start(self) if self.is_users else self

    def calls_for(self, rows: Sequence[ResponseRow]) -> list[RowsOfCall]:
        """Which rows each call gets."""
        if self.takes_batches:
            return [rows] if rows else []
        return [[row] for row in rows]

    def score_rows(self, rows: Sequence[ResponseRow]) -> list[Scored]:
        """The scores of the rows, one call after another, in this process. Not for async
        functions."""
        scored: list[Scored] = []
        for call in self.calls_for(rows):
            scored += self.score_call(call)
        return scored

    def score_call(self, call: RowsOfCall) -> list[Scored]:
        """The scores of the rows of one call."""
        try:
            arguments = arguments_of(self.style, call, self._answer_key)
            result = self._function(**arguments)
        except BaseException as error:  # also sys.exit(), which must not end the process silently
            raise self.failure(self._describe(error), call) from error
        return self._read(result, call)

    async def score_call_async(self, call: RowsOfCall) -> list[Scored]:
        """The same for an async function. It can be cancelled."""
        try:
            arguments = arguments_of(self.style, call, self._answer_key)
            pending: Awaitable[Any] = self._function(**arguments)
            result = await pending
        except CancelledError:
            raise
        except BaseException as error:
            raise self.failure(self._describe(error), call) from error
        return self._read(result, call)

    def place_of(self, call: RowsOfCall) -> str:
        """The rows of a call, for error messages."""
        if len(call) > 1:
            return f"for {len(call)} responses, from {call[0].name} to {call[-1].name}"
        (row,) = call
        text = row.inputs["solution_str"]
        shown = text[:SHOWN_CHARACTERS]
        begins = "begins with" if len(text) > SHOWN_CHARACTERS else "is"
        return f"for {row.name}; the response {begins} {shown!r}"

    def failure(self, problem: str, call: RowsOfCall) -> SampleError:
        """The error of a call that has this problem."""
        return SampleError(f"{self.name}: {problem}, {self.place_of(call)}")

    def _read(self, result: object, call: RowsOfCall) -> list[Scored]:
        """What a call returned for each of its rows."""
        try:
            if self.takes_batches:
                results = _as_list(result, len(call))
            else:
                results = [result]
        except TypeError as error:
            raise RewardError(f"{self.name}: {error}, {self.place_of(call)}") from error
        return [self._read_row(of_row, row) for of_row, row in zip(results, call, strict=True)]

    def _read_row(self, result: object, row: ResponseRow) -> Scored:
        if result is None and self._may_leave_out:
            return Scored(math.nan, {})
        try:
            return _as_scored(result)
        except (TypeError, ValueError) as error:
            raise RewardError(f"{self.name}: {error}, {self.place_of([row])}") from error

    def _describe(self, error: BaseException) -> str:
        """The error, with the last line of the user's file in its traceback."""
        if self._file is None:
            return str(error)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._file)]
        where = f" at {self._file.name}:{lines[-1]}" if lines else ""
        in_one_line = " ".join(str(error).split())
        return f"{type(error).__name__}{where}: {in_one_line}"


class WeightedRewards:
    """The weighted sum of several functions. The score of each is logged under its name."""

    is_async = False

    def __init__(self, parts: Sequence[tuple[str, float, RewardFunction]]) -> None:
        self._parts = parts
        self._scorers: list[Reward] = [function for _, _, function in parts]
        self.is_users = any(function.is_users for _, _, function in parts)
        self.takes_batches = any(function.takes_batches for _, _, function in parts)

    def in_processes(self, start: Callable[[RewardFunction], Reward]) -> Reward:
        """The same, with code of the user in the processes that `start` makes for a function."""
        placed = WeightedRewards(self._parts)
        placed._scorers = [function.in_processes(start) for _, _, function in self._parts]
        return placed

    def score_rows(self, rows: Sequence[ResponseRow]) -> list[Scored]:
        """The sums for all rows. The functions score the rows one after another."""
        of_functions = [scorer.score_rows(rows) for scorer in self._scorers]
        of_rows = zip(*of_functions, strict=True)
        return [self._sum(of_row, row) for of_row, row in zip(of_rows, rows, strict=True)]

    def _sum(self, of_row: Sequence[Scored], row: ResponseRow) -> Scored:
        """The sum for one response; 0 if a function failed for it. Other numbers of a function are
        logged below its name. The answer is that of the first function that returns one."""
        if all(math.isnan(scored.score) for scored in of_row):
            fix = "one of them must return a number"
            raise RewardError(
                f"reward.functions: all functions returned None, for {row.name}; {fix}"
            )
        failures = [scored.numbers[FAILED] for scored in of_row if FAILED in scored.numbers]
        if any(failures):
            return Scored(0.0, {FAILED: 1.0})
        total = 0.0
        numbers: dict[str, float] = {}
        pred = None
        for (name, weight, _), scored in zip(self._parts, of_row, strict=True):
            if math.isnan(scored.score):
                continue
            total += weight * scored.score
            numbers[name] = scored.score
            for key, value in scored.numbers.items():
                if key != FAILED:
                    numbers[f"{name}/{key}"] = value
            if pred is None:
                pred = scored.pred
        if failures:
            numbers[FAILED] = 0.0
        return Scored(total, numbers, pred)


def score_batch(
    reward: Reward, columns: Mapping[str, Iterable[Any]], responses: Sequence[str]
) -> list[Scored]:
    """The scores of the responses to a batch, which has the columns of `prompts.batch_of`. It needs
    no `raw_prompt` if the functions are built-in rules."""
    columns = {"raw_prompt": [""] * len(responses), **columns}
    read = [columns[name] for name in SCORED_COLUMNS]
    rows: list[ResponseRow] = []
    for response, data_source, reward_model, extra_info, origin, uid, prompt in zip(
        responses, *read, strict=True
    ):
        inputs = {
            "data_source": data_source,
            "solution_str": response,
            "ground_truth": reward_model.get("ground_truth"),
            "extra_info": extra_info,
        }
        rows.append(ResponseRow(f"{origin} (uid {uid})", inputs, prompt))
    return reward.score_rows(rows)


def with_overlong_penalty(
    scored: Scored,
    num_tokens: int,
    keys: RewardKwargsConfig,
) -> Scored:
    """The score with DAPO's penalty, a negative number, for a response with this number of tokens.
    It grows linearly over the last `len` tokens before `max_resp_len`, up to `penalty_factor`, and
    further after that."""
    buffer = keys.overlong_buffer_cfg
    num_free_tokens = keys.max_resp_len - buffer.len
    # Negative if the response has more tokens than are free.
    part_of_buffer = (num_free_tokens - num_tokens) / buffer.len
    penalty = min(part_of_buffer * buffer.penalty_factor, 0.0)
    numbers = dict(scored.numbers)
    if buffer.log:
        numbers["overlong_reward"] = penalty
        numbers["overlong"] = float(penalty < 0)
    return Scored(scored.score + penalty, numbers, scored.pred)


def _as_list(result: object, num_rows: int) -> list[Any]:
    """The scores that a function for batches returned. Raises TypeError if it is not one for each
    row."""
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"returned {type(result).__name__}, not a list with a score for each response"
        )
    if len(values) != num_rows:
        raise TypeError(f"returned {len(values)} scores for {num_rows} responses")
    return list(values)


def _as_scored(result: object) -> Scored:
    """The score, the other numbers, and `pred`; other entries of a dict that are not numbers are
    not logged."""
    if not isinstance(result, Mapping):
        return Scored(_as_number("the score", result), {})
    if "score" not in result:
        keys = ", ".join(map(str, result))
        raise ValueError(f"returned a dict without 'score'; it has {keys}")
    numbers: dict[str, float] = {}
    for key, value in result.items():
        # A score that is not a number is an error, and other entries may be anything.
        if key == "score" or _is_number(value):
            name = str(key)
            numbers[name] = _as_number(name, value)
    answer = numbers.get("pred", result.get("pred"))
    pred = None if answer is None else str(answer)
    return Scored(numbers.pop("score"), numbers, pred)


def _is_number(value: object) -> bool:
    """Also true for scalars of numpy and torch, which have no dimensions."""
    if isinstance(value, Real):
        return True
    return getattr(value, "ndim", None) == 0 and not isinstance(value, str)


def _as_number(name: str, value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"{name} is {type(value).__name__} {value!r:.60}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it must be finite")
    return number
