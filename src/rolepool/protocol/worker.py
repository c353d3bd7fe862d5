"""What the author of a role writes: a `Worker`, whose registered methods can be called on its
group.

Owns how a method is registered (which arguments each rank gets, and how the results are collected)
and what a role knows about the process it runs in: its rank, its device and its seeds.
`rolepool.cluster` runs the calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self, TypeVar

from rolepool.errors import DataError
from rolepool.placement.parallel import ParallelDims
from rolepool.protocol.encoding import Value
from rolepool.seeds import derive_seed


@dataclass(frozen=True)
class WorkerContext:
    """Where a role runs: its pool, its rank there and in data and tensor parallelism, its device
    and its seeds."""

    pool: str = "local"
    role: str = "role"
    rank: int = 0
    dims: ParallelDims = field(default_factory=ParallelDims)
    """How the ranks of the pool work together on the role."""
    address: str = "127.0.0.1"
    """The address of its node."""
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
    if siblings is None:
        siblings = {}
    token = _context.set((context, siblings))
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

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Here and not in `__init__`, which a role of the user may write without calling ours.
        worker = super().__new__(cls)
        context, siblings = _context.get()
        worker.context = context
        worker.siblings = siblings
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
        self,
        mesh_name: str,
        dp_rank: int,
        is_collect: bool,
    ) -> None:
        """Check what a worker of verl says about its mesh. How batches are split is decided when
        the role is added."""
        of_mesh = (dp_rank, is_collect)
        of_role = (self.context.dp_rank, self.context.returns_result)
        if of_mesh != of_role:
            pair = f"(dp_rank, is_collect) of rank {self.rank}"
            problem = f"{pair} is {of_mesh}, but here it is {of_role}"
            raise DataError(
                f"mesh {mesh_name!r}: {problem}; set tensor_parallel when the role is added"
            )


# Calls


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


Argument = Value
"""An argument of a method."""
DispatchFunction = Callable[..., tuple[tuple[Argument, ...], dict[str, Argument]]]
CollectFunction = Callable[[object, list[Value]], Value]


class MethodSpec(NamedTuple):
    """What `register` stores for a method."""

    dispatch: Dispatch
    execute: Execute
    blocking: bool
    reads: frozenset[str] | Callable[..., Iterable[str]] | None
    dispatch_fn: DispatchFunction | None = None
    collect_fn: CollectFunction | None = None


MARK = "__rolepool_method__"
Method = TypeVar("Method", bound=Callable[..., object])


def register(
    dispatch_mode: Dispatch | dict[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    reads: Iterable[str] | Callable[..., Iterable[str]] | None = None,
) -> Callable[[Method], Method]:
    """Make a worker's method callable on its group.

    `dispatch_mode` is a `Dispatch`, or `{"dispatch_fn": f, "collect_fn": g}`: `f(group, *args,
    **kwargs)` returns args and kwargs in which every value is a list with one entry per rank;
    `g(group, results)` gets the list of the ranks' results and returns the result of the call. A
    call waits for its result if `blocking` is true, and returns a future if it is false; each call
    can override it. `reads` names the keys of batches that the method reads; other keys are not
    sent. None means all keys. If the keys depend on the config, `reads` is a function, which gets
    the class of the role and the arguments of its constructor.
    """
    custom: dict[str, Callable[..., Any]] = {}
    if isinstance(dispatch_mode, dict) and set(dispatch_mode) == {"dispatch_fn", "collect_fn"}:
        custom = dispatch_mode
        dispatch_mode = Dispatch.ALL_TO_ALL
    if not isinstance(dispatch_mode, Dispatch):
        needed = "a Dispatch, or a dict with the functions dispatch_fn and collect_fn"
        raise DataError(f"dispatch_mode is {dispatch_mode!r}; it must be {needed}")
    if not isinstance(execute_mode, Execute):
        raise DataError(f"execute_mode is {execute_mode!r}; it must be an Execute")
    keys = reads if reads is None or callable(reads) else frozenset(reads)
    spec = MethodSpec(dispatch_mode, execute_mode, blocking, reads=keys, **custom)

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
    methods: dict[str, MethodSpec] = {}
    for name in dir(worker_class):
        member = inspect.getattr_static(worker_class, name)
        if hasattr(member, MARK):
            methods[name] = getattr(member, MARK)
    return methods


def keys_read_by(
    worker_class: type,
    args: Sequence[Argument],
    kwargs: Mapping[str, Argument],
) -> dict[str, frozenset[str] | None]:
    """The keys of batches that each method of a role reads, if the role is constructed with these
    arguments. None means all keys."""
    keys: dict[str, frozenset[str] | None] = {}
    for name, spec in registered_methods(worker_class).items():
        if callable(spec.reads):
            keys[name] = frozenset(spec.reads(worker_class, *args, **kwargs))
        else:
            keys[name] = spec.reads
    return keys
