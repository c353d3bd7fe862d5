"""The metrics in console logs of rolepool or of other programs.

Owns the parsing of console lines `step:N - key:value - key:value ...`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rolepool.errors import ConfigError, explained
from rolepool.report.metrics_by_step import TIMING, MetricsByStep
from rolepool.report.run import distinct_names, read_parts

COLOR_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEP = re.compile(r"(?<![\w/-])step:(\d+) - ")
NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
# A plain number, or one as numpy and torch print it: np.float64(1.5), tensor(1.5, device='cuda:0').
# Output of another process may follow on the same line.
FIELD = re.compile(
    rf"(?P<key>\S+?):\s*(?:[\w.]+\(\s*(?P<wrapped>{NUMBER})[^)]*\)|(?P<bare>{NUMBER}))(?:\s.*)?",
    re.I,
)
REST = r"(?! *step:\d+ - )(?= *(?:- )?(?:\S* -|\S*[\d)] *(?:\n|$)))"
"""What follows the place where a line was cut: the rest of a field and a separator, or the rest of
the last field."""
ADDED_LATER = ("val-core/", "val-aux/", "val/", "timing_s/testing", "timing_s/save_checkpoint")
"""Metrics that a validation or a save adds to a step that already has its line."""


def read_logs(paths: Sequence[str | Path]) -> dict[str, MetricsByStep]:
    """The metrics of all runs of all logs, by distinct names. A run folder counts as a log; its
    metrics.jsonl is preferred to its train.log, which has rounded numbers. A run that moved counts
    as several runs, one for each placement. Raises ConfigError for a log without a run."""
    logs: dict[str, MetricsByStep] = {}
    for path, name in zip(map(Path, paths), distinct_names(paths), strict=True):
        if (path / "metrics.jsonl").is_file():
            runs = {}
            for part, run in read_parts(path, name).items():
                runs[part] = run.metrics
        elif path.is_dir():
            runs = _read_log(path / "train.log", name)
        else:
            runs = _read_log(path, name)
        if not any(runs.values()):
            raise ConfigError(
                f"{path}: has no line `step:N - key:value ...`; give a run folder, or its train.log"
            )
        logs |= runs
    return logs


def _read_log(file: Path, name: str) -> dict[str, MetricsByStep]:
    """The runs in a console log, by name."""
    fix = "give a console log or a run folder"
    with (
        explained(f"{file}: cannot be read", fix),
        file.open(encoding="utf-8", errors="replace") as lines,
    ):
        runs = parse_log(lines)
    if len(runs) == 1:
        return {name: runs[0]}
    named_runs = {}
    for number, run in enumerate(runs, 1):
        named_runs[f"{name}, run {number}"] = run
    return named_runs


def parse_log(lines: Iterable[str]) -> list[MetricsByStep]:
    """The runs in the lines of a console log. A new run begins when the step number does not
    increase, with two exceptions: what a validation or a save adds to a step belongs to that step,
    and a repeated line counts once."""
    runs: list[MetricsByStep] = []
    last = -math.inf
    for line in _unwrapped(lines):
        for step, row in _parse_line(line):
            if not runs or step < last:
                runs.append({step: row})
            elif step > last:
                runs[-1][step] = row
            elif _is_addition(row, runs[-1][step]):
                runs[-1][step].update(row)
            # Compared as text, because NaN is not equal to itself.
            elif str(runs[-1][step]) != str(row):
                runs.append({step: row})
            last = step
    return runs


def _is_addition(row: dict[str, float], row_of_step: dict[str, float]) -> bool:
    """Whether a row was added to a step by a validation or a save."""
    is_new = not row_of_step.keys() & row.keys()
    return is_new and all(name.startswith(ADDED_LATER) for name in row)


def _unwrapped(parts: Iterable[str]) -> list[str]:
    """The lines. A line that a terminal has cut at its width, which is the longest length in the
    log, is one again."""
    lines: list[str] = []
    for part in parts:
        # A progress bar returns to the start of its line with a carriage return, which `splitlines`
        # takes for a line end.
        lines += COLOR_CODE.sub("", part).splitlines()
    width = max(map(len, lines), default=0)
    text = "\n".join(["", *lines])
    # The end of a line of the full width, before what continues it.
    cut = re.compile(rf"(?<=\n.{{{width}}})\n{REST}")
    return cut.sub("", text).splitlines()


def _parse_line(line: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The rows in a line: usually none or one; two if a killed run left its line without an end."""
    # Some logs have `timing/gen` instead of `timing_s/gen`.
    line = line.replace(" timing/", f" {TIMING}")
    _, *numbers_and_texts = STEP.split(line)
    steps = numbers_and_texts[::2]
    texts = numbers_and_texts[1::2]
    for step, text in zip(steps, texts, strict=True):
        row = {}
        for part in text.split(" - "):
            field = FIELD.fullmatch(part.strip())
            if field:
                number = field["wrapped"] or field["bare"]
                row[field["key"]] = float(number)
        if row:
            yield int(step), row
