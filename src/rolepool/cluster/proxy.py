"""The proxy of a role: its registered methods, to be called on all processes of its pool.

Owns which rank gets which arguments, and which future a call returns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rolepool.cluster import calls
from rolepool.cluster.answers import Answer
from rolepool.cluster.calls import Args, Argument, Kwargs, Value
from rolepool.cluster.launch import Process
from rolepool.cluster.pending import PendingCall
from rolepool.errors import DataError
from rolepool.placement.parallel import ParallelDims
from rolepool.protocol.futures import CallFuture, DataProtoFuture, Keys, collect_first
from rolepool.protocol.worker import Dispatch, Execute, MethodSpec, Worker, registered_methods

if TYPE_CHECKING:
    from rolepool.cluster.group import WorkerGroup

LISTS = (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE)
"""Modes in which every argument is a list."""
WITH_PARTS = (*calls.PER_DP_GROUP, Dispatch.ALL_TO_ALL)
"""Modes in which not all ranks get the same arguments."""

next_call_number = itertools.count(1).__next__
"""Returns the number of a new call. All groups of this process count their calls together."""


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
    keys_read: Mapping[str, Keys]
    """The keys of batches that each method reads."""
    blocking: bool | None = None
    """The default of calls through this proxy; None means what each method was registered with."""
    has_started: bool = False
    """Whether the run has waited until the role can be used."""

    def __post_init__(self) -> None:
        self.world_size = self.group.world_size
        self.dp_size = self.dims.dp
        self._specs = registered_methods(self.worker_class)
        for name, spec in self._specs.items():
            self.__dict__.setdefault(name, partial(self._call, name, spec))

    def with_blocking(self, blocking: bool | None) -> RoleProxy:
        return replace(self, blocking=blocking)

    def __getattr__(self, name: str) -> Callable[..., Value]:
        # Not `self._specs`, which would call this method again as long as there is none.
        specs = self.__dict__.get("_specs", ())
        known = ", ".join(sorted(specs)) or "none"
        class_name = self.worker_class.__name__
        raise AttributeError(f"{class_name} has no registered method {name}; it has {known}")

    def _call(
        self,
        method: str,
        spec: MethodSpec,
        /,
        *args: Argument,
        blocking: bool | None = None,
        **kwargs: Argument,
    ) -> Value:
        future = self._submit(method, spec, args, kwargs)
        if blocking is None:
            blocking = self.blocking
        if blocking is None:
            blocking = spec.blocking
        return future.get() if blocking else future

    def _submit(self, method: str, spec: MethodSpec, args: Args, kwargs: Kwargs) -> CallFuture:
        self.group.raise_if_broken()
        if spec.dispatch_fn is not None:
            args, kwargs = spec.dispatch_fn(self, *args, **kwargs)
        elif spec.dispatch in calls.SPLITTING:
            args, kwargs = calls.splittable(f"{self.role_name}.{method}", args, kwargs)
        values = (*args, *kwargs.values())
        sources = list(calls.sources_of(values))
        source_numbers = {source.number for source in sources}
        call = calls.Call(
            role=self.role_name,
            method=method,
            args=args,
            kwargs=kwargs,
            queued_s=time.time(),
            number=next_call_number(),
            after=tuple(sorted(source_numbers)),
        )
        only_zero = spec.execute is Execute.RANK_ZERO or spec.dispatch is Dispatch.RANK_ZERO
        processes = self.group.processes
        if only_zero:
            processes = processes[:1]
        stride = 1
        if spec.dispatch in calls.PER_DP_GROUP:
            stride = self.dims.ranks_per_part
        num_parts = self._num_parts(call, spec, len(processes))
        pending = PendingCall(
            group=self.group,
            role=self.role_name,
            method=method,
            number=call.number,
            stride=stride,
            sources=sources,
        )
        _send(
            call,
            reads=self.keys_read[method],
            num_parts=num_parts,
            processes=processes,
            pending=pending,
            in_lists=spec.dispatch in LISTS,
        )
        if spec.dispatch is Dispatch.DP_COMPUTE_PROTO:
            return DataProtoFuture([pending])
        collect: Callable[[list[Value]], Value] = collect_first if only_zero else list
        if spec.collect_fn is not None:
            collect = partial(spec.collect_fn, self)
        return CallFuture([pending], collect)

    def _num_parts(self, call: calls.Call, spec: MethodSpec, num_ranks: int) -> int:
        """The number of different messages; neighbouring ranks get the same one. Checks the lengths
        of lists."""
        has_arguments = call.args or call.kwargs
        if spec.dispatch not in WITH_PARTS or not has_arguments:
            return 1
        num_parts = num_ranks
        if spec.dispatch is not Dispatch.ALL_TO_ALL:
            num_parts = min(num_ranks, self.dp_size)
        if spec.dispatch in LISTS:
            _check_lists(call, spec, num_parts)
        return num_parts


def _check_lists(call: calls.Call, spec: MethodSpec, num_parts: int) -> None:
    """Raise a DataError if an argument is not a list with an entry for each part."""
    for name, value in (*enumerate(call.args), *call.kwargs.items()):
        if not isinstance(value, list | tuple):
            what_it_is = type(value).__name__
        elif len(value) != num_parts:
            what_it_is = f"{len(value)} entries"
        else:
            continue
        is_per_group = spec.dispatch is Dispatch.DP_COMPUTE
        parts = "data-parallel groups" if is_per_group else "ranks"
        raise DataError(
            f"{call.role}.{call.method}: argument {name} must be a list with one entry for each of "
            f"{num_parts} {parts}, not {what_it_is}"
        )


def _send(
    call: calls.Call,
    reads: Keys,
    num_parts: int,
    processes: Sequence[Process],
    pending: PendingCall,
    *,
    in_lists: bool,
) -> None:
    """Send each process its message. A part is packed after the ranks of the part before have got
    theirs, because they can already compute."""
    ranks_per_part = len(processes) // num_parts
    for part in range(num_parts):
        packed, objects = calls.pack_call(call, reads, num_parts, part, in_lists=in_lists)
        references = _references(objects)
        first_rank = part * ranks_per_part
        end_rank = first_rank + ranks_per_part
        for process in processes[first_rank:end_rank]:
            reply, stored = process.actor.run.remote(packed, *references)
            pending.all_objects.append((reply, stored))


def _references(
    objects: calls.Objects,
) -> list[list[Answer | None] | calls.PackedReply | Answer]:
    """What `WorkerProcess.run` gets after its message. Ray delivers the replies, because they are
    arguments themselves. It does not look into the list with the stored data."""
    if not objects:
        return []
    stored = [data for _, data in objects]
    replies = [reply for reply, _ in objects]
    return [stored, *replies]
