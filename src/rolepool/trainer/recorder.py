"""Notes of the calls that a step makes: each call with the name of its operation.

The recorder is the same for calls of a run and for calls on paper (`rolepool.trainer.paper`), so an
operation has one name everywhere. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rolepool.placement.roles import Role, operation_of


@runtime_checkable
class Future(Protocol):
    """A result that may not exist yet: a `CallFuture`, or a future on paper."""

    @property
    def calls(self) -> Iterable[Any]:
        """The calls from which it comes."""


class NotedCall(NamedTuple):
    """A call that was made."""

    operation: str
    future: Any
    """mypy cannot know it: it is a `CallFuture` of a run, or a future on paper."""


class CallRecorder:
    """Notes each call with its operation when it is made."""

    def __init__(self) -> None:
        self._noted: list[NotedCall] = []
        self._name: str | None = None
        """The operation of all calls that are made now, if a step says it."""

    def note(self, operation: str, future: object) -> None:
        """Note a call. The step may have said another name for it. A result that is not a future,
        such as that of a call that waits, has no calls to note."""
        if isinstance(future, Future):
            self._noted.append(NotedCall(self._name or operation, future))

    @contextmanager
    def named(self, operation: str) -> Iterator[None]:
        """Calls that are made inside belong to this operation, whatever the table says."""
        before = self._name
        self._name = operation
        try:
            yield
        finally:
            self._name = before

    def begin(self, noted: Sequence[NotedCall] = ()) -> None:
        """Begin a phase of a step whose earlier phase made these calls. Calls that were made since
        the last phase, such as those of a validation, belong to no step and are dropped."""
        self._noted = [*noted]

    def take(self) -> list[NotedCall]:
        """The calls that were noted. From now on none is."""
        noted = self._noted
        self._noted = []
        return noted


class RecordedRole:
    """A role. Its calls are noted under the names that the table of roles gives them."""

    def __init__(self, recorder: CallRecorder, role: Role, calls: Any) -> None:
        self._recorder = recorder
        self._role = role
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._calls, name)
        if not callable(attribute) or isinstance(attribute, type):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            future = attribute(*args, **kwargs)
            self._recorder.note(operation_of(self._role, name), future)
            return future

        return call


def with_own_names(
    noted: Iterable[NotedCall], names: Mapping[str, Sequence[Any]]
) -> list[NotedCall]:
    """The noted calls. A step may name futures itself: these calls get its names, and those that
    were not noted, because they were made in another way, are added."""
    own_names: dict[Any, str] = {}
    """The name of each call that the step names."""
    for operation, futures in names.items():
        for future in futures:
            own_names.update(dict.fromkeys(future.calls, operation))

    renamed: list[NotedCall] = []
    known: set[Any] = set()
    for operation, future in noted:
        known.update(future.calls)
        first_call = next(iter(future.calls))
        name = own_names.get(first_call, operation)
        renamed.append(NotedCall(name, future))
    for operation, futures in names.items():
        for future in futures:
            if known.isdisjoint(future.calls):
                renamed.append(NotedCall(operation, future))
    return renamed


def by_operation(noted: Iterable[NotedCall]) -> dict[str, list[Any]]:
    """The futures of each operation, in the order in which the calls were made."""
    futures: dict[str, list[Any]] = {}
    for operation, future in noted:
        futures.setdefault(operation, []).append(future)
    return futures
