"""Worker groups: the processes of a pool, their roles, and what happens if a call fails.

If a call fails, the group finds out which process died: a rank whose peer died only sees a closed
connection, but the error must name the peer. There is one group for each pool. The roles of a pool
are proxies of the same processes, which run calls in the order in which they were made.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from rolepool.cluster.answers import Answer, Asked, await_all, cause_of, outcomes
from rolepool.cluster.calls import Argument
from rolepool.cluster.connection import raise_if_ray_died
from rolepool.cluster.deaths import Death, death_named_by, find_deaths, has_died, is_death_of
from rolepool.cluster.launch import Process
from rolepool.cluster.pending import PendingCall
from rolepool.cluster.proxy import RoleProxy
from rolepool.errors import ConfigError, WorkerError
from rolepool.placement.parallel import ParallelDims
from rolepool.protocol.futures import CallFuture
from rolepool.protocol.worker import Worker, keys_read_by

GRACE_S = 3.0
"""The time in which the other ranks of a failed call must end too. Otherwise they hang, and the
pool is stopped."""


class WorkerGroup:
    """The processes of a pool. `Cluster` creates it."""

    def __init__(
        self,
        name: str,
        processes: Sequence[Process],
        all_groups: Mapping[str, WorkerGroup],
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
        self.num_calls: Counter[tuple[str, str]] = Counter()
        """How often each method of each role was called."""
        self.was_asked = False
        """Whether its processes were asked if they live, since the last repair of the cluster."""

    def add_role(
        self,
        role: str,
        worker_class: type[Worker],
        /,
        *args: Argument,
        dims: ParallelDims | None = None,
        blocking: bool = True,
        **kwargs: Argument,
    ) -> RoleProxy:
        """Construct a role in every process of the pool.

        `dims` says how the processes work together on the role. Without them each process gets its
        own part of a batch.
        With `blocking=False` it returns at once, and `proxy.ready.get()` waits. Calls can be made
        before that.
        """
        if role in self.roles:
            raise WorkerError(f"{self.name} already has a role {role}")
        if dims is None:
            dims = ParallelDims.over(self.world_size)
        if dims.world_size != self.world_size:
            raise WorkerError(
                f"{self.name}: it has {self.world_size} processes, which cannot be {dims}; "
                f"dp * sp * tp must be {self.world_size}"
            )
        self.raise_if_broken()
        keys_read = keys_read_by(worker_class, args, kwargs)
        construction = PendingCall(self, role, "__init__")
        for process in self.processes:
            answer = process.actor.add_role.remote(
                role,
                worker_class,
                dims,
                args,
                kwargs,
                time.time(),
            )
            construction.all_objects.append((answer, None))
        ready = CallFuture([construction], lambda results: None)
        proxy = RoleProxy(
            group=self,
            role_name=role,
            worker_class=worker_class,
            dims=dims,
            ready=ready,
            keys_read=keys_read,
        )
        if blocking:
            ready.get()
        self.roles[role] = proxy
        return proxy

    def role(self, role: str, blocking: bool | None = None) -> RoleProxy:
        """A proxy of a role. `blocking` overrides the default of each method, for all calls through
        this proxy."""
        if role not in self.roles:
            known = ", ".join(self.roles) or "none"
            raise WorkerError(f"{self.name} has no role {role}; it has {known}")
        return self.roles[role].with_blocking(blocking)

    def check_exists(self, setting: str, path: str | Path, fix: str) -> None:
        """Raise a ConfigError about `setting` (`key=value`) if a node of the pool does not have the
        file or folder."""
        asked: dict[Answer, Asked] = {}
        for process in self.processes:
            answer = process.actor.why_missing.remote(str(path))
            asked[answer] = Asked(str(process), self.name)
        # Several processes of a node have the same problem.
        problems = set(await_all(asked, f"look for {path}")) - {None}
        ConfigError.raise_if_any(f"{setting}: {problem}; {fix}" for problem in sorted(problems))

    def note_call(self, call: PendingCall) -> None:
        """Remember a call that is about to be sent."""
        self.recent.append(weakref.ref(call))
        self.num_calls[call.role, call.method] += 1

    def note_duration(self, call: PendingCall, duration_s: float) -> None:
        """Remember how long a call took, if no earlier one of its method took longer."""
        key = (call.role, call.method)
        longest_s = self.longest_s.get(key, 0.0)
        self.longest_s[key] = max(longest_s, duration_s)

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
        for death in find_deaths(dead):  # now they only say why they died
            self._break_after(death)

    def _break_after(self, death: Death, call: PendingCall | None = None) -> WorkerError:
        """Break the group. The error names the call that the process was running, or else this
        call."""
        dead = death.process
        ended = self._call_ended_by(dead) or call
        if ended is None:
            error = dead.error(f"{dead} died: {death.reason}", is_death=True)
        else:
            error = dead.error(
                f"{dead} died during {ended.role}.{ended.method}: {death.reason}",
                role=ended.role,
                method=ended.method,
                is_death=True,
            )
        self.break_with(error)
        return error

    def names_of_broken(self) -> set[str]:
        """The groups of the cluster that cannot be used any more."""
        # A list, because another thread can add groups meanwhile.
        groups = list(self._all_groups.values())
        return {group.name for group in groups if group.broken is not None}

    def raise_if_another_died(self, known: Collection[str]) -> None:
        """Raise the error about a death in a group that is not one of the `known` ones."""
        for name, group in list(self._all_groups.items()):
            if name in known:
                continue
            broken = group.broken
            if broken is not None and broken.is_death:
                raise broken

    def diagnose(self, error: BaseException, call: PendingCall) -> WorkerError:
        """The error that a failed call raises. It is about the death or the exception that caused
        the failure."""
        self.raise_if_broken()
        cause = cause_of(error)
        known = self.known_failure(cause)
        if known is not None:
            return known
        errors = []
        for death in self._deaths_behind(cause):
            group = self._all_groups[death.process.pool]
            errors.append(group._break_after(death, call))
        self.raise_if_broken()
        if errors:
            return errors[0]
        failure = cause
        if not isinstance(failure, WorkerError):
            failure = WorkerError(f"{call.what} failed: {cause}", pool=self.name)
        if not call.has_ended(within_s=GRACE_S):
            self.break_with(failure)
        return failure

    def _deaths_behind(self, cause: BaseException) -> list[Death]:
        """The deaths that may have caused a failure. If the cause does not name the process, all
        processes are asked."""
        if not isinstance(cause, RayActorError):
            return ask_healthy(self._all_groups.values())
        deaths: list[Death] = []
        for group in self._all_groups.values():
            if group.broken is None:
                deaths += death_named_by(cause, group.processes)
        return deaths

    def known_failure(self, cause: BaseException) -> WorkerError | None:
        """If this error is about a broken pool, the error that broke it, because this error may be
        a consequence."""
        pool = cause.pool if isinstance(cause, WorkerError) else None
        for group in self._all_groups.values():
            if group.broken is None:
                continue
            is_about_process = any(is_death_of(process, cause) for process in group.processes)
            if pool == group.name or is_about_process:
                return group.broken
        return None

    def _call_ended_by(self, process: Process) -> PendingCall | None:
        """The first call that was running or queued in a process when the process died."""
        for reference in list(self.recent):
            call = reference()
            if call is None:
                continue
            answers = call.all_refs
            if process.rank >= len(answers):
                continue
            answer = answers[process.rank]
            (outcome,) = outcomes([answer], timeout_s=0)
            if is_death_of(process, outcome):
                return call
        return None


def ask_healthy(groups: Iterable[WorkerGroup]) -> list[Death]:
    """Ask the processes of those groups that can be used whether they live. Returns the deaths."""
    processes: list[Process] = []
    for group in groups:
        if group.broken is None:
            group.was_asked = True
            processes += group.processes
    return find_deaths(processes)
