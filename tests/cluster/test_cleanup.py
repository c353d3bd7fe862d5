"""What a run leaves behind, however it ends: nothing. And what it says on the way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from cluster_helpers import all_ended, is_running, leaked_since, shared_memory, wait_until

DRIVER = Path(__file__).with_name("driver_for_cleanup.py")
SIGNALS = {
    "interrupt": signal.SIGINT,
    "interrupt while starting": signal.SIGINT,
    "terminate": signal.SIGTERM,
}
FAST = [
    "interrupt while starting",
    "leave",
]  # in this order, because the first one is told to end while it starts
SLOW = ["raise", "interrupt", "terminate"]
ENDINGS = [*FAST, *(pytest.param(ending, marks=pytest.mark.slow) for ending in SLOW)]
SOON_S = 30


@dataclass
class Ended:
    """A driver's run that is over."""

    code: int
    output: str
    started: list[psutil.Process]
    worker_pids: list[int]
    took_s: float
    """From when it was told to end, or said that it was ready, to its end."""


@dataclass
class Run:
    """A driver under way, with what it writes in a file."""

    ending: str
    pools: list[str]
    file: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        with self.file.open("wb") as file:
            command = [sys.executable, "-u", str(DRIVER), self.ending, *self.pools]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def finish(self) -> Ended:
        awaited = "started 1 of 1" if self.ending == "interrupt while starting" else "READY"
        wait_until(
            lambda: awaited in self.output() or self.process.poll() is not None, timeout_s=200
        )
        assert awaited in self.output(), self.output()
        started = (
            []
            if self.process.poll() is not None
            else psutil.Process(self.process.pid).children(recursive=True)
        )
        begin = time.monotonic()
        if self.ending in SIGNALS:
            self.process.send_signal(SIGNALS[self.ending])
        code = self.process.wait(timeout=60)
        ready = re.search(r"^READY ([\d ]+)$", self.output(), re.MULTILINE)
        pids = [int(pid) for pid in ready.group(1).split()] if ready else []
        return Ended(code, self.output(), started, pids, time.monotonic() - begin)


@pytest.fixture(scope="module")
def before_runs() -> set[str]:
    """What was in shared memory."""
    return shared_memory()


def side_by_side(endings: list[str], folder: Path) -> dict[str, Ended]:
    """Drivers, each with a Ray of its own."""
    under_way: list[Run] = []
    try:
        for ending in endings:
            pools = ["left", "right"] if ending == "leave" else ["left"]
            under_way.append(Run(ending, pools, folder / f"{ending}.log"))
        return {run.ending: run.finish() for run in under_way}
    finally:
        for run in under_way:
            run.process.kill()


@pytest.fixture(scope="module")
def runs(before_runs: set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return side_by_side(FAST, tmp_path_factory.mktemp("drivers"))


@pytest.fixture(scope="module")
def slow_runs(before_runs: set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return side_by_side(SLOW, tmp_path_factory.mktemp("drivers"))


@pytest.fixture
def run(request: pytest.FixtureRequest, ending: str) -> Ended:
    found: dict[str, Ended] = request.getfixturevalue("slow_runs" if ending in SLOW else "runs")
    return found[ending]


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_process_is_left(run: Ended, ending: str) -> None:
    if ending not in ("leave", "raise"):  # those may be over before they are looked at
        names = {process.pid for process in run.started}
        assert set(run.worker_pids) <= names and len(names) >= 4, (
            "the raylet, the GCS and the workers were seen"
        )
    wait_until(lambda: not [one for one in run.started if one.is_running() and is_running(one.pid)])
    wait_until(lambda: all_ended(run.worker_pids))


def test_a_driver_that_leaves_the_context_ends_well(runs: dict[str, Ended]) -> None:
    assert runs["leave"].code == 0, runs["leave"].output
    assert "Traceback" not in runs["leave"].output
    assert runs["leave"].took_s < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["raise"])
def test_an_exception_of_the_driver_is_what_it_ends_with(run: Ended) -> None:
    assert run.code == 1
    assert "RuntimeError: the driver fails with 50 rows" in run.output
    assert run.took_s < SOON_S


@pytest.mark.parametrize(
    "ending",
    [
        "interrupt while starting",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW[1:]),
    ],
)
def test_a_signal_ends_the_driver_soon(run: Ended, ending: str) -> None:
    assert run.code != 0
    assert run.took_s < SOON_S
    assert ("KeyboardInterrupt" in run.output) == ending.startswith("interrupt"), run.output


def test_shared_memory_is_as_it_was(before_runs: set[str], runs: dict[str, Ended]) -> None:
    wait_until(lambda: not leaked_since(before_runs))


def test_start_up_shows_its_progress(runs: dict[str, Ended]) -> None:
    lines = [line for line in runs["leave"].output.splitlines() if "worker processes" in line]
    assert [re.sub(r".*:", "", line) for line in lines] == [
        "started 1 of 2 worker processes",
        "started 2 of 2 worker processes",
    ]


@pytest.mark.parametrize("pool", ["left", "right"])
def test_what_workers_print_and_log_carries_their_pool_and_rank(
    runs: dict[str, Ended], pool: str
) -> None:
    output = runs["leave"].output
    for line in (f"hello from {pool}", f"INFO a.role: logged hello from {pool}"):
        assert re.search(rf"\({pool}/0 pid=\d+\)\S* {line}\n", output)


TWO_RAYS = """
from rolepool.cluster.connection import local_ray

for _ in range(2):
    with local_ray(num_cpus=1, num_gpus=0):
        pass
"""


def test_a_process_can_start_a_ray_after_the_end_of_another() -> None:
    command = [sys.executable, "-c", TWO_RAYS]
    # Ray says nothing if it believes to be in a test.
    environment = {**os.environ}
    environment.pop("PYTEST_CURRENT_TEST", None)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    # Ray says this if it is told where an earlier Ray kept its files.
    assert "object spilling" not in ended.stderr
