"""A run folder, read back.

Owns how its files are read: lines that a killed run or a full disk left unreadable are skipped and counted, and so is
a whole file that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from rolepool.errors import ConfigError
from rolepool.metrics.analysis import Recorded
from rolepool.metrics.spans import Span
from rolepool.placement.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What a run wrote down. `skipped` counts the unreadable lines of each file that has some."""

    folder: Path
    name: str
    config: dict[str, Any]
    plan: Plan | None
    spans: list[Recorded]
    rows: list[dict[str, float]]
    monitor: list[dict[str, Any]]
    skipped: dict[str, int]


def read_run(folder: str | Path) -> Run:
    """A run folder's content; ConfigError where the folder is no run."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl", "spans.jsonl")):
        what = "has no config.yaml, metrics.jsonl or spans.jsonl" if folder.is_dir() else "is no folder"
        raise ConfigError(f"run {folder}: {what}; give the folder a run wrote to (its trainer.default_local_dir)")
    skipped: dict[str, int] = {}
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=_whole_file(folder / "config.yaml", _config, skipped) or {},
        plan=_whole_file(folder / "plan.json", Plan.model_validate_json, skipped),
        spans=_lines(folder / "spans.jsonl", _span, skipped),
        rows=_lines(folder / "metrics.jsonl", _row, skipped),
        monitor=_lines(folder / "monitor.jsonl", _moment, skipped),
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
    except (ValueError, yaml.YAMLError):
        skipped[file.name] = 1
        return None


def _lines(file: Path, read: Callable[[bytes], T], skipped: dict[str, int]) -> list[T]:
    """What can be read of a file of one JSON object a line."""
    found: list[T] = []
    if file.is_file():
        with file.open("rb") as lines:
            for line in lines:
                try:
                    found.append(read(line))
                except ValueError:
                    skipped[file.name] = skipped.get(file.name, 0) + 1
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
_Row = TypeAdapter(dict[str, int | float], config=ConfigDict(strict=True))  # a loss may well be NaN


def _config(text: bytes) -> dict[str, Any]:
    return TypeAdapter(dict[str, Any]).validate_python(yaml.safe_load(text))


def _span(line: bytes) -> Recorded:
    fields = vars(_SpanLine.model_validate_json(line))
    span = Span(*(fields[name] for name in Span._fields))
    if span.end_s < span.start_s:
        raise ValueError("ends before it starts")
    return Recorded(fields["step"], fields["operation"], span)


def _row(line: bytes) -> dict[str, float]:
    row = _Row.validate_json(line)
    if not isinstance(row.get("step"), int):
        raise ValueError("belongs to no step")
    return row


def _moment(line: bytes) -> dict[str, Any]:
    return _Moment.model_validate_json(line).model_dump()
