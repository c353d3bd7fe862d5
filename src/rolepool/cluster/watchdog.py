"""What runs now in each pool: a file for other programs such as `rolepool watch`, and a report if a call does not end.

A thread of the driver asks Ray once per second which calls have ended. The workers and the step do not wait for it.
Owns when a call counts as stalled, the report with the Python stacks of all ranks, and what happens then.
"""

import json
import math
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError

from rolepool.cluster.group import PendingCall, WorkerGroup
from rolepool.cluster.launch import Process, outcomes, pinned_to
from rolepool.config.run_keys import TrainerConfig
from rolepool.errors import first_few
from rolepool.files import write_atomically
from rolepool.metrics.run_folder import State
from rolepool.metrics.sampling import once_per_second
from rolepool.placement.roles import OPERATIONS

MIN_LIMIT_S = 60.0
LIMIT_FACTOR = 5
FIRST_LIMIT_S = 600.0
"""The limit of the first call of a method: it loads a model, or compiles."""
STATES = STOPPED, SILENT, ANSWERS = "is stopped", "does not answer", "does not return"
WAITS = re.compile("distributed_c10d|_functional_collectives")
"""In the stacks of a process that is inside a collective."""
OPERATION_NAMES = {
    method: one.name for one in reversed(OPERATIONS.values()) for method in (one.method, *one.other_methods)
}
"""Two operations have the same method; the first one in the order of a step gives the name."""
ACTIONS = {"report": "", "restart": " kills processes that are stopped or do not answer", "abort": " ends the run"}


def calls_so_far(group: WorkerGroup) -> Iterator[PendingCall]:
    """The calls of a pool up to the one that runs now, with the times at which they were first seen to run and to have
    ended. Calls run one after another, so the first call that has not ended is running, or it waits for its inputs."""
    for call in (call for reference in list(group.recent) if (call := reference()) is not None and call.all_objects):
        if call.end_s is None and not all(source.has_ended(within_s=0) for source in call.sources):
            return
        call.start_s = call.start_s or time.time()
        if call.end_s is None and call.has_ended(within_s=0):
            call.end_s = time.time()
        yield call
        if call.end_s is None:
            return


class Finding(NamedTuple):
    """What a process does."""

    process: Process
    state: str
    stacks: str


class Watchdog:
    """Watches the pools from its creation to `stop`. `tell` gets the line about each stall, in another thread."""

    def __init__(
        self, groups: Mapping[str, WorkerGroup], keys: TrainerConfig, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self.groups = groups
        self._keys, self._folder, self._tell = keys, folder.absolute(), tell
        self._what, self._since_s = "start", math.inf
        self._with_logs: set[str] = set()
        self._reported: weakref.WeakSet[PendingCall] = weakref.WeakSet()
        self.stop = once_per_second(self._look)

    def begin(self, what: str) -> None:
        """What the run does from now on, such as a step. Before the first time, `state.json` is not written. The output
        of processes that are new goes to files, too."""
        self._what, self._since_s = what, time.time()
        for process in (process for group in self.groups.values() for process in group.processes):
            if process.actor_id not in self._with_logs:
                self._with_logs.add(process.actor_id)
                process.actor.limit_output.remote(str(self._folder / "logs" / f"{process.pool}-{process.rank}.log"))

    def _look(self) -> None:
        with suppress(RayError, OSError):  # of a Ray that ends; the run itself reports a full disk
            seen = {pool: list(calls_so_far(group)) for pool, group in list(self.groups.items())}
            for call in (calls[-1] for calls in seen.values() if calls):
                took_s = time.time() - call.start_s if call.start_s and call.end_s is None else 0.0
                if took_s > self._limit_s(call) and call not in self._reported:
                    self._reported.add(call)
                    self._report(call, examine(call.group.processes))
            if self._since_s < math.inf:
                operations = {pool: list(self._operations(calls)) for pool, calls in seen.items()}
                state = State(time.time(), self._what, self._since_s, operations)
                write_atomically(self._folder / "state.json", [json.dumps(state._asdict())])

    def _operations(self, calls: Sequence[PendingCall]) -> Iterator[tuple[str, float, float | None]]:
        """Name, start and end of the calls that have run since `begin`."""
        for call in calls:
            is_new = call.end_s is None or call.end_s > self._since_s
            if call.number and call.start_s is not None and is_new:  # those without a number construct a role
                yield OPERATION_NAMES.get(call.method, call.method), call.start_s, call.end_s

    def _limit_s(self, call: PendingCall) -> float:
        longest_s = call.group.longest_s.get((call.role, call.method))
        if longest_s is None:
            return max(FIRST_LIMIT_S, self._keys.stall_timeout_s or 0.0)
        return self._keys.stall_timeout_s or max(MIN_LIMIT_S, LIMIT_FACTOR * longest_s)

    def _report(self, call: PendingCall, findings: Sequence[Finding]) -> None:
        """Say which ranks hold up the call, write the stacks of all ranks, and do what `trainer.on_stall` says."""
        ready, _ = ray.wait(call.all_refs, num_returns=len(call.all_refs), timeout=0)
        working = [one for one, answer in zip(findings, call.all_refs, strict=False) if answer not in ready]
        if not working or call.start_s is None:
            return
        path = self._folder / "stalls" / f"{re.sub(r'[^A-Za-z0-9]+', '_', self._what)}-{call.group.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (f"{one.process} {one.state}\n\n{one.stacks}\n" for one in findings))
        # Ranks that wait for others in a collective are not the cause, unless all of them do.
        causes = [one for one in working if not WAITS.search(one.stacks)] or working
        causes.sort(key=lambda one: STATES.index(one.state))
        causes = [one for one in causes if one.state == causes[0].state]
        names = first_few([f"{one.process} {one.state}" for one in causes], most=4)
        on_stall, took_s = self._keys.on_stall, time.time() - call.start_s
        line = (
            f"stall: {names}: {call.role}.{call.method} of {self._what} has not ended for {took_s:.0f} s; "
            f"stacks of all ranks: {path}; trainer.on_stall={on_stall}{ACTIONS[on_stall]}"
        )
        self._tell(line)
        if on_stall == "abort":
            call.group.break_with(causes[0].process.error(line, role=call.role, method=call.method))
        for process, state, _ in causes if on_stall != "report" else ():
            if state != ANSWERS:
                on_node(process, kill, process.pid)


def examine(processes: Sequence[Process]) -> list[Finding]:
    """What each process does, with its stacks if it can tell them or if its signal handler can write them."""
    answers = outcomes([process.actor.stacks.remote() for process in processes], timeout_s=5.0)
    findings = []
    for process, stacks in zip(processes, answers, strict=True):
        is_silent = isinstance(stacks, RayError)
        told = on_node(process, look_at, process.pid, process.stack_file) if is_silent else (ANSWERS, stacks)
        findings.append(Finding(process, *told))
    return findings


def on_node(process: Process, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that runs on the node of a process."""
    if process.node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    task: Any = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned_to(process.node_id))
    return ray.get(task.remote(*args), timeout=30.0)


def look_at(pid: int, stack_file: str) -> tuple[str, str]:
    """The state of a process of this node that does not answer, and its stacks, which its signal handler writes."""
    try:
        if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return STOPPED, ""
        num_before = len(Path(stack_file).read_bytes())
        os.kill(pid, signal.SIGUSR1)
        time.sleep(2.0)  # until the handler has written them
        return SILENT, Path(stack_file).read_bytes()[num_before:].decode(errors="replace")
    except (psutil.NoSuchProcess, OSError) as error:
        return SILENT, f"no stacks: {error}"


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
