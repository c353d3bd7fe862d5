"""A run folder, read back.

Owns how its files are read: lines that a killed run or a full disk left unreadable are skipped, counted, and reported
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolepool.metrics.analysis import Recorded
from rolepool.placement.plan import Plan


@dataclass(frozen=True)
class Run:
    """What a run wrote down. `skipped` counts the unreadable lines of each file that has some."""

    folder: Path
    name: str
    config: dict[str, Any]
    plan: Plan | None
    spans: list[Recorded]
    rows: list[dict[str, float]]
    monitor: list[dict[str, Any]]
    skipped: dict[str, int]


def read_run(folder: str | Path) -> Run:
    """A run folder's content; ConfigError where the folder is no run."""
    raise NotImplementedError
