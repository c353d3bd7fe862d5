"""From a reservation to running processes: one on every slot, each on exactly the GPU that the plan
says.

Owns the start of processes: their ranks, the process group of each pool, the daemons of CUDA MPS,
and the clocks of their nodes.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain

import ray

from rolepool.cluster.answers import START_TIMEOUT_S, ActorHandle, Answer, Asked, await_all
from rolepool.cluster.begin import Starting, begin_processes
from rolepool.cluster.nodes import users_of
from rolepool.cluster.process import Measure, Measured, Whereabouts
from rolepool.cluster.reservation import Reservation
from rolepool.errors import PlacementError, WorkerError, logger
from rolepool.placement.parallel import ParallelDims
from rolepool.placement.plan import Slot
from rolepool.protocol.worker import WorkerContext

NUM_CLOCK_QUESTIONS = 5
"""How often a process is asked for its time. The fastest answer is the most exact one."""


@dataclass(kw_only=True, eq=False)
class Process(Whereabouts):
    """A running worker process. It gets its rank when all processes of its pool have started."""

    actor: ActorHandle
    pool: str
    rank: int = field(init=False)
    clock_ahead_s: float = 0.0
    """How far the clock of its node is ahead of the driver's clock."""

    @property
    def actor_id(self) -> str:
        return str(self.actor._actor_id.hex())

    def __str__(self) -> str:
        return f"{self.pool} rank {self.rank} (node {self.address}, pid {self.pid})"

    def error(self, problem: str, **call: str | int | None) -> WorkerError:
        """An error about this process."""
        return WorkerError(
            problem,
            pool=self.pool,
            rank=self.rank,
            node=self.address,
            pid=self.pid,
            **call,
        )


def start_pools(
    places: Mapping[str, Reservation],
    cleanup: ExitStack,
    *,
    run_seed: int,
    deterministic: bool,
) -> dict[str, list[Process]]:
    """Start the processes of these pools, all pools at the same time, each in the place that is
    reserved for it. Returns the processes of each pool.

    `cleanup` ends the processes, also those of a start that failed. Raises PlacementError or
    WorkerError; every wait has a timeout.
    """
    starting = begin_processes(places, cleanup)
    return finish_start(places, starting, run_seed=run_seed, deterministic=deterministic)


def finish_start(
    places: Mapping[str, Reservation],
    starting: Sequence[Starting],
    *,
    run_seed: int,
    deterministic: bool,
) -> dict[str, list[Process]]:
    """Wait until these processes have started, give them their ranks, and form their pools. Returns
    the processes of each pool. Errors are those of `start_pools`."""
    started = _await_processes(places, starting)
    pools: dict[str, list[Process]] = {}
    for name, processes in started.items():
        pools[name] = _in_rank_order(name, places[name], processes)
    _start_mps(places, pools)
    _form_pools(places, pools, run_seed, deterministic)
    all_processes = chain(*pools.values())
    _measure_clocks(all_processes)
    return pools


def _await_processes(
    places: Mapping[str, Reservation], starting: Sequence[Starting]
) -> dict[str, list[Process]]:
    """The processes of each pool, which have answered and have no ranks yet."""
    asked: dict[Answer, Asked] = {}
    for name, _, actor in starting:
        answer = actor.whereabouts.remote()
        asked[answer] = Asked(f"a process of {name}", name)
    answers = await_all(asked, "start", "started %d of %d worker processes")
    started: dict[str, list[Process]] = {name: [] for name in places}
    for (name, bundle, actor), whereabouts in zip(starting, answers, strict=True):
        process = Process(**vars(whereabouts), actor=actor, pool=name)
        started[name].append(process)
        reserved = places[name]
        if reserved.device != "cpu":  # Ray chose the GPU of each bundle, and now it is known
            reserved.bundles[process.node_id, process.gpus[0]] = bundle
    return started


def _in_rank_order(pool: str, reserved: Reservation, started: Sequence[Process]) -> list[Process]:
    """The pool's processes in rank order, each on the slot it really holds. Raises a PlacementError
    if that is not the plan's slot."""
    planned = reserved.plan.pools[pool].slots
    if reserved.device == "cpu":
        # CPU slots are interchangeable: nothing tells which one a process holds.
        in_order = list(started)
    else:
        index_of = {node.node_id: index for index, node in enumerate(reserved.nodes)}
        holder_of: dict[Slot, Process] = {}
        for process in started:
            node = index_of[process.node_id]
            gpu = process.gpus[0]
            holder_of.setdefault(Slot(node, gpu), process)
        for rank, slot in enumerate(planned):
            if slot not in holder_of:
                others = holder_of.keys() - set(planned)
                raise _not_as_planned(pool, rank, slot, others, reserved)
        in_order = [holder_of[slot] for slot in planned]
    for rank, process in enumerate(in_order):
        process.rank = rank
    return in_order


def _not_as_planned(
    pool: str, rank: int, slot: Slot, others: Collection[Slot], reserved: Reservation
) -> PlacementError:
    """The error about a rank that did not get its slot; its pool got others."""
    planned = f"{pool} rank {rank} is planned for node {slot.node} GPU {slot.gpu}"
    in_order = sorted(others)
    assigned = " and ".join(f"node {node} GPU {gpu}" for node, gpu in in_order)
    users = users_of(reserved.nodes[slot.node])
    held = f"GPU {slot.gpu} is held by another job; on the node: {users}"
    fix = "wait until that job ends, or plan with fewer GPUs"
    return PlacementError(f"{planned}, but Ray assigned {assigned}: {held}; {fix}")


def _start_mps(places: Mapping[str, Reservation], pools: Mapping[str, Sequence[Process]]) -> None:
    """Start one daemon on every node, in the first process that shares a GPU there, before any of
    them uses its GPU. Plans without MPS need none."""
    sharing: dict[str, list[Process]] = defaultdict(list)
    for name, processes in pools.items():
        plan = places[name].plan
        uses_mps = plan.mps and name in plan.sharing_pools
        if not uses_mps:
            continue
        for process in processes:
            sharing[process.node_id].append(process)
    if not sharing:
        return
    asked: dict[Answer, Asked] = {}
    for processes in sharing.values():
        first = processes[0]
        answer = first.actor.start_mps.remote()
        asked[answer] = Asked(str(first), first.pool)
    answers = await_all(asked, "start CUDA MPS (placement.mps=true)")
    for processes, variables in zip(sharing.values(), answers, strict=True):
        # A process runs this before it takes its rank, which is when it first uses its GPU.
        for process in processes:
            process.actor.set_environment.remote(variables)
        logger.info("started CUDA MPS on node %s", processes[0].address)


def _form_pools(
    places: Mapping[str, Reservation],
    pools: Mapping[str, Sequence[Process]],
    run_seed: int,
    deterministic: bool,
) -> None:
    """Give every process its rank, and form one process group for each pool; all pools at the same
    time."""
    joined: dict[Answer, Asked] = {}
    for name, processes in pools.items():
        reserved = places[name]
        device = "cpu" if reserved.device == "cpu" else reserved.plan.device
        context = WorkerContext(
            pool=name,
            dims=ParallelDims.over(len(processes)),
            device=device,
            run_seed=run_seed,
            deterministic=deterministic,
        )
        pool = reserved.plan.pools[name]
        master = _give_ranks(processes, context, pool.share)
        secret = secrets.token_hex(16)
        for process in processes:
            answer = process.actor.join_pool.remote(master, secret, START_TIMEOUT_S)
            joined[answer] = Asked(str(process), name)
    await_all(joined, "meet the other ranks of its pool")


def _give_ranks(processes: Sequence[Process], context: WorkerContext, share: float) -> Answer:
    """Tell the processes of a pool their ranks. Returns the address of rank 0, which is not awaited
    here: the other ranks get the reference."""
    node_ids = [process.node_id for process in processes]
    addresses: list[Answer] = []
    for rank, process in enumerate(processes):
        node_ids_before = node_ids[:rank]
        of_rank = replace(
            context,
            rank=rank,
            local_rank=node_ids_before.count(process.node_id),
            local_world_size=node_ids.count(process.node_id),
        )
        address = process.actor.take_rank.remote(of_rank, share)
        addresses.append(address)
    return addresses[0]


def measure(
    pools: Collection[Sequence[Process]],
    function: Measure[Measured],
    *,
    together: bool,
) -> list[Measured]:
    """Call a function in every process, with the process group of its pool, or with one of all
    processes. Returns the result of the first rank of each group."""
    groups = pools
    if together:
        groups = [list(chain(*pools))]
    asked: dict[ray.ObjectRef[Measured], Asked] = {}
    answers_of_first: list[ray.ObjectRef[Measured]] = []
    for processes in groups:
        store = processes[0].actor.store_address.remote()
        secret = secrets.token_hex(16)
        for rank, process in enumerate(processes):
            if together:
                answer = process.actor.measure_together.remote(
                    function,
                    store,
                    secret,
                    rank,
                    len(processes),
                )
            else:
                answer = process.actor.measure.remote(function)
            asked[answer] = Asked(str(process), process.pool)
            if rank == 0:
                answers_of_first.append(answer)
    await_all(asked, "measure what sharding costs")
    return ray.get(answers_of_first)


def _measure_clocks(processes: Iterable[Process]) -> None:
    """Measure how far the clocks of other nodes are ahead of the driver's clock."""
    ahead_s = {ray.util.get_node_ip_address(): 0.0}
    for process in processes:
        address = process.address
        if address not in ahead_s:
            ahead_s[address] = _clock_ahead_s(process)
        process.clock_ahead_s = ahead_s[address]


def _clock_ahead_s(process: Process) -> float:
    """How far the clock of a process is ahead. It is asked a few times."""
    answers = []
    for _ in range(NUM_CLOCK_QUESTIONS):
        asked_s = time.time()
        told_s: float = ray.get(process.actor.ping.remote(), timeout=START_TIMEOUT_S)
        answered_s = time.time()
        # The process read its clock about halfway between question and answer.
        halfway_s = (asked_s + answered_s) / 2
        ahead_s = told_s - halfway_s
        answers.append((answered_s - asked_s, ahead_s))
    _, ahead_s = min(answers)
    return ahead_s
