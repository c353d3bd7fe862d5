"""What the author of a role writes: a `Worker`, whose registered methods can be called on its group.

Owns what a role knows about its process, and how a method is registered: which arguments each rank gets, and how the
results are collected. `rolepool.cluster` runs the calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Self, TypeVar

from rolepool.errors import DataError
from rolepool.seeds import derive_seed


@dataclass(frozen=True)
class WorkerContext:
    """Where a role runs: its pool, its rank there and in data and tensor parallelism, its device and its seeds."""

    pool: str = "local"
    role: str = "role"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    tp_size: int = 1
    device: str = "cpu"
    run_seed: int = 1

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def init_seed(self) -> int:
        """Seed while the role is constructed: the same on every rank and in every pool, so that weights are equal."""
        return derive_seed(self.run_seed, self.role)

    @property
    def seed(self) -> int:
        """Seed for the calls of the role: a different one on every rank."""
        return derive_seed(self.run_seed, self.role, self.rank)


_context: ContextVar[tuple[WorkerContext, Mapping[str, Worker]]] = ContextVar(
    "worker_context", default=(WorkerContext(), MappingProxyType({}))
)


@contextmanager
def made_in(context: WorkerContext, siblings: Mapping[str, Worker] | None = None) -> Iterator[None]:
    """Workers that are constructed inside the block get this context, and the roles of the same process as siblings."""
    token = _context.set((context, {} if siblings is None else siblings))
    try:
        yield
    finally:
        _context.reset(token)


class Worker:
    """A role. `self.context`, `self.siblings` and the properties below exist before `__init__` runs."""

    context: WorkerContext
    siblings: Mapping[str, Worker]
    """The current roles of this process by name. Roles of one pool may share memory."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker.context, worker.siblings = _context.get()
        return worker

    def less_memory(self, method: str) -> Sequence[str]:
        """Overrides (`key=value`), the best first, that a user can try if this method ran out of memory.

        It is also called if `__init__` itself ran out of memory, with `method="__init__"`.
        """
        return ()

    def less_memory_at_rest(self) -> Sequence[str]:
        """Overrides that make this role hold less memory between its calls, while other roles of its process run."""
        return ()

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def device(self) -> str:
        return self.context.device


# Calls


class Dispatch(Enum):
    """Which ranks get which arguments, and what the call returns."""

    RANK_ZERO = "rank_zero"
    """Only rank 0 runs the method. The call returns its result."""
    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments. The call returns a list of results, one per rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank. The call returns a list of results, one per rank."""
    DP_COMPUTE = "dp_compute"
    """Every argument is a list with one entry per data-parallel group. The call returns one result per group."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are split into one part per data-parallel group. The resulting batches (or lists) are joined."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split in the same way. The call returns a list of results, one per group."""


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


DispatchFn = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
CollectFn = Callable[[Any, list[Any]], Any]


@dataclass(frozen=True)
class MethodSpec:
    """What `register` stores for a method."""

    dispatch: Dispatch
    execute: Execute
    blocking: bool
    reads: frozenset[str] | None
    dispatch_fn: DispatchFn | None = None
    collect_fn: CollectFn | None = None


MARK = "__rolepool_method__"
Method = TypeVar("Method", bound=Callable[..., Any])


def register(
    dispatch_mode: Dispatch | dict[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    reads: Iterable[str] | None = None,
) -> Callable[[Method], Method]:
    """Make a worker's method callable on its group.

    `dispatch_mode` is a `Dispatch`, or `{"dispatch_fn": f, "collect_fn": g}`: `f(group, *args, **kwargs)` returns
    args and kwargs in which every value is a list with one entry per rank; `g(group, results)` gets the list of the
    ranks' results and returns the result of the call. A call waits for its result if `blocking` is true, and returns a
    future if it is false; each call can override it. `reads` names the keys of batches that the method reads; other
    keys are not sent. None means all keys.
    """
    custom: dict[str, Any] = {}
    if isinstance(dispatch_mode, dict):
        if set(dispatch_mode) != {"dispatch_fn", "collect_fn"}:
            raise DataError(f"dispatch_mode has {sorted(dispatch_mode)}; it must have dispatch_fn and collect_fn")
        custom, dispatch_mode = dispatch_mode, Dispatch.ALL_TO_ALL
    if not isinstance(dispatch_mode, Dispatch):
        raise DataError(f"dispatch_mode is {dispatch_mode!r}; it must be a Dispatch, or a dict of two functions")
    if not isinstance(execute_mode, Execute):
        raise DataError(f"execute_mode is {execute_mode!r}; it must be an Execute")
    keys = None if reads is None else frozenset(reads)
    spec = MethodSpec(dispatch_mode, execute_mode, blocking, keys, **custom)

    def mark(method: Method) -> Method:
        if "blocking" in inspect.signature(method).parameters:
            raise DataError(
                f"{method.__name__} has a parameter named blocking, which every call takes already; rename it"
            )
        setattr(method, MARK, spec)
        return method

    return mark


def registered_methods(worker_class: type) -> dict[str, MethodSpec]:
    """The methods of a class that its group can call."""
    members = ((name, inspect.getattr_static(worker_class, name)) for name in dir(worker_class))
    return {name: getattr(member, MARK) for name, member in members if hasattr(member, MARK)}
