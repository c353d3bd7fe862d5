"""The first part of a start: Ray, the resources of a plan, and its processes, which import what they
need.

Needs no torch, so the driver does it first, and imports torch and reads its data while the processes
start. `Cluster` does the second part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import ray
from ray.exceptions import RayError

from rolepool.cluster import reservation
from rolepool.cluster.actor import WorkerActor
from rolepool.cluster.answers import ActorHandle
from rolepool.cluster.connection import connect, raise_if_ray_died
from rolepool.cluster.nodes import live_nodes
from rolepool.cluster.reservation import Bundle, Reservation
from rolepool.config.functions import EXTENSIONS
from rolepool.errors import RayDiedError
from rolepool.placement import Plan

BUNDLE_PART = 0.01
"""The part of a bundle's GPU that Ray counts for a process. The bundle reserves the GPU, so the
part can be small, and the processes of another plan can start in the bundle before those of the
present plan end."""
MIN_CPUS = 8
"""What a local Ray counts at least, no matter how many cores there are, so that a run can move to
more CPU slots."""

Modules = Mapping[str, Sequence[str]]
"""The modules that the processes of each pool import while they start."""


class Starting(NamedTuple):
    """A process that has not answered yet."""

    pool: str
    bundle: Bundle
    actor: ActorHandle


class Begun(AbstractContextManager["Begun"]):
    """Processes that are starting. As a context manager, it ends them and Ray, unless a `Cluster`
    has taken them over."""

    def __init__(
        self,
        reserved: Reservation,
        places: Mapping[str, Reservation],
        starting: Sequence[Starting],
        cleanup: ExitStack,
    ) -> None:
        self.reserved = reserved
        self.places = places
        """The reservation of each pool, also of those beside the plan."""
        self.starting = starting
        self._cleanup = cleanup

    def take(self) -> ExitStack:
        """What ends the processes and Ray. From now on the caller owns it."""
        return self._cleanup.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An error here would hide the error that ended the run.
        with suppress(RayError):
            self._cleanup.__exit__(kind, error, trace)


def begin(
    plan: Plan,
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    timeout_s: float = 60.0,
    helpers: Mapping[str, int] | None = None,
    modules: Modules | None = None,
) -> Begun:
    """Start Ray or join it, reserve what the plan needs, and start all processes, without waiting
    for them.

    `helpers` are pools of processes beside those of the plan, without GPUs, and the number of their
    processes.
    """
    num_processes = sum(pool.world_size for pool in plan.pools.values())
    # One CPU more than processes, for tasks and helpers beside them.
    num_ray_cpus = num_cpus or max(num_processes + 1, MIN_CPUS)
    with ExitStack() as cleanup:  # if the start fails, it undoes what was done so far
        cleanup.callback(connect(address, num_ray_cpus, plan.device))
        cleanup.push(_name_ray_as_cause)
        reserved = reservation.reserve(plan, live_nodes(), cleanup, timeout_s, held={})
        places = dict.fromkeys(plan.pools, reserved)
        for name, count in (helpers or {}).items():
            places[name] = reservation.place_for_helpers(name, count)
        starting = begin_processes(places, cleanup, modules)
        return Begun(reserved, places, starting, cleanup.pop_all())


def begin_processes(
    places: Mapping[str, Reservation], cleanup: ExitStack, modules: Modules | None = None
) -> list[Starting]:
    """Start the processes of these pools, each in the place that is reserved for it, without waiting
    for them. `cleanup` ends them."""
    # Made once for all processes, because Ray stores each class that is made here in the cluster.
    actor_class = ray.remote(concurrency_groups={"health": 1})(WorkerActor)  # type: ignore[call-overload]
    starting: list[Starting] = []
    for name, reserved in places.items():
        to_import = (modules or {}).get(name, ())
        for slot in reserved.plan.pools[name].slots:
            bundle = reserved.bundles[reserved.nodes[slot.node].node_id, slot.gpu]
            with_options = actor_class.options(
                num_cpus=0,
                num_gpus=0 if reserved.device == "cpu" else BUNDLE_PART,
                max_restarts=0,
                scheduling_strategy=bundle,
            )
            actor = with_options.remote(str(Path.cwd()), EXTENSIONS, to_import)
            cleanup.callback(ray.kill, actor)
            starting.append(Starting(name, bundle, actor))
    return starting


def _name_ray_as_cause(kind: object, error: BaseException | None, trace: object) -> None:
    """If Ray has died, errors of all types follow, and some of them blame a worker."""
    if isinstance(error, Exception) and not isinstance(error, RayDiedError):
        raise_if_ray_died()
