"""Ctrl-C and SIGTERM: what ends a run at once, what lets a step end first, and that a child is told
and waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rolepool.command_line import run_program
from rolepool.errors import Terminated
from rolepool.trainer.interrupt import SAME_SIGNAL_S, Interrupt
from rolepool.trainer.supervisor import wait_for


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_before_the_first_step_one_signal_ends_the_run(
    number: signal.Signals, error: type[BaseException]
) -> None:
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt) as raised, interrupt.watch():
        signal.raise_signal(number)
    assert raised.type is error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_in_a_step_the_first_signal_asks_and_the_second_drops_it(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    interrupt = Interrupt()

    def program(arguments: list[str]) -> None:
        with interrupt.watch():
            interrupt.in_steps = True
            signal.raise_signal(number)
            signal.raise_signal(number)  # `timeout` sends it twice
            assert interrupt.asked
            time.sleep(SAME_SIGNAL_S)
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("step 3 was dropped") from None

    assert run_program(program, []) == code
    assert capsys.readouterr().err == "interrupted: step 3 was dropped\n"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_child_that_trains_is_told_of_ctrl_c_once_and_waited_for() -> None:
    program = """if True:
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(0.5)  # longer than Python itself waits for a child; a second Ctrl-C would end it here
            print("saved")
        """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert wait_for(child.pid) == (0, signal.SIGINT)
        assert child.stdout.read() == b"saved\n"
