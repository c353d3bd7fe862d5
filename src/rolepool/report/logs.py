"""Console logs, ours and those of others: `step:N - key:value - key:value ...` among whatever else was printed.

Owns the reading of such lines, and the cutting of a file into runs. Knows nothing of what the keys mean, except which
of them a validation adds to a step that has its row already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from rolepool.errors import ConfigError
from rolepool.report.run import Rows, read_run

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
    logs = []
    for path, name in zip(map(Path, paths), distinct_names([Path(path) for path in paths]), strict=True):
        runs = _read(path)
        if not any(runs):
            raise ConfigError(f"{path}: has no line `step:N - key:value ...`; give the console log of a run")
        logs += [Log(name if len(runs) == 1 else f"{name}, run {number}", run) for number, run in enumerate(runs, 1)]
    return logs


def _read(path: Path) -> list[Rows]:
    """The console line is rounded, and keeps the steps that a resumed run did again: so metrics, where there are."""
    if (path / "metrics.jsonl").is_file():
        return [read_run(path).rows]
    file = path / "train.log" if path.is_dir() else path
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return parse_log(lines)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a console log or a run folder") from None


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths; whole paths where those are the same, and numbered where these are too."""
    last = [path.absolute().name.removesuffix(".log") for path in paths]
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
