"""A run folder, read back.

Owns how its files are read: lines that a killed run or a full disk left unreadable are skipped and counted, and so is
a whole file that cannot be read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from rolepool.errors import ConfigError, explained
from rolepool.metrics.analysis import Recorded
from rolepool.metrics.spans import Span
from rolepool.placement.plan import Plan

T = TypeVar("T")

Rows = dict[int, dict[str, float]]
"""Metrics by step, in the order of steps."""


@dataclass(frozen=True)
class Run:
    """What a run wrote down. `skipped` counts the unreadable lines of each file that has some."""

    folder: Path
    name: str
    config: dict[str, Any]
    plan: Plan | None
    spans: list[Recorded]
    rows: Rows
    """A step's validation is in its row."""
    monitor: list[dict[str, Any]]
    skipped: dict[str, int]


def read_run(folder: str | Path) -> Run:
    """A run folder's content; ConfigError where the folder is no run."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl", "spans.jsonl")):
        what = "has no config.yaml, metrics.jsonl or spans.jsonl" if folder.is_dir() else "is no folder"
        raise ConfigError(f"run {folder}: {what}; give the folder a run wrote to (its trainer.default_local_dir)")
    skipped: dict[str, int] = {}
    rows: Rows = {}
    for step, row in _all(Lines(folder / "metrics.jsonl", read_row), skipped):
        rows.setdefault(step, {}).update(row)
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=_whole_file(folder / "config.yaml", _config, skipped) or {},
        plan=_whole_file(folder / "plan.json", Plan.model_validate_json, skipped),
        spans=_all(Lines(folder / "spans.jsonl", read_span), skipped),
        rows=dict(sorted(rows.items())),
        monitor=_all(Lines(folder / "monitor.jsonl", read_moment), skipped),
        skipped=skipped,
    )


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where the config has no such key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _whole_file(file: Path, read: Callable[[bytes], T], skipped: dict[str, int]) -> T | None:
    if not file.is_file():
        return None
    try:
        return read(file.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        skipped[file.name] = 1
        return None


class Lines(Generic[T]):
    """A file of one JSON object a line, read again and again while it grows; of a long one perhaps the end only."""

    def __init__(self, path: Path, read: Callable[[bytes], T], last_bytes: float = math.inf) -> None:
        self.path = path
        self.num_unreadable = 0
        self.is_cut_off = False
        """Whether the last line has no end, or not yet."""
        self._read = read
        self._last_bytes = last_bytes
        self._inode = self._offset = 0

    def new(self) -> Iterator[T]:
        """What was added since the last time, and all of it again when a resumed run wrote the file anew."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, int(max(0, status.st_size - self._last_bytes))
            file.seek(self._offset)
            for line in file:
                self.is_cut_off = not line.endswith(b"\n")
                if self.is_cut_off:
                    return
                self._offset += len(line)
                try:
                    found = self._read(line)
                except ValueError:
                    self.num_unreadable += 1
                else:
                    yield found


def _all(lines: Lines[T], skipped: dict[str, int]) -> list[T]:
    with explained(f"{lines.path}: cannot be read", "give a run folder whose files can be"):
        found = list(lines.new())
    if num_skipped := lines.num_unreadable + lines.is_cut_off:
        skipped[lines.path.name] = num_skipped
    return found


# One object each. Fields that are unknown here are ignored; those that `Span` has a default for may be missing.


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Gpu(_Object):
    index: int
    utilization: float
    memory_bytes: int
    memory_total_bytes: int = 0
    power_w: float
    pools: list[str]


class _Process(_Object):
    pid: int
    pool: str
    rank: int
    roles: list[str]
    cpu_percent: float
    memory_bytes: int


class _Moment(_Object):
    time_s: float
    node: str
    gpus: list[_Gpu]
    processes: list[_Process]


_types = {"step": int, "operation": str, **get_type_hints(Span)}
_fields: dict[str, Any] = {name: (type_, Span._field_defaults.get(name, ...)) for name, type_ in _types.items()}
_SpanLine = create_model("_SpanLine", __base__=_Object, **_fields)
_Row = TypeAdapter(dict[str, float], config=ConfigDict(strict=True))  # a loss may well be NaN


def _config(text: bytes) -> dict[str, Any]:
    return TypeAdapter(dict[str, Any]).validate_python(yaml.safe_load(text))


def read_span(line: bytes) -> Recorded:
    fields = vars(_SpanLine.model_validate_json(line))
    span = Span(*(fields[name] for name in Span._fields))
    if span.end_s < span.start_s:
        raise ValueError("ends before it starts")
    return Recorded(fields["step"], fields["operation"], span)


def read_row(line: bytes) -> tuple[int, dict[str, float]]:
    row = _Row.validate_json(line)
    step = row.pop("step", math.nan)
    if not step.is_integer():
        raise ValueError("belongs to no step")
    return int(step), row


def read_moment(line: bytes) -> dict[str, Any]:
    return _Moment.model_validate_json(line).model_dump()
