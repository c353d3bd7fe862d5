"""The process that `rolepool train` keeps beside the driver: it restarts a driver that was killed.

Owns the driver's process: its start, the signals that are passed on to it, and when it is started again. The driver has
its own session, so a signal to the process group of the command (Ctrl-C, `timeout`, a scheduler) reaches this process
only, and not the processes of Ray.
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

from rolepool.command_line import EXIT_USER_ERROR, print_errors
from rolepool.config.run_keys import TrainerConfig
from rolepool.metrics.run_folder import last_step

EXIT_RAY_DIED = 75
"""The driver's exit code if its Ray has died. It is not seen outside."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM)
ENDED_ON_PURPOSE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


class Death(NamedTuple):
    """How the driver before this one died."""

    what: str
    time_s: float
    step: int
    """The last step that it had completed, or 0."""
    has_checkpoint: bool
    """Whether the run has saved a checkpoint of its own."""


class Supervisor:
    """Starts a driver, and starts it again if it was killed, until `trainer.max_restarts`."""

    def __init__(self, keys: TrainerConfig) -> None:
        self._keys = keys
        self._folder = Path(keys.default_local_dir).expanduser()
        self._plan_before = self._plan_version()
        self._driver = 0
        self._asked: int | None = None
        self._num_restarts = self._furthest_step = 0

    def run(self) -> int | Death | None:
        """Return in this process when the last driver has ended, with the exit code. Return in every driver at once,
        with the death of the driver before it, or None in the first driver."""
        before = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        death: Death | None = None
        while self._fork():
            code = os.waitstatus_to_exitcode(os.waitpid(self._driver, 0)[1])
            if code >= 0 and code != EXIT_RAY_DIED:
                return code
            kill_session(self._driver)
            Console().show_cursor()  # a progress bar hides it
            number = self._asked or (-code if -code in ENDED_ON_PURPOSE else None)
            if number is not None:
                return 128 + number
            death = self._death(code)
            if not self._may_restart(death):
                return EXIT_USER_ERROR if code == EXIT_RAY_DIED else 128 - code
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        return death

    def _fork(self) -> bool:
        """Start a driver. Returns False in it; its signals are blocked until it has its own handlers."""
        signals = {*PASSED_ON, signal.SIGTSTP}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        sys.stdout.flush()
        supervisor = os.getpid()
        self._driver = os.fork()
        if self._driver == 0:
            os.setsid()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no driver without a supervisor
            if os.getppid() != supervisor:
                os._exit(EXIT_USER_ERROR)
            return False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        with suppress(ProcessLookupError):
            os.kill(self._driver, number)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z stops the driver too, until `fg` or `bg`."""
        os.killpg(self._driver, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(self._driver, signal.SIGCONT)

    def _plan_version(self) -> int:
        """Changes when a driver takes over the run folder. What was in the folder before is not of this run."""
        plan = self._folder / "plan.json"
        return plan.stat().st_mtime_ns if plan.exists() else 0

    def _death(self, code: int) -> Death:
        what = f"driver, killed by signal {-code}" if code < 0 else "Ray"
        if self._plan_version() == self._plan_before:
            return Death(what, time.time(), step=0, has_checkpoint=False)
        has_checkpoint = any(self._folder.glob("checkpoints/step_*/trainer.json"))
        return Death(what, time.time(), last_step(self._folder), has_checkpoint)

    def _may_restart(self, death: Death) -> bool:
        """Count the restart. A step counts as new only if no driver before has completed it: otherwise, a run that dies
        in the same step each time would never end."""
        if death.step > self._furthest_step:
            self._furthest_step, self._num_restarts = death.step, 0
        self._num_restarts += 1
        most = self._keys.max_restarts
        when = f"{death.what}, after step {death.step}" if death.step else f"{death.what}, before the first step ended"
        if self._num_restarts > most:
            fix = "fix the cause, and run the same command again to resume"
            print_errors([f"{when}; not restarted any more (trainer.max_restarts={most}); {fix}"])
            return False
        where = "from the newest checkpoint" if death.has_checkpoint else "from where the run began: no checkpoint yet"
        print_errors([f"{when}; restarting {where} ({self._num_restarts} of {most} without a new step)"], label="")
        return True


def kill_session(session: int) -> None:
    """Kill what a dead driver has left in its session, so that the next driver finds free memory and GPUs."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session:
                process.kill()
