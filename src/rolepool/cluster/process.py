"""The worker process: one for each slot of a pool, hosting all roles of that pool.

Owns the process: its rank, device, process group and seeds. It runs one call after another, which
`rolepool.cluster.actor` passes on to it. Roles reach it as classes, so it does not know what they
compute.
"""

import asyncio
import faulthandler
import gc
import inspect
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import psutil
import ray
import torch
import torch.distributed as dist
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rolepool.cluster.answers import Answer
from rolepool.cluster.calls import (
    PER_DP_GROUP,
    Args,
    Argument,
    Kwargs,
    PackedReply,
    Value,
    pack_reply,
    resolve_arguments,
    unpack_call,
    without_padding,
)
from rolepool.cluster.determinism import compute_deterministically
from rolepool.cluster.mps import MpsDaemon
from rolepool.cluster.output import LOG_FORMAT, write_output_to
from rolepool.cluster.titles import keep_title, set_title
from rolepool.config.functions import import_extensions, import_object
from rolepool.errors import RolepoolError, WorkerError, logger
from rolepool.metrics import Span
from rolepool.placement.hardware import detect_gpu_memory
from rolepool.placement.parallel import ParallelDims
from rolepool.protocol import Dispatch, Worker, WorkerContext, aborting
from rolepool.protocol import worker as workers
from rolepool.protocol.columns import INPUT_IDS, flat_values, is_ragged, num_bytes
from rolepool.protocol.data import DataProto, tensordict_to_batch
from rolepool.protocol.encoding import Encoded
from rolepool.protocol.futures import Reply, encode_result
from rolepool.protocol.out_of_memory import explain_out_of_memory, is_out_of_memory
from rolepool.protocol.part_times import PartTimes, part
from rolepool.protocol.random_state import random_state, set_random_state
from rolepool.protocol.stores import listening_store

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


Measured = TypeVar("Measured")
Measure = Callable[[str], Measured]
"""Gets the device of its process and may use collectives."""


@dataclass
class Whereabouts:
    """What a process tells about itself before it has a rank."""

    address: str
    pid: int
    node_id: str
    gpus: tuple[int, ...]
    """The indices on its node of the GPUs it holds: one, or none on a CPU slot."""
    gpu_memory_bytes: int | None
    """None on a CPU slot."""
    imports_s: tuple[float, float]
    """When it began to import modules, and when it had imported all, on the clock of its node."""
    stack_file: str
    """A file on its node to which SIGUSR1 writes the Python stacks of the process."""


class WorkerProcess:
    """The state of the process, which its actor (`WorkerActor`) has."""

    def __init__(
        self, folder: str, extensions: Sequence[str], imports_s: tuple[float, float]
    ) -> None:
        """`folder` is the driver's working folder. Relative paths are relative to it, not to the
        folder where Ray was started. `extensions` are the modules of the driver's
        `trainer.extensions`. `imports_s` is told by `whereabouts`."""
        keep_title()
        gc.freeze()  # modules stay, so nobody has to look through them for garbage
        self._folder = folder
        self._imports_s = imports_s
        # Files that the config names are checked on every node before they are read.
        with suppress(OSError):
            os.chdir(folder)
        import_extensions(extensions)
        self._roles: dict[str, Worker] = {}
        self._random_states: dict[str, Mapping[str, object]] = {}
        self._active_role = ""
        self._failed_roles: dict[str, WorkerError] = {}
        self._loop = asyncio.new_event_loop()
        self._store: TCPStore | None = None
        self._address = ray.util.get_node_ip_address()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._stack_file = tempfile.TemporaryFile()  # noqa: SIM115  # has no name, and ends with this process
        faulthandler.register(signal.SIGUSR1, self._stack_file, all_threads=True, chain=False)

    def whereabouts(self) -> Whereabouts:
        gpus = tuple(int(gpu) for gpu in ray.get_gpu_ids())
        pid = os.getpid()
        stack_descriptor = self._stack_file.fileno()
        return Whereabouts(
            address=self._address,
            pid=pid,
            node_id=ray.get_runtime_context().get_node_id(),
            gpus=gpus,
            gpu_memory_bytes=detect_gpu_memory() if gpus else None,
            imports_s=self._imports_s,
            stack_file=f"/proc/{pid}/fd/{stack_descriptor}",
        )

    def ping(self) -> float:
        """The time on this node. It also answers while a call runs."""
        return time.time()

    def stacks(self) -> str:
        """The Python stack of each thread. It also answers while a call waits, for example in a
        collective."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = []
        for thread_id, frame in sys._current_frames().items():
            stack = "".join(traceback.format_stack(frame))
            stacks.append(f"thread {names.get(thread_id)}:\n{stack}")
        return "\n".join(stacks)

    def abort_waits(self, reason: str) -> None:
        """End the waits of a call for ranks of other pools. The call then fails."""
        aborting.abort_all(reason)

    def limit_output(self, path: str) -> None:
        """From now on, write all that this process prints to this file, and show only some of it on
        the console."""
        write_output_to(Path(path))

    def why_missing(self, path: str) -> str | None:
        """The problem that this node does not have the file or folder; None if it has it."""
        full_path = Path(self._folder, Path(path).expanduser())
        if full_path.exists():
            return None
        return f"node {self._address} has no {full_path}"

    # Start

    def import_workers(self, names: Sequence[str]) -> None:
        """Import the classes of roles now, which takes a while, so that roles can be added quickly
        later."""
        for name in names:
            import_object("worker", name)

    def start_mps(self) -> dict[str, str]:
        """Run CUDA MPS on this node as long as this process lives. Returns the variables that its
        clients need."""
        self._mps = MpsDaemon()
        return self._mps.environment

    def set_environment(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)

    def take_rank(self, context: WorkerContext, share: float) -> tuple[str, int] | None:
        """Become this rank, with this share of the GPU's memory. Rank 0 returns the address of the
        process group."""
        set_title(context.pool, context.rank)
        # Ray reads this line, and prints the name before every later line.
        name = f"{context.pool}/{context.rank}"
        for stream in (sys.stdout, sys.stderr):
            print(f"{LOG_PREFIX_ACTOR_NAME}{name}", file=stream, flush=True)
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)
        device = _device_for(context.device)
        self._context = context = replace(context, device=device, address=self._address)
        if context.deterministic:
            compute_deterministically(context.device)
        if context.device == "cpu":
            torch.set_num_threads(1)
        elif share < 1:
            torch.cuda.set_per_process_memory_fraction(share)
        os.environ.update(
            RANK=str(context.rank),
            WORLD_SIZE=str(context.world_size),
            LOCAL_RANK=str(context.local_rank),
            LOCAL_WORLD_SIZE=str(context.local_world_size),
        )
        if context.rank:
            return None
        self._store = listening_store(self._address, context.world_size)
        return self._address, self._store.port

    def join_pool(self, master: tuple[str, int], secret: str, timeout_s: float) -> None:
        """Join the process group of the pool. All keys of its store begin with the secret, which
        other programs that can reach the store do not know."""
        address, port = master
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        self._choose_interface()
        server = self._store
        if server is None:
            server = TCPStore(
                address,
                port,
                is_master=False,
                timeout=timedelta(seconds=timeout_s),
            )
        self._pool_store = PrefixStore(secret, server)
        context = self._context
        if context.device != "cpu":
            torch.cuda.set_device(0)
        self._join(self._pool_store, context.rank, context.world_size)

    def _choose_interface(self) -> None:
        """Let gloo and NCCL use the interface with the address of this node. Otherwise gloo uses
        the address of the host name, and NCCL any address that is not a loopback address."""
        for name, addresses in psutil.net_if_addrs().items():
            if all(entry.address != self._address for entry in addresses):
                continue
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if self._address == "127.0.0.1":
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)

    def _join(self, store: Store, rank: int, world_size: int) -> None:
        backend = "gloo" if self._context.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )

    def store_address(self) -> tuple[str, int]:
        """Where other processes find the store of this process, which must be rank 0 of its
        pool."""
        assert self._store is not None
        return self._address, self._store.port

    def measure(self, function: Measure[Measured]) -> Measured:
        """Call a function with the device of this process. It may use the process group of the
        pool."""
        return function(self._context.device)

    def measure_together(
        self,
        function: Measure[Measured],
        host: tuple[str, int],
        secret: str,
        rank: int,
        world_size: int,
    ) -> Measured:
        """The same with a process group of several pools, which exists only during the call. `host`
        has the store of its rank 0. No role may use the process group of the pool yet, because it
        is made again."""
        address, port = host
        server = self._store
        if server is None or rank > 0:
            server = TCPStore(address, port, is_master=False)
        dist.destroy_process_group()
        own_store = PrefixStore(secret, server)
        self._join(own_store, rank, world_size)
        result = function(self._context.device)
        dist.barrier()  # a rank that leaves early would break the connections of the others
        dist.destroy_process_group()
        # With a longer prefix, because the store still has the keys of the first time.
        self._pool_store = PrefixStore(secret, self._pool_store)
        self._join(self._pool_store, self._context.rank, self._context.world_size)
        return result

    def add_role(
        self,
        name: str,
        worker_class: type[Worker],
        dims: ParallelDims,
        args: Args,
        kwargs: Kwargs,
        queued_s: float,
    ) -> PackedReply:
        """Construct a role. Its weights depend on the role's seed only, not on rank or pool."""
        start_s = time.time()
        context = replace(self._context, role=name, dims=dims)
        self._failed_roles.pop(name, None)
        self._reseed(name, context.init_seed)
        try:
            with workers.made_in(context, self._roles):
                # In two steps, so that `less_memory` can be called if `__init__` runs out of
                # memory.
                worker = worker_class.__new__(worker_class, *args, **kwargs)
                self._roles[name] = worker
                worker.__init__(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            failure = self._explain(error, name, "__init__")
            self._failed_roles[name] = failure
            self._roles.pop(name, None)
            raise failure from None
        self._reseed(name, context.seed)
        span = self._span(name, "__init__", queued_s, start_s)
        return pack_reply(Reply(span))

    def _reseed(self, role: str, seed: int) -> None:
        self._switch_random_state(role)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    # Work

    def run(
        self,
        packed: bytes,
        stored: Sequence[Answer | None] = (),
        *direct: PackedReply,
    ) -> tuple[PackedReply, dict[str, Encoded] | None]:
        """Run a method of a role. The reply has its span and its result. The large columns of a
        batch are a second return value. Ray keeps it in this node's shared memory, even if this
        process dies, and the processes that need it fetch it from there."""
        start_s = time.time()
        call = unpack_call(packed)
        if self._context.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        self._switch_random_state(call.role)
        share = None
        try:
            with PartTimes() as times:
                if call.role in self._failed_roles:
                    raise self._failed_roles[call.role]
                worker = self._roles[call.role]
                if call.args or call.kwargs:
                    with part("fetch"):
                        call, share = resolve_arguments(call, direct, stored)
                method = getattr(worker, call.method)
                result = method(*call.args, **call.kwargs)
                if inspect.iscoroutine(result):
                    result = self._loop.run_until_complete(result)
                amounts = amounts_of((*call.args, *call.kwargs.values()), result)
                dispatch = getattr(method, workers.MARK).dispatch
                if dispatch in PER_DP_GROUP and not worker.context.returns_result:
                    result = None
                elif dispatch is Dispatch.DP_COMPUTE_PROTO:
                    result = without_padding(tensordict_to_batch(result), share)
                value, header, large = encode_result(result)
        except Exception as error:
            raise self._explain(error, call.role, call.method) from None
        peak_bytes, reserved_bytes = self._memory_bytes()
        # Before the span ends, because this waits for the GPU.
        parts = times.added_up()
        span = self._span(call.role, call.method, call.queued_s, start_s)._replace(
            call=call.number,
            after=call.after,
            num_rows=amounts.num_rows,
            num_tokens=amounts.num_tokens,
            num_bytes=amounts.num_bytes,
            peak_memory_bytes=peak_bytes,
            parts=parts,
            reserved_memory_bytes=reserved_bytes,
        )
        return pack_reply(Reply(span, value, header)), large

    def _memory_bytes(self) -> tuple[int, int]:
        """Allocated and reserved memory: on a GPU, the peaks since the call began; on a CPU, both
        are the memory of the process now."""
        if self._context.device != "cpu":
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        # The file stays open, because opening it takes longer than reading it.
        _, num_resident_pages, *_ = os.pread(self._statm, 100, 0).split()
        num_bytes = int(num_resident_pages) * PAGE_BYTES
        return num_bytes, num_bytes

    def _explain(self, error: Exception, role: str, method: str) -> WorkerError:
        """The error that the driver gets. It names role, method and process."""
        if isinstance(error, WorkerError):
            return error
        context = self._context
        pid = os.getpid()
        method_and_place = f"{role}.{method}, node {self._address}, pid {pid}"
        who = f"{context.pool} rank {context.rank} ({method_and_place})"
        if is_out_of_memory(error):
            remedies = self._roles[role].less_memory(method)
            problems = explain_out_of_memory(who, error, context.device, remedies)
        elif isinstance(error, RolepoolError):  # the message says what the user can change
            *others, last = error.problems
            problems = [*others, f"{last}; in {who}"]
        else:
            summary_lines = traceback.format_exception_only(error)
            summary = "".join(summary_lines).strip()
            trace_lines = traceback.format_exception(error)
            trace = "".join(trace_lines).rstrip()
            problems = [f"{who} failed: {summary}", trace]
        return WorkerError(
            problems,
            pool=context.pool,
            role=role,
            rank=context.rank,
            node=self._address,
            pid=pid,
            method=method,
        )

    def _switch_random_state(self, role: str) -> None:
        """Each role has its own stream of random numbers, which does not depend on what other roles
        draw."""
        if role == self._active_role:
            return
        self._random_states[self._active_role] = random_state()
        if role in self._random_states:
            set_random_state(self._random_states[role])
        self._active_role = role

    def _span(self, role: str, method: str, queued_s: float, start_s: float) -> Span:
        """The span of a call that ends now."""
        context = self._context
        device = "cpu"
        if context.device != "cpu":
            device = f"cuda:{ray.get_gpu_ids()[0]}"
        return Span(
            pool=context.pool,
            role=role,
            rank=context.rank,
            method=method,
            queued_s=queued_s,
            start_s=start_s,
            end_s=time.time(),
            node=self._address,
            device=device,
        )


def _device_for(wanted: str) -> str:
    """The device of a process. With `auto` it is the GPU of the slot, or the CPU if this torch
    cannot use the GPU."""
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        fix = "install a CUDA build of torch, or set trainer.device=cpu"
        raise WorkerError(
            f"trainer.device=cuda: torch sees no CUDA device in a worker process; {fix}"
        )
    logger.warning(
        "the slot has a GPU, but this build of torch cannot use it; computing on the CPU"
    )
    return "cpu"


class Amounts(NamedTuple):
    """How much work a call did, as its span records it."""

    num_rows: int
    num_tokens: int
    num_bytes: int


def amounts_of(arguments: Sequence[Argument], result: Value) -> Amounts:
    """The rows and bytes of the batches among the arguments. Tokens are those of the result, or of
    the first batch that has tokens."""
    inputs = [value for value in arguments if isinstance(value, DataProto)]
    num_rows = max(map(len, inputs), default=0)
    total_bytes = 0
    for batch in inputs:
        if batch.batch is None:
            continue
        for column in batch.batch.values():
            total_bytes += num_bytes(column)
    batches = inputs
    if isinstance(result, DataProto):
        batches = [result, *inputs]
    return Amounts(
        num_rows=num_rows,
        num_tokens=_num_tokens(batches),
        num_bytes=total_bytes,
    )


def _num_tokens(batches: Sequence[DataProto]) -> int:
    """The tokens of the first batch that has ragged ones; 0 if there is none."""
    for batch in batches:
        if batch.batch is None:
            continue
        column = batch.batch.get(INPUT_IDS)
        if is_ragged(column):
            return flat_values(column).numel()
    return 0
