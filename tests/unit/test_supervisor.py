"""The supervisor of `rolepool train`, with real processes and signals, and drivers that do not
train."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

HANGS_S = 120
"""Only a process that hangs takes so long."""
PROGRAM = """if True:
    import os, signal, subprocess, sys, time
    from pathlib import Path
    from rolepool.config import load_config
    from rolepool.metrics.run_folder import RunFolder
    from rolepool.command_line import EXIT_RAY_DIED
    from rolepool.trainer.supervisor import EXIT_TRACEBACK, supervise

    folder = RunFolder(sys.argv[1])
    keys = load_config([], [f"trainer.default_local_dir={folder.path}", *sys.argv[2:]]).config.trainer
    death = supervise(keys)
    if isinstance(death, int):
        sys.exit(death)

    def say(words):
        print(words, flush=True)

    def ask(number, frame):
        say(f"signal {number}")
        sys.exit(128 + number)

    """


def start(folder: Path, driver: str, *keys: str, **options: object) -> subprocess.Popen[str]:
    """A command whose driver runs this code."""
    program = PROGRAM + driver.replace("\n", "\n    ")
    command = [sys.executable, "-c", program, str(folder), *keys]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, **options)  # type: ignore[call-overload, no-any-return]


def first_line(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    return run.stdout.readline().strip()


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_driver_is_restarted_until_the_limit(tmp_path: Path) -> None:
    run = start(
        tmp_path,
        "say(death and death.what)\nos.kill(os.getpid(), signal.SIGKILL)",
        "trainer.max_restarts=2",
    )
    output, _ = run.communicate(timeout=HANGS_S)
    assert run.returncode == 128 + 9
    died = "driver, killed by signal 9"
    again = f"{died}, before the first step ended; restarting from where the run began: no checkpoint yet"
    last = f"{died}, before the first step ended; not restarted any more (trainer.max_restarts=2); "
    assert output.splitlines() == [
        "None",
        f"{again} (1 of 2 without a new step)",
        died,
        f"{again} (2 of 2 without a new step)",
        died,
        f"{last}fix the cause, and run the same command again",
    ]


def test_only_a_step_that_is_new_resets_the_count(tmp_path: Path) -> None:
    driver = """
folder.write("plan.json", f"{time.time()}")
steps = [1, 2, 1, 2] if death is None else [2, 3] if death.step == 2 else []
for step in steps:
    folder.add_metrics(step, {})
Path(folder.path / "checkpoints/step_000001").mkdir(parents=True, exist_ok=True)
Path(folder.path / "checkpoints/step_000001/trainer.json").touch()
if death is not None:
    folder.add_event("restart", 9, death.what, 1.0, repeated_from_step=2)
    say(f"after step {death.step}")
os.kill(os.getpid(), signal.SIGSEGV)"""
    output, _ = start(tmp_path, driver, "trainer.max_restarts=1").communicate(timeout=HANGS_S)
    lines = [line.partition(";")[2] for line in output.splitlines() if line.startswith("driver")]
    assert (
        lines[:-1] == [" restarting from the newest checkpoint (1 of 1 without a new step)"] * 2
    ), output
    assert lines[-1].startswith(" not restarted any more (trainer.max_restarts=1)")
    assert [line for line in output.splitlines() if line.startswith("after")] == [
        "after step 2",
        "after step 3",
    ]


@pytest.mark.parametrize(
    ("ending", "code", "num_starts"),
    [("2", 2, 1), ("0", 0, 1), ("EXIT_TRACEBACK", 1, 1), ("EXIT_RAY_DIED", 2, 2), ("1", 2, 2)],
)
def test_only_a_driver_whose_ray_died_is_restarted_after_it_ended_by_itself(
    ending: str, code: int, num_starts: int, tmp_path: Path
) -> None:
    run = start(tmp_path, f"say('started')\nsys.exit({ending})", "trainer.max_restarts=1")
    output, _ = run.communicate(timeout=HANGS_S)
    assert (run.returncode, output.count("started\n")) == (code, num_starts), output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_reaches_the_driver_once_and_none_of_its_processes(
    number: signal.Signals, tmp_path: Path
) -> None:
    driver = """
child = subprocess.Popen(["sleep", "300"])
try:
    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    say(child.pid)
    while True:
        time.sleep(1)
finally:
    say(f"child {child.poll()}")
    child.kill()"""
    run = start(tmp_path, driver, process_group=0)
    first_line(run)
    os.killpg(run.pid, number)
    output, _ = run.communicate(timeout=HANGS_S)
    assert (run.returncode, output.split("\n")) == (
        128 + number,
        [f"signal {number:d}", "child None", ""],
    )


@pytest.mark.parametrize("who", ["supervisor", "driver"])
def test_nothing_is_left_of_a_run_that_was_killed(who: str, tmp_path: Path) -> None:
    driver = """
child = subprocess.Popen(["sleep", "300"], process_group=0)
say(f"{os.getpid()} {child.pid}")
time.sleep(300)"""
    run = start(tmp_path, driver, "trainer.max_restarts=0")
    driver_pid, child_pid = map(int, first_line(run).split())
    try:
        os.kill(run.pid if who == "supervisor" else driver_pid, signal.SIGKILL)
        assert run.wait(timeout=HANGS_S) == (-9 if who == "supervisor" else 128 + 9)
        wait_until(lambda: ended(driver_pid))
        if (
            who == "driver"
        ):  # the processes of Ray notice the end of a driver themselves, other ones may not
            wait_until(lambda: ended(child_pid))
    finally:
        if not ended(child_pid):
            os.kill(child_pid, signal.SIGKILL)


def test_a_driver_that_somebody_ended_is_not_restarted(tmp_path: Path) -> None:
    run = start(tmp_path, "say('started')\nos.kill(os.getpid(), signal.SIGTERM)")
    output, _ = run.communicate(timeout=HANGS_S)
    assert (run.returncode, output) == (128 + 15, "started\n")


def test_in_a_terminal_ctrl_c_reaches_the_driver_once_and_the_driver_sees_the_terminal(
    tmp_path: Path,
) -> None:
    driver = """
signal.signal(signal.SIGINT, ask)
say(f"{sys.stdout.isatty()} {os.get_terminal_size().columns > 0 or os.get_terminal_size().lines == 0}")
time.sleep(300)"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(
            sys.executable,
            [sys.executable, "-c", PROGRAM + driver.replace("\n", "\n    "), str(tmp_path)],
        )
    output = b""
    while b"True" not in output:
        output += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):  # EIO: nobody writes any more
        while part := os.read(terminal, 1000):
            output += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert output.count(b"signal 2") == 1 and output.startswith(b"True True")
