"""Reading what runs wrote: run folders, and console logs of rolepool or of other programs.

Owns how the files of a run folder are read, and the parsing of console lines `step:N - key:value -
key:value ...`. Lines that a killed run or a full disk left unreadable are skipped and counted. A
small file that cannot be read is skipped as a whole, with the reason.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import psutil
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model

from rolepool.config.loading import show
from rolepool.config.saved import saved_values
from rolepool.errors import ConfigError, encodable, explained, one_line
from rolepool.metrics.run_folder import (
    event_kind,
    event_lines,
    last_lines,
    lock_text,
    newest_validation,
)
from rolepool.metrics.sampling import Sample
from rolepool.metrics.spans import Recorded, Span
from rolepool.placement.plan import Plan, PlanHistory, PlannedSteps
from rolepool.reading import LARGEST, open_regular, read_small

T = TypeVar("T")

TIMING = "timing_s/"
"""The metric of an operation's time is this prefix and the operation's name."""

MAX_STEP = 2**31
"""Rows and spans of later steps are not those of a run."""
TAIL_BYTES = 2**15
"""How much of the end of metrics.jsonl `sampled_lines` reads."""
NUM_SAMPLES = 80
"""Lines that it reads from the rest of a long file."""

MetricsByStep = dict[int, dict[str, float]]
"""The metrics of each step by name, in the order of steps."""


class Event(NamedTuple):
    """A row of metrics.jsonl about a restart or a move."""

    kind: str
    step: int
    """The step in which something died, or the first step after a move."""
    what: str
    """What died, or the placements before and after a move."""
    seconds: float
    """From the death, or from the end of the last step, until training resumed."""
    repeated_from_step: int | None = None
    """After a restart."""


Lines = Callable[[Path], Iterator[bytes]]
"""Which lines of a file are read."""


@dataclass
class Run:
    """What was read from a run folder. `skipped` counts the unreadable lines of each file that has
    some, and `unread` has the reasons why whole files were not read."""

    folder: Path
    name: str
    config: dict[str, Any]
    plans: list[PlannedSteps]
    """In the order of steps; empty if there is no readable plan.json. Each move adds one."""
    spans: list[Recorded]
    metrics: MetricsByStep
    """The metrics of a validation are included in those of its step."""
    monitor: list[Sample]
    skipped: dict[str, int]
    events: list[Event] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> Plan | None:
        """The newest plan."""
        return self.plans[-1].plan if self.plans else None

    @property
    def event_counts(self) -> dict[str, int]:
        """The number of restarts and of moves, without those that are 0. A resume with another
        placement is a move."""
        counts = {
            "restarts": sum(event.kind == "restart" for event in self.events),
            "moves": len(self.plans[1:]),
        }
        return {name: count for name, count in counts.items() if count}

    @property
    def notes(self) -> list[str]:
        """What could not be read, in words."""
        whole = [f"{file} cannot be read: {reason}" for file, reason in self.unread.items()]
        return whole + [
            f"skipped {number} unreadable lines of {file}" for file, number in self.skipped.items()
        ]

    @property
    def step(self) -> int:
        """The last step that has ended."""
        return max(
            (step for step, row in self.metrics.items() if f"{TIMING}step" in row), default=0
        )

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the whole run, from its last row, or from the config; None if it
        is unknown."""
        if rows := list(finite_values(self.metrics, "training/num_steps").values()):
            number: Any = int(rows[-1])
        else:
            number = value_at(self.config, "trainer.total_training_steps")
        return number if isinstance(number, int) and 0 <= number <= MAX_STEP else None

    @property
    def is_finished(self) -> bool:
        """Whether the run has made all its steps, or its only validation."""
        if value_at(self.config, "trainer.val_only") is True:
            return any(f"{TIMING}testing" in row for row in self.metrics.values())
        return self.num_steps is not None and self.step >= self.num_steps

    def read_lines(self, name: str, read: Callable[[bytes], T], lines_of: Lines) -> Iterator[T]:
        """What is in some lines of a file. Lines that cannot be read are counted in `skipped`."""
        path = self.folder / name
        with explained(f"{path}: cannot be read", "give a run folder with readable files"):
            for line in lines_of(path) if path.is_file() else ():
                try:
                    yield read(line)
                except ValueError:
                    self.skipped[name] = self.skipped.get(name, 0) + 1

    def read_whole(self, name: str, read: Callable[[bytes], T]) -> T | None:
        """What is in a small file of the run folder; None if the file does not exist or cannot be
        read."""
        try:
            return read(read_small(self.folder / name)) if (self.folder / name).is_file() else None
        except (OSError, ValueError) as error:
            self.unread[name] = _reason(error)
            return None


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in a short line."""
    text = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else one_line(error)
    return show(" ".join(text.split()))


def sampled_lines(path: Path) -> Iterator[bytes]:
    """The restarts in metrics.jsonl, the newest validation, some lines that are spread over a long
    file, and the lines at its end."""
    yield from event_lines(path.parent, "restart")
    yield from newest_validation(path.parent)
    with open_regular(path) as file:
        tail = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
        for offset in range(0, tail, tail // NUM_SAMPLES + 1):
            file.seek(offset)
            beginning = file.readline(TAIL_BYTES)
            if not offset:
                yield beginning  # the validation before training; the first step is the next line
            yield file.readline(TAIL_BYTES)
    # Not a line that is being written.
    yield from (line for line in last_lines(path, TAIL_BYTES) if line.endswith(b"\n"))


def read_run(
    folder: str | Path, last_bytes: float = math.inf, lines_of_metrics: Lines = last_lines
) -> Run:
    """Read a run folder. Raises ConfigError if the folder is not one.

    `last_bytes` limits how much is read of spans and samples: only the end of a longer file. With
    `sampled_lines` as `lines_of_metrics`, only some of the metrics are read, too.
    """
    run = open_run(folder)
    end_of = partial(last_lines, last_bytes=last_bytes)
    run.spans = list(run.read_lines("spans.jsonl", read_span, end_of))
    run.monitor = list(run.read_lines("monitor.jsonl", read_sample, end_of))
    for row in run.read_lines("metrics.jsonl", read_row, lines_of_metrics):
        if not isinstance(row, Event):
            step, metrics = row
            run.metrics.setdefault(step, {}).update(metrics)
        elif row not in run.events:  # a resumed run has written it again
            run.events.append(row)
    run.metrics = dict(sorted(run.metrics.items()))
    return run


def open_run(folder: str | Path) -> Run:
    """Read only config and plans of a run folder. Raises ConfigError if the folder is not one."""
    folder = Path(folder)
    if not any(
        (folder / name).is_file() for name in ("config.yaml", "metrics.jsonl", "spans.jsonl")
    ):
        what = (
            "has no config.yaml, metrics.jsonl or spans.jsonl"
            if folder.is_dir()
            else "is not a folder"
        )
        raise ConfigError(
            f"run {folder}: {what}; give the folder a run wrote to (its trainer.default_local_dir)"
        )
    run = Run(folder, encodable(folder.resolve().name), {}, [], [], {}, [], {})
    run.config = run.read_whole("config.yaml", saved_values) or {}
    history = run.read_whole("plan.json", PlanHistory.model_validate_json)
    run.plans = history.plans if history is not None else []
    return run


LOCK = re.compile(r"(?:process (\d{1,9}) on (.+))?")
"""What a run writes into its lock. For a moment the lock is empty."""


def state_of(run: Run, *, is_silent: bool) -> str:
    """What has become of a run: running, finished, stopped, failed or unknown (docs/profiling.md
    explains them). A run holds a lock, which names its process and its machine. It removes the lock
    when it ends."""
    lock = run.folder / ".lock"
    if not lock.is_file():
        return "finished" if run.is_finished else "stopped"
    try:
        holder, locked_s = LOCK.fullmatch(lock_text(run.folder)), lock.stat().st_mtime
    except (OSError, ValueError):  # just removed, or not the lock of a run
        holder = None
    if holder is None:
        return "finished" if run.is_finished else "unknown"
    pid, machine = holder.groups()
    if machine != os.uname().nodename:
        return "running" if not is_silent else "finished" if run.is_finished else "unknown"
    with suppress(psutil.Error, ValueError, OverflowError):
        # A process that is younger than the lock is another one with the same number.
        if psutil.Process(int(pid)).create_time() <= locked_s + 2:
            return "running"
    return "finished" if run.is_finished else "failed"


def parts_of(run: Run) -> list[Run]:
    """The parts of a run that were made with different plans, in the order of steps, each as a run
    of its own. If the run never moved, it is its only part."""
    if len(run.plans) < 2:
        return [run]
    parts = []
    later = [planned.first_step for planned in run.plans[1:]]
    for planned, first, after in zip(run.plans, [0, *later], [*later, math.inf], strict=True):
        metrics = {step: row for step, row in run.metrics.items() if first <= step < after}
        spans = [recorded for recorded in run.spans if first <= recorded.step < after]
        start_s = min((recorded.span.start_s for recorded in spans), default=math.inf)
        end_s = max((recorded.span.end_s for recorded in spans), default=math.inf)
        monitor = [sample for sample in run.monitor if start_s <= sample["time_s"] <= end_s]
        name = (
            f"{run.name} (steps {planned.first_step} to {max(metrics, default=planned.first_step)})"
        )
        parts.append(
            replace(run, name=name, plans=[planned], spans=spans, metrics=metrics, monitor=monitor)
        )
    return parts


def read_parts(folder: str | Path, name: str) -> dict[str, Run]:
    """Read a run folder. Returns the parts that have metrics, by name; the run itself if none
    has."""
    run = read_run(folder)
    run.name = name
    return {part.name: part for part in parts_of(run) if part.metrics} or {name: run}


def finite_values(metrics: MetricsByStep, name: str) -> dict[int, float]:
    """The value of this metric for each step that has a finite one."""
    return {
        step: row[name] for step, row in metrics.items() if math.isfinite(row.get(name, math.nan))
    }


def metric_names(metrics: MetricsByStep) -> list[str]:
    """All names of metrics, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in metrics.values() for name in row))


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if the config has no such key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# One line of each file. Unknown fields are ignored. Fields for which `Span` has a default may be
# missing.

_types = {
    "step": Annotated[int, Field(ge=0, le=MAX_STEP)],
    "operation": str,
    **get_type_hints(Span, include_extras=True),
}
_fields: dict[str, Any] = {
    name: (type_, Span._field_defaults.get(name, ...)) for name, type_ in _types.items()
}
_SpanLine = create_model(
    "_SpanLine", __config__=ConfigDict(strict=True, allow_inf_nan=False), **_fields
)
_Row = TypeAdapter(dict[str, float], config=ConfigDict(strict=True))  # a loss may be NaN
_Event, _Object = TypeAdapter(Event), TypeAdapter(dict[str, Any])
read_sample = partial(TypeAdapter(Sample).validate_json, strict=True)


def read_span(line: bytes) -> Recorded:
    fields = vars(_SpanLine.model_validate_json(line))
    span = Span(*(fields[name] for name in Span._fields))
    if span.end_s < span.start_s:
        raise ValueError("ends before it starts")
    return Recorded(fields["step"], fields["operation"], span)


def read_row(line: bytes) -> tuple[int, dict[str, float]] | Event:
    """A step and its metrics, or an event."""
    if kind := event_kind(line):
        row = _Object.validate_json(line)
        known = {**row, "kind": kind, **_Object.validate_python(row.get(kind))}
        return _Event.validate_python(
            {name: known[name] for name in Event._fields if name in known}
        )
    metrics = _Row.validate_json(line)
    step = metrics.pop("step", math.nan)
    if not step.is_integer() or not 0 <= step <= MAX_STEP:
        raise ValueError("has no step")
    for name, value in metrics.items():
        if abs(value) > LARGEST:
            metrics[name] = math.copysign(math.inf, value)
    return int(step), metrics


# Console logs

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
            found = {part: run.metrics for part, run in read_parts(path, name).items()}
        else:
            file = path / "train.log" if path.is_dir() else path
            fix = "give a console log or a run folder"
            with (
                explained(f"{file}: cannot be read", fix),
                file.open(encoding="utf-8", errors="replace") as lines,
            ):
                runs = parse_log(lines)
            found = {
                name if len(runs) == 1 else f"{name}, run {number}": run
                for number, run in enumerate(runs, 1)
            }
        if not any(found.values()):
            raise ConfigError(
                f"{path}: has no line `step:N - key:value ...`; give a run folder, or its train.log"
            )
        logs |= found
    return logs


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """A name for each path: its last part, or the full path if several have the same last part;
    paths that are the same get numbers."""
    last = [encodable(Path(path).absolute().name.removesuffix(".log")) for path in paths]
    names = [
        name if last.count(name) == 1 else encodable(str(path))
        for name, path in zip(last, paths, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(names, 1)
    ]


def parse_log(lines: Iterable[str]) -> list[MetricsByStep]:
    """The runs in the lines of a console log. A new run begins when the step number does not
    increase, with two exceptions: what a validation or a save adds to a step belongs to that step,
    and a repeated line counts once."""
    runs: list[MetricsByStep] = []
    last = math.inf
    for step, row in (row for line in _unwrapped(lines) for row in _parse_line(line)):
        is_addition = all(name.startswith(ADDED_LATER) for name in row)
        if step > last:
            runs[-1][step] = row
        elif step == last and is_addition and not runs[-1][step].keys() & row.keys():
            runs[-1][step].update(row)
        elif step < last or str(runs[-1][step]) != str(
            row
        ):  # compared as text because NaN is not equal to itself
            runs.append({step: row})
        last = step
    return runs


def _unwrapped(parts: Iterable[str]) -> list[str]:
    """The lines. A line that a terminal has cut at its width, which is the longest length in the
    log, is one again."""
    # A progress bar returns to the start of its line with a carriage return, which `splitlines`
    # takes for a line end.
    lines = [line for part in parts for line in COLOR_CODE.sub("", part).splitlines()]
    width = max(map(len, lines), default=0)
    return re.sub(rf"(?<=\n.{{{width}}})\n{REST}", "", "\n".join(["", *lines])).splitlines()


def _parse_line(line: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The rows in a line: usually none or one; two if a killed run left its line without an end."""
    _, *found = STEP.split(line.replace(" timing/", f" {TIMING}"))
    for step, text in zip(found[::2], found[1::2], strict=True):
        fields = (FIELD.fullmatch(part.strip()) for part in text.split(" - "))
        row = {field["key"]: float(field["wrapped"] or field["bare"]) for field in fields if field}
        if row:
            yield int(step), row
