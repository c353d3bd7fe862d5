"""The rows that a run has written: which step or event a line belongs to, and the newest ones.

`metrics.run_folder` writes them. Lines are bytes, and they may be damaged, because a run may end at
any time.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rolepool.reading import lines_within, open_regular, parse_json

Event = Literal["restart", "move"]
EVENT = re.compile(rb'"(restart|move)": {')
"""What all rows of metrics.jsonl contain that record an event instead of numbers: processes that
died were replaced, or the run moved to another placement."""
UNREADABLE = 2**63
"""Stands for the step of a line that cannot be read."""
TAIL_BYTES = 2**25
"""How much of the end of a long metrics.jsonl is searched for events and for the last step."""


def last_lines(path: Path, last_bytes: float = math.inf) -> Iterator[bytes]:
    """The lines of a file, if it exists; only those in its last bytes if it is longer. The last
    line may be incomplete."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        start = int(max(0, num_bytes - last_bytes))
        if start:
            # The search may begin within a line, whose rest is left out. The byte before is read,
            # too: if it ends a line, nothing is left out.
            file.seek(start - 1)
            next(lines_within(file), None)
        yield from lines_within(file)


def step_of(line: bytes) -> int:
    """The step of a line. A line that a crash or a full disk made unreadable counts as later than
    all steps."""
    try:
        if line.startswith(b"step:"):
            return int(line[5:].split(b" ")[0])
        return int(parse_json(line)["step"])
    except (ValueError, OverflowError, LookupError, TypeError):
        return UNREADABLE


def event_kind(line: bytes) -> str | None:
    """The kind of event that a row of metrics.jsonl records; None if it has numbers."""
    event = EVENT.search(line)
    if event is None:
        return None
    return event[1].decode()


def event_lines(folder: Path, kind: str) -> list[bytes]:
    """The newest complete rows of metrics.jsonl about events of this kind."""
    lines = []
    for line in last_lines(folder / "metrics.jsonl", TAIL_BYTES):
        is_complete = line.endswith(b"\n")
        if is_complete and event_kind(line) == kind:
            lines.append(line)
    return lines


def newest_validation(folder: Path) -> list[bytes]:
    """The newest row of metrics.jsonl that has scores of a validation, if there is one."""
    newest: list[bytes] = []
    for line in last_lines(folder / "metrics.jsonl", TAIL_BYTES):
        is_complete = line.endswith(b"\n")
        if is_complete and b'"val-core/' in line:
            newest = [line]
    return newest


def last_step(folder: Path) -> int:
    """The step of the newest row of metrics; 0 if there is none."""
    lines = last_lines(folder / "metrics.jsonl", TAIL_BYTES)
    rows = [line for line in lines if event_kind(line) is None]
    for row in reversed(rows):
        step = step_of(row)
        if step < UNREADABLE:
            return step
    return 0


def divided(file: Path, step: int) -> tuple[bytes, bytes]:
    """The lines of a file up to a step, with those of all restarts, and the later lines."""
    kept: list[bytes] = []
    later: list[bytes] = []
    for line in file.read_bytes().splitlines():
        whole_line = line + b"\n"
        is_kept = step_of(line) <= step or event_kind(line) == "restart"
        if is_kept:
            kept.append(whole_line)
        else:
            later.append(whole_line)
    return b"".join(kept), b"".join(later)
