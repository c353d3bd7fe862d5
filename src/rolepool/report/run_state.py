"""What has become of a run: running, finished, stopped, failed or unknown (docs/profiling.md
explains them).

A run holds a lock, which names its process and its machine. It removes the lock when it ends.
"""

import os
import re
from contextlib import suppress

import psutil

from rolepool.metrics.run_folder import lock_text
from rolepool.report.run import ReadRun

LOCK = re.compile(r"(?:process (\d{1,9}) on (.+))?")
"""What a run writes into its lock. For a moment the lock is empty."""

CLOCK_TOLERANCE_S = 2
"""The start of a process and the time of a file come from different clocks."""


def state_of(run: ReadRun, *, is_silent: bool) -> str:
    """The state of a run. `is_silent` says that nothing has been written for some time, which
    decides about a run on another machine."""
    lock = run.folder / ".lock"
    if not lock.is_file():
        return "finished" if run.is_finished else "stopped"
    try:
        holder = LOCK.fullmatch(lock_text(run.folder))
        locked_s = lock.stat().st_mtime
    except (OSError, ValueError):  # just removed, or not the lock of a run
        holder = None
    if holder is None:
        return "finished" if run.is_finished else "unknown"

    pid, machine = holder.groups()
    if machine != os.uname().nodename:
        if not is_silent:
            return "running"
        return "finished" if run.is_finished else "unknown"
    if _is_alive(pid, locked_s):
        return "running"
    return "finished" if run.is_finished else "failed"


def _is_alive(pid: str, locked_s: float) -> bool:
    """Whether the process that took the lock is alive. A process that is younger than the lock is
    another one with the same number."""
    with suppress(psutil.Error, ValueError, OverflowError):
        return psutil.Process(int(pid)).create_time() <= locked_s + CLOCK_TOLERANCE_S
    return False
