"""The run folder: what a run writes down, so that every number can be traced back.

Owns the names of its files and how they are written: whole files by rename, rows by appended lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rolepool.metrics.spans import Span


class RunFolder:
    """`config.yaml`, `plan.json`, `metrics.jsonl`, `spans.jsonl`, `train.log`, `checkpoints/`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write(self, name: str, text: str) -> None:
        """A whole file, or the old one as it was."""
        temporary = self.path / f".tmp-{name}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", json.dumps({"step": step, **metrics}))

    def add_spans(self, step: int, operation: str, spans: Iterable[Span]) -> None:
        for span in spans:
            self._append("spans.jsonl", json.dumps({"step": step, "operation": operation, **span._asdict()}))

    def add_log(self, line: str) -> None:
        self._append("train.log", line)

    def forget_after(self, step: int) -> None:
        """Drop rows of later steps, which a resumed run does again."""
        for name in ("metrics.jsonl", "spans.jsonl"):
            file = self.path / name
            if file.exists():
                lines = file.read_text(encoding="utf-8").splitlines()
                self.write(name, "".join(f"{line}\n" for line in lines if _step_of(line) <= step))

    def _append(self, name: str, line: str) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def console_line(step: int, metrics: Mapping[str, float]) -> str:
    """`step:N - key:value - key:value ...`"""
    return " - ".join([f"step:{step}", *(f"{name}:{value:.6g}" for name, value in metrics.items())])


def _step_of(line: str) -> int:
    """A line cut off by a crash belongs to no step that was finished."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**63
