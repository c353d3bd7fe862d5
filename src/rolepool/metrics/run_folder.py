"""The run folder: what a run writes.

Owns the names of the folder's files and how they are written (complete files are replaced
atomically, rows are appended), the lock that keeps a second run out, and moving an earlier run
aside. `metrics.run_rows` reads rows again.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from rolepool.errors import ConfigError, explained, logger
from rolepool.files import atomic_path, write_atomically
from rolepool.metrics.row_text import console_line
from rolepool.metrics.run_rows import Event, divided
from rolepool.metrics.sharding_times import SHARDING_FILE
from rolepool.metrics.spans import Recorded
from rolepool.metrics.start_times import START_FILE
from rolepool.placement.plan import Plan, PlanHistory, PlannedSteps, Schedule
from rolepool.reading import Number, read_small

RUN_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "spans.jsonl",
    "monitor.jsonl",
    "train.log",
    "report.html",
    "tensorboard",
    "validation",
    "training_responses",
    "checkpoints",
    "trace.json",
    "state.json",
    SHARDING_FILE,
    START_FILE,
    "plan.json",
)
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


LOCK_FILE = ".lock"
MAX_LOCK_BYTES = 2**12
STEP_FOLDERS = ("checkpoints", "validation", "training_responses")
"""Folders with an entry `step_000012` for some steps."""
STEP_ROW_FILES = ("metrics.jsonl", "spans.jsonl", "train.log")
"""Files in which each line belongs to a step."""


class RunFolder:
    """A folder with `RUN_FILES` in it. Other files in it are not touched."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.lock_file = self.path / LOCK_FILE

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Create the folder and keep other runs out of it, until the block ends or this process
        dies."""
        key = f"trainer.default_local_dir={self.path}"
        with explained(f"{key}: cannot be written", "name another folder"):
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            # An old lock can be opened even if no file can be created.
            tempfile.TemporaryFile(dir=self.path).close()
            lock = self.lock_file.open("a+", encoding="utf-8", errors="replace")
        with lock:
            if not self._take(lock):
                lock.seek(0)
                holder = lock.read(MAX_LOCK_BYTES)
                what = f"another run is writing there ({holder}); wait until it ends, or name another folder"
                raise ConfigError(f"{key}: {what}")
            try:
                with explained(
                    f"{key}: cannot be written", "free disk space, or name another folder"
                ):
                    holder = f"process {os.getpid()} on {os.uname().nodename}"
                    self.lock_file.write_text(holder, encoding="utf-8")
                yield
            finally:
                self.lock_file.unlink(missing_ok=True)
                if is_new:
                    with suppress(OSError):  # not empty: the run has started
                        self.path.rmdir()

    def _take(self, lock: IO[str]) -> bool:
        """Lock the file. Returns whether no other run has locked it."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            # Some network file systems have no locks.
            logger.warning(
                "%s cannot be locked (%s): do not start another run in it",
                self.path,
                error.strerror,
            )
            return True
        # If the previous run removed the file after it was opened here, the file has no link any
        # more.
        return os.fstat(lock.fileno()).st_nlink > 0

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
        aside = self._next_earlier_folder()
        moved = self._existing_files()
        if after_step is not None:
            moved = self._folders_after(after_step)
        elif moved:
            moved = [*self._existing_files(LOG_FOLDERS), *moved]

        divided_files: dict[Path, tuple[bytes, bytes]] = {}
        if after_step is not None:
            for file in self._existing_files(STEP_ROW_FILES):
                divided_files[file] = divided(file, after_step)

        for path in moved:
            target = aside / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        for file, (kept, later) in divided_files.items():
            if later:
                aside.mkdir(parents=True, exist_ok=True)
                moved_file = aside / file.name
                moved_file.write_bytes(later)
                with atomic_path(file) as temporary:
                    temporary.write_bytes(kept)
        if not aside.exists():
            return None
        # If the run resumes, its config and plan were not moved.
        for path in self._existing_files(("config.yaml", "plan.json")):
            copy = aside / path.name
            copy.write_bytes(path.read_bytes())
        return aside

    def _next_earlier_folder(self) -> Path:
        """The first `earlier/N` after all that exist."""
        earlier = self.path / "earlier"
        newest = 0
        for path in earlier.glob("*"):
            if path.name.isdecimal():
                newest = max(newest, int(path.name))
        return earlier / str(newest + 1)

    def _folders_after(self, step: int) -> list[Path]:
        """What the folders of `STEP_FOLDERS` have for later steps."""
        later = []
        for folder in STEP_FOLDERS:
            for path in self.path.glob(f"{folder}/step_*"):
                number = path.stem.removeprefix("step_")
                if number.isdecimal() and int(number) > step:
                    later.append(path)
        return later

    def write(self, name: str, text: str) -> None:
        write_atomically(self.path / name, [text])

    def add_plan(
        self,
        first_step: int,
        plan: Plan,
        schedule: Schedule | None = None,
    ) -> None:
        """Write to plan.json that the plan holds from this step on. Plans of later steps are
        removed."""
        earlier: list[PlannedSteps] = []
        with suppress(OSError, ValueError):  # there is none, or it is damaged
            text = read_small(self.path / "plan.json")
            history = PlanHistory.model_validate_json(text)
            for planned in history.plans:
                if planned.first_step < first_step:
                    earlier.append(planned)
        if earlier and earlier[-1].plan == plan:
            # A run that resumes with the same placement has not moved.
            last = earlier.pop()
            first_step = last.first_step
        newest = PlannedSteps(first_step, plan, schedule)
        new_history = PlanHistory(plans=[*earlier, newest])
        new_text = new_history.model_dump_json(indent=2)
        self.write("plan.json", new_text)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        row = json.dumps({"step": step, **metrics})
        self._append("metrics.jsonl", [row])
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
        event = {
            "what": what,
            **steps,
            "seconds": round(seconds, 1),
            "pools": list(pools),
        }
        row = json.dumps({"step": step, kind: event})
        self._append("metrics.jsonl", [row])

    def add_spans(self, recorded: Iterable[Recorded]) -> None:
        lines = []
        for step, operation, span in recorded:
            row = {"step": step, "operation": operation, **span._asdict()}
            lines.append(json.dumps(row))
        self._append("spans.jsonl", lines)

    def add_samples(
        self,
        step: int,
        samples: Iterable[Mapping[str, object]],
        folder: str = "validation",
    ) -> None:
        """What a validation, or a training step, generated, one row for each response."""
        (self.path / folder).mkdir(exist_ok=True)
        lines = [json.dumps(row, default=str) + "\n" for row in samples]
        self.write(f"{folder}/step_{step:06d}.jsonl", "".join(lines))

    def add_monitor(self, samples: Iterable[Mapping[str, object]]) -> None:
        """What the monitors measured on GPUs and processes."""
        self._append("monitor.jsonl", map(json.dumps, samples))

    def _existing_files(self, names: Iterable[str] = RUN_FILES) -> list[Path]:
        existing = []
        for name in names:
            path = self.path / name
            if path.exists():
                existing.append(path)
        return existing

    def _append(self, name: str, lines: Iterable[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        path = self.path / name
        what = f"trainer.default_local_dir={self.path}: {name} cannot be written"
        with (
            explained(what, "fix it and resume"),
            path.open("a", encoding="utf-8") as file,
        ):
            file.write(text)


def lock_text(folder: Path) -> str:
    """What the run that holds the lock of a folder has written into it: its process and its
    machine."""
    return read_small(folder / LOCK_FILE, MAX_LOCK_BYTES).decode(errors="replace")


SAMPLE_NAMES = {"prompt": "input", "response": "output", "ground_truth": "gts"}
"""The names of some columns in files of samples, which are verl's."""


def write_samples(
    key: str,
    folder: str,
    step: int,
    samples: Iterable[Mapping[str, object]],
) -> None:
    """Write all samples of a step or validation to STEP.jsonl, in the folder that a key names."""
    path = Path(folder).expanduser() / f"{step}.jsonl"
    lines = []
    for sample in samples:
        row: dict[str, object] = {}
        for name, value in sample.items():
            name_in_file = SAMPLE_NAMES.get(name, name)
            row[name_in_file] = value
        row["step"] = step
        lines.append(json.dumps(row, default=str) + "\n")
    with explained(f"{key}={folder}: {path.name} cannot be written", "fix it and resume"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lines)
