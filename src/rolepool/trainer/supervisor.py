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
    furthest_step = num_restarts = 0
    while driver := _start_driver():
        code, asked = wait_for(driver)
        if code >= 0 and code not in (EXIT_RAY_DIED, 1):
            return 1 if code == EXIT_TRACEBACK else code
        _kill_session(driver)
        Console().show_cursor()  # a progress bar hides it
        if asked or -code in ON_PURPOSE:
            return 128 + (asked or -code)
        what = f"driver, killed by signal {-code}" if code < 0 else "Ray (raylet or GCS server)"
        has_begun = (
            _plan_time(folder) != plan_before
        )  # otherwise, what is in the folder is of an earlier run
        has_checkpoint = has_begun and any(folder.glob("checkpoints/step_*/trainer.json"))
        death = Death(what, time.time(), last_step(folder) if has_begun else 0, has_checkpoint)
        # A repeated step is not progress: otherwise, a run that dies in the same step each time
        # would never end.
        num_restarts = 1 if death.step > furthest_step else num_restarts + 1
        furthest_step = max(furthest_step, death.step)
        _announce(death, num_restarts, keys.max_restarts)
        if num_restarts > keys.max_restarts:
            return EXIT_USER_ERROR if code > 0 else 128 - code
    return death


def _start_driver() -> int:
    """Fork. Returns the driver's process id, and 0 in the driver."""
    if sys.stdout is not None:  # None if the shell closed it
        sys.stdout.flush()
    supervisor = os.getpid()
    driver = os.fork()
    if driver == 0:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(
                PR_SET_PDEATHSIG, signal.SIGKILL
            )  # the driver ends with its supervisor
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

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    _, status = os.waitpid(process, 0)
    for number, handler in before.items():
        signal.signal(number, handler)
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
    when = f"{death.what}, " + (
        f"after step {death.step}" if death.step else "before the first step ended"
    )
    where = (
        "from the newest checkpoint"
        if death.has_checkpoint
        else "from where the run began: no checkpoint yet"
    )
    then = f"restarting {where} ({number} of {most} without a new step)"
    if number > most:
        then = f"not restarted any more (trainer.max_restarts={most}); fix the cause, and run the same command again"
    print_errors([f"{when}; {then}"], label="")
