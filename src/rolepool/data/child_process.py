"""A child process that runs a user's code. It ends with its parent, and with it everything that it
has started.

Owns the start and the end of such a child. The child is forked, so that it has everything that the
user's file has loaded. Does not know what the child computes.

Between parent and child there is a guard, a process that only waits. All processes that the child
starts become children of the guard if their own parents end, so none of them can escape from it:
not with a session of its own, and not with a second fork. If the child or the parent ends, the
guard kills all of them.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GUARDED = {signal.SIGTERM, signal.SIGCHLD}
"""The signals that a guard waits for: its parent has ended or wants the child to end; a process has
ended."""
END_TIMEOUT_S = 10.0
"""The time in which killed processes must have ended. Longer only if the system itself holds one
up."""
POLL_S = 0.001


class ChildProcess:
    """A forked child that answers messages of its parent."""

    _pid: int | None = None
    """The guard of the child."""
    _channel: Connection

    def _serve(self, channel: Connection) -> None:
        """What the child does. It must not return."""
        raise NotImplementedError

    def _start_child(self) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._channel.close()
                _guard(parent, lambda: self._serve(theirs), theirs.close)
            finally:
                os._exit(1)
        theirs.close()

    def _end_child(self) -> str:
        """Kill the child, if there is one, and what it has started. Returns how it ended, maybe
        before."""
        reason = "unknown reason"
        if self._pid is None:
            return reason
        # Somebody else may have waited for it.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGTERM)
            code = os.waitstatus_to_exitcode(_wait_for(self._pid))
            reason = f"exit code {code}"
            if code < 0:
                reason = signal.Signals(-code).name
            elif code > 128:
                # The child ended with a signal, and the guard tells it like a shell.
                reason = signal.Signals(code - 128).name
        self._pid = None
        self._channel.close()
        return reason


def _wait_for(guard: int) -> int:
    """Wait until the guard has ended. Returns its status."""
    deadline = time.monotonic() + 2 * END_TIMEOUT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(guard, os.WNOHANG)
        if pid == guard:
            return status
        time.sleep(POLL_S)
    os.kill(guard, signal.SIGKILL)
    _, status = os.waitpid(guard, 0)
    return status


def _guard(parent: int, serve: Callable[[], None], close_channel: Callable[[], None]) -> NoReturn:
    """Start the child, and wait until it or the parent has ended. Then end all that the child has
    started."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If it were ignored, the kernel would not keep how a child ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, GUARDED)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before it was watched
        os._exit(1)
    child = os.fork()
    if child == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARDED)
            serve()
        finally:
            os._exit(1)
    close_channel()  # otherwise the parent would not see that the child has closed it
    status = None
    while status is None and signal.sigwait(GUARDED) == signal.SIGCHLD:
        status = _reap(child)
    ended_now = _kill_descendants(child)
    if status is None:
        status = ended_now
    code: int = -signal.SIGKILL
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # An exit code is not negative, so a signal is told like a shell tells it.
        code = 128 - code
    os._exit(code)


def _reap(child: int) -> int | None:
    """Remove the processes that have ended from the system's table. Returns the child's status if
    it is one of them."""
    of_child = None
    with suppress(ChildProcessError):  # there is no process any more
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:  # the others are still running
                break
            if pid == child:
                of_child = status
    return of_child


def _kill_descendants(child: int) -> int | None:
    """Kill all processes below this one, also those that they start meanwhile. Returns the child's
    status if it ended here. That is not always SIGKILL, because the child may have been about to
    end."""
    status = None
    deadline = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline:
        descendants = psutil.Process().children(recursive=True)
        if not descendants:
            break
        for process in descendants:
            with suppress(psutil.Error):
                process.kill()
        ended = _reap(child)
        if ended is not None:
            status = ended
        time.sleep(POLL_S)
    return status
