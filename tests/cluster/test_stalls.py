"""A call that does not end is reported with the stacks of all ranks, and what does not answer is
killed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from cluster_helpers import is_running, start, wait_until
from roles_for_tests import Stuck

from rolepool.cluster import Cluster, RoleProxy
from rolepool.cluster.output import INTERVAL_S
from rolepool.config import load_config
from rolepool.errors import WorkerError
from rolepool.protocol import CallFuture

LIMIT_S = 2.0
REPORTED_WITHIN_S = LIMIT_S + 12.0
"""A silent process has five seconds to answer, and its signal handler two more."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def shared_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="warning")
    yield
    ray.shutdown()


class Stalled:
    """A pool of two ranks whose rank 1 gets stuck in step 3."""

    def __init__(self, cluster: Cluster, folder: Path, on_stall: str) -> None:
        self.processes = cluster.groups["pool"].processes
        self.role: RoleProxy = cluster.groups["pool"].add_role("critic", Stuck)
        self.lines: list[str] = []
        self.stacks = folder / "stalls" / "step_3-pool.txt"
        keys = load_config(
            [], [f"trainer.stall_timeout_s={LIMIT_S}", f"trainer.on_stall={on_stall}"]
        ).config.trainer
        cluster.start_watchdog(keys, folder, self.lines.append).begin("step 3")
        assert self.role.meet().get() == [0, 1]  # the limit holds from the second call on

    def line_about(self, how: str) -> tuple[CallFuture, str]:
        if how == "stop":
            os.kill(self.processes[1].pid, signal.SIGSTOP)
        call = self.role.meet(how, stuck_rank=1) if how != "stop" else self.role.meet()
        begin_s = time.monotonic()
        wait_until(lambda: self.lines, timeout_s=60)
        assert time.monotonic() - begin_s < REPORTED_WITHIN_S
        return call, self.lines[0]


@pytest.fixture
def stalled(request: Any, tmp_path: Path) -> Iterator[Stalled]:
    with start({"pool": [2]}) as cluster:
        yield Stalled(cluster, tmp_path, request.param)


@pytest.mark.parametrize("stalled", ["report"], indirect=True)
def test_a_rank_that_sleeps_is_told_from_those_that_wait_for_it_and_is_not_killed(
    stalled: Stalled,
) -> None:
    call, line = stalled.line_about("sleep")
    who = re.escape(str(stalled.processes[1]))
    pattern = rf"stall: {who} does not return: critic.meet of step 3 has not ended for \d+ s; stacks of all ranks: "
    assert re.fullmatch(pattern + rf"{stalled.stacks}; trainer.on_stall=report", line)
    before, after = stalled.stacks.read_text().split(str(stalled.processes[1]))
    assert "all_reduce" in before, "rank 0 answers from inside the collective"
    assert "in sleep_for_ever" in after
    time.sleep(2 * LIMIT_S)
    assert stalled.lines == [line], "once"
    assert not call.done()
    assert all(is_running(process.pid) for process in stalled.processes)


@pytest.mark.parametrize("stalled", ["restart"], indirect=True)
def test_a_rank_that_holds_the_gil_is_killed_after_its_stacks_are_written(stalled: Stalled) -> None:
    call, line = stalled.line_about("spin")
    assert line.startswith(f"stall: {stalled.processes[1]} does not answer: critic.meet of step 3")
    assert line.endswith(
        "; trainer.on_stall=restart kills processes that are stopped or do not answer"
    )
    assert "in spin_with_the_gil" in stalled.stacks.read_text()
    with pytest.raises(
        WorkerError, match=re.escape(f"{stalled.processes[1]} died during critic.meet")
    ):
        call.get(timeout_s=20)


@pytest.mark.parametrize("stalled", ["restart", "abort"], indirect=True)
def test_a_stopped_rank_is_named_as_stopped_and_killed(
    stalled: Stalled, request: pytest.FixtureRequest
) -> None:
    call, line = stalled.line_about("stop")
    assert line.startswith(f"stall: {stalled.processes[1]} is stopped: critic.meet of step 3")
    with pytest.raises(WorkerError) as caught:
        call.get(timeout_s=20)
    expected = (
        line if "abort" in request.node.name else f"{stalled.processes[1]} died during critic.meet"
    )
    assert str(caught.value).startswith(expected)
    assert (caught.value.pool, caught.value.rank, caught.value.role) == ("pool", 1, "critic")
    wait_until(lambda: not is_running(stalled.processes[1].pid), timeout_s=10)


@pytest.mark.parametrize("stalled", ["report"], indirect=True)
def test_twenty_thousand_printed_lines_are_in_a_file_and_only_some_on_the_console(
    stalled: Stalled, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stalled.role.print_lines(20_000).get()
    time.sleep(INTERVAL_S)
    stalled.role.print_lines(1).get()
    for rank in (0, 1):
        lines = (tmp_path / "logs" / f"pool-{rank}.log").read_text().splitlines()
        assert len(lines) == 20_003
        assert lines[19_999:20_001] == ["line 19999", "end"]
    shown = ""
    begin_s = time.monotonic()
    while "more lines are not shown" not in shown and time.monotonic() - begin_s < 20:
        time.sleep(0.2)
        shown += capfd.readouterr().out
    assert f"all lines are in {tmp_path / 'logs' / 'pool-'}" in shown
    assert len(shown.splitlines()) < 200
