"""The worker process: one Ray actor per slot of a pool, hosting all roles of that pool.

Owns the process: its rank, devices, process group, seeds and log prefix; and running one call after another. Roles
are handed to it as classes.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import psutil
import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rolepool.cluster.calls import Call, pack_reply, resolve, without_padding
from rolepool.cluster.mps import MpsDaemon
from rolepool.config.functions import import_extensions
from rolepool.errors import RolepoolError, WorkerError
from rolepool.metrics import Span
from rolepool.placement.inventory import detect_gpu_memory
from rolepool.protocol.data import DataProto
from rolepool.protocol.encoding import Encoded
from rolepool.protocol.memory import explain_out_of_memory, is_out_of_memory
from rolepool.protocol.parts import part, part_times
from rolepool.protocol.ragged import INPUT_IDS, flat_values, is_ragged, num_bytes
from rolepool.protocol.remote import Producer, Reply, Share, leave_here
from rolepool.protocol.worker import Worker, WorkerContext, made_in

logger = logging.getLogger(__name__)

NUM_STORING_THREADS = 4
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class Whereabouts(NamedTuple):
    """What a process says of itself before it has a rank."""

    node_id: str
    address: str
    gpus: tuple[int, ...]
    pid: int
    gpu_memory_bytes: int | None
    """None on a CPU slot."""


class WorkerProcess:
    """Made by `launch` on one slot. Calls run one at a time, in the order they were made."""

    def __init__(self, folder: str, extensions: Sequence[str] = ()) -> None:
        """`folder` is the driver's, and what relative paths mean here too; not the one in which Ray was started.
        `extensions` are the modules that the driver's `trainer.extensions` named."""
        self._folder = folder
        with suppress(OSError):  # what the config names is looked for on every node before it is read
            os.chdir(folder)
        import_extensions(extensions)
        self._roles: dict[str, Worker] = {}
        self._random_states: dict[str, _RandomState] = {}
        self._speaking: str | None = None
        self._failed_roles: dict[str, WorkerError] = {}
        self._loop = asyncio.new_event_loop()
        self._store: TCPStore | None = None
        self._storing = ThreadPoolExecutor(NUM_STORING_THREADS)
        self._address = ray.util.get_node_ip_address()

    def whereabouts(self) -> Whereabouts:
        gpus = tuple(int(gpu) for gpu in ray.get_gpu_ids())
        memory = detect_gpu_memory() if gpus else None
        return Whereabouts(ray.get_runtime_context().get_node_id(), self._address, gpus, os.getpid(), memory)

    @ray.method(concurrency_group="health")
    def ping(self) -> float:
        """Answers while a call runs; a process that died does not."""
        return time.time()

    @ray.method(concurrency_group="health")
    def why_missing(self, path: str) -> str | None:
        """Which node lacks which file, if this one does not have it."""
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
        """Become a rank, with this fraction of its GPU. Rank 0 answers with the address at which the others meet it."""
        _prefix_output(f"[{context.pool}/{context.rank}] ")
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
        """Meet the pool's other ranks in one process group."""
        address, port = master
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        # Otherwise gloo takes the address of the host's name, which on many systems is a loopback one.
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
        """Make a role. Its weights come from the role's seed alone, so they do not depend on rank or pool."""
        start_s = time.time()
        context = replace(self._context, role=name, tp_size=tp_size)
        self._failed_roles.pop(name, None)
        self._reseed(name, context.init_seed)
        try:
            with self._as_role(name, "__init__"), made_in(context, self._roles):
                # In two steps, so that a role that cannot be made can be asked what it would need.
                worker = self._roles[name] = worker_class.__new__(worker_class, *args, **kwargs)
                worker.__init__(*args, **kwargs)  # type: ignore[misc]
        except WorkerError as error:
            self._roles.pop(name, None)
            self._failed_roles[name] = error
            raise
        self._reseed(name, context.seed)
        return pack_reply(Reply(self._span(name, "__init__", queued_s, start_s), self._producer(name, "__init__")))

    def _reseed(self, role: str, seed: int) -> None:
        self._switch_random_state(role)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    # Work

    def run(self, packed: bytes, *objects: Any) -> bytes | Reply:
        """Run a method of a role and answer with its span and its result, whose data stays here."""
        start_s = time.time()
        call: Call = pickle.loads(packed)  # noqa: S301  # from our own driver, over Ray's channel
        producer = self._producer(call.role, call.method)
        if self._context.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        with self._as_role(call.role, call.method), part_times() as times:
            if call.role in self._failed_roles:
                raise self._failed_roles[call.role]
            worker = self._roles[call.role]
            with part("fetch"):
                args, kwargs, share = _resolved(call, objects)
            result = getattr(worker, call.method)(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = self._loop.run_until_complete(result)
            handled = _handled((*args, *kwargs.values()), result)
            is_answer = worker.context.tp_rank == 0 or not call.one_answer_per_dp_group
            if not is_answer:
                result = None
            elif call.returns_rows:
                result = without_padding(result, share)
            batch = leave_here(result, producer, self._store_all) if isinstance(result, DataProto) else None
        parts = times.seconds()
        span = self._span(call.role, call.method, call.queued_s, start_s)._replace(
            call=call.number,
            after=call.after,
            peak_memory_bytes=_peak_memory_bytes(self._context.device),
            parts=parts,
            **handled,
        )
        return pack_reply(Reply(span, producer, None if batch is not None else result, batch))

    def _store_all(self, objects: list[Encoded]) -> list[Any]:
        """Into shared memory, several at a time: storing one is mostly waiting for the node's store to answer."""
        return list(self._storing.map(ray.put, objects))

    @contextmanager
    def _as_role(self, role: str, method: str) -> Iterator[None]:
        """The role's own random state, and errors that say who they happened to."""
        self._switch_random_state(role)
        try:
            yield
        except WorkerError:
            raise
        except Exception as error:
            raise self._named(error, role, method) from None

    def _switch_random_state(self, role: str) -> None:
        """Each role goes on in its own stream of random numbers, whatever other roles drew from theirs meanwhile."""
        if role == self._speaking:
            return
        if self._speaking is not None:
            self._random_states[self._speaking] = _random_state()
        if role in self._random_states:
            _enter(self._random_states[role])
        self._speaking = role

    def _named(self, error: Exception, role: str, method: str) -> WorkerError:
        producer = self._producer(role, method)
        if is_out_of_memory(error):
            remedies = self._roles[role].less_memory(method)
            return producer.error(explain_out_of_memory(str(producer), error, self._context.device, remedies))
        if isinstance(error, RolepoolError):  # the user's to mend, by what it says and not by where it was noticed
            return producer.error([*error.problems[:-1], f"{error.problems[-1]}; in {producer}"])
        summary = "".join(traceback.format_exception_only(error)).strip()
        return producer.error([f"{producer} failed: {summary}", "".join(traceback.format_exception(error)).rstrip()])

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

    def _producer(self, role: str, method: str) -> Producer:
        return Producer(self._context.pool, role, self._context.rank, self._address, os.getpid(), method)


def _device_for(wanted: str) -> str:
    """The device of a process: on a GPU slot the GPU, if this torch can use it, unless it is wanted in any case."""
    if wanted == "cpu" or torch.cuda.is_available():
        return "cpu" if wanted == "cpu" else "cuda"
    if wanted == "cuda":
        raise WorkerError(
            "trainer.device=cuda: torch sees no CUDA device in a worker process; install a CUDA build of torch, "
            "or set trainer.device=cpu"
        )
    logger.warning("the slot has a GPU, but this torch sees none; computing on the CPU")
    return "cpu"


def _resolved(call: Call, objects: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any], Share | None]:
    """The call's arguments, and which share of its batch this rank has."""
    args = [resolve(argument, objects) for argument in call.args]
    kwargs = {name: resolve(argument, objects) for name, argument in call.kwargs.items()}
    shares = [share for _, share in (*args, *kwargs.values()) if share is not None]
    values = {name: value for name, (value, _) in kwargs.items()}
    return [value for value, _ in args], values, shares[0] if shares else None


def _handled(arguments: Sequence[Any], result: Any) -> dict[str, Any]:
    """How much a call handled, as its span tells it."""
    given = [value for value in arguments if isinstance(value, DataProto)]
    made = [result] if isinstance(result, DataProto) else []
    tokens = [batch.batch.get(INPUT_IDS) for batch in (*made, *given) if batch.batch is not None]
    return {
        "num_rows": max(map(len, given), default=0),
        "num_tokens": next((flat_values(column).numel() for column in tokens if is_ragged(column)), 0),
        "num_bytes": sum(num_bytes(tensor) for one in given if one.batch is not None for tensor in one.batch.values()),
    }


def _peak_memory_bytes(device: str) -> int:
    """On a GPU the most since the call began; on a CPU what the process holds now."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_RandomState = tuple[torch.Tensor, torch.Tensor | None, Any, Any]


def _random_state() -> _RandomState:
    """Of every generator that a role may draw from."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state() if on_gpu else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def _enter(state: _RandomState) -> None:
    cpu, cuda, python, numpy = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    random.setstate(python)
    np.random.set_state(numpy)


class _PrefixedStream:
    """Puts the process's name before every line it prints."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._at_line_start = True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write(self._prefix + line if self._at_line_start else line)
            self._at_line_start = line.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _prefix_output(prefix: str) -> None:
    sys.stdout = _PrefixedStream(sys.stdout, prefix)
    sys.stderr = _PrefixedStream(sys.stderr, prefix)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
