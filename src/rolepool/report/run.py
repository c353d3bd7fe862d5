"""A run as it was read from its folder: config, plans, metrics and spans.

Owns how the files of a run folder are read. Lines that a killed run or a full disk left unreadable
are skipped and counted. A small file that cannot be read is skipped as a whole, with the reason.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from rolepool.config import show
from rolepool.config.saved import saved_values
from rolepool.errors import ConfigError, encodable, explained, one_line
from rolepool.metrics.run_rows import event_lines, last_lines, newest_validation
from rolepool.metrics.sampling import Sample
from rolepool.metrics.spans import Recorded
from rolepool.metrics.start_times import START_FILE, StartTimes
from rolepool.placement.plan import Plan, PlanHistory, PlannedSteps
from rolepool.reading import open_regular, read_small
from rolepool.report.metrics_by_step import TIMING, MetricsByStep, finite_values, timed_steps
from rolepool.report.run_lines import MAX_STEP, Event, read_row, read_sample, read_span

T = TypeVar("T")

TAIL_BYTES = 2**15
"""How much of the end of metrics.jsonl `sampled_lines` reads."""
NUM_SAMPLES = 80
"""Lines that it reads from the rest of a long file."""

FILES_OF_A_RUN = ("config.yaml", "metrics.jsonl", "spans.jsonl")
"""A folder that has one of them is a run folder."""

Lines = Callable[[Path], Iterator[bytes]]
"""Which lines of a file are read."""


@dataclass
class ReadRun:
    """What was read from a run folder. `skipped` counts the unreadable lines of each file that has
    some, and `unread` has the reasons why whole files were not read."""

    folder: Path
    name: str
    config: dict[str, object] = field(default_factory=dict)
    plans: list[PlannedSteps] = field(default_factory=list)
    """In the order of steps; empty if there is no readable plan.json. Each move adds one."""
    spans: list[Recorded] = field(default_factory=list)
    metrics: MetricsByStep = field(default_factory=dict)
    """The metrics of a validation are included in those of its step."""
    monitor: list[Sample] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    start: StartTimes | None = None
    """None if the run has not written it."""
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> Plan | None:
        """The newest plan."""
        if not self.plans:
            return None
        return self.plans[-1].plan

    @property
    def event_counts(self) -> dict[str, int]:
        """The number of restarts and of moves, without those that are 0. A resume with another
        placement is a move."""
        kinds = [event.kind for event in self.events]
        num_restarts = kinds.count("restart")
        num_moves = len(self.plans[1:])
        counts = {}
        if num_restarts:
            counts["restarts"] = num_restarts
        if num_moves:
            counts["moves"] = num_moves
        return counts

    @property
    def notes(self) -> list[str]:
        """What could not be read, in words."""
        notes = []
        for file, reason in self.unread.items():
            notes.append(f"{file} cannot be read: {reason}")
        for file, num_lines in self.skipped.items():
            notes.append(f"skipped {num_lines} unreadable lines of {file}")
        return notes

    @property
    def step(self) -> int:
        """The last step that has ended."""
        return max(timed_steps(self.metrics), default=0)

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the whole run, from its last row, or from the config; None if it
        is unknown."""
        recorded = list(finite_values(self.metrics, "training/num_steps").values())
        if recorded:
            number: object = int(recorded[-1])
        else:
            number = value_at(self.config, "trainer.total_training_steps")
        if isinstance(number, int) and 0 <= number <= MAX_STEP:
            return number
        return None

    @property
    def is_finished(self) -> bool:
        """Whether the run has made all its steps, or its only validation."""
        if value_at(self.config, "trainer.val_only") is True:
            return any(f"{TIMING}testing" in row for row in self.metrics.values())
        return self.num_steps is not None and self.step >= self.num_steps

    def read_lines(self, name: str, read: Callable[[bytes], T], lines_of: Lines) -> Iterator[T]:
        """What is in some lines of a file. Lines that cannot be read are counted in `skipped`."""
        path = self.folder / name
        if not path.is_file():
            return
        with explained(f"{path}: cannot be read", "give a run folder with readable files"):
            for line in lines_of(path):
                try:
                    yield read(line)
                except ValueError:
                    self.skipped[name] = self.skipped.get(name, 0) + 1

    def read_whole(self, name: str, read: Callable[[bytes], T]) -> T | None:
        """What is in a small file of the run folder; None if the file does not exist or cannot be
        read."""
        path = self.folder / name
        try:
            if not path.is_file():
                return None
            return read(read_small(path))
        except (OSError, ValueError) as error:
            self.unread[name] = _reason(error)
            return None


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in a short line."""
    if isinstance(error, ValidationError):
        text = str(error.errors()[0]["msg"])
    else:
        text = one_line(error)
    return show(" ".join(text.split()))


def value_at(config: Mapping[str, object], key: str) -> object:
    """The value of a dotted key; None if the config has no such key."""
    value: object = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


# Reading a folder


def read_run(
    folder: str | Path,
    last_bytes: float = math.inf,
    lines_of_metrics: Lines = last_lines,
) -> ReadRun:
    """Read a run folder. Raises ConfigError if the folder is not one.

    `last_bytes` limits how much is read of spans and samples: only the end of a longer file. With
    `sampled_lines` as `lines_of_metrics`, only some of the metrics are read, too.
    """
    run = open_run(folder)
    end_of = partial(last_lines, last_bytes=last_bytes)
    run.spans = list(run.read_lines("spans.jsonl", read_span, end_of))
    if _is_longer(run.folder / "spans.jsonl", last_bytes):
        run.spans = _without_first_step(run.spans)
    run.monitor = list(run.read_lines("monitor.jsonl", read_sample, end_of))

    rows = run.read_lines("metrics.jsonl", read_row, lines_of_metrics)
    for row in rows:
        if not isinstance(row, Event):
            step, metrics = row
            metrics_of_step = run.metrics.setdefault(step, {})
            metrics_of_step.update(metrics)
        elif row not in run.events:  # a resumed run has written it again
            run.events.append(row)
    run.metrics = dict(sorted(run.metrics.items()))
    return run


def _is_longer(path: Path, num_bytes: float) -> bool:
    return path.is_file() and path.stat().st_size > num_bytes


def _without_first_step(spans: Sequence[Recorded]) -> list[Recorded]:
    """The spans of which none is missing. The first step at the end of a long file may have lost
    its first spans, so it would seem to have begun later."""

    def is_of_first_step(recorded: Recorded) -> bool:
        return recorded.step == spans[0].step

    return list(dropwhile(is_of_first_step, spans))


def open_run(folder: str | Path) -> ReadRun:
    """Read only config and plans of a run folder. Raises ConfigError if the folder is not one."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in FILES_OF_A_RUN):
        if folder.is_dir():
            problem = "has no config.yaml, metrics.jsonl or spans.jsonl"
        else:
            problem = "is not a folder"
        fix = "give the folder a run wrote to (its trainer.default_local_dir)"
        raise ConfigError(f"run {folder}: {problem}; {fix}")
    run = ReadRun(folder, encodable(folder.resolve().name))
    run.config = run.read_whole("config.yaml", saved_values) or {}
    run.start = run.read_whole(START_FILE, StartTimes.model_validate_json)
    history = run.read_whole("plan.json", PlanHistory.model_validate_json)
    if history is not None:
        run.plans = history.plans
    return run


def sampled_lines(path: Path) -> Iterator[bytes]:
    """The restarts in metrics.jsonl, the newest validation, some lines that are spread over a long
    file, and the lines at its end."""
    yield from event_lines(path.parent, "restart")
    yield from newest_validation(path.parent)
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        tail = max(0, num_bytes - TAIL_BYTES)
        distance = tail // NUM_SAMPLES + 1
        for offset in range(0, tail, distance):
            file.seek(offset)
            beginning = file.readline(TAIL_BYTES)
            # At the start of the file it is a whole line, and a row that is wanted: that of the
            # validation before training. Elsewhere it is the rest of a line.
            if offset == 0:
                yield beginning
            yield file.readline(TAIL_BYTES)
    for line in last_lines(path, TAIL_BYTES):
        if line.endswith(b"\n"):  # not a line that is being written
            yield line


# Parts of a run, and names of runs


def parts_of(run: ReadRun) -> list[ReadRun]:
    """The parts of a run that were made with different plans, in the order of steps, each as a run
    of its own. If the run never moved, it is its only part."""
    if len(run.plans) < 2:
        return [run]
    parts = []
    begin = 0
    for planned, following in pairwise(run.plans):
        end = following.first_step
        parts.append(_part(run, planned, begin, end))
        begin = end
    last_planned = run.plans[-1]
    parts.append(_part(run, last_planned, begin, math.inf))
    return parts


def _part(run: ReadRun, planned: PlannedSteps, begin: int, end: float) -> ReadRun:
    """The steps of a run from `begin` on, before `end`."""
    metrics = {step: row for step, row in run.metrics.items() if begin <= step < end}
    spans = [recorded for recorded in run.spans if begin <= recorded.step < end]
    first_step = planned.first_step
    last_step = max(metrics, default=first_step)
    return replace(
        run,
        name=f"{run.name} (steps {first_step} to {last_step})",
        plans=[planned],
        spans=spans,
        metrics=metrics,
        monitor=_samples_during(spans, run.monitor),
    )


def _samples_during(spans: Sequence[Recorded], monitor: Sequence[Sample]) -> list[Sample]:
    """The samples between the first and the last of these spans. Without spans it is not known
    which samples belong to their steps, so there are none."""
    if not spans:
        return []
    start_s = min(recorded.span.start_s for recorded in spans)
    end_s = max(recorded.span.end_s for recorded in spans)
    return [sample for sample in monitor if start_s <= sample["time_s"] <= end_s]


def read_parts(folder: str | Path, name: str) -> dict[str, ReadRun]:
    """Read a run folder. Returns the parts that have metrics, by name; the run itself if none
    has."""
    run = read_run(folder)
    run.name = name
    parts = {}
    for part in parts_of(run):
        if part.metrics:
            parts[part.name] = part
    return parts or {name: run}


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """A name for each path: its last part, or the full path if several have the same last part;
    paths that are the same get numbers."""
    last_parts = []
    for path in paths:
        file_name = Path(path).absolute().name
        last_part = file_name.removesuffix(".log")
        last_parts.append(encodable(last_part))

    names = []
    for last_part, path in zip(last_parts, paths, strict=True):
        if last_parts.count(last_part) == 1:
            names.append(last_part)
        else:
            full_path = encodable(str(path))
            names.append(full_path)

    numbered_names = []
    for number, name in enumerate(names, 1):
        if names.count(name) == 1:
            numbered_names.append(name)
        else:
            numbered_names.append(f"{name} ({number})")
    return numbered_names
