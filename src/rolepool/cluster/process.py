"""The worker process: one Ray actor per slot of a pool, hosting all roles of that pool.

Owns the process: its rank, device, process group, seeds, and what it prints. It runs one call after
another. Roles reach it as classes, so it does not know what they compute.
"""

import asyncio
import faulthandler
import gc
import inspect
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import psutil
import ray
import torch
import torch.distributed as dist
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rolepool.cluster.calls import (
    PER_DP_GROUP,
    pack_reply,
    resolve_arguments,
    unpack_call,
    without_padding,
)
from rolepool.cluster.determinism import compute_deterministically
from rolepool.cluster.mps import MpsDaemon
from rolepool.cluster.titles import keep_title, set_title
from rolepool.config.functions import import_extensions, import_object
from rolepool.errors import RolepoolError, WorkerError, logger
from rolepool.metrics import Span
from rolepool.placement.hardware import detect_gpu_memory
from rolepool.placement.parallel import ParallelDims
from rolepool.protocol import Dispatch, Worker, WorkerContext
from rolepool.protocol import worker as workers
from rolepool.protocol.columns import INPUT_IDS, flat_values, is_ragged, num_bytes
from rolepool.protocol.data import DataProto, tensordict_to_batch
from rolepool.protocol.futures import Reply, encode_result
from rolepool.protocol.out_of_memory import explain_out_of_memory, is_out_of_memory
from rolepool.protocol.part_times import PartTimes, part
from rolepool.protocol.random_state import random_state, set_random_state

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
HTTP_LIBRARIES = (
    "aiohttp",
    "anthropic",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "openai",
    "requests",
    "urllib3",
)
MAX_LINES = 50
INTERVAL_S = 5.0
"""So many lines of output are shown in each interval of this length."""


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
    stack_file: str
    """A file on its node to which SIGUSR1 writes the Python stacks of the process."""


class WorkerProcess:
    """Started by `start_pools` on one slot. It runs one call at a time, in the order in which they
    were made."""

    def __init__(self, folder: str, extensions: Sequence[str] = ()) -> None:
        """`folder` is the driver's working folder. Relative paths are relative to it, not to the
        folder where Ray was started. `extensions` are the modules of the driver's
        `trainer.extensions`."""
        keep_title()
        gc.freeze()  # modules stay, so nobody has to look through them for garbage
        self._folder = folder
        with suppress(
            OSError
        ):  # files that the config names are checked on every node before they are read
            os.chdir(folder)
        import_extensions(extensions)
        self._roles: dict[str, Worker] = {}
        self._random_states: dict[str, Any] = {}
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
        memory = detect_gpu_memory() if gpus else None
        node_id, pid = ray.get_runtime_context().get_node_id(), os.getpid()
        return Whereabouts(
            self._address, pid, node_id, gpus, memory, f"/proc/{pid}/fd/{self._stack_file.fileno()}"
        )

    @ray.method(concurrency_group="health")
    def ping(self) -> float:
        """The time on this node. It also answers while a call runs."""
        return time.time()

    @ray.method(concurrency_group="health")
    def stacks(self) -> str:
        """The Python stack of each thread. It also answers while a call waits, for example in a
        collective."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        stacks = [
            f"thread {names.get(ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in frames
        ]
        return "\n".join(stacks)

    @ray.method(concurrency_group="health")
    def limit_output(self, path: str) -> None:
        """From now on, write all that this process prints to this file, and show only some of it on
        the console."""
        sys.stdout, sys.stderr = (
            LimitedOutput(sys.stdout, Path(path)),
            LimitedOutput(sys.stderr, Path(path)),
        )
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)
        _write_details_to(sys.stderr)

    @ray.method(concurrency_group="health")
    def why_missing(self, path: str) -> str | None:
        """The problem that this node does not have the file or folder; None if it has it."""
        full_path = Path(self._folder, Path(path).expanduser())
        return None if full_path.exists() else f"node {self._address} has no {full_path}"

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
        for stream in (sys.stdout, sys.stderr):
            print(f"{LOG_PREFIX_ACTOR_NAME}{context.pool}/{context.rank}", file=stream, flush=True)
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)
        self._context = context = replace(context, device=_device_for(context.device))
        if context.deterministic:
            compute_deterministically(context.device)
        if context.device == "cpu":
            torch.set_num_threads(1)
        elif share < 1:
            torch.cuda.set_per_process_memory_fraction(share)
        for name in ("rank", "world_size", "local_rank", "local_world_size"):
            os.environ[name.upper()] = str(getattr(context, name))
        if context.rank:
            return None
        # The store itself would listen on all addresses. Port 0 lets the system choose a free one.
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.create_server((self._address, 0), family=family, backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        self._store = TCPStore(self._address, port, context.world_size, is_master=True, **options)
        return self._address, port

    def join_pool(self, master: tuple[str, int], secret: str, timeout_s: float) -> None:
        """Join the process group of the pool. All keys of its store begin with the secret, which
        other programs that can reach the store do not know."""
        address, port = master
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        # Without this gloo uses the address of the host name, and NCCL any address that is not a
        # loopback address.
        for name, addresses in psutil.net_if_addrs().items():
            if any(one.address == self._address for one in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                if self._address == "127.0.0.1":
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        server = self._store or TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        self._pool_store = PrefixStore(secret, server)
        if self._context.device != "cpu":
            torch.cuda.set_device(0)
        self._join(self._pool_store, self._context.rank, self._context.world_size)

    def _join(self, store: Store, rank: int, world_size: int) -> None:
        backend = "gloo" if self._context.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
        )

    def store_address(self) -> tuple[str, int]:
        """Where other processes find the store of this process, which must be rank 0 of its
        pool."""
        assert self._store is not None
        return self._address, self._store.port

    def measure(self, function: Callable[[str], Any]) -> Any:
        """Call a function with the device of this process. It may use the process group of the
        pool."""
        return function(self._context.device)

    def measure_together(
        self,
        function: Callable[[str], Any],
        host: tuple[str, int],
        secret: str,
        rank: int,
        world_size: int,
    ) -> Any:
        """The same with a process group of several pools, which exists only during the call. `host`
        has the store of its rank 0. No role may use the process group of the pool yet, because it
        is made again."""
        address, port = host
        server = self._store
        if server is None or rank > 0:
            server = TCPStore(address, port, is_master=False)
        dist.destroy_process_group()
        self._join(PrefixStore(secret, server), rank, world_size)
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
        args: Any,
        kwargs: Any,
        queued_s: float,
    ) -> bytes | Reply:
        """Construct a role. Its weights depend on the role's seed only, not on rank or pool."""
        start_s = time.time()
        context = replace(self._context, role=name, dims=dims)
        self._failed_roles.pop(name, None)
        self._reseed(name, context.init_seed)
        try:
            with workers.made_in(context, self._roles):
                # In two steps, so that `less_memory` can be called if `__init__` runs out of
                # memory.
                worker = self._roles[name] = worker_class.__new__(worker_class, *args, **kwargs)
                worker.__init__(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            failure = self._failed_roles[name] = self._explain(error, name, "__init__")
            self._roles.pop(name, None)
            raise failure from None
        self._reseed(name, context.seed)
        return pack_reply(Reply(self._span(name, "__init__", queued_s, start_s)))

    def _reseed(self, role: str, seed: int) -> None:
        self._switch_random_state(role)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    # Work

    @ray.method(num_returns=2)
    def run(
        self, packed: bytes, stored: Sequence[Any] = (), *direct: Any
    ) -> tuple[bytes | Reply, Any]:
        """Run a method of a role. The reply has its span and its result. The large columns of a
        batch are a second return value. Ray keeps it in this node's shared memory, even if this
        process dies, and the processes that need it fetch it from there."""
        start_s = time.time()
        call = unpack_call(packed)
        on_gpu = self._context.device != "cpu"
        if on_gpu:
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
                handled = _handled((*call.args, *call.kwargs.values()), result)
                dispatch = getattr(method, workers.MARK).dispatch
                if dispatch in PER_DP_GROUP and not worker.context.returns_result:
                    result = None
                elif dispatch is Dispatch.DP_COMPUTE_PROTO:
                    result = without_padding(tensordict_to_batch(result), share)
                value, header, large = encode_result(result)
        except Exception as error:
            raise self._explain(error, call.role, call.method) from None
        # On a GPU, the peaks since the call began; on a CPU, the current memory of the process.
        if on_gpu:
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        else:
            peak = reserved = int(os.pread(self._statm, 100, 0).split()[1]) * PAGE_BYTES
        more = call.number, call.after, *handled, peak, times.added_up(), reserved
        span = self._span(call.role, call.method, call.queued_s, start_s, *more)
        return pack_reply(Reply(span, value, header)), large

    def _explain(self, error: Exception, role: str, method: str) -> WorkerError:
        """The error that the driver gets. It names role, method and process."""
        if isinstance(error, WorkerError):
            return error
        context, pid = self._context, os.getpid()
        who = (
            f"{context.pool} rank {context.rank} ({role}.{method}, node {self._address}, pid {pid})"
        )
        if is_out_of_memory(error):
            problems = explain_out_of_memory(
                who, error, context.device, self._roles[role].less_memory(method)
            )
        elif isinstance(error, RolepoolError):  # the message says what the user can change
            problems = [*error.problems[:-1], f"{error.problems[-1]}; in {who}"]
        else:
            summary = "".join(traceback.format_exception_only(error)).strip()
            problems = [
                f"{who} failed: {summary}",
                "".join(traceback.format_exception(error)).rstrip(),
            ]
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

    def _span(self, role: str, method: str, queued_s: float, start_s: float, *more: Any) -> Span:
        """The span of a call that ends now. `more` are the fields that follow the device."""
        context = self._context
        device = "cpu" if context.device == "cpu" else f"cuda:{ray.get_gpu_ids()[0]}"
        times = queued_s, start_s, time.time()
        return Span(context.pool, role, context.rank, method, *times, self._address, device, *more)


def _device_for(wanted: str) -> str:
    """The device of a process. With `auto` it is the GPU of the slot, or the CPU if this torch
    cannot use the GPU."""
    if wanted == "cpu" or torch.cuda.is_available():
        return "cpu" if wanted == "cpu" else "cuda"
    if wanted == "cuda":
        fix = "install a CUDA build of torch, or set trainer.device=cpu"
        raise WorkerError(
            f"trainer.device=cuda: torch sees no CUDA device in a worker process; {fix}"
        )
    logger.warning(
        "the slot has a GPU, but this build of torch cannot use it; computing on the CPU"
    )
    return "cpu"


def _handled(arguments: Sequence[Any], result: Any) -> tuple[int, int, int]:
    """The numbers of rows, tokens and bytes that the span of a call records."""
    given = [value for value in arguments if isinstance(value, DataProto)]
    made = [result] if isinstance(result, DataProto) else []
    tokens = [batch.batch.get(INPUT_IDS) for batch in (*made, *given) if batch.batch is not None]
    num_rows = max(map(len, given), default=0)
    num_tokens = next((flat_values(column).numel() for column in tokens if is_ragged(column)), 0)
    return (
        num_rows,
        num_tokens,
        sum(num_bytes(t) for one in given if one.batch is not None for t in one.batch.values()),
    )


class LimitedOutput:
    """Replaces a text stream of this process. Ray shows on the driver's console what is written to
    the stream. After `MAX_LINES` lines, the rest of an interval is only in the file. The first
    output after the interval tells how many lines that were."""

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream, self._path = stream, path
        self._file: TextIO | None = None
        self._num_lines, self._since_s = 0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write_to_file(self, text: str) -> None:
        """Write to the file and not to the console."""
        with suppress(OSError):  # the code that prints must not fail on a full disk
            if self._file is None:  # a process that prints nothing needs no file
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", buffering=1, encoding="utf-8", errors="replace")
            self._file.write(text)

    def write(self, text: str) -> int:
        self.write_to_file(text)
        self._end_interval()
        for line in text.splitlines(keepends=True):
            if self._num_lines < MAX_LINES:
                self._stream.write(line)
            self._num_lines += line.endswith(("\n", "\r"))
        return len(text)

    def flush(self) -> None:
        self._end_interval()
        self._stream.flush()

    def _end_interval(self) -> None:
        """If the interval is over, begin the next one."""
        if time.monotonic() > self._since_s + INTERVAL_S:
            if (num_hidden := self._num_lines - MAX_LINES) > 0:
                self._stream.write(
                    f"... {num_hidden} more lines are not shown here; all lines are in {self._path}\n"
                )
            self._num_lines, self._since_s = 0, time.monotonic()


class _Details(logging.Handler):
    """Writes log records that are not for the console to the file of the process."""

    def __init__(self, output: LimitedOutput) -> None:
        super().__init__()
        self._output = output
        self.setFormatter(logging.Formatter(LOG_FORMAT))
        self.addFilter(_is_detail)

    def emit(self, record: logging.LogRecord) -> None:
        self._output.write_to_file(f"{self.format(record)}\n")


def _is_detail(record: logging.LogRecord) -> bool:
    """Whether a log record is of use only if somebody looks for a cause. Libraries for HTTP write
    one for each request, such as those of a reward function that asks a server."""
    is_of_requests = record.name.partition(".")[0] in HTTP_LIBRARIES
    lowest_shown = logging.WARNING if is_of_requests else logging.INFO
    return record.levelno < lowest_shown


def _write_details_to(output: LimitedOutput) -> None:
    """Write details, such as rolepool's log records below INFO, to the file of this output, and not
    to the console."""
    root = logging.getLogger()
    for handler in root.handlers:
        handler.addFilter(lambda record: not _is_detail(record))
    root.addHandler(_Details(output))
    logger.setLevel(logging.DEBUG)
