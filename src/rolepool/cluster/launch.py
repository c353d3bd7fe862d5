"""From a plan to running processes: one on every slot, each on exactly the GPU that the plan says.

Owns the list of nodes, the placement group, and the start of processes. There is one bundle for
each GPU, fixed to its node, and all processes that share the GPU are in it, because Ray assigns a
fraction of an exact GPU only inside bundles of whole GPUs.
"""

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray._private.state as ray_state
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rolepool.cluster.calls import reason_of
from rolepool.cluster.connection import raise_if_ray_died
from rolepool.cluster.process import Whereabouts, WorkerProcess
from rolepool.config.functions import EXTENSIONS
from rolepool.errors import PlacementError, RayDiedError, RolepoolError, WorkerError, logger
from rolepool.placement import Plan
from rolepool.placement.parallel import ParallelDims
from rolepool.placement.plan import ResourcePool, Slot
from rolepool.protocol.worker import WorkerContext

POLL_S = 0.2
START_TIMEOUT_S = 180.0
"""The time in which a process must start and import what it needs, after its resources are
reserved."""
BUNDLE_PART = 0.01
"""The part of a bundle's GPU that Ray counts for a process. The bundle reserves the GPU, so the
part can be small, and the processes of another plan can start in the bundle before those of the
present plan end."""


@dataclass(kw_only=True, eq=False)
class Process(Whereabouts):
    """A running worker process. It gets its rank when all processes of its pool have started."""

    actor: Any
    pool: str
    rank: int = field(init=False)
    clock_ahead_s: float = 0.0
    """How far the clock of its node is ahead of the driver's clock."""

    @property
    def actor_id(self) -> str:
        return str(self.actor._actor_id.hex())

    def __str__(self) -> str:
        return f"{self.pool} rank {self.rank} (node {self.address}, pid {self.pid})"

    def error(self, problem: str, **more: Any) -> WorkerError:
        """An error about this process."""
        return WorkerError(
            problem, pool=self.pool, rank=self.rank, node=self.address, pid=self.pid, **more
        )


# Nodes


class Node(NamedTuple):
    """A live node and its resources as Ray counts them."""

    node_id: str
    address: str
    num_gpus: int
    num_cpus: int

    def slots(self, device: str) -> int:
        """How many processes it can hold: one for each GPU, or one for each CPU on CPU slots."""
        return self.num_cpus if device == "cpu" else self.num_gpus


def live_nodes() -> list[Node]:
    """The nodes in the order in which a plan counts them: the driver's node, then by address, then
    by node id."""
    here = ray.get_runtime_context().get_node_id()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            gpus, cpus = (int(node["Resources"].get(name, 0)) for name in ("GPU", "CPU"))
            nodes.append(Node(node["NodeID"], node["NodeManagerAddress"], gpus, cpus))
    return sorted(nodes, key=lambda node: (node.node_id != here, node.address, node.node_id))


def pinned_to(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Where Ray starts an actor or a task that must run on this node."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def nodes_with_slots(device: str, nodes: Sequence[Node]) -> tuple[str, Sequence[Node]]:
    """The device of a plan's slots (`auto` means GPUs if the cluster has any), and the nodes that a
    plan counts. A head that only manages the cluster has no GPU, and no process is placed there."""
    if device == "auto":
        device = "cuda" if any(node.num_gpus for node in nodes) else "cpu"
    return device, [node for node in nodes if node.slots(device)] or nodes


def substitutes(
    plan: Plan, before: Sequence[Node], live: Sequence[Node], device: str
) -> list[Node] | None:
    """The nodes of a plan with another live node in the place of each lost one; None if there are
    not enough."""
    nodes = list(before)
    for index, node in enumerate(before):
        gpus = [
            slot.gpu for pool in plan.pools.values() for slot in pool.slots if slot.node == index
        ]
        if gpus and node not in live:
            spare = [one for one in live if one not in nodes and one.slots(device) > max(gpus)]
            if not spare:
                return None
            nodes[index] = spare[0]
    return nodes


def _users_of(node: Node) -> str:
    """Who else uses a node: actors with the drivers of their jobs, and placement groups.

    Ray does not tell which GPU an actor holds, only on which node it is.
    """
    ours = ray.get_runtime_context().get_job_id()
    drivers = {
        job[
            "JobID"
        ]: f"(pid {job['DriverPid']} on {job['DriverIPAddress']}: {job.get('Entrypoint', '')})"
        for job in ray_state.jobs()
    }
    users = set()
    for actor in ray_state.actors().values():
        if actor["Address"]["NodeID"] == node.node_id and actor["State"] == "ALIVE":
            job = actor["JobID"]
            whose = "this job" if job == ours else f"job {job} {drivers.get(job, '')}".strip()
            users.add(f"actor {actor['ActorClassName']} (pid {actor['Pid']}) of {whose}")
    for group in placement_group_table().values():
        num_bundles = list(group["bundles_to_node_id"].values()).count(node.node_id)
        if num_bundles and group["state"] == "CREATED":
            users.add(
                f"placement group {group['name'] or group['placement_group_id']} with {num_bundles} bundles"
            )
    return ", ".join(sorted(users)) or "no actor that Ray knows"


# Start


Measure = Callable[[str], Any]
"""Gets the device of its process and may use collectives."""
Bundles = dict[tuple[str, int], Any]
"""Where to start processes on each GPU (or CPU slot) that is reserved, by the node's id and the
GPU's number."""


class Reservation(NamedTuple):
    """The resources of a plan: its nodes, its device, and a bundle for each slot."""

    plan: Plan
    nodes: Sequence[Node]
    device: str
    bundles: Bundles


def reserve(
    plan: Plan, nodes: Sequence[Node], cleanup: ExitStack, timeout_s: float, held: Bundles
) -> Reservation:
    """Reserve the plan's resources, except those that are `held` already; `cleanup` releases them.

    Raises PlacementError, at the latest after `timeout_s`. The error says who uses the nodes then.
    """
    device, nodes = nodes_with_slots(plan.device, nodes)
    PlacementError.raise_if_any(_lacking(plan, nodes, device, held))
    if plan.mps and device == "cpu":
        raise PlacementError(
            "placement.mps=true: needs GPUs, and the cluster has none; set placement.mps=false"
        )
    slots = Counter(
        (nodes[slot.node].node_id, slot.gpu) for pool in plan.pools.values() for slot in pool.slots
    )
    needed = sorted(slots.keys() - held.keys())
    if not needed:
        return Reservation(plan, nodes, device, held)
    gpu = {} if device == "cpu" else {"GPU": 1.0}
    bundles = [{"CPU": float(slots[place]), **gpu} for place in needed]
    fixed = [{"ray.io/node-id": node_id} for node_id, _ in needed]
    group = placement_group(bundles, strategy="PACK", bundle_label_selector=fixed)
    cleanup.callback(_release, group)
    if not group.wait(timeout_s):
        raise PlacementError(_not_free(plan, nodes, device, timeout_s))
    new = {
        place: PlacementGroupSchedulingStrategy(group, index) for index, place in enumerate(needed)
    }
    return Reservation(plan, nodes, device, {**held, **new})


def start_pools(
    reserved: Reservation,
    names: Collection[str],
    cleanup: ExitStack,
    *,
    run_seed: int,
    deterministic: bool,
) -> dict[str, list[Process]]:
    """Start the processes of these pools, all pools at the same time. Returns the processes of each
    pool.

    `cleanup` ends the processes, also those of a start that failed. Raises PlacementError or
    WorkerError; every wait has a timeout.
    """
    plan, device, nodes = reserved.plan, reserved.device, reserved.nodes
    actor_class = ray.remote(concurrency_groups={"health": 1})(WorkerProcess)  # type: ignore[call-overload]
    options = {"num_cpus": 0, "num_gpus": 0 if device == "cpu" else BUNDLE_PART, "max_restarts": 0}
    places = [
        (name, nodes[slot.node].node_id, slot.gpu)
        for name in names
        for slot in plan.pools[name].slots
    ]
    bundles = [(name, reserved.bundles[node_id, gpu]) for name, node_id, gpu in places]
    actors, asked = list[Any](), dict[Any, tuple[str, str]]()
    for name, bundle in bundles:
        with_options = actor_class.options(**options, scheduling_strategy=bundle)
        actors.append(with_options.remote(str(Path.cwd()), EXTENSIONS))
        cleanup.callback(ray.kill, actors[-1])
        asked[actors[-1].whereabouts.remote()] = f"a process of {name}", name
    started: dict[str, list[Process]] = {name: [] for name in names}
    answers = await_all(asked, "start", "started %d of %d worker processes")
    for (name, bundle), actor, told in zip(bundles, actors, answers, strict=True):
        started[name].append(Process(**vars(told), actor=actor, pool=name))
        if device != "cpu":  # Ray chose the GPU of each bundle, and now it is known
            reserved.bundles[told.node_id, told.gpus[0]] = bundle
    pools = {name: _match(name, reserved, processes) for name, processes in started.items()}
    if plan.mps:
        _start_mps(plan, pools)
    _form_pools(reserved, pools, run_seed, deterministic)
    _measure_clocks([process for processes in pools.values() for process in processes])
    return pools


def place_for_helpers(name: str, count: int) -> Reservation:
    """A pool of processes on the driver's node, beside those of the plan. It reserves neither GPU
    nor CPU, because the processes are for light work such as rule rewards."""
    here, slots = live_nodes()[0], tuple(Slot(0, rank) for rank in range(count))
    pools = {name: ResourcePool((count,), slots=slots)}
    plan = Plan(gpus_per_node=(count,), device="cpu", pools=pools, roles={})
    return Reservation(
        plan, [here], "cpu", {(here.node_id, slot.gpu): pinned_to(here.node_id) for slot in slots}
    )


def _lacking(plan: Plan, nodes: Sequence[Node], device: str, held: Bundles) -> Iterator[str]:
    """What the cluster can never provide and the plan needs, with a line for each pool and node."""
    word = "CPUs" if device == "cpu" else "GPUs"
    for name, pool in plan.pools.items():
        for index, count in pool.counts_by_node.items():
            highest = max(slot.gpu for slot in pool.slots if slot.node == index)
            if index >= len(nodes):
                there = f"the cluster has {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
                fix = "add nodes (ray start), or lower trainer.nnodes"
                yield f"Not enough nodes: {name} needs {count} {word} on node {index}, and {there}; {fix}"
            elif highest >= nodes[index].slots(device):
                needed = f"{name} needs {count} on node {index} ({nodes[index].address}), up to number {highest}"
                fix = f"lower trainer.n_gpus_per_node or add {word}"
                yield f"Not enough {word}: {needed}; the node has {nodes[index].slots(device)}; {fix}"
    for index, node in enumerate(nodes):
        places = [
            (node.node_id, slot.gpu)
            for pool in plan.pools.values()
            for slot in pool.slots
            if slot.node == index
        ]
        num_processes = sum(place not in held for place in places)
        if num_processes > node.num_cpus:
            needed = f"{num_processes} processes on node {index} ({node.address}) need one each"
            fix = "raise ray_kwargs.ray_init.num_cpus, or start that node with more"
            yield f"Not enough CPUs: {needed}, and Ray has {node.num_cpus} there; {fix}"


def _not_free(plan: Plan, nodes: Sequence[Node], device: str, timeout_s: float) -> Iterator[str]:
    """What is not free on the nodes, and who uses it, with a line for each pool and node."""
    word, available = "CPU" if device == "cpu" else "GPU", ray_state.available_resources_per_node()
    for name, pool in plan.pools.items():
        for index, count in pool.counts_by_node.items():
            node = nodes[index]
            needed = f"{name} needs {count * pool.share:g} on node {index} ({node.address})"
            free = f"{available.get(node.node_id, {}).get(word, 0.0):g} of {node.slots(device)} are free"
            fix = f"on the node: {_users_of(node)}; wait until they are free, or use fewer {word}s"
            yield f"Not enough {word}s within placement.timeout_s={timeout_s:g}: {needed}, {free}; {fix}"


def _release(group: Any) -> None:
    with suppress(RayDiedError):
        raise_if_ray_died()  # without a GCS server, the next line would wait for a minute
        remove_placement_group(group)


def await_all(
    asked: dict[Any, tuple[str, str]], what: str, progress: str | None = None
) -> list[Any]:
    """Wait for the answers of all processes and return them. The first error is raised at once.

    `asked` has the reference of each answer, with the process and the pool that errors name. `what`
    says in errors what the processes do, and `progress` is logged after each answer, with the
    number of answers. If a node is lost, that is an error, too: Ray would wait until the node
    returns.
    """
    waiting, deadline, before = list(asked), time.monotonic() + START_TIMEOUT_S, live_nodes()
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=POLL_S)
        who, pool = asked[(ready or waiting)[0]]
        if ready:
            (outcome,) = outcomes(ready, timeout_s=0)
            if isinstance(outcome, RayError):
                cause = cause_of(outcome)
                if isinstance(cause, RolepoolError):
                    raise cause from None
                is_death = isinstance(cause, RayActorError)
                raise WorkerError(
                    f"{who} could not {what}: {reason_of(cause)}", pool=pool, is_death=is_death
                ) from None
            if progress is not None:
                logger.info(progress, len(asked) - len(waiting), len(asked))
            continue
        raise_if_ray_died()
        if {node.node_id for node in before} - {node.node_id for node in live_nodes()}:
            raise WorkerError(f"{who} did not {what}, because its node was lost", is_death=True)
        if time.monotonic() > deadline:
            missing = f"{len(waiting)} of {len(asked)} processes have not answered"
            raise WorkerError(
                f"{who} did not {what} within {START_TIMEOUT_S:.0f} s; {missing}", pool=pool
            )
    return list(ray.get(list(asked)))


def outcomes(asked: Collection[Any], timeout_s: float) -> list[Any]:
    """Wait for these answers of actors, and return each of them, or Ray's error if there is none.
    It is a GetTimeoutError if the answer has not arrived in time."""
    ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    found: list[Any] = []
    for one in asked:
        try:
            found.append(ray.get(one, timeout=0))
        except RayError as error:
            found.append(error)
    return found


def cause_of(error: BaseException) -> BaseException:
    """The exception of the worker, without the exceptions that Ray wraps around it each time it is
    passed on."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


def _match(pool: str, reserved: Reservation, started: Sequence[Process]) -> list[Process]:
    """The pool's processes in rank order, each on the slot it really holds. Raises a PlacementError
    if that is not the plan's slot."""
    slots = held = list(reserved.plan.pools[pool].slots)
    if reserved.device != "cpu":
        index_of = {node.node_id: index for index, node in enumerate(reserved.nodes)}
        held = [Slot(index_of[process.node_id], process.gpus[0]) for process in started]
    if missing := [slot for slot in slots if slot not in held]:
        slot = missing[0]
        planned = f"{pool} rank {slots.index(slot)} is planned for node {slot.node} GPU {slot.gpu}"
        given = " and ".join(
            f"node {node} GPU {gpu}" for node, gpu in sorted(set(held) - set(slots))
        )
        users = f"GPU {slot.gpu} is held by another job; on the node: {_users_of(reserved.nodes[slot.node])}"
        fix = "wait until that job ends, or plan with fewer GPUs"
        raise PlacementError(f"{planned}, but Ray assigned {given}: {users}; {fix}")
    members = [started[held.index(slot)] for slot in slots]
    for rank, process in enumerate(members):
        process.rank = rank
    return members


def _start_mps(plan: Plan, processes: dict[str, list[Process]]) -> None:
    """Start one daemon on every node, in the first process that shares a GPU there, before any of
    them uses its GPU."""
    sharing: dict[str, list[Process]] = defaultdict(list)
    for process in (process for name in plan.sharing_pools for process in processes.get(name, ())):
        sharing[process.node_id].append(process)
    firsts = [members[0] for members in sharing.values()]
    asked = {first.actor.start_mps.remote(): (str(first), first.pool) for first in firsts}
    answers = await_all(asked, "start CUDA MPS (placement.mps=true)")
    for members, variables in zip(sharing.values(), answers, strict=True):
        # A process runs this before it takes its rank, which is when it first uses its GPU.
        for process in members:
            process.actor.set_environment.remote(variables)
        logger.info("started CUDA MPS on node %s", members[0].address)


def _form_pools(
    reserved: Reservation,
    processes: dict[str, list[Process]],
    run_seed: int,
    deterministic: bool,
) -> None:
    """Give every process its rank, and form one process group for each pool; all pools at the same
    time."""
    joined, device = {}, "cpu" if reserved.device == "cpu" else reserved.plan.device
    for name, members in processes.items():
        nodes = [process.node_id for process in members]
        dims = ParallelDims.over(len(members))
        base = WorkerContext(
            pool=name, dims=dims, device=device, run_seed=run_seed, deterministic=deterministic
        )
        addresses = []
        for rank, (process, node) in enumerate(zip(members, nodes, strict=True)):
            context = replace(
                base,
                rank=rank,
                local_rank=nodes[:rank].count(node),
                local_world_size=nodes.count(node),
            )
            addresses.append(
                process.actor.take_rank.remote(context, reserved.plan.pools[name].share)
            )
        secret = secrets.token_hex(16)
        for process in members:
            joined[process.actor.join_pool.remote(addresses[0], secret, START_TIMEOUT_S)] = (
                str(process),
                name,
            )
    await_all(joined, "meet the other ranks of its pool")


def measure(
    pools: Collection[Sequence[Process]], function: Measure, *, together: bool
) -> list[Any]:
    """Call a function in every process, with the process group of its pool, or with one of all
    processes. Returns the result of the first rank of each group."""
    asked: dict[Any, tuple[str, str]] = {}
    firsts: list[Any] = []
    groups = [[process for members in pools for process in members]] if together else pools
    for members in groups:
        host, secret = members[0].actor.store_address.remote(), secrets.token_hex(16)
        for rank, process in enumerate(members):
            if together:
                answer = process.actor.measure_together.remote(
                    function, host, secret, rank, len(members)
                )
            else:
                answer = process.actor.measure.remote(function)
            asked[answer] = str(process), process.pool
            if rank == 0:
                firsts.append(answer)
    await_all(asked, "measure what sharding costs")
    return list(ray.get(firsts))


def _measure_clocks(processes: Sequence[Process]) -> None:
    """Measure how far the clocks of other nodes are ahead. Each is asked a few times; the fastest
    answer is used."""
    ahead_s = {ray.util.get_node_ip_address(): 0.0}
    for process in processes:
        if process.address not in ahead_s:
            answers = []
            for _ in range(5):
                asked_s = time.time()
                told_s: float = ray.get(process.actor.ping.remote(), timeout=START_TIMEOUT_S)
                answered_s = time.time()
                answers.append((answered_s - asked_s, told_s - (asked_s + answered_s) / 2))
            ahead_s[process.address] = min(answers)[1]
        process.clock_ahead_s = ahead_s[process.address]
