"""Snapshots of a run in shared memory: where they are, when they are taken, and which one is complete.

Owns the folder in shared memory. Two snapshots are written in turn, so that one is complete while the other is written.
The ranks write them (`rolepool.models.snapshot`); the driver keeps the position in the data.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rolepool.config import Config
from rolepool.models.checkpoint import saved_step
from rolepool.placement import Plan
from rolepool.placement.estimate import GIB, snapshot_bytes
from rolepool.trainer.checkpoint import Position
from rolepool.trainer.step import Roles

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rolepool-"
COMPLETE_TIMEOUT_S = 60.0


def remove_left_behind(shared_memory: Path) -> None:
    """Remove the snapshots of drivers that were killed. A driver that lives holds a lock on its folder."""
    for folder in shared_memory.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, or removed meanwhile
            if (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Hold a lock on a folder until this process ends; None if another process holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


class Snapshots:
    """The last two snapshots of a run. If `why_off` is not None, there are none, and it says why."""

    def __init__(self, config: Config, plan: Plan, *, on_gpus: bool) -> None:
        # Snapshots from GPUs were not tried yet, so they must be asked for.
        self._every = config.trainer.snapshot_freq or (-1 if on_gpus else 1)
        self._taken: list[tuple[Position, Path]] = []
        self._num_moves = 0
        self._folder: Path | None = None
        self._lock: int | None = None
        self.why_off = self._why_off(config, plan)

    def _why_off(self, config: Config, plan: Plan) -> str | None:
        if self._every < 1:
            return f"trainer.snapshot_freq is {self._every}{'' if config.trainer.snapshot_freq else ' on GPUs'}"
        if not plan.is_on_one_node:
            return "the run uses several nodes"
        needed, free = snapshot_bytes(config, plan), shutil.disk_usage(SHARED_MEMORY).free
        if needed > free:
            return f"they need {needed / GIB:.1f} GiB, and {SHARED_MEMORY} has {free / GIB:.1f} GiB free"
        return None

    def take(self, roles: Roles, position: Position) -> None:
        """Queue a snapshot of the state after this step, if one is due. The first one is always taken."""
        if self.why_off is None and not (self._taken and position.step % self._every):
            self._take(roles, position)

    def _take(self, roles: Roles, position: Position) -> None:
        if self._folder is None:
            remove_left_behind(SHARED_MEMORY)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
            self._lock = _lock(self._folder)
        # A step that is repeated is written to the same place.
        place = self._folder / f"{self._num_moves}-{position.step // max(1, self._every) % 2}"
        before = [one for one in self._taken if one[0].step < position.step and one[1] != place]
        self._taken = [*before, (position, place)][-2:]
        for name, role in roles.trained.items():
            role.take_snapshot(str(place / name), position.step)

    def newest(self, roles: Roles, most: int) -> tuple[Path, Position] | None:
        """The newest complete snapshot of a step up to `most`: its folder, and the state of the run; None if there is
        none."""
        for position, folder in reversed([one for one in self._taken if one[0].step <= most]):
            if all(saved_step(folder / name) == position.step for name in roles.trained):
                return folder, position
        return None

    def complete(self, roles: Roles, position: Position) -> Path | None:
        """The snapshot of the state after this step, when it is complete; None if there is none. It is taken now if it
        was not due."""
        if self.why_off is not None:
            return None
        if all(one.step != position.step for one, _ in self._taken):
            self._take(roles, position)
        deadline = time.monotonic() + COMPLETE_TIMEOUT_S
        while time.monotonic() < deadline:
            folder, found = self.newest(roles, position.step) or (None, None)
            if found is not None and found.step == position.step:
                return folder
            time.sleep(0.01)
        return None

    def have_moved(self) -> None:
        """Other ranks write the next snapshots, so they get folders of their own."""
        self._num_moves += 1

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
