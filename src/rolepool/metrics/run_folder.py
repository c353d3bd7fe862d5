"""What a run writes: the run folder, and the loggers of `trainer.logger` (TensorBoard, Weights &
Biases, MLflow).

Owns the names of the folder's files and how they are written (complete files are replaced
atomically, rows are appended), the lock that keeps a second run out, moving an earlier run aside,
and how a row of metrics and a curve look as one line of text.
"""

import fcntl
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rolepool.config import Config
from rolepool.errors import ConfigError, explained, logger
from rolepool.files import atomic_path, write_atomically
from rolepool.metrics.sharding_times import SHARDING_FILE
from rolepool.metrics.spans import Recorded
from rolepool.placement.plan import Plan, PlanHistory, PlannedSteps, Schedule
from rolepool.reading import Number, lines_within, open_regular, parse_json, read_small

RUN_FILES: tuple[str, ...] = (
    "config.yaml",
    "metrics.jsonl",
    "spans.jsonl",
    "monitor.jsonl",
    "train.log",
)
RUN_FILES += ("report.html", "tensorboard", "validation", "training_responses", "checkpoints")
RUN_FILES += ("trace.json", "state.json", SHARDING_FILE, "plan.json")
"""All files and folders of a run. plan.json marks the folder as a run: it is written first and
moved aside last."""
LOG_FOLDERS = ("stalls", "logs")
"""Folders that may exist without a run, because a start that failed has written to them."""


class State(NamedTuple):
    """`state.json`: what a run that is training does now. It is stale if `time_s` is long ago."""

    time_s: Number
    what: str
    """Such as `step 12`, since `since_s`."""
    since_s: Number
    pools: dict[str, list[tuple[str, Number, Number | None]]]
    """The operations of each pool since then: name, start, and end, which is None for the one that
    runs now."""


Event = Literal["restart", "move"]
EVENT = re.compile(rb'"(restart|move)": {')
"""What all rows of metrics.jsonl contain that record an event instead of numbers: processes that
died were replaced, or the run moved to another placement."""
UNREADABLE = 2**63
TAIL_BYTES = 2**25
"""How much of the end of a long metrics.jsonl is searched for events and for the last step."""
MAX_LOCK_BYTES = 2**12
STEP_FOLDERS = ("checkpoints", "validation", "training_responses")
"""Folders with an entry `step_000012` for some steps."""
STEP_ROW_FILES = ("metrics.jsonl", "spans.jsonl", "train.log")
"""Files in which each line belongs to a step."""
BARS = "▁▂▃▄▅▆▇█"


class RunFolder:
    """A folder with `RUN_FILES` in it. Other files in it are not touched."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.lock_file = self.path / ".lock"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Create the folder and keep other runs out of it, until the block ends or this process
        dies."""
        key, file = f"trainer.default_local_dir={self.path}", self.lock_file
        with explained(f"{key}: cannot be written", "name another folder"):
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(
                dir=self.path
            ).close()  # an old lock can be opened even if no file can be created
            lock = file.open("a+", encoding="utf-8", errors="replace")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # If the previous run removed the file after it was opened here, the file has no
                # link any more.
                is_ours = os.fstat(lock.fileno()).st_nlink > 0
            except BlockingIOError:
                is_ours = False
            except OSError as error:  # some network file systems have no locks
                logger.warning(
                    "%s cannot be locked (%s): do not start another run in it",
                    self.path,
                    error.strerror,
                )
                is_ours = True
            if not is_ours:
                lock.seek(0)
                holder = lock.read(MAX_LOCK_BYTES)
                what = f"another run is writing there ({holder}); wait until it ends, or name another folder"
                raise ConfigError(f"{key}: {what}")
            try:
                with explained(
                    f"{key}: cannot be written", "free disk space, or name another folder"
                ):
                    file.write_text(
                        f"process {os.getpid()} on {os.uname().nodename}", encoding="utf-8"
                    )
                yield
            finally:
                file.unlink(missing_ok=True)
                if is_new:
                    with suppress(OSError):  # not empty: the run has started
                        self.path.rmdir()

    @property
    def holds_a_run(self) -> bool:
        return (self.path / "plan.json").exists()

    def check_is_ours(self) -> None:
        """Raise ConfigError if the folder has files with the names of `RUN_FILES` that no run
        wrote."""
        names = ", ".join(path.name for path in self._existing_files())
        if names and not self.holds_a_run:
            what = f"the run would overwrite {names}, which no run wrote (there is no plan.json)"
            fix = "name a new folder, and let a shell write its output somewhere else"
            raise ConfigError(f"trainer.default_local_dir={self.path}: {what}; {fix}")

    def begin(self, after_step: int | None) -> Path | None:
        """Move what a run that resumes after this step will write again to `earlier/N`; None moves
        the whole run.

        Nothing is moved before everything was read, so that a file that cannot be read leaves the
        folder as it is. Returns the folder it was moved to, or None if there was nothing to move.
        """
        numbers = [int(path.name) for path in self.path.glob("earlier/*") if path.name.isdecimal()]
        aside = self.path / "earlier" / str(max(numbers, default=0) + 1)
        moved = self._existing_files()
        divided: dict[Path, tuple[bytes, bytes]] = {}
        if after_step is not None:
            numbered = [
                path for folder in STEP_FOLDERS for path in self.path.glob(f"{folder}/step_*")
            ]
            moved = [
                path
                for path in numbered
                if path.stem[5:].isdecimal() and int(path.stem[5:]) > after_step
            ]
            divided = {
                file: _divided(file, after_step) for file in self._existing_files(STEP_ROW_FILES)
            }
        elif moved:
            moved = [*self._existing_files(LOG_FOLDERS), *moved]
        for path in moved:
            target = aside / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        for file, (kept, later) in divided.items():
            if later:
                aside.mkdir(parents=True, exist_ok=True)
                (aside / file.name).write_bytes(later)
                with atomic_path(file) as temporary:
                    temporary.write_bytes(kept)
        if not aside.exists():
            return None
        for path in self._existing_files(("config.yaml", "plan.json")):  # only if the run resumes
            (aside / path.name).write_bytes(path.read_bytes())
        return aside

    def write(self, name: str, text: str) -> None:
        write_atomically(self.path / name, [text])

    def add_plan(self, first_step: int, plan: Plan, schedule: Schedule | None = None) -> None:
        """Write to plan.json that the plan holds from this step on. Plans of later steps are
        removed."""
        earlier: list[PlannedSteps] = []
        with suppress(OSError, ValueError):  # there is none, or it is damaged
            history = PlanHistory.model_validate_json(read_small(self.path / "plan.json")).plans
            earlier = [planned for planned in history if planned.first_step < first_step]
        if earlier and earlier[-1].plan == plan:
            first_step = earlier.pop().first_step
        earlier.append(PlannedSteps(first_step, plan, schedule))
        self.write("plan.json", PlanHistory(plans=earlier).model_dump_json(indent=2))

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", [json.dumps({"step": step, **metrics})])
        self._append("train.log", [console_line(step, metrics)])

    def add_event(
        self,
        kind: Event,
        step: int,
        what: str,
        seconds: float,
        pools: Sequence[str] = (),
        **steps: int,
    ) -> None:
        """Record that something died in a step, or that the run moved before it, how long the run
        did not train, and which pools have new processes. `steps` are `repeated_from_step` of a
        restart, and `after_step` of a move."""
        event = {"what": what, **steps, "seconds": round(seconds, 1), "pools": list(pools)}
        self._append("metrics.jsonl", [json.dumps({"step": step, kind: event})])

    def add_spans(self, recorded: Iterable[Recorded]) -> None:
        lines = (
            {"step": step, "operation": operation, **span._asdict()}
            for step, operation, span in recorded
        )
        self._append("spans.jsonl", map(json.dumps, lines))

    def add_samples(
        self, step: int, samples: Iterable[Mapping[str, Any]], folder: str = "validation"
    ) -> None:
        """What a validation, or a training step, generated, one row for each response."""
        (self.path / folder).mkdir(exist_ok=True)
        lines = (f"{json.dumps(row, default=str)}\n" for row in samples)
        self.write(f"{folder}/step_{step:06d}.jsonl", "".join(lines))

    def add_monitor(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """What the monitors measured on GPUs and processes."""
        self._append("monitor.jsonl", map(json.dumps, samples))

    def _existing_files(self, names: Iterable[str] = RUN_FILES) -> list[Path]:
        return [path for path in (self.path / name for name in names) if path.exists()]

    def _append(self, name: str, lines: Iterable[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        what = f"trainer.default_local_dir={self.path}: {name} cannot be written"
        with (
            explained(what, "fix it and resume"),
            (self.path / name).open("a", encoding="utf-8") as file,
        ):
            file.write(text)


def _divided(file: Path, step: int) -> tuple[bytes, bytes]:
    """The lines of a file up to a step, with those of all restarts, and the later lines."""
    kept: list[bytes] = []
    later: list[bytes] = []
    for line in file.read_bytes().splitlines():
        is_kept = _step_of(line) <= step or event_kind(line) == "restart"
        (kept if is_kept else later).append(line + b"\n")
    return b"".join(kept), b"".join(later)


def lock_text(folder: Path) -> str:
    """What the run that holds the lock of a folder has written into it: its process and its
    machine."""
    return read_small(folder / ".lock", MAX_LOCK_BYTES).decode(errors="replace")


def last_lines(path: Path, last_bytes: float = math.inf) -> Iterator[bytes]:
    """The lines of a file, if it exists; only those in its last bytes if it is longer. The last
    line may be incomplete."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        start = int(max(0, os.fstat(file.fileno()).st_size - last_bytes))
        if start:
            file.seek(start - 1)
            next(lines_within(file), None)  # the rest of a line
        yield from lines_within(file)


def event_kind(line: bytes) -> str | None:
    """The kind of event that a row of metrics.jsonl records; None if it has numbers."""
    found = EVENT.search(line)
    return found[1].decode() if found else None


def event_lines(folder: Path, kind: str) -> list[bytes]:
    lines = last_lines(folder / "metrics.jsonl", TAIL_BYTES)
    return [line for line in lines if event_kind(line) == kind and line.endswith(b"\n")]


def newest_validation(folder: Path) -> list[bytes]:
    """The newest row of metrics.jsonl that has scores of a validation, if there is one."""
    newest: list[bytes] = []
    for line in last_lines(folder / "metrics.jsonl", TAIL_BYTES):
        if b'"val-core/' in line and line.endswith(b"\n"):
            newest = [line]
    return newest


def last_step(folder: Path) -> int:
    """The step of the newest row of metrics; 0 if there is none."""
    lines = [
        line
        for line in last_lines(folder / "metrics.jsonl", TAIL_BYTES)
        if event_kind(line) is None
    ]
    return next((step for step in map(_step_of, reversed(lines)) if step < UNREADABLE), 0)


SAMPLE_NAMES = {"prompt": "input", "response": "output", "ground_truth": "gts"}
"""The names of some columns in files of samples, which are verl's."""


def write_samples(key: str, folder: str, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write all samples of a step or validation to STEP.jsonl, in the folder that a key names."""
    path = Path(folder).expanduser() / f"{step}.jsonl"
    rows = (
        {**{SAMPLE_NAMES.get(name, name): value for name, value in row.items()}, "step": step}
        for row in samples
    )
    with explained(f"{key}={folder}: {path.name} cannot be written", "fix it and resume"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(row, default=str) + "\n" for row in rows))


def console_line(step: int, metrics: Mapping[str, float]) -> str:
    """`step:N - key:value - key:value ...`"""
    return " - ".join([f"step:{step}", *(f"{name}:{value:.6g}" for name, value in metrics.items())])


VALIDATION_MEAN = re.compile(r"val-core/(.+/)?[^/@]+/mean(@\d+)?")


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """The mean score over the data sources of a validation; None if the row has none. Names may be
    those of `validation_metrics`, of older runs (without `@N`), or of verl."""
    means = [value for name, value in metrics.items() if VALIDATION_MEAN.fullmatch(name)]
    return sum(means) / len(means) if means else None


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values as a line of bars. Its scale goes from 0 (or the minimum) to 1 (or the
    maximum)."""
    low, high = min(0.0, *values), max(1.0, *values)
    groups = [
        values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)
    ]
    means = [sum(group) / len(group) for group in groups if group]
    return "".join(
        BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means
    )


def _step_of(line: bytes) -> int:
    """The step of a line. A line that a crash or a full disk made unreadable counts as later than
    all steps."""
    try:
        if line.startswith(b"step:"):
            return int(line[5:].split(b" ")[0])
        return int(parse_json(line)["step"])
    except (ValueError, OverflowError, LookupError, TypeError):
        return UNREADABLE


# Loggers. Each library is needed only if `trainer.logger` names it. A logger is a function that
# writes a row of metrics, and one that ends it.

Log = Callable[[int, Mapping[str, float]], None]
Close = Callable[[], None]


class Loggers:
    """All loggers of a run that has started. If one fails, there is one warning and training
    continues."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._loggers: dict[str, tuple[Log, Close]] = {}
        names = [name for name in config.trainer.logger if name in MAKERS]
        self._try(names, lambda name: self._loggers.update({name: MAKERS[name](config, folder)}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(self._loggers, lambda name: self._loggers[name][0](step, metrics))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log samples of a validation, with the loggers that have tables."""
        if samples:
            self._try(
                [name for name in self._loggers if name in TABLES],
                lambda name: TABLES[name](step, samples),
            )

    def close(self) -> None:
        self._try(self._loggers, lambda name: self._loggers[name][1]())

    def _try(self, names: Iterable[str], act: Callable[[str], None]) -> None:
        """Do something with each logger; remove it if that fails."""
        for name in list(names):
            try:
                act(name)
            except Exception as error:  # no logger may stop training
                logger.warning(
                    "trainer.logger: %s failed; training continues without it: %r", name, error
                )
                self._loggers.pop(name, None)


def _tensorboard(config: Config, folder: Path) -> tuple[Log, Close]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer: Any = EventFileWriter(str(folder / "tensorboard"))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        # `tensorboard.summary.Writer` would write tensors, which many programs do not find among
        # the scalars.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        writer.flush()

    return log, writer.close


def _wandb(config: Config, folder: Path) -> tuple[Log, Close]:
    import wandb

    names = {"project": config.trainer.project_name, "name": config.trainer.experiment_name}
    run: Any = wandb.init(**names, dir=str(folder), config=config.model_dump(mode="json"))
    return lambda step, metrics: run.log(dict(metrics), step=step), run.finish


def _mlflow(config: Config, folder: Path) -> tuple[Log, Close]:
    import mlflow

    mlflow.set_experiment(config.trainer.project_name)
    mlflow.start_run(run_name=config.trainer.experiment_name)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        # MLflow does not allow "@" in names.
        mlflow.log_metrics(
            {name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step
        )

    return log, mlflow.end_run


def _wandb_table(step: int, samples: Sequence[Mapping[str, Any]]) -> None:
    import wandb

    names = [
        "prompt",
        "response",
        "ground_truth",
        "score",
    ]  # other numbers may be missing in some samples
    rows = [[sample[name] for name in names] for sample in samples]
    wandb.log(
        {"val/generations": wandb.Table(columns=names, data=rows, allow_mixed_types=True)},
        step=step,
    )


def _mlflow_table(step: int, samples: Sequence[Mapping[str, Any]]) -> None:
    import mlflow

    mlflow.log_text(
        json.dumps(samples, indent=2, default=str), f"val_generations/step_{step:06d}.json"
    )


TABLES = {"wandb": _wandb_table, "mlflow": _mlflow_table}
MAKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
