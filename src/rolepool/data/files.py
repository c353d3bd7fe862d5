"""Rows of prompt files: Parquet, JSONL and Hugging Face datasets, and what a row must contain.

Owns the formats, which columns of a row mean what, and a check of all files that needs neither
torch nor a tokenizer. `find_problems` is called before training imports anything slow.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError
from typing_extensions import TypedDict

from rolepool.config import Config, show
from rolepool.config.base import lines_of
from rolepool.config.sources import is_demo_to_make
from rolepool.data.reasoning_gym import (
    check_generator,
    is_generated,
    is_generator,
    open_generator,
)
from rolepool.data.reward_functions import PYTHON_FUNCTION, functions_of
from rolepool.data.reward_needs import TRUTH, Need, likely_answer, missing, needs_of
from rolepool.data.rules import RULES_WITHOUT_TRUTH, call_rule, rules_for
from rolepool.errors import ConfigError, DataError, explained

Row = dict[str, Any]
COLUMN_KEYS = ("data.prompt_key", "data.answer_key")
"""The keys that name columns of a row."""


class BadRow(DataError):
    """A row that cannot be used. Rows of the same `kind` have the same problem."""

    def __init__(self, problem: str, kind: str = "") -> None:
        super().__init__(problem)
        self.kind = kind


def lines_by_kind(problems: Sequence[BadRow], num_rows: int) -> Iterator[str]:
    """One line for each kind of problem: its first row, and in how many of the rows it occurs."""
    problems_of_kinds: dict[str, list[BadRow]] = {}
    for problem in problems:
        same_kind = problems_of_kinds.setdefault(problem.kind, [])
        same_kind.append(problem)
    for alike in problems_of_kinds.values():
        line = str(alike[0])
        if len(alike) > 1:
            line += f" ({len(alike)} of {num_rows} rows have this problem)"
        yield line


def find_problems(config: Config, only_keys: Collection[str] | None = None) -> list[str]:
    """Problems with files of prompts, the first row of each, and files of reward functions; one
    line each.

    `only_keys` are the keys whose files are looked at; None means all.
    """
    checks = {
        "data.train_files": _train_files,
        "data.val_files": _val_files,
        "custom_reward_function.path": _reward_files,
        "reward.functions": _reward_files,
    }
    lines: list[str] = []
    for key, check in checks.items():
        if only_keys is None or key in only_keys:
            lines += lines_of(check(config))
    return list(dict.fromkeys(lines))


def _train_files(config: Config) -> Iterator[str]:
    if not config.data.train_files:
        yield "data.train_files=[]: there are no prompts; name files with rows"
    yield from _files(config, "data.train_files")


def _val_files(config: Config) -> Iterator[str]:
    return _files(config, "data.val_files")


def _files(config: Config, key: str) -> Iterator[str]:
    for path in config.at(key):
        yield from lines_of(_file(path, key, config))


def _file(path: str, key: str, config: Config) -> Iterator[str]:
    """The file can be opened, and its first row can be used."""
    if path.startswith("hf:"):
        _hub_name(path, key)  # only its form, because it may have to be downloaded
    elif is_generator(path):
        check_generator(path, key)  # the package takes seconds to import
    elif not is_demo_to_make(path):
        rows = open_rows(path, key, max_rows=1)
        if not rows.num_rows:
            raise ConfigError(f"{key}={path}: has no rows; name a file with rows")
        place, row = rows.read(0)
        checks = [_column(place, row, key, config) for key in COLUMN_KEYS]
        missing_columns = lines_of(*checks)
        yield from missing_columns
        if not missing_columns:
            needs = needs_of(config)
            checked_columns(place, row, rows.source, config, needs)


def _column(place: str, row: Row, key: str, config: Config) -> Iterator[str]:
    problem = missing_column(place, row, key, config)
    if problem is not None:
        yield str(problem)


def _reward_files(config: Config) -> Iterator[str]:
    """The functions can be found; if not, the function that looks for them raises ConfigError."""
    is_from_python = config.custom_reward_function.path == PYTHON_FUNCTION
    if not config.reward_model.enable and not is_from_python:
        functions_of(config)
    yield from ()


# What a row must contain


class _Message(TypedDict):
    role: str
    content: str


_Text = Annotated[str, Field(min_length=1), Tag("text")]
_Chat = Annotated[list[_Message], Field(min_length=1), Tag("chat")]


def _form_of(prompt: object) -> str:
    return "text" if isinstance(prompt, str) else "chat"


class _Row(BaseModel, strict=True):
    prompt: Annotated[_Text | _Chat, Discriminator(_form_of)]
    # With a length, pydantic checks the Unicode, too.
    data_source: Annotated[str, Field(min_length=1)] | None = None
    reward_model: dict[str, Any] | None = None
    extra_info: dict[str, Any] | None = None


_HINTS = {
    "prompt": "; a prompt is a string, or a list of messages {role, content}; data.prompt_key names its column",
    "data_source": "; it names the dataset, which selects the reward",
}


def _column_of(key: str, row: Row, config: Config) -> str | None:
    """The column that a key of `COLUMN_KEYS` names. It names columns of files: the rows of a
    generator have the same columns whatever the files have."""
    if is_generated(row):
        return {"data.prompt_key": "prompt", "data.answer_key": None}[key]
    name: str | None = config.at(key)
    return name


def missing_column(place: str, row: Row, key: str, config: Config) -> BadRow | None:
    """The problem if the row does not have the column that this key names."""
    name = _column_of(key, row, config)
    if name is None or name in row:
        return None
    columns = ", ".join(row)
    problem = f"{key}={name}: there is no such column (columns: {columns})"
    return BadRow(f"{place}: {problem}", kind=key)


def checked_columns(
    place: str,
    row: Row,
    source: str,
    config: Config,
    needs: Sequence[Need],
) -> Row:
    """The columns of a row that training uses. Raises BadRow if the row cannot be used. `place` is
    its place in the files, `source` its default data source, and `needs` what functions of the user
    need."""
    for key in COLUMN_KEYS:
        problem = missing_column(place, row, key, config)
        if problem is not None:
            raise problem
    prompt_key = str(_column_of("data.prompt_key", row, config))
    _check_form(place, row, prompt_key)
    used = used_columns(row, source, config)
    _check_rules(place, row, used, config)
    _check_needs(place, row, used, config, needs)
    return used


def _check_form(place: str, row: Row, prompt_key: str) -> None:
    """Raise BadRow if a column has a wrong type, or something else than text."""
    columns = f"(columns: {', '.join(row)})"
    try:
        _Row.model_validate({**row, "prompt": row.get(prompt_key)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = first["loc"]
        names: list[str | int] = []
        for part in location:
            # A prompt may have two forms, and pydantic names the one that it has tried.
            if part not in ("text", "chat"):
                names.append(prompt_key if part == "prompt" else part)
        # Without numbers, because the place in a list makes no other kind.
        texts = [name for name in names if isinstance(name, str)]
        kind = ".".join([*texts, first["type"]])
        setting = ".".join(map(str, names))
        if first["type"] != "missing":
            setting += f"={show(first['input'])}"
        hint = _HINTS.get(str(location[0]), "")
        raise BadRow(f"{place}: {setting}: {first['msg']}{hint} {columns}", kind) from None
    for name, value in row.items():
        if _is_media(name, value):
            reason = f"has {name}, and only texts can be read"
            fix = "remove the column, or use other rows"
            raise BadRow(f"{place}: {reason}; {fix} {columns}", "media")


def _check_rules(place: str, row: Row, used: Row, config: Config) -> None:
    """Raise BadRow if a rule that scores the row cannot read its ground truth."""
    try:
        rules = rules_for(config, used["data_source"])
    except DataError as error:
        raise BadRow(f"{place}: {error}", "data_source") from None
    truth = used["reward_model"].get(TRUTH)
    for name, rule in rules.items():
        if name in RULES_WITHOUT_TRUTH:
            continue
        if truth is None:
            reason = f"the rule {name} compares it with the response"
            raise _without_truth(place, row, config, reason)
        try:
            call_rule(rule, "", truth, used["extra_info"])
        except DataError as error:
            raise BadRow(f"{place}: {error}", name) from None


def _check_needs(
    place: str,
    row: Row,
    used: Row,
    config: Config,
    needs: Sequence[Need],
) -> None:
    """Raise BadRow if the row lacks what a function of the user needs."""
    for need in needs:
        lack = missing(need, used)
        if lack is None:
            continue
        column, reason = lack
        if column == TRUTH:
            parameter = f"{TRUTH}=None in the parameters of {need.function}"
            other_fix = f", or write {parameter} if it can do without"
            raise _without_truth(place, row, config, reason, other_fix)
        fix = "name the column like that, or give the parameter a default"
        columns = f"(columns: {', '.join(row)})"
        problem = f"there is no column {column}, and {reason}; {fix} {columns}"
        raise BadRow(f"{place}: {problem}", f"column {column}")


def _without_truth(
    place: str,
    row: Row,
    config: Config,
    reason: str,
    other_fix: str = "",
) -> BadRow:
    """The problem of a row that has no ground truth, and what to do about it."""
    answer_key = config.data.answer_key
    has_own = TRUTH in (row.get("reward_model") or {})
    if answer_key is not None or has_own:
        name = f"reward_model.{TRUTH}" if answer_key is None else answer_key
        problem = f"{place}: {name} is null, and {reason}; write an answer, or remove such rows{other_fix}"
    else:
        likely = likely_answer(row, config.data.prompt_key)
        if likely is None:
            fix = "set data.answer_key to the column with the answers"
        else:
            fix = f"set data.answer_key={likely}"
        problem = f"{place}: there is no ground truth, and {reason}; {fix}{other_fix}"
    return BadRow(f"{problem} (columns: {', '.join(row)})", TRUTH)


def _is_media(name: str, value: Any) -> bool:
    """Whether a column has images, videos or sounds. They are bytes, or structures with bytes or
    addresses. A column with a name in the plural is always theirs."""
    is_media_name = re.fullmatch(r"(image|video|audio)s?", name) is not None
    is_structure = isinstance(value, bytes | list | dict) or name.endswith("s")
    return is_media_name and is_structure and bool(value)


def used_columns(row: Row, source: str, config: Config) -> Row:
    """The columns that training uses: the prompt, and what rewards need. Other columns become part
    of extra_info."""
    prompt_key = str(_column_of("data.prompt_key", row, config))
    answer_key = _column_of("data.answer_key", row, config)
    reward_model = dict(row.get("reward_model") or {})
    if answer_key is not None:
        reward_model[TRUTH] = row.get(answer_key)
    named = (prompt_key, answer_key, "data_source", "reward_model", "extra_info")
    extra_info = {name: value for name, value in row.items() if name not in named}
    # An entry of extra_info comes before a column with the same name.
    extra_info.update(row.get("extra_info") or {})
    prompt = row[prompt_key]
    return {
        "raw_prompt": _with_system_prompt(prompt, config.data.system_prompt),
        "data_source": row.get("data_source") or source,
        "reward_model": reward_model,
        "extra_info": extra_info,
    }


def _with_system_prompt(prompt: Any, system_prompt: str | None) -> Any:
    """A chat that begins with the system prompt, unless it begins with its own system message."""
    if system_prompt is None:
        return prompt
    if isinstance(prompt, str):
        chat = [{"role": "user", "content": prompt}]
    else:
        chat = prompt
    if chat[0]["role"] == "system":
        return chat
    return [{"role": "system", "content": system_prompt}, *chat]


# The formats


class Rows(NamedTuple):
    """The rows of a file or a dataset, numbered from 0. `read` returns a row, after its place for
    error messages."""

    source: str
    num_rows: int
    read: Callable[[int], tuple[str, Row]]


def _rows_of_lines(file: Path, max_rows: int | None) -> Rows:
    """The rows of a JSONL file. Only the offset and the number (from 1) of each line are kept.
    Blank lines are not rows."""
    starts = array("Q")
    numbers = array("Q")
    start = 0
    with file.open("rb") as lines:
        for line, text in enumerate(lines, start=1):
            if text.strip():
                starts.append(start)
                numbers.append(line)
            start += len(text)
            if len(starts) == max_rows:
                break

    def read(number: int) -> tuple[str, Row]:
        place = f"{file}, line {numbers[number]}"
        with file.open("rb") as lines:
            lines.seek(starts[number])
            text = lines.readline()
        fix = "write one object per line"
        try:
            row = json.loads(text)
        except RecursionError as error:
            raise BadRow(f"{place}: is nested too deeply; {fix}", "not JSON") from error
        except ValueError as error:  # it is not JSON or not UTF-8
            raise BadRow(f"{place}: is not JSON: {error}; {fix}", "not JSON") from error
        if not isinstance(row, dict):
            raise BadRow(f"{place}: is a JSON {type(row).__name__}; {fix}", "not an object")
        return place, row

    return Rows(file.stem, len(starts), read)


def _rows_of_table(
    name: str | Path,
    source: str,
    num_rows: int,
    row_at: Callable[[int], Row],
) -> Rows:
    def read(number: int) -> tuple[str, Row]:
        return f"{name}, row {number} (the first is 0)", row_at(number)

    return Rows(source, num_rows, read)


def open_rows(path: str, key: str, max_rows: int | None = None) -> Rows:
    """The rows of one file or dataset that the config key `key` names, or at most the first
    `max_rows` of a file."""
    if path.startswith("hf:"):
        return _load_from_hub(path, key)
    if is_generator(path):
        items = open_generator(path, key)
        return _rows_of_table(path, path, len(items), items.__getitem__)
    file = Path(path).expanduser()
    if not file.is_file():
        place = f"looked in {file.absolute().parent}"
        raise ConfigError(
            f"{key}={path}: is not a local file ({place}); name .parquet or .jsonl files"
        )
    if file.suffix not in (".parquet", ".jsonl", ".json"):
        raise ConfigError(
            f"{key}={path}: prompts must be .parquet or .jsonl files, not {file.suffix!r}"
        )
    with explained(f"{key}={path}: cannot be read", "name a readable file", pyarrow.ArrowException):
        if file.suffix != ".parquet":
            return _rows_of_lines(file, max_rows)
        # Not read_table, which reads `year=2024` in a folder's name as a column.
        parquet = pyarrow.parquet.ParquetFile(file, memory_map=True)
        if max_rows is None:
            table = parquet.read()
        else:
            first_batch = islice(parquet.iter_batches(batch_size=max_rows or 1), 1)
            table = pyarrow.Table.from_batches(first_batch, parquet.schema_arrow)

    def row_at(number: int) -> Row:
        one_row = table.slice(number, length=1)
        row: Row = one_row.to_pylist()[0]
        return row

    return _rows_of_table(file, file.stem, table.num_rows, row_at)


_HUB_NAME = re.compile(r"hf:([^:]+)(?::([^:\[]+))?:([^:\[]+(?:\[.*\])?)")


def _hub_name(path: str, key: str) -> tuple[str, str | None, str]:
    """Name or folder, subset and split of `hf:NAME:SPLIT` or `hf:NAME:SUBSET:SPLIT`. Raises
    ConfigError."""
    match = _HUB_NAME.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"{key}={path}: write hf:NAME:SPLIT, such as hf:HuggingFaceH4/MATH-500:test"
        )
    if find_spec("datasets") is None:
        raise ConfigError(
            f"{key}={path}: needs the package datasets; run pip install 'rolepool[datasets]'"
        )
    name, subset, split = match.groups()
    if name.startswith(("/", "~", ".")) and not Path(name).expanduser().is_dir():
        raise ConfigError(
            f"{key}={path}: there is no such folder; name a dataset folder or org/name"
        )
    return name, subset, split


def _load_from_hub(path: str, key: str) -> Rows:
    """A dataset of the hub, or of a folder that contains data files or that `save_to_disk` has
    written."""
    name, subset, split = _hub_name(path, key)
    import datasets
    from datasets.exceptions import DatasetsError

    folder = Path(name).expanduser()
    is_local = folder.is_dir()
    fix = "check the name, the subset and the split (hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT)"
    with explained(f"{key}={path}: cannot be loaded", fix, ValueError, DatasetsError):
        markers = (folder / "dataset_dict.json", folder / "state.json")
        if any(marker.is_file() for marker in markers):
            saved = datasets.load_from_disk(str(folder))
            if isinstance(saved, dict):
                splits = saved
            else:
                splits = {str(saved.split or "train"): saved}
            if split not in splits:
                raise ValueError(f"it has the splits {', '.join(splits)}")
            loaded = splits[split]
        else:
            dataset = str(folder) if is_local else name
            loaded = datasets.load_dataset(dataset, subset, split=split)
    source = folder.name if is_local else name
    return _rows_of_table(path, source, len(loaded), loaded.__getitem__)
