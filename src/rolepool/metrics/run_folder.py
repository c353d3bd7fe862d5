"""The run folder: what a run writes down, so that every number can be traced back.

Owns the names of its files and how they are written: whole files by rename, rows by appended lines; who may write; what
becomes of an earlier run in it; and how a row and a curve look in one line of text.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rolepool.errors import ConfigError, explained
from rolepool.metrics.analysis import Recorded

logger = logging.getLogger(__name__)

NAMES = (
    "config.yaml",
    "metrics.jsonl",
    "spans.jsonl",
    "monitor.jsonl",
    "train.log",
    "report.html",
    "tensorboard",
    "validation",
    "checkpoints",
    "trace.json",
    "plan.json",
)
"""All that a run writes. The plan is the mark of a run: it comes first, and goes last when a run is set aside."""


BARS = "▁▂▃▄▅▆▇█"


class RunFolder:
    """A folder with these names in it, and possibly with others, which are left alone."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Make the folder, and keep other runs out of it for the time of the block or until this process dies."""
        key, file = f"trainer.default_local_dir={self.path}", self.path / ".lock"
        try:
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()  # an older lock can be opened where nothing new can be made
            lock = file.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{key}: no folder to write to ({error.strerror}); name another") from None
        with lock:
            if not self._lock(lock):
                lock.seek(0)
                raise ConfigError(
                    f"{key}: another run writes there ({lock.read()}); wait until it ends, or name another folder"
                )
            try:
                with explained(f"{key}: cannot be written", "make room, or name another folder"):
                    lock.truncate(0)
                    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
                    lock.flush()
                yield
            finally:
                file.unlink(missing_ok=True)
                if is_new:
                    with suppress(OSError):  # a run that has started leaves something in it
                        self.path.rmdir()

    def _lock(self, lock: TextIO) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): start no other run in it", self.path, error.strerror)
        return os.fstat(lock.fileno()).st_nlink > 0  # else its holder removed it after it was opened here

    @property
    def holds_a_run(self) -> bool:
        return (self.path / "plan.json").exists()

    def check_is_ours(self) -> None:
        """Files that have a run's names, and that no run wrote, would be moved or replaced by a new run."""
        found = self._found()
        if found and not self.holds_a_run:
            names = ", ".join(path.name for path in found)
            raise ConfigError(
                f"trainer.default_local_dir={self.path}: {names} would be in the run's way, and no run wrote that "
                "(there is no plan.json); name a new folder, and have a shell write its output elsewhere"
            )

    def begin(self, after_step: int | None) -> Path | None:
        """Set aside what a run that goes on after a step will do again, or with None all of an earlier run.

        A new run neither mixes with an earlier one nor loses it. Returns where it is now, if there was anything.
        """
        earlier = self.path / "earlier"
        numbers = [int(path.name) for path in earlier.glob("*") if path.name.isdecimal()]
        aside = earlier / str(max(numbers, default=0) + 1)
        for path in self._found() if after_step is None else self._files_after(after_step):
            target = aside / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        if after_step is not None:
            self._move_rows_after(after_step, aside)
        if not aside.exists():
            return None
        for path in (self.path / "config.yaml", self.path / "plan.json"):  # still there where a run goes on
            if path.exists():
                shutil.copy2(path, aside)
        return aside

    def write(self, name: str, text: str) -> None:
        write_whole(self.path / name, [text])

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", [json.dumps({"step": step, **metrics})])

    def add_spans(self, recorded: Iterable[Recorded]) -> None:
        lines = ({"step": step, "operation": operation, **span._asdict()} for step, operation, span in recorded)
        self._append("spans.jsonl", map(json.dumps, lines))

    def add_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """What a validation generated, one row each."""
        (self.path / "validation").mkdir(exist_ok=True)
        self.write(f"validation/step_{step:06d}.jsonl", "".join(f"{json.dumps(row)}\n" for row in samples))

    def add_monitor(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """What monitors saw of GPUs and processes."""
        self._append("monitor.jsonl", map(json.dumps, samples))

    def add_log(self, line: str) -> None:
        self._append("train.log", [line])

    def _found(self) -> list[Path]:
        return [path for path in (self.path / name for name in NAMES) if path.exists()]

    def _files_after(self, step: int) -> list[Path]:
        """Checkpoints and samples of later steps."""
        files = [*self.checkpoints.glob("step_*"), *(self.path / "validation").glob("step_*")]
        return [file for file in files if (number := re.fullmatch(r"step_(\d+)", file.stem)) and int(number[1]) > step]

    def _move_rows_after(self, step: int, aside: Path) -> None:
        for name in ("metrics.jsonl", "spans.jsonl", "train.log"):
            file = self.path / name
            kept: list[bytes] = []
            later: list[bytes] = []
            for line in file.read_bytes().splitlines() if file.exists() else []:
                (kept if _step_of(line) <= step else later).append(line + b"\n")
            if later:
                aside.mkdir(parents=True, exist_ok=True)
                (aside / name).write_bytes(b"".join(later))
                self.write(name, b"".join(kept).decode())

    def _append(self, name: str, lines: Iterable[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        what = f"trainer.default_local_dir={self.path}: {name} cannot be written"
        with explained(what, "mend that and go on"), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(text)


def write_whole(path: Path, pieces: Iterable[str]) -> Path:
    """Write a whole file, or leave the old one as it was."""
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to. It becomes `path` at the end of the block; after an error in it, nothing of it is left."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def console_line(step: int, metrics: Mapping[str, float]) -> str:
    """`step:N - key:value - key:value ...`"""
    return " - ".join([f"step:{step}", *(f"{name}:{value:.6g}" for name, value in metrics.items())])


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The course of values between 0 (or their least) and 1 (or their most) as a line of bars."""
    low, high = min(0.0, *values), max(1.0, *values)
    groups = [values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)]
    means = [sum(group) / len(group) for group in groups if group]
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means)


def _step_of(line: bytes) -> int:
    """A line that a crash or a full disk left unreadable belongs to no step that was finished."""
    try:
        text = line.decode()
        logged = re.match(r"step:(\d+) ", text)
        return int(logged[1] if logged else json.loads(text)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**63
