"""The cluster of a run: Ray, the processes of a plan, and a worker group for each pool.

Owns which processes there are: the start, processes that replace dead ones or lost nodes, the move
to the processes of another plan, and the clean-up at the end.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypedDict

from ray.exceptions import RayError

from rolepool.cluster import launch, reservation
from rolepool.cluster.answers import Answer, Asked, await_all, outcomes
from rolepool.cluster.begin import Begun, begin
from rolepool.cluster.connection import connect
from rolepool.cluster.deaths import find_deaths
from rolepool.cluster.group import WorkerGroup, ask_healthy
from rolepool.cluster.launch import Process
from rolepool.cluster.monitors import Monitors
from rolepool.cluster.nodes import live_node_ids, live_nodes, nodes_with_slots, substitutes
from rolepool.cluster.process import Measure, Measured
from rolepool.cluster.reservation import Bundles, Reservation
from rolepool.cluster.watchdog import Watchdog
from rolepool.config.run_keys import TrainerConfig
from rolepool.errors import PlacementError, WorkerError
from rolepool.placement import Plan

NODE_POLL_S = 0.5
"""How often to look for a node that replaces a lost one."""
ABORT_TIMEOUT_S = 5.0
"""The time in which a process must answer that it has aborted its waits."""
END_TIMEOUT_S = 60.0
"""The time in which processes must end after they were killed."""


class ProcessSettings(TypedDict):
    """What every process of a run is told, also one that replaces a dead one."""

    run_seed: int
    deterministic: bool


class Prepared(NamedTuple):
    """Processes of another plan, which run beside those of the present one and have no roles
    yet."""

    reserved: Reservation
    processes: dict[str, list[Process]]
    cleanup: ExitStack
    """Ends the processes."""


class Cluster(AbstractContextManager["Cluster"]):
    """The processes of a plan. As a context manager, it stops every process at its end, and Ray if
    it started Ray."""

    def __init__(
        self,
        plan: Plan,
        *,
        address: str | None = None,
        num_cpus: int | None = None,
        timeout_s: float = 60.0,
        run_seed: int = 1,
        deterministic: bool = False,
        helpers: Mapping[str, int] | None = None,
        begun: Begun | None = None,
    ) -> None:
        """`helpers` are pools of processes beside those of the plan, without GPUs, and the number
        of their processes. They start at the same time as the others. If the start of this plan has
        `begun` already, it is only finished here."""
        self.plan = plan
        self.groups: dict[str, WorkerGroup] = {}
        self._settings = ProcessSettings(run_seed=run_seed, deterministic=deterministic)
        self._timeout_s = timeout_s
        if begun is None:
            begun = begin(
                plan, address=address, num_cpus=num_cpus, timeout_s=timeout_s, helpers=helpers
            )
        with ExitStack() as cleanup:  # if the start fails, it undoes what was done so far
            cleanup.push(begun.take())
            self._reserved = begun.reserved
            pools = launch.finish_start(begun.places, begun.starting, **self._settings)
            self._cleanup = cleanup.pop_all()
        self._add_groups(pools)

    def _add_groups(self, pools: Mapping[str, Sequence[Process]]) -> None:
        """Make a group of the processes of each pool. It replaces the group of an earlier pool of
        this name."""
        for name, processes in pools.items():
            self.groups[name] = WorkerGroup(name, processes, self.groups)

    @property
    def _planned_processes(self) -> list[Process]:
        """The processes of the plan, without helpers."""
        processes: list[Process] = []
        for name in self.plan.pools:
            processes += self.groups[name].processes
        return processes

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The memory of the smallest GPU that the plan's processes hold; None on CPU slots."""
        smallest: int | None = None
        for process in self._planned_processes:
            size = process.gpu_memory_bytes
            if size is not None and (smallest is None or size < smallest):
                smallest = size
        return smallest

    @property
    def nodes(self) -> dict[str, str]:
        """The address of each node that has processes of the plan, by node id."""
        return {process.node_id: process.address for process in self._planned_processes}

    @property
    def num_live_nodes(self) -> int:
        """How many of the plan's nodes are alive."""
        reserved = {node.node_id for node in self._reserved.nodes}
        still_alive = reserved & live_node_ids()
        return len(still_alive)

    @property
    def has_all_nodes(self) -> bool:
        """Whether all nodes that have processes of the plan are alive."""
        return self.nodes.keys() <= live_node_ids()

    def replace_nodes(self) -> None:
        """Wait until there is a node for each lost one, and reserve its resources. The pools that
        were there must be repaired then. Raises PlacementError if there is none in time."""
        deadline = time.monotonic() + self._timeout_s
        before = self._reserved
        while True:
            nodes = substitutes(self.plan, before.nodes, live_nodes(), before.device)
            if nodes is not None:
                break
            if time.monotonic() > deadline:
                raise self._node_was_lost()
            time.sleep(NODE_POLL_S)
        self._reserved = reservation.reserve(
            self.plan,
            nodes,
            self._cleanup,
            self._timeout_s,
            held=self._held(),
        )

    def _node_was_lost(self) -> PlacementError:
        live = live_nodes()
        lost_nodes = [node for node in self._reserved.nodes if node not in live]
        lost = " and ".join(node.address for node in lost_nodes)
        limit = f"placement.timeout_s={self._timeout_s:g}"
        return PlacementError(
            f"node {lost} was lost, and no other node replaced it in {limit}; add a node, or set "
            "placement.on_node_loss=shrink, and run the same command to resume"
        )

    def _held(self) -> Bundles:
        """The bundles on nodes that are alive."""
        live = live_node_ids()
        held: Bundles = {}
        for (node_id, gpu), bundle in self._reserved.bundles.items():
            if node_id in live:
                held[node_id, gpu] = bundle
        return held

    def add_helpers(self, name: str, count: int) -> WorkerGroup:
        """Start a pool of processes beside those of the plan, without GPUs."""
        places = {name: reservation.place_for_helpers(name, count)}
        pools = launch.start_pools(places, self._cleanup, **self._settings)
        self._add_groups(pools)
        return self.groups[name]

    def find_death(self) -> WorkerError | None:
        """The error about a process that has died; None if all live.

        Processes that were asked since the last repair are not asked again, because Ray tells the
        driver about a death after that.
        """
        groups = list(self.groups.values())
        for group in groups:
            group.break_if_dead()
        unasked = [group for group in groups if not group.was_asked]
        for dead, reason in ask_healthy(unasked):
            error = dead.error(f"{dead} died: {reason}", is_death=True)
            self.groups[dead.pool].break_with(error)
        for group in groups:
            broken = group.broken
            if broken is not None and broken.is_death:
                return broken
        return None

    def abort_waits(self, reason: str) -> None:
        """End the waits for ranks of another pool, in all processes that live. Their calls fail then.
        Ranks that wait for a dead one through NCCL would wait for ever."""
        asked: list[Answer] = []
        for group in self.groups.values():
            if group.broken is None:
                asked += [process.actor.abort_waits.remote(reason) for process in group.processes]
        # A process that does not answer has died, or the watchdog will find it.
        outcomes(asked, ABORT_TIMEOUT_S)

    def repair(self) -> list[str]:
        """Start all processes of pools in which a process died again, on the same slots. Returns
        the pools' names.

        The group of such a pool is replaced, so its roles must be added again. Other pools are not
        touched.
        """
        self.find_death()
        places: dict[str, Reservation] = {}
        for name, group in self.groups.items():
            group.was_asked = False
            if group.broken is None:
                continue
            if name in self.plan.pools:
                places[name] = self._reserved
            else:
                places[name] = reservation.place_for_helpers(name, group.world_size)
        pools = launch.start_pools(places, self._cleanup, **self._settings)
        self._add_groups(pools)
        return list(places)

    def measure(self, function: Measure[Measured]) -> list[Measured]:
        """Call a function in the processes of the plan, which must not have roles yet. On CPU slots
        all processes form one process group during the call. On GPUs each pool uses its own,
        because new connections between GPUs take memory and time; pools of one GPU are left out.
        Returns a result for each process group with several ranks."""
        on_cpu = self._reserved.device == "cpu"
        pools: list[list[Process]] = []
        num_processes = 0
        for name in self.plan.pools:
            processes = self.groups[name].processes
            if on_cpu or len(processes) > 1:
                pools.append(processes)
                num_processes += len(processes)
        if num_processes < 2:
            return []
        return launch.measure(pools, function, together=on_cpu)

    def prepare(self, plan: Plan, names: Sequence[str], workers: Sequence[str]) -> Prepared:
        """Start the processes of these pools of another plan, beside those that run, and let them
        import the classes of their roles. Raises an error if they cannot start. Other pools stay as
        they are. May run in another thread."""
        with ExitStack() as cleanup:
            reserved = reservation.reserve(
                plan,
                live_nodes(),
                cleanup,
                self._timeout_s,
                held=self._held(),
            )
            places = dict.fromkeys(names, reserved)
            processes = launch.start_pools(places, cleanup, **self._settings)
            asked: dict[Answer, Asked] = {}
            for members in processes.values():
                for process in members:
                    answer = process.actor.import_workers.remote(workers)
                    asked[answer] = Asked(str(process), process.pool)
            await_all(asked, "import the classes of its roles")
            return Prepared(reserved, processes, cleanup.pop_all())

    def switch(self, prepared: Prepared) -> None:
        """Go over to the plan of these processes. The pools that it replaces or does not have are
        ended."""
        plan = prepared.reserved.plan
        replaced = []
        ended: list[Process] = []
        for name in self.plan.pools:
            stays_as_it_is = name in plan.pools and name not in prepared.processes
            if stays_as_it_is:
                continue
            replaced.append(name)
            group = self.groups.pop(name)
            ended += group.processes
            reason = f"{name} has ended because the run has moved"
            group.break_with(WorkerError(reason, pool=name))
        _await_end(ended, " and ".join(replaced))
        self._add_groups(prepared.processes)
        self._cleanup.push(prepared.cleanup)
        self.plan = plan
        self._reserved = prepared.reserved

    def start_monitors(self) -> Monitors:
        """Sample the use of GPUs and processes on every node, until the cluster is closed."""
        return Monitors(self.groups, self._cleanup)

    def start_watchdog(
        self, keys: TrainerConfig, run_folder: Path, tell: Callable[[str], None]
    ) -> Watchdog:
        """Look for calls that do not end, until the cluster is closed. `tell` gets the line about
        each of them."""
        watchdog = Watchdog(self.groups, keys, run_folder, tell)
        self._cleanup.callback(watchdog.stop)
        return watchdog

    def close(self) -> None:
        """Stop every process, release the resources, and disconnect from Ray."""
        self.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Ray also releases everything when the job ends. An error here would hide the error that
        # ended the run.
        with suppress(RayError):
            self._cleanup.__exit__(kind, error, trace)


def live_inventory(address: str | None, device: str) -> tuple[int, ...]:
    """Slots per node of a running cluster, in the order in which a plan counts nodes. If `address`
    is None, it is the cluster of this machine."""
    with ExitStack() as cleanup:
        cleanup.callback(connect(address or "auto", 0, device))
        device, nodes = nodes_with_slots(device, live_nodes())
        return tuple(node.slots(device) for node in nodes)


def _await_end(killed: Sequence[Process], names: str) -> None:
    """Wait until processes that were killed have ended, because only then their memory is free."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while len(find_deaths(killed)) < len(killed):
        if time.monotonic() > deadline:
            raise WorkerError(
                f"the processes of {names} have not ended {END_TIMEOUT_S:g} s "
                "after they were killed"
            )
