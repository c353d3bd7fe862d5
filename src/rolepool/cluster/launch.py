"""From a plan to running processes: one on every slot, each on exactly the GPU that the plan says.

Owns the placement group and start-up. One bundle per GPU, pinned to its node, with all processes that share the GPU
inside: Ray puts fractions of a GPU on exact GPUs only inside whole-GPU bundles.
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
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rolepool.cluster.calls import reason_of
from rolepool.cluster.nodes import Node, free_slots, holders, slot_device
from rolepool.cluster.process import Whereabouts, WorkerProcess
from rolepool.config.functions import EXTENSIONS
from rolepool.errors import PlacementError, WorkerError
from rolepool.placement import Plan
from rolepool.placement.slots import Slot
from rolepool.protocol.remote import Producer
from rolepool.protocol.worker import WorkerContext

logger = logging.getLogger(__name__)

NUM_CLOCK_QUESTIONS = 5
START_TIMEOUT_S = 180.0
"""For a process to start and import what it needs, after its resources are there."""


@dataclass(frozen=True)
class Process:
    """A running worker process and the rank it has."""

    actor: Any
    pool: str
    rank: int
    slot: Slot
    address: str
    pid: int
    node_id: str
    gpu: int | None
    """The number on its node of the GPU it holds."""
    gpu_memory_bytes: int | None = None
    clock_ahead_s: float = 0.0
    """How far the clock of its node is ahead of the driver's."""

    @property
    def actor_id(self) -> str:
        return str(self.actor._actor_id.hex())

    def __str__(self) -> str:
        return f"{self.pool} rank {self.rank} (node {self.address}, pid {self.pid})"

    def producer(self, role: str, method: str) -> Producer:
        return Producer(self.pool, role, self.rank, self.address, self.pid, method)


def launch(
    plan: Plan, nodes: Sequence[Node], *, timeout_s: float, run_seed: int
) -> tuple[dict[str, list[Process]], PlacementGroup]:
    """Start the plan's processes, all pools side by side: those of each pool, and the resources they stand on.

    Raises PlacementError or WorkerError; every wait ends.
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
        for actors in started.values():
            for actor in actors:
                ray.kill(actor)
        remove_placement_group(group)
        raise
    return processes, group


def launch_helpers(name: str, count: int, *, run_seed: int) -> list[Process]:
    """Processes beside the plan's on the driver's node, which take no GPU and wait for no CPU: for light work such as
    rule rewards."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actors = [_start(here, num_cpus=0, num_gpus=0) for _ in range(count)]
    try:
        found = _await_start({name: actors})[name]
        processes = [
            Process(actor, name, rank, Slot(0, rank), place.address, place.pid, place.node_id, None)
            for rank, (actor, place) in enumerate(zip(actors, found, strict=True))
        ]
        _form_pools({name: 1.0}, {name: processes}, "cpu", run_seed)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return processes


# Resources


def _num_processes(plan: Plan) -> Counter[Slot]:
    """How many processes share each slot."""
    return Counter(slot for pool in plan.pools.values() for slot in pool.slots)


def _check_it_can_ever_fit(plan: Plan, nodes: Sequence[Node], device: str) -> None:
    """What the cluster lacks however long one waits, per pool and node."""
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
    num_processes = _num_processes(plan)
    gpu = {} if device == "cpu" else {"GPU": 1.0}
    bundles = [{"CPU": float(num_processes[slot]), **gpu} for slot in slots]
    pinned = [{"ray.io/node-id": nodes[slot.node].node_id} for slot in slots]
    group: PlacementGroup = placement_group(bundles, strategy="PACK", bundle_label_selector=pinned)
    if not group.wait(timeout_s):
        problems = list(_missing(plan, nodes, device, timeout_s))
        remove_placement_group(group)
        raise PlacementError(problems)
    return group


def _missing(plan: Plan, nodes: Sequence[Node], device: str, timeout_s: float) -> Iterator[str]:
    """Per pool and node what is needed, what is there and who holds the rest."""
    word = "CPUs" if device == "cpu" else "GPUs"
    for name, pool in plan.pools.items():
        for index, count in pool.counts_by_node.items():
            node = nodes[index]
            others = ", ".join(sorted(set(holders(node)))) or "nobody that Ray names"
            yield (
                f"Not enough {word} within placement.timeout_s={timeout_s:g}: {name} needs {count * pool.share:g} on "
                f"node {index} ({node.address}), {free_slots(node, device):g} of {node.slots(device)} are free; "
                f"on the node: {others}; wait for it, or use fewer {word}"
            )


# Processes


def _start(where: Any, *, num_cpus: int, num_gpus: float) -> Any:
    actor_class = ray.remote(concurrency_groups={"health": 1})(WorkerProcess)  # type: ignore[call-overload]
    options = actor_class.options(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0, scheduling_strategy=where)
    return options.remote(str(Path.cwd()), EXTENSIONS)


def _await_start(started: dict[str, list[Any]]) -> dict[str, list[Whereabouts]]:
    """Every process's word that it is there, with progress on the way."""
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
    """The answers as they come; of those asked, `asked` tells who they are and in which pool."""
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
    """What a worker raised, out of the wrappings that Ray adds each time it is passed on."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


def _match(
    name: str, plan: Plan, actors: list[Any], found: list[Whereabouts], nodes: Sequence[Node], device: str
) -> list[Process]:
    """The pool's processes in rank order, each on the slot it really holds. Fails when those are not the plan's."""
    slots = plan.pools[name].slots
    if device == "cpu":
        held = dict(zip(slots, zip(actors, found, strict=True), strict=True))
    else:
        index_of = {node.node_id: index for index, node in enumerate(nodes)}
        held = {
            Slot(index_of[place.node_id], place.gpus[0]): (actor, place)
            for actor, place in zip(actors, found, strict=True)
        }
    missing = [slot for slot in slots if slot not in held]
    if missing:
        slot, given = missing[0], sorted(set(held) - set(slots))
        others = ", ".join(sorted(set(holders(nodes[slot.node])))) or "nobody that Ray names"
        raise PlacementError(
            f"{name} rank {slots.index(slot)} is planned on node {slot.node} GPU {slot.gpu}, and Ray gave "
            f"{' and '.join(f'node {node} GPU {gpu}' for node, gpu in given)}: GPU {slot.gpu} is held by another job; "
            f"on the node: {others}; wait for it, or plan around it with fewer GPUs"
        )
    return [
        Process(
            actor,
            name,
            rank,
            slot,
            place.address,
            place.pid,
            place.node_id,
            None if device == "cpu" else slot.gpu,
            place.gpu_memory_bytes,
        )
        for rank, slot in enumerate(slots)
        for actor, place in [held[slot]]
    ]


def _start_mps(plan: Plan, processes: dict[str, list[Process]]) -> None:
    """On every node one daemon, held by the first of those who share GPUs there, before any of them uses its GPU."""
    sharing: dict[int, list[Process]] = {}
    for name in plan.sharing_pools:
        for process in processes[name]:
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
        # In the order of calls this comes before the rank, with which a process turns to its GPU.
        for process in members:
            process.actor.set_environment.remote(variables)
        logger.info("started CUDA MPS on node %d (%s)", node, members[0].address)


def _form_pools(shares: dict[str, float], processes: dict[str, list[Process]], device: str, run_seed: int) -> None:
    """Give every process its rank, and let those of a pool meet in one process group; all pools side by side."""
    joined = {}
    for name, members in processes.items():
        nodes = [process.slot.node for process in members]
        answers = []
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
            answers.append(process.actor.take_rank.remote(context, shares[name]))
        for process in members:
            joined[process.actor.join_pool.remote(answers[0], START_TIMEOUT_S)] = str(process), name
    for _ in await_all(joined, "meet the other ranks of its pool"):
        pass


def _with_clocks(processes: dict[str, list[Process]]) -> dict[str, list[Process]]:
    """Learn how far the clocks of other nodes are ahead, from the quickest of a few questions."""
    ahead_s = {ray.util.get_node_ip_address(): 0.0}
    for process in (process for members in processes.values() for process in members):
        if process.address not in ahead_s:
            ahead_s[process.address] = min(_ask_clock(process) for _ in range(NUM_CLOCK_QUESTIONS))[1]
    return {
        name: [replace(process, clock_ahead_s=ahead_s[process.address]) for process in members]
        for name, members in processes.items()
    }


def _ask_clock(process: Process) -> tuple[float, float]:
    """How long the answer took, and how far the clock was ahead if the question took half of that."""
    asked_s = time.time()
    told_s: float = ray.get(process.actor.ping.remote(), timeout=START_TIMEOUT_S)
    answered_s = time.time()
    return answered_s - asked_s, told_s - (asked_s + answered_s) / 2
