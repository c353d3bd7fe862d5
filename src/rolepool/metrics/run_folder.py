"""The run folder: what a run writes down, so that every number can be traced back.

Owns the names of its files and how they are written: whole files by rename, rows by appended lines; and how a row and
a curve look in one line of text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rolepool.metrics.analysis import Recorded

NAMES = (
    "config.yaml",
    "plan.json",
    "metrics.jsonl",
    "spans.jsonl",
    "monitor.jsonl",
    "train.log",
    "report.html",
    "tensorboard",
    "validation",
    "checkpoints",
)
"""All that a run writes."""


BARS = "▁▂▃▄▅▆▇█"


class RunFolder:
    """A folder with these names in it, and possibly with others, which are left alone."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def begin(self, after_step: int | None) -> None:
        """Go on after a step: rows of later ones are dropped, as they are done again. None: an earlier run is set aside
        in `earlier/`, so that a new one neither mixes with it nor loses it."""
        if after_step is not None:
            self._forget_after(after_step)
            return
        found = [self.path / name for name in NAMES if (self.path / name).exists()]
        if found:
            earlier = self.path / "earlier"
            earlier.mkdir(exist_ok=True)
            aside = earlier / str(len(list(earlier.iterdir())) + 1)
            aside.mkdir()
            for path in found:
                path.rename(aside / path.name)

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

    def _forget_after(self, step: int) -> None:
        for name in ("metrics.jsonl", "spans.jsonl", "train.log"):
            file = self.path / name
            if file.exists():
                lines = file.read_text(encoding="utf-8").splitlines()
                self.write(name, "".join(f"{line}\n" for line in lines if _step_of(line) <= step))

    def _append(self, name: str, lines: Iterable[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        with (self.path / name).open("a", encoding="utf-8") as file:
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


def _step_of(line: str) -> int:
    """A line cut off by a crash belongs to no step that was finished."""
    if logged := re.match(r"step:(\d+) ", line):
        return int(logged[1])
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**63
