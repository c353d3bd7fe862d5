"""A child that runs a user's code ends with everything that it has started, however it or its
parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from rolepool.data.child_process import ChildProcess

ESCAPES = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # nobody waits for it, and its parent has ended
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    os._exit(0)
"""
NUM_STARTED = 4


class Starter(ChildProcess):
    """Its child starts processes in all the ways in which they can get out of sight, and answers
    with its own pid."""

    def __init__(self, then: Callable[[], object] = lambda: time.sleep(1000)) -> None:
        self._then = then

    def _serve(self, channel: Connection) -> None:
        exec(ESCAPES)
        channel.send(os.getpid())
        self._then()

    def start(self) -> int:
        """The child's pid."""
        self._start_child()
        assert self._channel.poll(60)
        pid: int = self._channel.recv()
        return pid

    def started(self) -> list[psutil.Process]:
        """What the child has started."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = psutil.Process(self._pid).children(recursive=True)
            started = [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
            if len(started) == NUM_STARTED + 1:
                return started
            time.sleep(0.01)
        raise AssertionError(found)


def end(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for the end of processes. Returns those that are still there."""
    return psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (lambda: time.sleep(1000), "SIGKILL"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
    ],
    ids=["killed", "exits", "crashes"],
)
def test_what_a_child_has_started_ends_with_it(then: Callable[[], object], reason: str) -> None:
    starter = Starter(lambda: (time.sleep(0.5), then()))
    starter.start()
    started = starter.started()
    if reason != "SIGKILL":
        assert starter._channel.poll(60), "the parent sees that the child has ended"
    assert starter._end_child() == reason
    assert not end(started)
    assert starter._end_child() == "unknown reason", "there is no child any more"


def test_what_a_child_has_started_ends_with_the_parent(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_child_process import Starter
starter = Starter()
starter.start()
print(*[process.pid for process in starter.started()], flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        started = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(started) == NUM_STARTED + 1
        parent.kill()
        assert not end(started)
