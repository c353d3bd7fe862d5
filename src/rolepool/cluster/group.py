"""Worker groups: the processes of a pool, their roles, and calls on them.

Owns which rank gets which arguments. If a call fails, it finds out which process died: a rank whose
peer died only sees a closed connection, but the error must name the peer. There is one group for
each pool. The roles of a pool are proxies of the same processes, which run calls in the order in
which they were made.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rolepool.cluster import calls
from rolepool.cluster.connection import raise_if_ray_died
from rolepool.cluster.launch import POLL_S, Process, await_all, cause_of, outcomes
from rolepool.errors import ConfigError, DataError, WorkerError
from rolepool.metrics import Span
from rolepool.placement.parallel import ParallelDims
from rolepool.protocol.encoding import Encoded
from rolepool.protocol.futures import CallFuture, DataProtoFuture, Pending, Reply, collect_first
from rolepool.protocol.worker import Dispatch, Execute, MethodSpec, Worker, registered_methods

GRACE_S = 3.0
"""The time in which the other ranks of a failed call must end too. Otherwise they hang, and the
pool is stopped."""
CALL_TIMEOUT_S = 24 * 3600.0

next_call_number = itertools.count(1).__next__
"""Returns the number of a new call. All groups of this process count their calls together."""


class WorkerGroup:
    """The processes of a pool. `Cluster` creates it."""

    def __init__(
        self, name: str, processes: Sequence[Process], all_groups: Mapping[str, WorkerGroup]
    ) -> None:
        self.name = name
        self.processes = list(processes)
        self.world_size = len(self.processes)
        self.roles: dict[str, RoleProxy] = {}
        self._all_groups = all_groups
        self.broken: WorkerError | None = None
        """Why the group cannot be used any more; None if it can."""
        self.recent: deque[weakref.ref[PendingCall]] = deque(maxlen=256)
        """The last calls, to find the call that a dead process was running. The references are
        weak, so that results can be freed."""
        self.longest_s: dict[tuple[str, str], float] = {}
        """The longest time that a call of each role and method has taken so far."""

    def add_role(
        self,
        role: str,
        worker_class: type[Worker],
        /,
        *args: Any,
        dims: ParallelDims | None = None,
        blocking: bool = True,
        **kwargs: Any,
    ) -> RoleProxy:
        """Construct a role in every process of the pool.

        `dims` says how the processes work together on the role. Without them each process gets its
        own part of a batch.
        With `blocking=False` it returns at once, and `proxy.ready.get()` waits. Calls can be made
        before that.
        """
        if role in self.roles:
            raise WorkerError(f"{self.name} already has a role {role}")
        dims = ParallelDims.over(self.world_size) if dims is None else dims
        if dims.world_size != self.world_size:
            raise WorkerError(
                f"{self.name}: it has {self.world_size} processes, which cannot be {dims}; "
                f"dp * sp * tp must be {self.world_size}"
            )
        self.raise_if_broken()
        made = PendingCall(self, role, "__init__")
        for process in self.processes:
            answer = process.actor.add_role.remote(
                role, worker_class, dims, args, kwargs, time.time()
            )
            made.all_objects.append((answer, None))
        ready = CallFuture([made], lambda results: None)
        proxy = RoleProxy(self, role, worker_class, dims, ready)
        if blocking:
            ready.get()
        self.roles[role] = proxy
        return proxy

    def role(self, role: str, blocking: bool | None = None) -> RoleProxy:
        """A proxy of a role. `blocking` overrides the default of each method, for all calls through
        this proxy."""
        if role not in self.roles:
            raise WorkerError(
                f"{self.name} has no role {role}; it has {', '.join(self.roles) or 'none'}"
            )
        return self.roles[role].with_blocking(blocking)

    def check_exists(self, setting: str, path: str | Path, fix: str) -> None:
        """Raise a ConfigError about `setting` (`key=value`) if a node of the pool does not have the
        file or folder."""
        asked = {
            process.actor.why_missing.remote(str(path)): (str(process), self.name)
            for process in self.processes
        }
        problems = sorted({problem for problem in await_all(asked, f"look for {path}") if problem})
        ConfigError.raise_if_any(f"{setting}: {problem}; {fix}" for problem in problems)

    # Failure

    def raise_if_broken(self) -> None:
        raise_if_ray_died()
        if self.broken is not None:
            raise self.broken

    def break_with(self, error: WorkerError) -> None:
        """Kill all processes, because some may hang. From now on every call, pending or new, raises
        this error."""
        if self.broken is None:
            self.broken = error
            for process in self.processes:
                ray.kill(process.actor)

    def break_if_dead(self) -> None:
        """Break the group if one of its processes has died. This asks no process that lives,
        because Ray tells the driver about each death. Other threads may wait for calls."""
        if self.broken is not None:
            return
        dead = [process for process in self.processes if has_died(process)]
        for process, reason in find_deaths(dead):
            self._break_after_death(process, reason)

    def _break_after_death(
        self, dead: Process, reason: str, call: PendingCall | None = None
    ) -> WorkerError:
        """Break the group. The error names the call that the process was running, or else this
        call."""
        ended = self._call_ended_by(dead) or call
        if ended is None:
            error = dead.error(f"{dead} died: {reason}", is_death=True)
        else:
            message = f"{dead} died during {ended.role}.{ended.method}: {reason}"
            error = dead.error(message, role=ended.role, method=ended.method, is_death=True)
        self.break_with(error)
        return error

    def names_of_broken(self) -> set[str]:
        """The groups of the cluster that cannot be used any more."""
        return {name for name, group in list(self._all_groups.items()) if group.broken is not None}

    def raise_if_another_died(self, known: Collection[str]) -> None:
        """Raise the error about a death in a group that is not one of the `known` ones."""
        for name, group in list(self._all_groups.items()):
            if name not in known and group.broken is not None and group.broken.is_death:
                raise group.broken

    def diagnose(self, error: BaseException, call: PendingCall) -> WorkerError:
        """The error that a failed call raises. It is about the death or the exception that caused
        the failure."""
        self.raise_if_broken()
        cause = cause_of(error)
        if (known := self.known_failure(cause)) is not None:
            return known
        errors = []
        for dead, reason in find_deaths(processes_of_healthy(self._all_groups), cause):
            errors.append(self._all_groups[dead.pool]._break_after_death(dead, reason, call))
        self.raise_if_broken()
        if errors:
            return errors[0]
        named = (
            cause
            if isinstance(cause, WorkerError)
            else WorkerError(f"{call.what} failed: {cause}", pool=self.name)
        )
        if not call.has_ended(within_s=GRACE_S):
            self.break_with(named)
        return named

    def known_failure(self, cause: BaseException) -> WorkerError | None:
        """If this error is about a broken pool, the error that broke it, because this error may be
        a consequence."""
        for group in self._all_groups.values():
            names_pool = isinstance(cause, WorkerError) and cause.pool == group.name
            names_process = any(is_death_of(process, cause) for process in group.processes)
            if group.broken is not None and (names_pool or names_process):
                return group.broken
        return None

    def _call_ended_by(self, process: Process) -> PendingCall | None:
        """The first call that was running or queued in a process when the process died."""
        calls = [call for call in (reference() for reference in self.recent) if call is not None]
        answers = [
            (call, call.all_refs[process.rank])
            for call in calls
            if process.rank < len(call.all_refs)
        ]
        return next(
            (call for call, answer in answers if is_death_of(process, *outcomes([answer], 0))), None
        )


@dataclass(eq=False, repr=False)
class RoleProxy:
    """The registered methods of a role, as methods of this object. Each of them takes `blocking=`
    in addition."""

    group: WorkerGroup
    role_name: str
    worker_class: type[Worker]
    dims: ParallelDims
    ready: CallFuture
    """Ends when every process has constructed the role."""
    blocking: bool | None = None
    """The default of calls through this proxy; None means what each method was registered with."""

    def __post_init__(self) -> None:
        self.world_size = self.group.world_size
        self.dp_size = self.dims.dp
        self._specs = registered_methods(self.worker_class)
        for name, spec in self._specs.items():
            self.__dict__.setdefault(name, partial(self._call, name, spec))

    def with_blocking(self, blocking: bool | None) -> RoleProxy:
        return replace(self, blocking=blocking)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        known = ", ".join(sorted(self.__dict__.get("_specs", ()))) or "none"
        raise AttributeError(
            f"{self.worker_class.__name__} has no registered method {name}; it has {known}"
        )

    def _call(
        self,
        method: str,
        spec: MethodSpec,
        /,
        *args: Any,
        blocking: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        future = self._submit(method, spec, args, kwargs)
        chosen = next(
            choice for choice in (blocking, self.blocking, spec.blocking) if choice is not None
        )
        return future.get() if chosen else future

    def _submit(
        self, name: str, spec: MethodSpec, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CallFuture:
        self.group.raise_if_broken()
        if spec.dispatch_fn is not None:
            args, kwargs = spec.dispatch_fn(self, *args, **kwargs)
        elif spec.dispatch in calls.SPLITTING:
            args, kwargs = calls.splittable(f"{self.role_name}.{name}", args, kwargs)
        only_zero = spec.execute is Execute.RANK_ZERO or spec.dispatch is Dispatch.RANK_ZERO
        processes = self.group.processes[:1] if only_zero else self.group.processes
        sources = list(calls.sources_of((*args, *kwargs.values())))
        after = tuple(sorted({source.number for source in sources}))
        call = calls.Call(
            self.role_name, name, args, kwargs, time.time(), next_call_number(), after
        )
        num_parts = self._num_parts(call, spec, len(processes))
        stride = self.dims.ranks_per_part if spec.dispatch in calls.PER_DP_GROUP else 1
        pending = PendingCall(self.group, self.role_name, name, call.number, stride, sources)
        ranks_per_part = len(processes) // num_parts
        for rank, process in enumerate(processes):
            if rank % ranks_per_part == 0:  # the ranks of an earlier part already compute
                part = rank // ranks_per_part
                packed, objects = calls.pack_call(
                    call, spec.reads, num_parts, part, in_lists=spec.dispatch in LISTS
                )
                references = (
                    [[stored for _, stored in objects], *(direct for direct, _ in objects)]
                    if objects
                    else []
                )
            pending.all_objects.append(tuple(process.actor.run.remote(packed, *references)))
        if spec.dispatch is Dispatch.DP_COMPUTE_PROTO:
            return DataProtoFuture([pending])
        collect = collect_first if only_zero else list
        return CallFuture(
            [pending], collect if spec.collect_fn is None else partial(spec.collect_fn, self)
        )

    def _num_parts(self, call: calls.Call, spec: MethodSpec, num_ranks: int) -> int:
        """The number of different messages; neighbouring ranks get the same one. Checks the lengths
        of lists."""
        if spec.dispatch not in (*calls.PER_DP_GROUP, Dispatch.ALL_TO_ALL) or not (
            call.args or call.kwargs
        ):
            return 1
        num_parts = (
            num_ranks if spec.dispatch is Dispatch.ALL_TO_ALL else min(num_ranks, self.dp_size)
        )
        for key, value in (
            (*enumerate(call.args), *call.kwargs.items()) if spec.dispatch in LISTS else ()
        ):
            if not isinstance(value, list | tuple) or len(value) != num_parts:
                size = (
                    f"{len(value)} entries"
                    if isinstance(value, list | tuple)
                    else type(value).__name__
                )
                raise DataError(
                    f"{call.role}.{call.method}: argument {key} must be a list with one entry for each of {num_parts} "
                    f"{'data-parallel groups' if spec.dispatch is Dispatch.DP_COMPUTE else 'ranks'}, not {size}"
                )
        return num_parts


LISTS = (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE)
"""Modes in which every argument is a list."""


@dataclass(eq=False, repr=False)
class PendingCall:
    """A call that was made: references to the ranks' replies, and the calls whose results it
    needs."""

    group: WorkerGroup
    role: str
    method: str
    number: int = 0
    stride: int = 1
    """A result is returned by one of so many neighbouring ranks."""
    sources: Sequence[Pending] = ()
    all_objects: list[tuple[Any, Any]] = field(default_factory=list, init=False)
    """References to the reply of each rank and to the data that is stored for it."""
    start_s: float = field(default=0.0, init=False)
    end_s: float | None = field(default=None, init=False)
    """When `watchdog.calls_so_far` first saw that it could run (0 before that), and that it had ended."""
    is_reported: bool = field(default=False, init=False)
    """Whether the watchdog has reported it as a stall."""
    _replies: list[Reply] | None = field(default=None, init=False)
    _error: WorkerError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.group.recent.append(weakref.ref(self))

    @property
    def what(self) -> str:
        return f"{self.role}.{self.method} on {self.group.name}"

    @property
    def all_refs(self) -> list[Any]:
        return [reply for reply, _ in self.all_objects]

    @property
    def objects(self) -> list[tuple[Any, Any]]:
        """References to the replies with a result, to pass them to another call without reading
        them."""
        return self.all_objects[:: self.stride]

    def replies(self, timeout_s: float | None) -> list[Reply]:
        return self._wait(timeout_s)[:: self.stride]

    def spans(self, timeout_s: float | None) -> list[Span]:
        spans = [reply.span for reply in self._wait(timeout_s)]
        return [span.on_clock(self.group.processes[span.rank].clock_ahead_s) for span in spans]

    def has_ended(self, within_s: float) -> bool:
        ready, _ = ray.wait(self.all_refs, num_returns=len(self.all_refs), timeout=within_s)
        return len(ready) == len(self.all_refs)

    def fetch(self, replies: Sequence[Reply]) -> list[dict[str, Encoded]]:
        try:
            return calls.fetch_stored(replies)
        except WorkerError as error:
            raise (self.group.known_failure(error) or error) from None

    def _wait(self, timeout_s: float | None) -> list[Reply]:
        """Every rank's reply. The error of one rank is raised at once, even if another one never
        replies."""
        if self._error is not None:
            raise self._error
        timeout_s = CALL_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        known = self.group.names_of_broken()
        while self._replies is None:
            try:
                packed = ray.get(
                    self.all_refs, timeout=max(0.0, min(POLL_S, deadline - time.monotonic()))
                )
                pairs = zip(packed, self.all_objects, strict=True)
                self._replies = [calls.unpack_reply(one, stored) for one, (_, stored) in pairs]
                self.sources = ()
                longest_s, key = self.group.longest_s, (self.role, self.method)
                longest_s[key] = max(
                    longest_s.get(key, 0.0), *(reply.span.duration_s for reply in self._replies)
                )
            except GetTimeoutError:
                self.group.raise_if_broken()
                # The watchdog may have seen a death in a pool whose calls nobody waits for now.
                self.group.raise_if_another_died(known)
                if time.monotonic() >= deadline:
                    raise WorkerError(f"{self.what} has not ended after {timeout_s:g} s") from None
            except RayError as error:
                self._error = self.group.diagnose(error, self)
                raise self._error from None
        return self._replies


# Ray's errors


def processes_of_healthy(groups: Mapping[str, WorkerGroup]) -> list[Process]:
    """The processes of all groups that can be used."""
    processes: list[Process] = []
    for group in groups.values():
        if group.broken is None:
            processes += group.processes
    return processes


def has_died(process: Process) -> bool:
    """Whether Ray has told the driver that the process died. This sends no message."""
    return bool(process.actor._get_local_state() == ActorTableData.ActorState.DEAD)


def is_death_of(process: Process, error: Any) -> bool:
    """Whether an error of Ray says that this process died."""
    return isinstance(error, RayActorError) and error.actor_id == process.actor_id


def find_deaths(
    processes: Sequence[Process], cause: BaseException | None = None
) -> list[tuple[Process, str]]:
    """The processes that died, and why: the one that the cause names. If it names none, every
    process gets a ping."""
    if isinstance(cause, RayActorError):
        return [
            (process, calls.reason_of(cause))
            for process in processes
            if is_death_of(process, cause)
        ]
    # A process that does not answer in time is busy. If it were dead, Ray would answer.
    answers = outcomes([process.actor.ping.remote() for process in processes], timeout_s=2.0)
    found = zip(processes, answers, strict=True)
    return [
        (process, calls.reason_of(error)) for process, error in found if is_death_of(process, error)
    ]
