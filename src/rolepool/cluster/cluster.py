"""The cluster of a run: Ray, the processes of a plan, and a worker group for each pool.

Owns the clean-up at the end, and what looks at the processes while they work: the monitors of the
nodes, and the watchdog. The watchdog writes what runs now in each pool to a file for other programs
such as `rolepool watch`. It also owns when a call counts as stalled, the report with the Python
stacks of all ranks, and what happens then.
"""

import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError

from rolepool.cluster import launch
from rolepool.cluster.connection import connect, raise_if_ray_died
from rolepool.cluster.group import PendingCall, WorkerGroup, find_deaths
from rolepool.cluster.launch import (
    Bundles,
    Measure,
    Process,
    Reservation,
    live_nodes,
    outcomes,
    pinned_to,
)
from rolepool.config.run_keys import TrainerConfig
from rolepool.errors import PlacementError, RayDiedError, WorkerError, first_few, logger, one_line
from rolepool.files import write_atomically
from rolepool.metrics.run_folder import State
from rolepool.metrics.sampling import INTERVAL_S, NodeMonitor, Watched, once_per_second
from rolepool.placement import Plan
from rolepool.placement.roles import OPERATIONS

END_TIMEOUT_S = 60.0
MIN_CPUS = 8
"""What a local Ray counts at least, no matter how many cores there are, so that a run can move to
more CPU slots."""


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
    ) -> None:
        self.plan = plan
        self.groups: dict[str, WorkerGroup] = {}
        self._run_seed, self._timeout_s = run_seed, timeout_s
        num_processes = sum(pool.world_size for pool in plan.pools.values())
        with ExitStack() as cleanup:  # if the start fails, it undoes what was done so far
            cleanup.callback(
                connect(address, num_cpus or max(num_processes + 1, MIN_CPUS), plan.device)
            )
            cleanup.push(_name_ray_as_cause)
            self._reserved = launch.reserve(plan, live_nodes(), cleanup, timeout_s, held={})
            pools = launch.start_pools(self._reserved, plan.pools, cleanup, run_seed=run_seed)
            self._cleanup = cleanup.pop_all()
        self._add_groups(pools)

    def _add_groups(self, pools: Mapping[str, Sequence[Process]]) -> None:
        """Make a group of the processes of each pool. It replaces the group of an earlier pool of
        this name."""
        for name, processes in pools.items():
            self.groups[name] = WorkerGroup(name, processes, self.groups)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The memory of the smallest GPU that the plan's processes hold; None on CPU slots."""
        held = [
            process.gpu_memory_bytes
            for pool in self.plan.pools
            for process in self.groups[pool].processes
        ]
        return min((memory for memory in held if memory is not None), default=None)

    @property
    def nodes(self) -> dict[str, str]:
        """The address of each node that has processes of the plan, by node id."""
        return {
            one.node_id: one.address
            for pool in self.plan.pools
            for one in self.groups[pool].processes
        }

    @property
    def num_live_nodes(self) -> int:
        """How many of the plan's nodes are alive."""
        return len(
            {node.node_id for node in live_nodes()}
            & {node.node_id for node in self._reserved.nodes}
        )

    @property
    def has_all_nodes(self) -> bool:
        """Whether all nodes that have processes of the plan are alive."""
        return self.nodes.keys() <= {node.node_id for node in live_nodes()}

    def replace_nodes(self) -> None:
        """Wait until there is a node for each lost one, and reserve its resources. The pools that
        were there must be repaired then. Raises PlacementError if there is none in time."""
        deadline, before = time.monotonic() + self._timeout_s, self._reserved
        while (
            nodes := launch.substitutes(self.plan, before.nodes, live_nodes(), before.device)
        ) is None:
            if time.monotonic() > deadline:
                lost = " and ".join(
                    node.address for node in before.nodes if node not in live_nodes()
                )
                limit = f"placement.timeout_s={self._timeout_s:g}"
                problem = f"node {lost} was lost, and no other node replaced it in {limit}"
                fix = "add a node, or set placement.on_node_loss=shrink, and run the same command to resume"
                raise PlacementError(f"{problem}; {fix}")
            time.sleep(0.5)
        self._reserved = launch.reserve(
            self.plan, nodes, self._cleanup, self._timeout_s, self._held()
        )

    def _held(self) -> Bundles:
        """The bundles on nodes that are alive."""
        live = {node.node_id for node in live_nodes()}
        return {
            place: bundle for place, bundle in self._reserved.bundles.items() if place[0] in live
        }

    def add_helpers(self, name: str, count: int) -> WorkerGroup:
        """Start a pool of processes beside those of the plan, without GPUs."""
        place = launch.place_for_helpers(name, count)
        self._add_groups(launch.start_pools(place, [name], self._cleanup, run_seed=self._run_seed))
        return self.groups[name]

    def find_death(self) -> WorkerError | None:
        """The error about a process that has died; None if all live."""
        healthy = [group for group in self.groups.values() if group.broken is None]
        for dead, reason in find_deaths(
            [process for group in healthy for process in group.processes]
        ):
            self.groups[dead.pool].break_with(dead.error(f"{dead} died: {reason}", is_death=True))
        errors = [group.broken for group in self.groups.values() if group.broken is not None]
        return next((error for error in errors if error.is_death), None)

    def repair(self) -> list[str]:
        """Start the processes of pools in which a process died again, on the same slots. Returns
        the pools' names.

        The group of such a pool is replaced, so its roles must be added again. Other pools are not
        touched.
        """
        self.find_death()
        broken = [name for name, group in self.groups.items() if group.broken is not None]
        planned = [name for name in broken if name in self.plan.pools]
        self._add_groups(
            launch.start_pools(self._reserved, planned, self._cleanup, run_seed=self._run_seed)
        )
        for name in {*broken} - {*planned}:
            self.add_helpers(name, self.groups[name].world_size)
        return broken

    def measure(self, function: Measure) -> list[Any]:
        """Call a function in the processes of the plan, which must not have roles yet. On CPU slots
        all processes form one process group during the call. On GPUs each pool uses its own,
        because new connections between GPUs take memory and time; pools of one GPU are left out.
        Returns a result for each process group with several ranks."""
        pools = [self.groups[name].processes for name in self.plan.pools]
        on_cpu = self._reserved.device == "cpu"
        if not on_cpu:
            pools = [members for members in pools if len(members) > 1]
        if sum(map(len, pools)) < 2:
            return []
        return launch.measure(pools, function, together=on_cpu)

    def prepare(self, plan: Plan, names: Sequence[str], workers: Sequence[str]) -> Prepared:
        """Start the processes of these pools of another plan, beside those that run, and let them
        import the classes of their roles. Raises an error if they cannot start. Other pools stay as
        they are. May run in another thread."""
        with ExitStack() as cleanup:
            reserved = launch.reserve(plan, live_nodes(), cleanup, self._timeout_s, self._held())
            processes = launch.start_pools(reserved, names, cleanup, run_seed=self._run_seed)
            started = [process for pool in processes.values() for process in pool]
            asked = {
                one.actor.import_workers.remote(workers): (str(one), one.pool) for one in started
            }
            launch.await_all(asked, "import the classes of its roles")
            return Prepared(reserved, processes, cleanup.pop_all())

    def switch(self, prepared: Prepared) -> None:
        """Go over to the plan of these processes. The pools that it replaces or does not have are
        ended."""
        plan = prepared.reserved.plan
        replaced = [
            name for name in self.plan.pools if name in prepared.processes or name not in plan.pools
        ]
        ended: list[Process] = []
        for name in replaced:
            ended += self.groups[name].processes
            self.groups.pop(name).break_with(
                WorkerError(f"{name} has ended because the run has moved", pool=name)
            )
        deadline = time.monotonic() + END_TIMEOUT_S
        while len(find_deaths(ended)) < len(ended):  # their memory is free when they have ended
            if time.monotonic() > deadline:
                names = " and ".join(replaced)
                raise WorkerError(
                    f"the processes of {names} have not ended {END_TIMEOUT_S:g} s after they were killed"
                )
        self._add_groups(prepared.processes)
        self._cleanup.push(prepared.cleanup)
        self.plan, self._reserved = plan, prepared.reserved

    def start_monitors(self) -> "Monitors":
        """Sample the use of GPUs and processes on every node, until the cluster is closed."""
        return Monitors(self.groups, self._cleanup)

    def start_watchdog(
        self, keys: TrainerConfig, run_folder: Path, tell: Callable[[str], None]
    ) -> "Watchdog":
        """Look for calls that do not end, until the cluster is closed. `tell` gets the line about
        each of them."""
        watchdog = Watchdog(self.groups, keys, run_folder, tell)
        self._cleanup.callback(watchdog.stop)
        return watchdog

    def close(self) -> None:
        """Stop every process, release the resources, and disconnect from Ray."""
        self.__exit__(None, None, None)

    def __exit__(self, *error: Any) -> None:
        # Ray also releases everything when the job ends. An error here would hide the error that
        # ended the run.
        with suppress(RayError):
            self._cleanup.__exit__(*error)


def _name_ray_as_cause(kind: object, error: BaseException | None, trace: object) -> None:
    """If Ray has died, errors of all types follow, and some of them blame a worker."""
    if isinstance(error, Exception) and not isinstance(error, RayDiedError):
        raise_if_ray_died()


class Monitors:
    """A monitor on each node of the pools. If one fails, there is one warning, and it is not asked
    again."""

    def __init__(self, groups: Mapping[str, WorkerGroup], cleanup: ExitStack) -> None:
        self._groups, self._cleanup = groups, cleanup
        self._monitors: dict[str, tuple[Any, float]] = {}
        self._due_s = 0.0
        self.watch()

    def watch(self) -> None:
        """Sample the processes that the groups have now. A monitor that failed is started again."""
        roles = {name: list(group.roles) for name, group in self._groups.items()}
        by_node: dict[str, list[Process]] = defaultdict(list)
        for process in (process for group in self._groups.values() for process in group.processes):
            by_node[process.node_id].append(process)
        for node_id, there in by_node.items():
            watched = [
                Watched(one.pid, one.pool, one.rank, one.gpus[0] if one.gpus else None)
                for one in there
            ]
            if node_id in self._monitors:
                self._monitors[node_id][0].watch.remote(watched, roles)
                continue
            actor_class = ray.remote(NodeMonitor).options(
                num_cpus=0, scheduling_strategy=pinned_to(node_id)
            )
            actor: Any = actor_class.remote(there[0].address, watched, roles)
            self._monitors[node_id] = actor, there[0].clock_ahead_s
            self._cleanup.callback(ray.kill, actor)

    def take(self) -> list[dict[str, Any]]:
        """The samples of all monitors since the last call, with times of the driver's clock. Within
        one interval, only the first call asks the monitors."""
        if time.monotonic() < self._due_s:
            return []
        self._due_s = time.monotonic() + INTERVAL_S
        samples: list[dict[str, Any]] = []
        answers = outcomes(
            [actor.take.remote() for actor, _ in self._monitors.values()], timeout_s=10.0
        )
        for (node_id, (_, ahead_s)), taken in zip(
            list(self._monitors.items()), answers, strict=True
        ):
            if isinstance(taken, RayError):
                logger.warning("node %s is not monitored any more: %s", node_id, one_line(taken))
                del self._monitors[node_id]
                continue
            samples.extend({**sample, "time_s": sample["time_s"] - ahead_s} for sample in taken)
        return samples


def live_inventory(address: str | None, device: str) -> tuple[int, ...]:
    """Slots per node of a running cluster, in the order in which a plan counts nodes. If `address`
    is None, it is the cluster of this machine."""
    with ExitStack() as cleanup:
        cleanup.callback(connect(address or "auto", 0, device))
        device, nodes = launch.nodes_with_slots(device, live_nodes())
        return tuple(node.slots(device) for node in nodes)


# Stalls

MIN_LIMIT_S = 60.0
LIMIT_FACTOR = 5
FIRST_LIMIT_S = 600.0
"""The limit of the first call of a method: it loads a model, or compiles."""
STATES = STOPPED, SILENT, ANSWERS = "is stopped", "does not answer", "does not return"
WAITS = re.compile("distributed_c10d|_functional_collectives")
"""In the stacks of a process that is inside a collective."""
OPERATION_NAMES = {
    method: one.name
    for one in reversed(OPERATIONS.values())
    for method in (one.method, *one.other_methods)
}
"""Two operations have the same method; the first one in the order of a step gives the name."""
ACTIONS = {
    "report": "",
    "restart": " kills processes that are stopped or do not answer",
    "abort": " ends the run",
}


def calls_so_far(group: WorkerGroup) -> Iterator[PendingCall]:
    """The calls of a pool up to the one that runs now, with the times at which they were first seen
    to run and to have ended. Calls run one after another, so the first call that has not ended is
    running, or it waits for its inputs."""
    for call in (
        call
        for reference in list(group.recent)
        if (call := reference()) is not None and call.all_objects
    ):
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
        self._keys, self._folder, self._tell = keys, folder.absolute(), tell
        self._what, self._since_s = "start", 0.0
        self._with_logs: set[str] = set()
        self.stop = once_per_second(self._look)

    def begin(self, what: str) -> None:
        """What the run does from now on, such as a step. Before the first time, `state.json` is not
        written. The output of processes that are new goes to files, too."""
        self._what, self._since_s = what, time.time()
        for process in (process for group in self.groups.values() for process in group.processes):
            if process.actor_id not in self._with_logs:
                self._with_logs.add(process.actor_id)
                process.actor.limit_output.remote(
                    str(self._folder / "logs" / f"{process.pool}-{process.rank}.log")
                )

    def _look(self) -> None:
        with suppress(RayError, OSError):  # of a Ray that ends; the run itself reports a full disk
            seen = {pool: list(calls_so_far(group)) for pool, group in list(self.groups.items())}
            for call in (calls[-1] for calls in seen.values() if calls):
                is_late = call.end_s is None and time.time() - call.start_s > self._limit_s(call)
                if is_late and not call.is_reported:
                    call.is_reported = True
                    self._report(call, examine(call.group.processes))
            if self._since_s:
                operations = {pool: self._operations(calls) for pool, calls in seen.items()}
                state = State(time.time(), self._what, self._since_s, operations)
                write_atomically(self._folder / "state.json", [json.dumps(state._asdict())])

    def _operations(self, calls: Sequence[PendingCall]) -> list[tuple[str, float, float | None]]:
        """Name, start and end of the calls that have run since `begin`. Calls without a number
        construct a role."""
        new = [
            call
            for call in calls
            if call.number and (call.end_s is None or call.end_s > self._since_s)
        ]
        return [
            (OPERATION_NAMES.get(call.method, call.method), call.start_s, call.end_s)
            for call in new
        ]

    def _limit_s(self, call: PendingCall) -> float:
        longest_s = call.group.longest_s.get((call.role, call.method))
        if longest_s is None:
            return max(FIRST_LIMIT_S, self._keys.stall_timeout_s or 0.0)
        return self._keys.stall_timeout_s or max(MIN_LIMIT_S, LIMIT_FACTOR * longest_s)

    def _report(self, call: PendingCall, findings: Sequence[Finding]) -> None:
        """Say which ranks hold up the call, write the stacks of all ranks, and do what
        `trainer.on_stall` says."""
        ready, _ = ray.wait(call.all_refs, num_returns=len(call.all_refs), timeout=0)
        working = [
            one for one, answer in zip(findings, call.all_refs, strict=False) if answer not in ready
        ]
        if not working:
            return
        path = (
            self._folder
            / "stalls"
            / f"{re.sub(r'[^A-Za-z0-9]+', '_', self._what)}-{call.group.name}.txt"
        )
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
    """What each process does, with its stacks if it can tell them or if its signal handler can
    write them."""
    answers = outcomes([process.actor.stacks.remote() for process in processes], timeout_s=5.0)
    findings = []
    for process, stacks in zip(processes, answers, strict=True):
        is_silent = isinstance(stacks, RayError)
        told = (
            on_node(process, look_at, process.pid, process.stack_file)
            if is_silent
            else (ANSWERS, stacks)
        )
        findings.append(Finding(process, *told))
    return findings


def on_node(process: Process, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that runs on the node of a process."""
    if process.node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    task: Any = ray.remote(function).options(
        num_cpus=0, max_retries=0, scheduling_strategy=pinned_to(process.node_id)
    )
    return ray.get(task.remote(*args), timeout=30.0)


def look_at(pid: int, stack_file: str) -> tuple[str, str]:
    """The state of a process of this node that does not answer, and its stacks, which its signal
    handler writes."""
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
