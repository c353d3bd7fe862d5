"""The watchdog of a run: what each pool runs now, and which calls take too long.

It writes what runs now to `state.json`, for other programs such as `rolepool watch`. It also owns
when a call counts as stalled, the line and the file about it, and what happens then, and it looks
for deaths in pools that the run does not wait for. How a process is examined is the business of
`rolepool.cluster.stalls`.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import ray
from ray.exceptions import RayError

from rolepool.cluster.group import WorkerGroup
from rolepool.cluster.pending import PendingCall
from rolepool.cluster.stalls import BY_URGENCY, RETURNS_LATE, Examined, examine, kill_process
from rolepool.config.run_keys import TrainerConfig
from rolepool.errors import first_few
from rolepool.files import write_atomically
from rolepool.metrics.run_folder import State
from rolepool.metrics.sampling import once_per_second
from rolepool.placement.roles import OPERATIONS

MIN_LIMIT_S = 60.0
LIMIT_FACTOR = 5
"""A call may take so many times as long as the longest call of its method so far."""
FIRST_LIMIT_S = 600.0
"""The limit of the first call of a method: it loads a model, or compiles."""
ACTIONS = {
    "report": "",
    "restart": " kills processes that are stopped or do not answer",
    "abort": " ends the run",
}
"""What each value of `trainer.on_stall` does, for the line about a stall."""


def _operation_names() -> dict[str, str]:
    """The operation of each method of a role. If two operations have the same method, the first one
    in the order of a step gives the name."""
    names: dict[str, str] = {}
    for operation in OPERATIONS.values():
        for method in (operation.method, *operation.other_methods):
            names.setdefault(method, operation.name)
    return names


OPERATION_NAMES = _operation_names()


class Watchdog:
    """Watches the pools from its creation to `stop`. `tell` gets the line about each stall, in
    another thread.

    The thread asks Ray once per second which calls have ended. The workers and the step do not wait
    for it.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        keys: TrainerConfig,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self.groups = groups
        self._keys = keys
        self._folder = folder.absolute()
        self._tell = tell
        self._what = "start"
        self._since_s = 0.0
        """0 as long as `begin` was not called."""
        self._with_logs: set[str] = set()
        """The processes whose output goes to files."""
        self.stop = once_per_second(self._look)

    def begin(self, what: str) -> None:
        """What the run does from now on, such as a step. Before the first time, `state.json` is not
        written. The output of processes that are new goes to files, too."""
        self._what = what
        self._since_s = time.time()
        for group in self.groups.values():
            for process in group.processes:
                if process.actor_id in self._with_logs:
                    continue
                self._with_logs.add(process.actor_id)
                log = self._folder / "logs" / f"{process.pool}-{process.rank}.log"
                process.actor.limit_output.remote(str(log))

    def _look(self) -> None:
        # RayError: Ray ends while we look. OSError: the disk is full, which the run itself reports.
        with suppress(RayError, OSError):
            # A list, because the run can add groups meanwhile.
            groups = list(self.groups.items())
            # The run may wait for another pool, whose call can take minutes. Ranks that wait for a
            # dead one in a collective of GPUs never return.
            for _, group in groups:
                group.break_if_dead()
            calls_of_pools = {pool: list(calls_so_far(group)) for pool, group in groups}
            for calls in calls_of_pools.values():
                if not calls:
                    continue
                last = calls[-1]
                if self._is_late(last):
                    last.is_reported = True
                    self._handle_stall(last)
            if self._since_s:
                self._write_state(calls_of_pools)

    # The state

    def _write_state(self, calls_of_pools: Mapping[str, Sequence[PendingCall]]) -> None:
        operations = {pool: self._operations(calls) for pool, calls in calls_of_pools.items()}
        state = State(time.time(), self._what, self._since_s, operations)
        text = json.dumps(state._asdict())
        write_atomically(self._folder / "state.json", [text])

    def _operations(self, calls: Sequence[PendingCall]) -> list[tuple[str, float, float | None]]:
        """Name, start and end of the calls that have run since `begin`."""
        operations = []
        for call in calls:
            constructs_a_role = not call.number
            ended_before = call.end_s is not None and call.end_s <= self._since_s
            if constructs_a_role or ended_before:
                continue
            name = OPERATION_NAMES.get(call.method, call.method)
            operations.append((name, call.start_s, call.end_s))
        return operations

    # Stalls

    def _is_late(self, call: PendingCall) -> bool:
        """Whether the call runs for too long, and was not reported yet."""
        if call.end_s is not None or call.is_reported:
            return False
        return time.time() - call.start_s > self._limit_s(call)

    def _limit_s(self, call: PendingCall) -> float:
        limit_of_user_s = self._keys.stall_timeout_s
        longest_s = call.group.longest_s.get((call.role, call.method))
        if longest_s is None:
            return max(FIRST_LIMIT_S, limit_of_user_s or 0.0)
        return limit_of_user_s or max(MIN_LIMIT_S, LIMIT_FACTOR * longest_s)

    def _handle_stall(self, call: PendingCall) -> None:
        """Say which ranks hold up the call, write the stacks of all ranks, and do what
        `trainer.on_stall` says."""
        examined = examine(call.group.processes)
        # Examining takes seconds, so the call may have ended meanwhile.
        replies = call.all_refs
        ready, _ = ray.wait(replies, num_returns=len(replies), timeout=0)
        working: list[Examined] = []
        for rank, reply in zip(examined, replies, strict=False):
            if reply not in ready:
                working.append(rank)
        if not working:
            return
        stack_file = self._write_stacks(call, examined)
        causes = _causes(working)
        line = self._line_about(call, causes, stack_file)
        self._tell(line)
        on_stall = self._keys.on_stall
        first_cause = causes[0]
        if on_stall == "abort":
            error = first_cause.process.error(line, role=call.role, method=call.method)
            call.group.break_with(error)
        if on_stall == "report" or first_cause.state == RETURNS_LATE:
            return
        for cause in causes:
            kill_process(cause.process)

    def _write_stacks(self, call: PendingCall, examined: Sequence[Examined]) -> Path:
        """Write the stacks of all ranks to a file, and return its path."""
        what = re.sub(r"[^A-Za-z0-9]+", "_", self._what)
        path = self._folder / "stalls" / f"{what}-{call.group.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = (f"{rank.process} {rank.state}\n\n{rank.stacks}\n" for rank in examined)
        write_atomically(path, texts)
        return path

    def _line_about(self, call: PendingCall, causes: Sequence[Examined], stack_file: Path) -> str:
        all_names = [f"{cause.process} {cause.state}" for cause in causes]
        names = first_few(all_names, most=4)
        took_s = time.time() - call.start_s
        on_stall = self._keys.on_stall
        return (
            f"stall: {names}: {call.role}.{call.method} of {self._what} has not ended for "
            f"{took_s:.0f} s; stacks of all ranks: {stack_file}; "
            f"trainer.on_stall={on_stall}{ACTIONS[on_stall]}"
        )


def calls_so_far(group: WorkerGroup) -> Iterator[PendingCall]:
    """The calls of a pool up to the one that runs now, with the times at which they were first seen
    to run and to have ended. Calls run one after another, so the first call that has not ended is
    running, or it waits for its inputs."""
    for reference in list(group.recent):
        call = reference()
        # No objects: the call is being made in another thread, and not all messages are sent.
        if call is None or not call.all_objects:
            continue
        if call.end_s is None and _waits_for_inputs(call):
            return
        call.start_s = call.start_s or time.time()
        if call.end_s is None and call.has_ended(within_s=0):
            call.end_s = time.time()
        yield call
        if call.end_s is None:
            return


def _waits_for_inputs(call: PendingCall) -> bool:
    return not all(source.has_ended(within_s=0) for source in call.sources)


def _causes(working: Sequence[Examined]) -> list[Examined]:
    """The ranks that hold up a call, from the ranks that have not ended it."""
    # Ranks that wait for others in a collective are not the cause, unless all of them do.
    suspects = [rank for rank in working if not rank.waits_for_others]
    if not suspects:
        suspects = list(working)
    states = {rank.state for rank in suspects}
    worst = min(states, key=BY_URGENCY.index)
    return [rank for rank in suspects if rank.state == worst]
