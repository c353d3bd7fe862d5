"""The worker process: one Ray actor per slot of a pool, hosting all roles of that pool.

Owns the process: its rank, device, process group, seeds and log prefix. It runs one call after another. It gets roles
as classes.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
import torch
import torch.distributed as dist
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rolepool.cluster.calls import Call, pack_reply, resolve_arguments, without_padding
from rolepool.cluster.mps import MpsDaemon
from rolepool.config.functions import import_extensions
from rolepool.errors import RolepoolError, WorkerError
from rolepool.metrics import Span
from rolepool.placement.plan import detect_gpu_memory
from rolepool.protocol.data import DataProto
from rolepool.protocol.encoding import Encoded
from rolepool.protocol.futures import Reply, reply_with
from rolepool.protocol.memory import explain_out_of_memory, is_out_of_memory
from rolepool.protocol.parts import part, part_times
from rolepool.protocol.ragged import INPUT_IDS, flat_values, is_ragged, num_bytes
from rolepool.protocol.random_state import random_state, set_random_state
from rolepool.protocol.worker import Worker, WorkerContext, made_in

logger = logging.getLogger(__name__)

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class Whereabouts(NamedTuple):
    """What a process says about itself before it has a rank."""

    address: str
    pid: int
    node_id: str
    gpus: tuple[int, ...]
    gpu_memory_bytes: int | None
    """None on a CPU slot."""


class WorkerProcess:
    """Started by `launch` on one slot. It runs one call at a time, in the order in which they were made."""

    def __init__(self, folder: str, extensions: Sequence[str] = ()) -> None:
        """`folder` is the driver's working folder. Relative paths refer to it, not to the folder where Ray started.
        `extensions` are the modules of the driver's `trainer.extensions`."""
        self._folder = folder
        with suppress(OSError):  # files that the config names are checked on every node before they are read
            os.chdir(folder)
        import_extensions(extensions)
        self._roles: dict[str, Worker] = {}
        self._random_states: dict[str, Any] = {}
        self._speaking: str | None = None
        self._failed_roles: dict[str, WorkerError] = {}
        self._loop = asyncio.new_event_loop()
        self._store: TCPStore | None = None
        self._address = ray.util.get_node_ip_address()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    def whereabouts(self) -> Whereabouts:
        gpus = tuple(int(gpu) for gpu in ray.get_gpu_ids())
        memory = detect_gpu_memory() if gpus else None
        return Whereabouts(self._address, os.getpid(), ray.get_runtime_context().get_node_id(), gpus, memory)

    @ray.method(concurrency_group="health")
    def ping(self) -> float:
        """The time here. It also answers while a call runs, but not if the process died."""
        return time.time()

    @ray.method(concurrency_group="health")
    def why_missing(self, path: str) -> str | None:
        """The message that this node lacks the file, if it does."""
        whole = Path(self._folder, Path(path).expanduser())
        return None if whole.exists() else f"node {self._address} has no {whole}"

    # Start

    def start_mps(self) -> dict[str, str]:
        """Run CUDA MPS on this node for as long as this process lives; the variables that its clients need."""
        self._mps = MpsDaemon()
        return self._mps.environment

    def set_environment(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)

    def take_rank(self, context: WorkerContext, share: float) -> tuple[str, int] | None:
        """Become this rank, with this share of the GPU's memory. Rank 0 returns the address of the process group."""
        # Ray reads this line, and prints the name before every line that follows.
        for stream in (sys.stdout, sys.stderr):
            print(f"{LOG_PREFIX_ACTOR_NAME}{context.pool}/{context.rank}", file=stream, flush=True)
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
        self._context = context = replace(context, device=_device_for(context.device))
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
        # Port 0 lets the system choose a free one, and the store holds it from then on.
        self._store = TCPStore(self._address, 0, context.world_size, is_master=True, wait_for_workers=False)
        return self._address, self._store.port

    def join_pool(self, master: tuple[str, int], timeout_s: float) -> None:
        """Join the process group of the pool."""
        address, port = master
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        # Without this gloo uses the address of the host name, which on many systems is a loopback address.
        for name, addresses in psutil.net_if_addrs().items():
            if any(one.address == self._address for one in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        on_gpu = self._context.device != "cpu"
        store = self._store or TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        if on_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=self._context.rank,
            world_size=self._context.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )

    def add_role(
        self, name: str, worker_class: type[Worker], tp_size: int, args: Any, kwargs: Any, queued_s: float
    ) -> bytes | Reply:
        """Construct a role. Its weights depend on the role's seed only, not on rank or pool."""
        start_s = time.time()
        context = replace(self._context, role=name, tp_size=tp_size)
        self._failed_roles.pop(name, None)
        self._reseed(name, context.init_seed)
        try:
            with self._as_role(name, "__init__"), made_in(context, self._roles):
                # In two steps, so that a role whose `__init__` runs out of memory can say what would need less.
                worker = self._roles[name] = worker_class.__new__(worker_class, *args, **kwargs)
                worker.__init__(*args, **kwargs)  # type: ignore[misc]
        except WorkerError as error:
            self._roles.pop(name, None)
            self._failed_roles[name] = error
            raise
        self._reseed(name, context.seed)
        return pack_reply(Reply(self._span(name, "__init__", queued_s, start_s)))

    def _reseed(self, role: str, seed: int) -> None:
        self._switch_random_state(role)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    # Work

    def run(self, packed: bytes, stored: Sequence[Any], *direct: Any) -> bytes | Reply:
        """Run a method of a role. The reply has its span and its result."""
        return self._run(packed, stored, direct)[0]

    @ray.method(num_returns=2)
    def run_rows(
        self, packed: bytes, stored: Sequence[Any], *direct: Any
    ) -> tuple[bytes | Reply, dict[str, Encoded] | None]:
        """The same for a method that returns rows. Their large columns are a second return value, which Ray keeps in
        this node's shared memory, also if this process dies, and which those who need it fetch."""
        return self._run(packed, stored, direct)

    def _run(
        self, packed: bytes, stored: Sequence[Any], direct: Sequence[Any]
    ) -> tuple[bytes | Reply, dict[str, Encoded] | None]:
        start_s = time.time()
        call: Call = pickle.loads(packed)  # noqa: S301  # from our own driver, over Ray's channel
        if self._context.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        with self._as_role(call.role, call.method), part_times() as times:
            if call.role in self._failed_roles:
                raise self._failed_roles[call.role]
            worker = self._roles[call.role]
            with part("fetch"):
                call, share = resolve_arguments(call, direct, stored)
            result = getattr(worker, call.method)(*call.args, **call.kwargs)
            if inspect.iscoroutine(result):
                result = self._loop.run_until_complete(result)
            handled = _handled((*call.args, *call.kwargs.values()), result)
            if call.one_reply_per_dp_group and worker.context.tp_rank:
                result = None
            elif call.returns_rows:
                result = without_padding(result, share)
            span = self._span(call.role, call.method, call.queued_s, start_s)
            reply, large = reply_with(span, result)
        span = span._replace(
            end_s=time.time(),
            call=call.number,
            after=call.after,
            peak_memory_bytes=self._peak_memory_bytes(),
            parts=times.seconds(),
            **handled,
        )
        return pack_reply(reply._replace(span=span)), large

    @contextmanager
    def _as_role(self, role: str, method: str) -> Iterator[None]:
        """Use the role's own random state, and turn errors into ones that name role, method and process."""
        self._switch_random_state(role)
        try:
            yield
        except WorkerError:
            raise
        except Exception as error:
            raise self._named(error, role, method) from None

    def _switch_random_state(self, role: str) -> None:
        """Each role has its own stream of random numbers, which does not depend on what other roles draw."""
        if role == self._speaking:
            return
        if self._speaking is not None:
            self._random_states[self._speaking] = random_state()
        if role in self._random_states:
            set_random_state(self._random_states[role])
        self._speaking = role

    def _named(self, error: Exception, role: str, method: str) -> WorkerError:
        pid, context = os.getpid(), self._context
        who = f"{context.pool} rank {context.rank} ({role}.{method}, node {self._address}, pid {pid})"
        if is_out_of_memory(error):
            problems = explain_out_of_memory(who, error, context.device, self._roles[role].less_memory(method))
        elif isinstance(error, RolepoolError):  # the message says what the user can change
            problems = [*error.problems[:-1], f"{error.problems[-1]}; in {who}"]
        else:
            summary = "".join(traceback.format_exception_only(error)).strip()
            problems = [f"{who} failed: {summary}", "".join(traceback.format_exception(error)).rstrip()]
        return WorkerError(
            problems, pool=context.pool, role=role, rank=context.rank, node=self._address, pid=pid, method=method
        )

    def _span(self, role: str, method: str, queued_s: float, start_s: float) -> Span:
        return Span(
            pool=self._context.pool,
            role=role,
            rank=self._context.rank,
            method=method,
            queued_s=queued_s,
            start_s=start_s,
            end_s=time.time(),
            node=self._address,
            device="cpu" if self._context.device == "cpu" else f"cuda:{ray.get_gpu_ids()[0]}",
        )

    def _peak_memory_bytes(self) -> int:
        """On a GPU, the peak since the call began; on a CPU, the current memory of the process."""
        if self._context.device != "cpu":
            return torch.cuda.max_memory_allocated()
        return int(os.pread(self._statm, 100, 0).split()[1]) * PAGE_BYTES


def _device_for(wanted: str) -> str:
    """The device of a process. On a GPU slot it is the GPU; with `auto`, the CPU if this torch cannot use the GPU."""
    if wanted == "cpu" or torch.cuda.is_available():
        return "cpu" if wanted == "cpu" else "cuda"
    if wanted == "cuda":
        raise WorkerError(
            "trainer.device=cuda: torch sees no CUDA device in a worker process; install a CUDA build of torch, "
            "or set trainer.device=cpu"
        )
    logger.warning("the slot has a GPU, but this torch sees none; computing on the CPU")
    return "cpu"


def _handled(arguments: Sequence[Any], result: Any) -> dict[str, Any]:
    """Rows, tokens and bytes of a call, for its span."""
    given = [value for value in arguments if isinstance(value, DataProto)]
    made = [result] if isinstance(result, DataProto) else []
    tokens = [batch.batch.get(INPUT_IDS) for batch in (*made, *given) if batch.batch is not None]
    return {
        "num_rows": max(map(len, given), default=0),
        "num_tokens": next((flat_values(column).numel() for column in tokens if is_ragged(column)), 0),
        "num_bytes": sum(num_bytes(tensor) for one in given if one.batch is not None for tensor in one.batch.values()),
    }
