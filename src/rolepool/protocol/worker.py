"""What the author of a role writes: a `Worker`, whose registered methods can be called on its
group.

Owns how a method is registered (which arguments each rank gets, and how the results are collected)
and what a role knows about the process it runs in: its rank and device, the time that parts of a
call take, the memory that is free, and the states of the random generators. `rolepool.cluster` runs
the calls.
"""

from __future__ import annotations

import inspect
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import psutil
import torch

from rolepool.errors import DataError
from rolepool.metrics.spans import Part
from rolepool.placement.parallel import ParallelDims
from rolepool.seeds import derive_seed
from rolepool.units import show_bytes


@dataclass(frozen=True)
class WorkerContext:
    """Where a role runs: its pool, its rank there and in data and tensor parallelism, its device
    and its seeds."""

    pool: str = "local"
    role: str = "role"
    rank: int = 0
    dims: ParallelDims = field(default_factory=ParallelDims)
    """How the ranks of the pool work together on the role."""
    local_rank: int = 0
    local_world_size: int = 1
    device: str = "cpu"
    run_seed: int = 1
    deterministic: bool = False
    """Whether the process computes with deterministic kernels."""

    @property
    def world_size(self) -> int:
        return self.dims.world_size

    @property
    def dp_rank(self) -> int:
        return self.dims.dp_rank(self.rank)

    @property
    def tp_rank(self) -> int:
        return self.dims.tp_rank(self.rank)

    @property
    def tp_size(self) -> int:
        return self.dims.tp

    @property
    def returns_result(self) -> bool:
        """Whether this rank is the first of those that compute the same rows."""
        return self.dims.returns_result(self.rank)

    @property
    def init_seed(self) -> int:
        """Seed while the role is constructed: the same on every rank and in every pool, so that
        weights are equal."""
        return derive_seed(self.run_seed, self.role)

    @property
    def seed(self) -> int:
        """Seed for the calls of the role: a different one on every rank."""
        return derive_seed(self.run_seed, self.role, self.rank)


Surroundings = tuple[WorkerContext, Mapping[str, "Worker"]]
_context: ContextVar[Surroundings] = ContextVar("worker_context", default=(WorkerContext(), {}))


@contextmanager
def made_in(context: WorkerContext, siblings: Mapping[str, Worker] | None = None) -> Iterator[None]:
    """Workers that are constructed inside the block get this context, and the roles of the same
    process as siblings."""
    token = _context.set((context, {} if siblings is None else siblings))
    try:
        yield
    finally:
        _context.reset(token)


class Worker:
    """A role. `self.context`, `siblings`, `rank`, `world_size` and `device` exist before `__init__`
    runs."""

    context: WorkerContext
    siblings: Mapping[str, Worker]
    """The current roles of this process by name. Roles of one pool may share memory."""
    rank: int
    world_size: int
    device: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker.context, worker.siblings = context, _ = _context.get()
        worker.rank = context.rank
        worker.world_size = context.world_size
        worker.device = context.device
        return worker

    def less_memory(self, method: str) -> Sequence[str]:
        """Overrides (`key=value`), the best first, that a user can try if this method ran out of
        memory.

        It is also called if `__init__` itself ran out of memory, with `method="__init__"`.
        """
        return ()

    def less_memory_at_rest(self) -> Sequence[str]:
        """Overrides that make this role hold less memory between its calls, while other roles of
        its process run."""
        return ()

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Check what a worker of verl says about its mesh. How batches are split is decided when
        the role is added."""
        given = (dp_rank, is_collect)
        known = (self.context.dp_rank, self.context.returns_result)
        if given != known:
            difference = (
                f"(dp_rank, is_collect) of rank {self.rank} is {given}, but here it is {known}"
            )
            raise DataError(
                f"mesh {mesh_name!r}: {difference}; set tensor_parallel when the role is added"
            )


# --- calls --------------------------------------------------------------------------------------------------------


class Dispatch(Enum):
    """Which ranks get which arguments, and what the call returns."""

    RANK_ZERO = "rank_zero"
    """Only rank 0 runs the method. The call returns its result."""
    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments. The call returns a list of results, one per rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank. The call returns a list of results, one per
    rank."""
    DP_COMPUTE = "dp_compute"
    """Every argument is a list with one entry per data-parallel group. The call returns one result
    per group."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are split into one part per data-parallel group. The resulting batches (or lists) are
    joined."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split in the same way. The call returns a list of results, one per group."""


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


class MethodSpec(NamedTuple):
    """What `register` stores for a method."""

    dispatch: Dispatch
    execute: Execute
    blocking: bool
    reads: frozenset[str] | None
    dispatch_fn: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    collect_fn: Callable[[Any, list[Any]], Any] | None = None


MARK = "__rolepool_method__"
Method = TypeVar("Method", bound=Callable[..., Any])


def register(
    dispatch_mode: Dispatch | dict[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    reads: Iterable[str] | None = None,
) -> Callable[[Method], Method]:
    """Make a worker's method callable on its group.

    `dispatch_mode` is a `Dispatch`, or `{"dispatch_fn": f, "collect_fn": g}`: `f(group, *args,
    **kwargs)` returns args and kwargs in which every value is a list with one entry per rank;
    `g(group, results)` gets the list of the ranks' results and returns the result of the call. A
    call waits for its result if `blocking` is true, and returns a future if it is false; each call
    can override it. `reads` names the keys of batches that the method reads; other keys are not
    sent. None means all keys.
    """
    custom: dict[str, Any] = {}
    if isinstance(dispatch_mode, dict) and set(dispatch_mode) == {"dispatch_fn", "collect_fn"}:
        custom = dispatch_mode
        dispatch_mode = Dispatch.ALL_TO_ALL
    if not isinstance(dispatch_mode, Dispatch):
        needed = "a Dispatch, or a dict with the functions dispatch_fn and collect_fn"
        raise DataError(f"dispatch_mode is {dispatch_mode!r}; it must be {needed}")
    if not isinstance(execute_mode, Execute):
        raise DataError(f"execute_mode is {execute_mode!r}; it must be an Execute")
    spec = MethodSpec(
        dispatch_mode, execute_mode, blocking, None if reads is None else frozenset(reads), **custom
    )

    def mark(method: Method) -> Method:
        if "blocking" in inspect.signature(method).parameters:
            raise DataError(
                f"{method.__name__} has a parameter named blocking, which every call takes; rename it"
            )
        setattr(method, MARK, spec)
        return method

    return mark


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Dispatch:
    """The mode that verl's function of this name stands for. Here a role has one mesh, so the name
    has no effect."""
    return Dispatch.DP_COMPUTE_PROTO


def registered_methods(worker_class: type) -> dict[str, MethodSpec]:
    """The methods of a class that its group can call."""
    members = ((name, inspect.getattr_static(worker_class, name)) for name in dir(worker_class))
    return {name: getattr(member, MARK) for name, member in members if hasattr(member, MARK)}


# --- time ---------------------------------------------------------------------------------------------------------


class PartTimes(list[tuple[str, int, int, int, Any, Any]]):
    """The parts of a call that were measured, if the call runs in a `with` block of it: name,
    pieces of work, tokens, attended tokens, start and end.

    Start and end are seconds, or CUDA events between kernels, so that measuring does not make the
    host wait for a GPU.
    """

    def __enter__(self) -> PartTimes:
        self._token = _part_times.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _part_times.reset(self._token)

    def added_up(self) -> tuple[Part, ...]:
        """The parts with the same name and pieces of about the same size, added up. Waits until the
        GPU has finished."""
        totals: dict[tuple[str, int], Part] = {}
        for name, num_pieces, num_tokens, num_attended, start, end in self:
            if isinstance(start, float):
                seconds = end - start
            else:
                end.synchronize()
                seconds = start.elapsed_time(end) / 1000
            key = name, (num_tokens // max(1, num_pieces)).bit_length()
            before = totals.get(key, Part(name, 0.0, 0))
            amounts = before.num_tokens + num_tokens, before.num_attended + num_attended
            totals[key] = Part(
                name, before.seconds + seconds, before.num_pieces + num_pieces, *amounts
            )
        return tuple(totals.values())


_part_times: ContextVar[PartTimes | None] = ContextVar("part_times", default=None)


@contextmanager
def part(
    name: str, num_tokens: int = 0, num_attended: int = 0, *, num_pieces: int = 1
) -> Iterator[None]:
    """Count the time inside the block as this part of the call and record the work: `num_pieces`
    pieces, such as decode steps, and the tokens and attended tokens of all of them. Outside of a
    call nothing is recorded."""
    times = _part_times.get()
    if times is None:
        yield
        return
    now = _cuda_event if torch.cuda.is_initialized() else time.perf_counter
    start = now()
    yield
    times.append((name, num_pieces, num_tokens, num_attended, start, now()))


def work_of(lengths: Iterable[int]) -> tuple[int, int]:
    """The tokens of rows of these lengths, and the attended tokens: how many tokens each token
    reads, added up."""
    lengths = list(lengths)
    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)


def _cuda_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# --- memory -------------------------------------------------------------------------------------------------------

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Texts in a RuntimeError of torch's CPU allocator and of CUDA libraries with their own
allocators."""
_WANTED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed."""
    names_it = isinstance(error, RuntimeError) and any(
        text in str(error) for text in _OUT_OF_MEMORY
    )
    return names_it or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain_out_of_memory(
    who: str, error: BaseException, device: str, remedies: Sequence[str]
) -> list[str]:
    """Two lines for the user: who asked for how much and how much was free; and what to change, the
    best first."""
    wanted = wanted_bytes(error)
    amount = "more memory" if wanted is None else show_bytes(wanted)
    place = "in host memory" if device == "cpu" else "on its GPU"
    if remedies:
        advice = f"try {' or '.join(remedies)}; more advice is"
    else:
        advice = "advice is"
    problem = f"it asked for {amount}, and {show_bytes(free_bytes(device))} are free {place}"
    return [
        f"{who} is out of memory: {problem}",
        f"{advice} in docs/troubleshooting.md, under Memory",
    ]


def wanted_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed, if the error names it."""
    found = _WANTED.search(str(error))
    if found:
        return int(float(found[1]) * 1024 ** "bkmgtpe".index(found[2][0].lower()))
    return None


def free_bytes(device: str) -> int:
    """What this process can still allocate. On a GPU it includes what the allocator caches, within
    its share."""
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    allowed = int(total * torch.cuda.get_per_process_memory_fraction()) - held
    return max(0, min(free, allowed)) + held - torch.cuda.memory_allocated()


# --- random generators --------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of every generator that a role may use. The GPU's is None if this process does not
    use a GPU."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state, also one that was stored as JSON with lists. A GPU's is ignored if there is
    no GPU."""
    torch.set_rng_state(torch.as_tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.as_tensor(state["cuda"], dtype=torch.uint8))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
