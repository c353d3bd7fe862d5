"""Console logs, ours and those of others: `step:N - key:value - key:value ...` among whatever else was printed.

Owns the reading of such lines, and the cutting of a file into runs. Knows nothing of what the keys mean, except which
of them a validation adds to a step that has its row already.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rolepool.errors import ConfigError

Rows = dict[int, dict[str, float]]
"""Metrics by step, in the order of steps."""

COLOR_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEP = re.compile(r"(?<![\w/-])step:(\d+) - ")
NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
# A bare number, or one in the words of numpy and torch: np.float64(1.5), tensor(1.5, device='cuda:0'). Words of another
# process may follow on the same line.
FIELD = re.compile(rf"(?P<key>\S+?):\s*(?:[\w.]+\(\s*(?P<wrapped>{NUMBER})[^)]*\)|(?P<bare>{NUMBER}))(?:\s.*)?", re.I)
ADDED_LATER = ("val-core/", "val-aux/", "val/", "timing_s/testing", "timing_s/save_checkpoint")


class Log(NamedTuple):
    """One run as a log tells it."""

    name: str
    rows: Rows

    def values(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a finite value of the key, and those values."""
        found = [(step, row[key]) for step, row in self.rows.items() if key in row and math.isfinite(row[key])]
        return [step for step, _ in found], [value for _, value in found]


def read_logs(paths: Sequence[str | Path]) -> list[Log]:
    """Every run of every log; a run folder stands for its metrics. Raises ConfigError where there is none."""
    files = [_file_of(Path(path)) for path in paths]
    shown = [file.parent if file.name in ("metrics.jsonl", "train.log") else file.with_suffix("") for file in files]
    logs = []
    for file, name in zip(files, distinct_names(shown), strict=True):
        runs = _read(file)
        if not runs:
            raise ConfigError(f"{file}: has no line `step:N - key:value ...`; give the console log of a run")
        logs += [Log(name if len(runs) == 1 else f"{name}, run {number}", run) for number, run in enumerate(runs, 1)]
    return logs


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths; whole paths where those are the same, and numbered where these are too."""
    last = [path.absolute().name for path in paths]
    names = [name if last.count(name) == 1 else str(path) for name, path in zip(last, paths, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def parse_log(lines: Iterable[str]) -> list[Rows]:
    """The runs in the lines of a console log."""
    # A progress bar goes back to the start of its line with a carriage return, which `splitlines` takes for an end.
    return cut_into_runs(row for part in lines for line in part.splitlines() for row in _parse_line(line))


def cut_into_runs(rows: Iterable[tuple[int, dict[str, float]]]) -> list[Rows]:
    """Rows by run. A step that is not later than the one before it begins a new run, with two exceptions.

    What a validation adds to the step belongs to it, and a line that came twice is one line.
    """
    runs: list[Rows] = []
    last = None
    for step, row in rows:
        if last is None or step < last:
            runs.append({step: dict(row)})
        elif step > last:
            runs[-1][step] = dict(row)
        elif all(name.startswith(ADDED_LATER) for name in row) and not runs[-1][step].keys() & row.keys():
            runs[-1][step].update(row)
        elif str(runs[-1][step]) != str(row):  # as text, because nan differs from itself
            runs.append({step: dict(row)})
        last = step
    return runs


def _parse_line(line: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The rows in a line: none, one, or another one begun where a killed run had left off."""
    line = COLOR_CODE.sub("", line)
    starts = list(STEP.finditer(line))
    for start, following in zip_longest(starts, starts[1:]):
        text = line[start.end() : following.start() if following else None]
        fields = (FIELD.fullmatch(part.strip()) for part in text.split(" - "))
        row = {field["key"]: float(field["wrapped"] or field["bare"]) for field in fields if field}
        if row:
            yield int(start[1]), row


def _file_of(path: Path) -> Path:
    if path.is_dir():
        # The console line is rounded, and keeps the steps that a resumed run did again.
        found = [file for name in ("metrics.jsonl", "train.log") if (file := path / name).is_file()]
        if not found:
            raise ConfigError(f"{path}: is no run folder, for it has neither metrics.jsonl nor train.log")
        return found[0]
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a console log or a run folder")
    return path


def _read(file: Path) -> list[Rows]:
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return cut_into_runs(_json_rows(lines)) if file.suffix == ".jsonl" else parse_log(lines)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None


def _json_rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float]]]:
    for line in lines:
        try:
            row: dict[str, Any] = json.loads(line)
            numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
            yield int(numbers.pop("step")), numbers
        except (ValueError, KeyError, AttributeError):  # cut off by a crash
            continue
