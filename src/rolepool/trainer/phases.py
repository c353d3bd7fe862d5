"""The phases of a start: what the driver does between the command and the first step.

Owns their times, and where those of the processes come from. Who shows phases is told elsewhere
(`rolepool.trainer.console`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rolepool.metrics.spans import DRIVER
from rolepool.metrics.start_times import Entry, StartTimes

if TYPE_CHECKING:
    from rolepool.cluster import WorkerGroup
    from rolepool.trainer.deployment import Deployment


class Phases:
    """The phases so far. One begins where the one before it ends."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        """Those that have ended."""
        self._running: tuple[str, float] | None = None
        """What the driver does now, and since when."""

    def begin(self, what: str) -> None:
        self.end()
        self._running = (what, time.time())

    def end(self) -> None:
        """The present phase has ended, and no other one follows."""
        if self._running is not None:
            what, start_s = self._running
            self.entries.append(Entry(DRIVER, what, start_s, time.time()))
        self._running = None

    def times(self, deployment: Deployment) -> StartTimes:
        """All phases that have ended, and what the processes of a deployment did."""
        processes: list[Entry] = []
        for group in deployment.cluster.groups.values():
            processes += _imports_of(group)
            processes += _roles_of(group)
        return StartTimes(phases=self.entries, processes=processes)


def _imports_of(group: WorkerGroup) -> Iterator[Entry]:
    for process in group.processes:
        start_s, end_s = process.imports_s
        ahead_s = process.clock_ahead_s
        who = f"{group.name} rank {process.rank}"
        yield Entry(who, "importing", start_s - ahead_s, end_s - ahead_s)


def _roles_of(group: WorkerGroup) -> Iterator[Entry]:
    """The construction of each role, which loads its model."""
    for role, proxy in group.roles.items():
        for span in proxy.ready.spans():
            who = f"{span.pool} rank {span.rank}"
            yield Entry(who, f"loading {role}", span.start_s, span.end_s)
