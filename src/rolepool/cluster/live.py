"""What runs now in each pool, as a file for other programs such as `rolepool watch`.

A thread of the driver asks Ray once per second which calls have ended. The workers and the step do not wait for it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from rolepool.cluster.group import PendingCall, WorkerGroup
from rolepool.metrics.run_folder import State
from rolepool.placement.roles import OPERATIONS

INTERVAL_S = 1.0


class LiveState:
    """Writes a `State` as JSON once per second, until `stop`."""

    def __init__(self, groups: Mapping[str, WorkerGroup], write: Callable[[str], None]) -> None:
        self._groups, self._write = groups, write
        # Two operations have the same method; the first one in the order of a step gives the name.
        operations = list(reversed(OPERATIONS.values()))
        self._names = {method: one.name for one in operations for method in (one.method, *one.other_methods)}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.begin("starting")
        self._thread.start()

    def begin(self, what: str) -> None:
        """What the run does from now on: a step, a validation, a save."""
        self._what, self._since_s = what, time.time()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            pools = {pool: list(self._operations(group)) for pool, group in list(self._groups.items())}
            state = State(time.time(), self._what, self._since_s, pools)
            with suppress(OSError):  # the run itself reports a full disk
                self._write(json.dumps(state._asdict()))

    def _operations(self, group: WorkerGroup) -> Iterator[tuple[str, float, float | None]]:
        """Name, start and end of what the pool has run since `begin`."""
        for call in calls_so_far(group):
            is_new = call.end_s is None or call.end_s > self._since_s
            if call.number and call.start_s is not None and is_new:  # those without a number construct a role
                yield self._names.get(call.method, call.method), call.start_s, call.end_s


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
