"""The process that `rolepool train` keeps beside the driver: it restarts a driver that was killed.

Owns the driver's process: its start, the signals that are passed on to it, and when it is started
again. The driver has its own session, so a signal to the process group of the command (Ctrl-C,
`timeout`, a scheduler) reaches this process only, and not the processes of Ray.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil
from rich.console import Console

from rolepool.command_line import EXIT_RAY_DIED, EXIT_USER_ERROR, print_errors
from rolepool.config.run_keys import TrainerConfig
from rolepool.metrics.run_rows import last_step

ON_PURPOSE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1
EXIT_TRACEBACK = 70
"""The exit code of a driver that ends with a traceback. Code 1 means that Ray ended the driver."""


class Death(NamedTuple):
    """How the driver before this one died."""

    what: str
    time_s: float
    step: int
    """The last step that it had completed, or 0."""
    has_checkpoint: bool
    """Whether the run has saved a checkpoint."""


def supervise(keys: TrainerConfig) -> int | Death | None:
    """Start a driver, and start it again each time it is killed.

    Returns in this process when the last driver has ended, with the exit code. Returns in every
    driver at once, with the death of the driver before it, or None in the first one.
    """
    folder = Path(keys.default_local_dir).expanduser()
    plan_before = _plan_time(folder)
    death: Death | None = None
    furthest_step = 0
    num_restarts = 0
    while driver := _start_driver():
        code, asked = wait_for(driver)
        was_killed = code < 0
        if not was_killed and code not in (EXIT_RAY_DIED, 1):
            return 1 if code == EXIT_TRACEBACK else code
        _kill_session(driver)
        Console().show_cursor()  # a progress bar hides it
        if asked or -code in ON_PURPOSE:
            return 128 + (asked or -code)
        has_begun = _plan_time(folder) != plan_before
        death = _death_of(code, folder, has_begun=has_begun)
        # A repeated step is not progress: otherwise, a run that dies in the same step each time
        # would never end.
        if death.step > furthest_step:
            furthest_step = death.step
            num_restarts = 0
        num_restarts += 1
        _announce(death, num_restarts, keys.max_restarts)
        if num_restarts > keys.max_restarts:
            return EXIT_USER_ERROR if code > 0 else 128 - code
    return death


def _death_of(code: int, folder: Path, *, has_begun: bool) -> Death:
    """The death of a driver that ended with this code. If its run had not begun, what is in the
    folder belongs to an earlier run."""
    what = "Ray (raylet or GCS server)"
    if code < 0:
        what = f"driver, killed by signal {-code}"
    step = 0
    has_checkpoint = False
    if has_begun:
        step = last_step(folder)
        has_checkpoint = any(folder.glob("checkpoints/step_*/trainer.json"))
    return Death(what, time.time(), step, has_checkpoint)


def _start_driver() -> int:
    """Fork. Returns the driver's process id, and 0 in the driver."""
    if sys.stdout is not None:  # None if the shell closed it
        sys.stdout.flush()
    supervisor = os.getpid()
    driver = os.fork()
    if driver == 0:
        os.setsid()
        if sys.platform == "linux":
            # The driver ends with its supervisor.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The supervisor ended before that call.
        if os.getppid() != supervisor:
            os._exit(EXIT_USER_ERROR)
    return driver


def wait_for(process: int) -> tuple[int, int]:
    """The exit code of a child process (or minus the signal that killed it), and the last signal
    that was passed on to it, or 0. Ctrl-C and SIGTERM are passed on."""
    asked = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = number
        with suppress(ProcessLookupError):
            os.kill(process, number)

    before_interrupt = signal.signal(signal.SIGINT, pass_on)
    before_terminate = signal.signal(signal.SIGTERM, pass_on)
    _, status = os.waitpid(process, 0)
    signal.signal(signal.SIGINT, before_interrupt)
    signal.signal(signal.SIGTERM, before_terminate)
    return os.waitstatus_to_exitcode(status), asked


def _plan_time(folder: Path) -> int:
    """Changes when a driver takes over the run folder."""
    plan = folder / "plan.json"
    return plan.stat().st_mtime_ns if plan.exists() else 0


def _kill_session(session: int) -> None:
    """Kill what a dead driver has left, so that the next driver finds free memory and GPUs."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session:
                process.kill()


def _announce(death: Death, number: int, most: int) -> None:
    """Print what happens now."""
    when = "before the first step ended"
    if death.step:
        when = f"after step {death.step}"
    where = "from where the run began: no checkpoint yet"
    if death.has_checkpoint:
        where = "from the newest checkpoint"
    then = f"restarting {where} ({number} of {most} without a new step)"
    if number > most:
        then = f"not restarted any more (trainer.max_restarts={most}); fix the cause, and run the same command again"
    print_errors([f"{death.what}, {when}; {then}"], label="")
