"""What Ray knows of a worker process: the methods that others call, and what comes before them.

Ray starts a process from a class of the driver. This one needs no torch, so the driver can start
processes before it has imported torch itself. What the methods do is in `rolepool.cluster.process`,
which only the process imports.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import ray

from rolepool.quick_imports import quick_imports

if TYPE_CHECKING:
    from rolepool.cluster.answers import Answer
    from rolepool.cluster.calls import Args, Kwargs, PackedReply
    from rolepool.cluster.process import Measure, Measured, Whereabouts
    from rolepool.placement.parallel import ParallelDims
    from rolepool.protocol import Worker, WorkerContext
    from rolepool.protocol.encoding import Encoded

Address = tuple[str, int]


class WorkerActor:
    """A worker process on one slot. It runs one call at a time, in the order in which they were
    made, except those of the group `health`."""

    def __init__(
        self, folder: str, extensions: Sequence[str] = (), modules: Sequence[str] = ()
    ) -> None:
        """`modules` are those that the roles of this process will need. They are imported now,
        while the driver does other work. See `WorkerProcess` for the rest."""
        start_s = time.time()
        with quick_imports():
            from rolepool.cluster.process import WorkerProcess

            for module in modules:
                # A role that needs the module imports it again, and then the error is reported.
                with suppress(Exception):
                    import_module(module)
        self._process = WorkerProcess(folder, extensions, (start_s, time.time()))

    def whereabouts(self) -> Whereabouts:
        return self._process.whereabouts()

    # Calls that are also answered while another call runs

    @ray.method(concurrency_group="health")
    def ping(self) -> float:
        return self._process.ping()

    @ray.method(concurrency_group="health")
    def stacks(self) -> str:
        return self._process.stacks()

    @ray.method(concurrency_group="health")
    def abort_waits(self, reason: str) -> None:
        self._process.abort_waits(reason)

    @ray.method(concurrency_group="health")
    def limit_output(self, path: str) -> None:
        self._process.limit_output(path)

    @ray.method(concurrency_group="health")
    def why_missing(self, path: str) -> str | None:
        return self._process.why_missing(path)

    # The start

    def import_workers(self, names: Sequence[str]) -> None:
        self._process.import_workers(names)

    def start_mps(self) -> dict[str, str]:
        return self._process.start_mps()

    def set_environment(self, variables: dict[str, str]) -> None:
        self._process.set_environment(variables)

    def take_rank(self, context: WorkerContext, share: float) -> Address | None:
        return self._process.take_rank(context, share)

    def join_pool(self, master: Address, secret: str, timeout_s: float) -> None:
        self._process.join_pool(master, secret, timeout_s)

    def store_address(self) -> Address:
        return self._process.store_address()

    def measure(self, function: Measure[Measured]) -> Measured:
        return self._process.measure(function)

    def measure_together(
        self,
        function: Measure[Measured],
        host: Address,
        secret: str,
        rank: int,
        world_size: int,
    ) -> Measured:
        return self._process.measure_together(function, host, secret, rank, world_size)

    # Work

    def add_role(
        self,
        name: str,
        worker_class: type[Worker],
        dims: ParallelDims,
        args: Args,
        kwargs: Kwargs,
        queued_s: float,
    ) -> PackedReply:
        return self._process.add_role(name, worker_class, dims, args, kwargs, queued_s)

    @ray.method(num_returns=2)
    def run(
        self,
        packed: bytes,
        stored: Sequence[Answer | None] = (),
        *direct: PackedReply,
    ) -> tuple[PackedReply, dict[str, Encoded] | None]:
        return self._process.run(packed, stored, *direct)
