"""How long a run takes from the command to its first step, for several commits in turn.

    python benchmarks/start.py main .
    python benchmarks/start.py main . --turns 5 --import-delay 8

A commit may be anything that git knows; `.` is the working tree as it is. Each turn trains one step
of `demo_split` with every commit, one after another on this machine, in the same Python environment.
The demo's files exist before the first turn.

On machines with GPUs and cold or remote disks, `import torch` takes 4 to 15 s in every process, in
which the processor is mostly idle. `--import-delay` adds such a wait to the import in all processes
of all commits. So a machine with few cores shows, too, what starts side by side.

Also shows the processor time of all processes, which depends less on other programs.

Prints the phases of each commit's median turn, and then the median times and the ratio of each
commit to the first one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from compare_commits import Side, checked_out

KEYS = ("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.save_freq=-1")
TIMEOUT_S = 300.0
CPU_INTERVAL_S = 0.5
PHASE = re.compile(r"(.*) \.\.\.( \(.*\))?$")
BEGINS_TRAINING = "training from step 1"
FIRST_ROW = "step 1/1 "
SLOW_IMPORT = '''
import sys, time

class SlowTorch:
    """Waits before torch is looked for, once in a process."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(SlowTorch)
            time.sleep({delay_s})
        return None

sys.meta_path.insert(0, SlowTorch)
'''
"""A module that Python imports at its start."""


class Start(NamedTuple):
    """One start. Times are seconds since the command."""

    phases: list[tuple[str, float]]
    """The phases that the console showed, and when they began."""
    to_training_s: float
    """Until everything was loaded and validated."""
    to_first_row_s: float
    cpu_s: float
    """The processor time of all processes until then. It depends less on what else the machine
    does."""


class CpuTime:
    """The processor time of a process and all that it starts, also of those that have ended. A
    thread looks twice a second."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[psutil.Process, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(CPU_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        with suppress(psutil.Error):
            for process in [self._root, *self._root.children(recursive=True)]:
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    self._seconds[process] = times.user + times.system

    def stop(self) -> float:
        """The seconds until now."""
        self._ended.set()
        self._thread.join()
        self._look()
        return sum(self._seconds.values())


def measure(side: Side, folder: Path, added_path: Sequence[str]) -> Start:
    """Train one step with a commit."""
    python_path = os.pathsep.join([*added_path, str(side.source / "src")])
    command = [sys.executable, "-u", "-m", "rolepool", "train", "demo_split", *KEYS]
    began_s = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    phases: list[tuple[str, float]] = []
    to_training_s = to_first_row_s = cpu_s = 0.0
    cpu_time = CpuTime(process.pid)
    for line in process.stdout:
        after_s = time.monotonic() - began_s
        phase = PHASE.match(line.rstrip())
        if phase is not None:
            phases.append((phase[1], after_s))
        if line.startswith(BEGINS_TRAINING):
            to_training_s = after_s
        if line.startswith(FIRST_ROW):
            to_first_row_s = after_s
            cpu_s = cpu_time.stop()
    if process.wait(TIMEOUT_S) != 0 or not to_first_row_s:
        raise SystemExit(f"error: {side.name} did not train; run `{' '.join(command)}` to see why")
    return Start(phases, to_training_s, to_first_row_s, cpu_s)


def print_timeline(side: Side, starts: Sequence[Start]) -> None:
    """The phases of the turn in the middle."""
    in_order = sorted(starts, key=lambda start: start.to_first_row_s)
    start = in_order[(len(in_order) - 1) // 2]
    print(f"{side.name}:")
    ends = [begin_s for _, begin_s in start.phases[1:]] + [start.to_first_row_s]
    print(f"  {start.phases[0][1]:6.1f} s  the command until the first phase")
    for (phase, begin_s), end_s in zip(start.phases, ends, strict=True):
        print(f"  {end_s - begin_s:6.1f} s  {phase}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="+", help="commits; `.` is the working tree")
    parser.add_argument("--turns", type=int, default=3, help="default: 3")
    parser.add_argument(
        "--import-delay", type=float, default=0.0, help="seconds that importing torch waits"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        parent = Path(name)
        (parent / "sources").mkdir()
        sides: list[Side] = []
        for commit in options.commits:
            sides.append(stack.enter_context(checked_out(commit, parent / "sources")))
        added_path = []
        if options.import_delay:
            added_path.append(str(parent))
            text = SLOW_IMPORT.format(delay_s=options.import_delay)
            (parent / "sitecustomize.py").write_text(text)
        demo = [sys.executable, "-m", "rolepool", "demo", str(parent / "runs/demo_data")]
        environment = {**os.environ, "PYTHONPATH": str(sides[0].source / "src")}
        subprocess.run(demo, env=environment, check=True, stdout=subprocess.DEVNULL)
        starts: list[list[Start]] = [[] for _ in sides]
        for turn in range(options.turns):
            for side, of_side in zip(sides, starts, strict=True):
                start = measure(side, parent, added_path)
                of_side.append(start)
                seconds = f"{start.to_first_row_s:.1f} s, processor {start.cpu_s:.1f} s"
                print(f"turn {turn + 1}, {side.name}: {seconds}", flush=True)
        for side, of_side in zip(sides, starts, strict=True):
            print_timeline(side, of_side)
        first = median(start.to_first_row_s for start in starts[0])
        for side, of_side in zip(sides, starts, strict=True):
            to_training = median(start.to_training_s for start in of_side)
            to_first_row = median(start.to_first_row_s for start in of_side)
            cpu = median(start.cpu_s for start in of_side)
            times = (
                f"to training {to_training:.1f} s, to the first row {to_first_row:.1f} s, "
                f"processor time {cpu:.1f} s"
            )
            print(f"{side.name}: {times}, ratio {to_first_row / first:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
