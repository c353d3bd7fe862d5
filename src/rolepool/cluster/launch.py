"""From a plan to running processes: one on every slot, each on exactly the GPU that the plan says.

Owns what Ray says about nodes, the placement group, and the start of processes. There is one bundle for each GPU, fixed
to its node, and all processes that share the GPU are in it: only inside bundles of whole GPUs does Ray place fractions
of a GPU on exact GPUs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray._private.state as ray_state
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rolepool.cluster.calls import reason_of
from rolepool.cluster.process import Whereabouts, WorkerProcess
from rolepool.config.functions import EXTENSIONS
from rolepool.errors import PlacementError, WorkerError
from rolepool.placement import Plan
from rolepool.placement.plan import Slot
from rolepool.protocol.worker import WorkerContext

logger = logging.getLogger(__name__)

NUM_CLOCK_QUESTIONS = 5
START_TIMEOUT_S = 180.0
"""The time in which a process must start and import what it needs, after its resources are reserved."""


@dataclass(frozen=True)
class Process:
    """A running worker process and its rank."""

    actor: Any
    pool: str
    rank: int
    slot: Slot
    address: str
    pid: int
    node_id: str
    gpus: tuple[int, ...]
    """The indices on its node of the GPUs it holds: one, or none on a CPU slot."""
    gpu_memory_bytes: int | None
    clock_ahead_s: float = 0.0
    """How far the clock of its node is ahead of the driver's clock."""

    @property
    def actor_id(self) -> str:
        return str(self.actor._actor_id.hex())

    def __str__(self) -> str:
        return f"{self.pool} rank {self.rank} (node {self.address}, pid {self.pid})"


# Nodes


@dataclass(frozen=True)
class Node:
    """A live node and its resources as Ray counts them."""

    node_id: str
    address: str
    num_gpus: int
    num_cpus: int

    def slots(self, device: str) -> int:
        """How many processes it can hold: one for each GPU, or one for each CPU on CPU slots."""
        return self.num_cpus if device == "cpu" else self.num_gpus


def live_nodes() -> list[Node]:
    """The nodes in the order in which a plan counts them: the driver's node, then by address, then by node id."""
    here = ray.get_runtime_context().get_node_id()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            gpus, cpus = (int(node["Resources"].get(name, 0)) for name in ("GPU", "CPU"))
            nodes.append(Node(node["NodeID"], node["NodeManagerAddress"], gpus, cpus))
    return sorted(nodes, key=lambda node: (node.node_id != here, node.address, node.node_id))


def slot_device(device: str, nodes: Sequence[Node]) -> str:
    """What the slots of a plan are. `auto` means GPUs if the cluster has any."""
    if device != "auto":
        return device
    return "cuda" if any(node.num_gpus for node in nodes) else "cpu"


def _users_of(node: Node) -> str:
    """Who uses a node beside us: placement groups and actors, and the drivers of other jobs.

    Ray does not say which GPU an actor holds, only on which node it is.
    """
    ours = ray.get_runtime_context().get_job_id()
    drivers = {
        job["JobID"]: f"(pid {job['DriverPid']} on {job['DriverIPAddress']}: {job.get('Entrypoint', '')})"
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
            users.add(f"placement group {group['name'] or group['placement_group_id']} with {num_bundles} bundles")
    return ", ".join(sorted(users)) or "nobody that Ray names"


# Start


def launch(
    plan: Plan, nodes: Sequence[Node], *, timeout_s: float, run_seed: int
) -> tuple[dict[str, list[Process]], PlacementGroup]:
    """Start the plan's processes, all pools at the same time. Returns the processes of each pool and their resources.

    Raises PlacementError or WorkerError; every wait has a timeout.
    """
    device = slot_device(plan.device, nodes)
    _check_it_can_ever_fit(plan, nodes, device)
    if plan.mps and device == "cpu":
        raise PlacementError("placement.mps=true: is for GPUs, and the cluster has none; set placement.mps=false")
    slots = sorted(_num_processes(plan))
    group = _reserve(plan, slots, nodes, device, timeout_s)
    started: dict[str, list[Any]] = {}
    try:
        bundles = {slot: PlacementGroupSchedulingStrategy(group, index) for index, slot in enumerate(slots)}
        for name, pool in plan.pools.items():
            num_gpus = 0 if device == "cpu" else pool.share
            started[name] = [_start(bundles[slot], num_cpus=1, num_gpus=num_gpus) for slot in pool.slots]
        found = _await_start(started)
        processes = {name: _match(name, plan, started[name], found[name], nodes, device) for name in plan.pools}
        if plan.mps:
            _start_mps(plan, processes)
        shares = {name: pool.share for name, pool in plan.pools.items()}
        _form_pools(shares, processes, "cpu" if device == "cpu" else plan.device, run_seed)
        processes = _with_clocks(processes)
    except BaseException:
        for actor in (actor for actors in started.values() for actor in actors):
            ray.kill(actor)
        remove_placement_group(group)
        raise
    return processes, group


def launch_helpers(name: str, count: int, *, run_seed: int) -> list[Process]:
    """Processes on the driver's node, beside those of the plan. They reserve neither GPU nor CPU, because they are for
    light work such as rule rewards."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actors = [_start(here, num_cpus=0, num_gpus=0) for _ in range(count)]
    try:
        found = _await_start({name: actors})[name]
        processes = [Process(actors[rank], name, rank, Slot(0, rank), *found[rank]) for rank in range(count)]
        _form_pools({name: 1.0}, {name: processes}, "cpu", run_seed)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return processes


def _num_processes(plan: Plan) -> Counter[Slot]:
    """How many processes share each slot."""
    return Counter(slot for pool in plan.pools.values() for slot in pool.slots)


def _check_it_can_ever_fit(plan: Plan, nodes: Sequence[Node], device: str) -> None:
    """Refuse, for each pool and node, what the cluster lacks however long one waits."""
    problems = []
    word = "CPUs" if device == "cpu" else "GPUs"
    for name, pool in plan.pools.items():
        for index, count in pool.counts_by_node.items():
            if index >= len(nodes):
                problems.append(
                    f"Not enough nodes: {name} needs {count} {word} on node {index}, and the cluster has {len(nodes)} "
                    f"node{'s' if len(nodes) > 1 else ''}; add nodes (ray start), or lower trainer.nnodes"
                )
                continue
            highest = max(slot.gpu for slot in pool.slots if slot.node == index)
            has = nodes[index].slots(device)
            if highest >= has:
                problems.append(
                    f"Not enough {word}: {name} needs {count} on node {index} ({nodes[index].address}), up to number "
                    f"{highest}, and the node has {has}; lower trainer.n_gpus_per_node, or add {word}"
                )
    for index, node in enumerate(nodes):
        num_processes = sum(count for slot, count in _num_processes(plan).items() if slot.node == index)
        if num_processes > node.num_cpus:
            problems.append(
                f"Not enough CPUs: {num_processes} processes on node {index} ({node.address}) need one each, and Ray "
                f"has {node.num_cpus} there; raise ray_kwargs.ray_init.num_cpus, or start that node with more"
            )
    if problems:
        raise PlacementError(problems)


def _reserve(plan: Plan, slots: Sequence[Slot], nodes: Sequence[Node], device: str, timeout_s: float) -> PlacementGroup:
    """Wait for a bundle on each slot. If that takes too long, the error says who uses the nodes."""
    num_processes = _num_processes(plan)
    gpu = {} if device == "cpu" else {"GPU": 1.0}
    bundles = [{"CPU": float(num_processes[slot]), **gpu} for slot in slots]
    fixed = [{"ray.io/node-id": nodes[slot.node].node_id} for slot in slots]
    group: PlacementGroup = placement_group(bundles, strategy="PACK", bundle_label_selector=fixed)
    if group.wait(timeout_s):
        return group
    word = "CPU" if device == "cpu" else "GPU"
    available = ray_state.available_resources_per_node()
    problems = []
    for name, pool in plan.pools.items():
        for index, count in pool.counts_by_node.items():
            node = nodes[index]
            free = available.get(node.node_id, {}).get(word, 0.0)
            problems.append(
                f"Not enough {word}s within placement.timeout_s={timeout_s:g}: {name} needs {count * pool.share:g} on "
                f"node {index} ({node.address}), {free:g} of {node.slots(device)} are free; "
                f"on the node: {_users_of(node)}; wait for it, or use fewer {word}s"
            )
    remove_placement_group(group)
    raise PlacementError(problems)


def _start(where: Any, *, num_cpus: int, num_gpus: float) -> Any:
    actor_class = ray.remote(concurrency_groups={"health": 1})(WorkerProcess)  # type: ignore[call-overload]
    options = actor_class.options(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0, scheduling_strategy=where)
    return options.remote(str(Path.cwd()), EXTENSIONS)


def _await_start(started: dict[str, list[Any]]) -> dict[str, list[Whereabouts]]:
    """Wait until every process has started; log the progress."""
    asked = {
        actor.whereabouts.remote(): (f"a process of {name}", name)
        for name, actors in started.items()
        for actor in actors
    }
    for num_started, _ in enumerate(await_all(asked, "start"), 1):
        logger.info("started %d of %d worker processes", num_started, len(asked))
    refs = iter(asked)
    return {name: [ray.get(next(refs)) for _ in actors] for name, actors in started.items()}


def await_all(asked: dict[Any, tuple[str, str]], what: str) -> Iterator[Any]:
    """The answers in the order in which they arrive. `asked` names the process and the pool for each of them."""
    waiting, deadline = list(asked), time.monotonic() + START_TIMEOUT_S
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        who, pool = asked[(ready or waiting)[0]]
        if not ready:
            missing = f"{len(waiting)} of {len(asked)} processes are missing"
            raise WorkerError(f"{who} did not {what} within {START_TIMEOUT_S:.0f} s; {missing}", pool=pool)
        try:
            yield ray.get(ready[0])
        except RayError as error:
            cause = cause_of(error)
            if isinstance(cause, WorkerError):
                raise cause from None
            raise WorkerError(f"{who} could not {what}: {reason_of(cause)}", pool=pool) from None


def cause_of(error: BaseException) -> BaseException:
    """What a worker raised, without the wrappers that Ray adds each time it is passed on."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


def _match(
    name: str, plan: Plan, actors: list[Any], found: list[Whereabouts], nodes: Sequence[Node], device: str
) -> list[Process]:
    """The pool's processes in rank order, each on the slot it really holds. Raises if it is not the plan's slot."""
    slots = list(plan.pools[name].slots)
    held = slots
    if device != "cpu":
        index_of = {node.node_id: index for index, node in enumerate(nodes)}
        held = [Slot(index_of[place.node_id], place.gpus[0]) for place in found]
    missing = [slot for slot in slots if slot not in held]
    if missing:
        slot, given = missing[0], sorted(set(held) - set(slots))
        raise PlacementError(
            f"{name} rank {slots.index(slot)} is planned on node {slot.node} GPU {slot.gpu}, and Ray gave "
            f"{' and '.join(f'node {node} GPU {gpu}' for node, gpu in given)}: GPU {slot.gpu} is held by another job; "
            f"on the node: {_users_of(nodes[slot.node])}; wait for it, or plan around it with fewer GPUs"
        )
    order = [held.index(slot) for slot in slots]
    return [Process(actors[i], name, rank, slots[rank], *found[i]) for rank, i in enumerate(order)]


def _start_mps(plan: Plan, processes: dict[str, list[Process]]) -> None:
    """Start one daemon on every node, in the first process that shares a GPU there, before any of them uses its GPU."""
    sharing: dict[int, list[Process]] = {}
    for process in (process for name in plan.sharing_pools for process in processes[name]):
        sharing.setdefault(process.slot.node, []).append(process)
    started = {node: members[0].actor.start_mps.remote() for node, members in sharing.items()}
    for node, members in sharing.items():
        try:
            variables = ray.get(started[node], timeout=START_TIMEOUT_S)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise WorkerError(
                f"placement.mps=true: no CUDA MPS on node {node} after {START_TIMEOUT_S:.0f} s: {reason_of(error)}"
            ) from None
        # A process runs this before it takes its rank, which is when it first uses its GPU.
        for process in members:
            process.actor.set_environment.remote(variables)
        logger.info("started CUDA MPS on node %d (%s)", node, members[0].address)


def _form_pools(shares: dict[str, float], processes: dict[str, list[Process]], device: str, run_seed: int) -> None:
    """Give every process its rank, and form one process group for each pool; all pools at the same time."""
    joined = {}
    for name, members in processes.items():
        nodes = [process.slot.node for process in members]
        addresses = []
        for rank, process in enumerate(members):
            context = WorkerContext(
                pool=name,
                rank=rank,
                world_size=len(members),
                local_rank=nodes[:rank].count(nodes[rank]),
                local_world_size=nodes.count(nodes[rank]),
                device=device,
                run_seed=run_seed,
            )
            addresses.append(process.actor.take_rank.remote(context, shares[name]))
        for process in members:
            joined[process.actor.join_pool.remote(addresses[0], START_TIMEOUT_S)] = str(process), name
    for _ in await_all(joined, "meet the other ranks of its pool"):
        pass


def _with_clocks(processes: dict[str, list[Process]]) -> dict[str, list[Process]]:
    """Measure how far the clocks of other nodes are ahead, by the fastest of a few questions to each."""
    ahead_s = {ray.util.get_node_ip_address(): 0.0}
    for process in (process for members in processes.values() for process in members):
        if process.address in ahead_s:
            continue
        answers = []
        for _ in range(NUM_CLOCK_QUESTIONS):
            asked_s = time.time()
            told_s: float = ray.get(process.actor.ping.remote(), timeout=START_TIMEOUT_S)
            answered_s = time.time()
            answers.append((answered_s - asked_s, told_s - (asked_s + answered_s) / 2))
        ahead_s[process.address] = min(answers)[1]
    return {
        name: [replace(process, clock_ahead_s=ahead_s[process.address]) for process in members]
        for name, members in processes.items()
    }
