"""Reading a run folder.

Owns how its files are read. Lines that a killed run or a full disk left unreadable are skipped and counted; so is a
whole file that cannot be read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, create_model

from rolepool.errors import ConfigError, explained
from rolepool.metrics.analysis import Recorded
from rolepool.metrics.sampling import Sample
from rolepool.metrics.spans import Span
from rolepool.placement.plan import Plan
from rolepool.report.colors import in_step_order

T = TypeVar("T")

TIMING = "timing_s/"
"""The name of an operation's time begins with it."""

MetricsByStep = dict[int, dict[str, float]]
"""The metrics of each step by name, in the order of steps."""


@dataclass(frozen=True)
class Run:
    """What a run folder contains. `skipped` counts the unreadable lines of each file that has some."""

    folder: Path
    name: str
    config: dict[str, Any]
    plan: Plan | None
    spans: list[Recorded]
    metrics: MetricsByStep
    """The metrics of a validation are included in those of its step."""
    monitor: list[Sample]
    skipped: dict[str, int]

    @property
    def notes(self) -> list[str]:
        """What could not be read, in words."""
        return [f"skipped {number} unreadable lines of {file}" for file, number in self.skipped.items()]


def read_run(folder: str | Path) -> Run:
    """Read a run folder. Raises ConfigError if the folder is not one."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl", "spans.jsonl")):
        what = "has no config.yaml, metrics.jsonl or spans.jsonl" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"run {folder}: {what}; give the folder a run wrote to (its trainer.default_local_dir)")
    skipped: dict[str, int] = {}
    metrics: MetricsByStep = {}
    for step, row in _read_lines(folder / "metrics.jsonl", read_row, skipped):
        metrics.setdefault(step, {}).update(row)
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=_read_file(folder / "config.yaml", _read_config, skipped) or {},
        plan=_read_file(folder / "plan.json", Plan.model_validate_json, skipped),
        spans=_read_lines(folder / "spans.jsonl", read_span, skipped),
        metrics=dict(sorted(metrics.items())),
        monitor=_read_lines(folder / "monitor.jsonl", read_sample, skipped),
        skipped=skipped,
    )


def points(metrics: MetricsByStep, name: str) -> list[tuple[float, float]]:
    """Step and value for each step that has this metric."""
    return [(step, row[name]) for step, row in metrics.items() if name in row]


def finite_values(metrics: MetricsByStep, name: str) -> tuple[list[float], list[float]]:
    """The steps that have a finite value of this metric, and these values."""
    found = [(step, value) for step, value in points(metrics, name) if math.isfinite(value)]
    return [step for step, _ in found], [value for _, value in found]


def metric_names(metrics: MetricsByStep) -> list[str]:
    """All names of metrics, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in metrics.values() for name in row))


def timed_operations(metrics: MetricsByStep) -> list[str]:
    """The operations that have a time in some step, in the order of a step; without `step` itself."""
    names = [name.removeprefix(TIMING) for name in metric_names(metrics) if name.startswith(TIMING)]
    return in_step_order(name for name in names if name != "step")


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if the config has no such key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _read_file(file: Path, read: Callable[[bytes], T], skipped: dict[str, int]) -> T | None:
    try:
        return read(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        skipped[file.name] = 1
        return None


def _read_lines(file: Path, read: Callable[[bytes], T], skipped: dict[str, int]) -> list[T]:
    lines = JsonLines(file, read)
    with explained(f"{file}: cannot be read", "give a run folder with readable files"):
        found = list(lines.read_new())
    if num_skipped := lines.num_unreadable + lines.is_cut_off:
        skipped[file.name] = num_skipped
    return found


class JsonLines(Generic[T]):
    """A file with one JSON object in each line, which can be read repeatedly while it grows.

    With `last_bytes`, only that much of the end of a long file is read at first.
    """

    def __init__(self, path: Path, read: Callable[[bytes], T], last_bytes: float = math.inf) -> None:
        self.path = path
        self.num_unreadable = 0
        self.is_cut_off = False
        """Whether the last line is incomplete."""
        self._read = read
        self._last_bytes = last_bytes
        self._inode = self._offset = 0

    def read_new(self) -> Iterator[T]:
        """The lines that were added since the last call; all lines if a resumed run has replaced the file."""
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


# One line of each file. Unknown fields are ignored. Fields for which `Span` has a default may be missing.

_types = {"step": int, "operation": str, **get_type_hints(Span)}
_fields: dict[str, Any] = {name: (type_, Span._field_defaults.get(name, ...)) for name, type_ in _types.items()}
_SpanLine = create_model("_SpanLine", __config__=ConfigDict(strict=True, allow_inf_nan=False), **_fields)
_Row = TypeAdapter(dict[str, float], config=ConfigDict(strict=True))  # a loss may be NaN
_Sample = TypeAdapter(Sample)
_Config = TypeAdapter(dict[str, Any])


def _read_config(text: bytes) -> dict[str, Any]:
    return _Config.validate_python(yaml.safe_load(text))


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
        raise ValueError("has no step")
    return int(step), row


def read_sample(line: bytes) -> Sample:
    return _Sample.validate_json(line, strict=True)
