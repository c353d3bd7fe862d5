"""Console logs of rolepool and of other programs: lines `step:N - key:value - key:value ...` between other output.

Owns parsing such lines and splitting a file into runs. Does not know what the keys mean, except which ones a
validation or a save adds to a step that already has its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from rolepool.errors import ConfigError, explained
from rolepool.report.run import MetricsByStep, read_run

COLOR_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEP = re.compile(r"(?<![\w/-])step:(\d+) - ")
NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
# A plain number, or one as numpy and torch print it: np.float64(1.5), tensor(1.5, device='cuda:0'). Output of another
# process may follow on the same line.
FIELD = re.compile(rf"(?P<key>\S+?):\s*(?:[\w.]+\(\s*(?P<wrapped>{NUMBER})[^)]*\)|(?P<bare>{NUMBER}))(?:\s.*)?", re.I)
ADDED_LATER = ("val-core/", "val-aux/", "val/", "timing_s/testing", "timing_s/save_checkpoint")


class Log(NamedTuple):
    """The metrics of one run, from a console log or a run folder."""

    name: str
    metrics: MetricsByStep


def read_logs(paths: Sequence[str | Path]) -> list[Log]:
    """All runs of all logs. A run folder counts as a log. Raises ConfigError for a log without a run."""
    files = [Path(path) for path in paths]
    logs = []
    for path, name in zip(files, distinct_names(files), strict=True):
        runs = _read(path)
        if not any(runs):
            raise ConfigError(f"{path}: has no line `step:N - key:value ...`; give the console log of a run")
        logs += [Log(name if len(runs) == 1 else f"{name}, run {number}", run) for number, run in enumerate(runs, 1)]
    return logs


def _read(path: Path) -> list[MetricsByStep]:
    """The runs in a log. A folder's metrics.jsonl is preferred to its train.log, which has rounded numbers."""
    if (path / "metrics.jsonl").is_file():
        return [read_run(path).metrics]
    file = path / "train.log" if path.is_dir() else path
    fix = "give a console log or a run folder"
    with explained(f"{file}: cannot be read", fix), file.open(encoding="utf-8", errors="replace") as lines:
        return parse_log(lines)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """A name for each path: its last part, or the whole path if several end alike; numbered if paths are the same."""
    last = [path.absolute().name.removesuffix(".log") for path in paths]
    names = [name if last.count(name) == 1 else str(path) for name, path in zip(last, paths, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def parse_log(lines: Iterable[str]) -> list[MetricsByStep]:
    """The runs in the lines of a console log."""
    # A progress bar returns to the start of its line with a carriage return, which `splitlines` takes for a line end.
    return split_into_runs(row for part in lines for line in part.splitlines() for row in _parse_line(line))


def split_into_runs(rows: Iterable[tuple[int, dict[str, float]]]) -> list[MetricsByStep]:
    """Split rows into runs. A new run begins when the step number does not increase, with two exceptions: what a
    validation or a save adds to a step belongs to that step, and a repeated line counts once."""
    runs: list[MetricsByStep] = []
    last = None
    for step, row in rows:
        if last is None or step < last:
            runs.append({step: dict(row)})
        elif step > last:
            runs[-1][step] = dict(row)
        elif all(name.startswith(ADDED_LATER) for name in row) and not runs[-1][step].keys() & row.keys():
            runs[-1][step].update(row)
        elif str(runs[-1][step]) != str(row):  # compared as text because NaN is not equal to itself
            runs.append({step: dict(row)})
        last = step
    return runs


def _parse_line(line: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The rows in a line: usually none or one; two if a killed run left its line without an end."""
    line = COLOR_CODE.sub("", line)
    starts = list(STEP.finditer(line))
    for start, following in zip_longest(starts, starts[1:]):
        text = line[start.end() : following.start() if following else None]
        fields = (FIELD.fullmatch(part.strip()) for part in text.split(" - "))
        row = {field["key"]: float(field["wrapped"] or field["bare"]) for field in fields if field}
        if row:
            yield int(start[1]), row
