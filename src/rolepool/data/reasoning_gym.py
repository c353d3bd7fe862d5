"""Rows from the generators of reasoning-gym, and its verifiers.

A file of prompts may be `reasoning_gym:TASK?name=value&...`, such as
`reasoning_gym:chain_sum?max_terms=2&size=1500`. Owns what such a name means and the rows of a
generator. The package is only imported when a generator is used, because that takes seconds.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl

import yaml

from rolepool.config import show
from rolepool.errors import ConfigError, explained, first_few

PREFIX = "reasoning_gym:"
SOURCE = "reasoning_gym"
"""The first part of the data source of each row; the task is the second."""
ENTRY = "reasoning_gym"
"""The name in `extra_info` of what the verifier needs."""
MAX_SIZE = 1_000_000
DEFAULTS = {"size": 1000, "seed": 1}
FORM = (
    "write reasoning_gym:TASK?name=value&name=value, "
    "such as reasoning_gym:chain_sum?max_terms=2&size=1500"
)


def is_generator(path: str) -> bool:
    return path.startswith(PREFIX)


def is_generated(row: Mapping[str, object]) -> bool:
    """Whether a generator has made this row."""
    extra = row.get("extra_info")
    return isinstance(extra, dict) and ENTRY in extra


def open_generator(path: str, key: str) -> Sequence[dict[str, Any]]:
    """The rows of a generator. Raises ConfigError if it does not exist or refuses its
    parameters."""
    task, parameters = _parts_of(path, key)
    return _Items(_dataset(f"{key}={path}", task, parameters), task)


def check_generator(path: str, key: str) -> None:
    """Raise ConfigError if the name is not well-formed, or if the package is not installed. Does
    not import it."""
    _parts_of(path, key)


def reason_of_repeats(training: str, validation: str) -> str | None:
    """Why two generators make the same items, with a seed for validation that repeats none of
    them; None if their seeds do not overlap, or if they are different tasks.

    Neighbouring seeds look different, but a generator gives item i the seed `seed` + i.
    """
    task, parameters = _parts_of(training, "data.train_files")
    other_task, other_parameters = _parts_of(validation, "data.val_files")
    # What is left are the parameters that decide what an item with a seed is.
    start: int = parameters.pop("seed")
    size: int = parameters.pop("size")
    other_start: int = other_parameters.pop("seed")
    other_size: int = other_parameters.pop("size")
    if (task, parameters) != (other_task, other_parameters):
        return None
    end = start + size
    other_end = other_start + other_size
    if other_start >= end or start >= other_end:
        return None
    return (
        f"item i of a generator has the seed `seed` + i, so seed={other_start} repeats items of "
        f"seed={start} with size={size}; write seed={end} or higher in data.val_files"
    )


def _parts_of(path: str, key: str) -> tuple[str, dict[str, Any]]:
    """The task, and its parameters."""
    task, _, query = path.removeprefix(PREFIX).partition("?")
    if not re.fullmatch(r"\w+", task):
        raise ConfigError(f"{key}={path}: does not name a task; {FORM}")
    parameters: dict[str, Any] = dict(DEFAULTS)
    with explained(f"{key}={path}: cannot be read", FORM, ValueError, yaml.YAMLError):
        for name, text in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
            parameters[name] = yaml.safe_load(text)
    for name in DEFAULTS:
        value = parameters[name]
        # `type`, because True is an int.
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise ConfigError(
                f"{key}={path}: {name}={show(value)} must be an integer from 0 to {MAX_SIZE}"
            )
    if find_spec("reasoning_gym") is None:
        raise ConfigError(
            f"{key}={path}: needs the package reasoning-gym; "
            "run pip install 'rolepool[reasoning-gym]'"
        )
    return task, parameters


def _dataset(setting: str, task: str, parameters: dict[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        if close:
            meant = f"did you mean {close[0]}?"
        else:
            meant = f"some are {first_few(sorted(DATASETS), 5)}"
        raise ConfigError(f"{setting}: reasoning-gym has no task {task}; {meant}")
    settings = DATASETS[task][1]
    known = [field.name for field in fields(settings)]
    unknown = [name for name in parameters if name not in known]
    if unknown:
        raise ConfigError(
            f"{setting}: {task} has no parameter {unknown[0]}; it has {', '.join(known)}"
        )
    # A generator checks its parameters with `assert` or its own errors.
    with explained(f"{setting}: reasoning-gym refuses it", "correct the parameters", Exception):
        return reasoning_gym.create_dataset(task, **parameters)


class _Items(Sequence[dict[str, Any]]):
    """The items of a generator as rows."""

    def __init__(self, dataset: Any, task: str) -> None:
        self._dataset = dataset
        self._task = task

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        item = self._dataset[index]
        message = {"role": "user", "content": item["question"]}
        entry = {"task": self._task, "item": dict(item)}
        return {
            "prompt": [message],
            "data_source": f"{SOURCE}/{self._task}",
            "reward_model": {"ground_truth": item["answer"]},
            "extra_info": {ENTRY: entry},
        }


def verify(answer: str, entry: dict[str, Any]) -> float:
    """The score of an answer. `entry` is what `ENTRY` names."""
    score_answer = _verifier(entry["task"])
    return float(score_answer(answer, entry["item"]))


@lru_cache
def _verifier(task: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
