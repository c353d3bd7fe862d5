"""A call that was made: the references to its replies, and the wait for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray
from ray.exceptions import GetTimeoutError, RayError

from rolepool.cluster import calls
from rolepool.cluster.answers import POLL_S, Answer
from rolepool.errors import WorkerError
from rolepool.metrics import Span
from rolepool.protocol.encoding import Encoded
from rolepool.protocol.futures import Pending, Reply

if TYPE_CHECKING:
    from rolepool.cluster.group import WorkerGroup

CALL_TIMEOUT_S = 24 * 3600.0


@dataclass(eq=False, repr=False)
class PendingCall:
    """A call that was made: references to the ranks' replies, and the calls whose results it
    needs."""

    group: WorkerGroup
    role: str
    method: str
    number: int = 0
    """0 if the call constructs a role."""
    stride: int = 1
    """A result is returned by one of so many neighbouring ranks."""
    sources: Sequence[Pending] = ()
    all_objects: list[tuple[Answer, Answer | None]] = field(default_factory=list, init=False)
    """References to the reply of each rank and to the data that is stored for it."""
    start_s: float = field(default=0.0, init=False)
    end_s: float | None = field(default=None, init=False)
    """When `watchdog.calls_so_far` first saw that it could run (0 before that), and that it had ended."""
    is_reported: bool = field(default=False, init=False)
    """Whether the watchdog has reported it as a stall."""
    _replies: list[Reply] | None = field(default=None, init=False)
    _error: WorkerError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.group.note_call(self)

    @property
    def what(self) -> str:
        return f"{self.role}.{self.method} on {self.group.name}"

    @property
    def all_refs(self) -> list[Answer]:
        return [reply for reply, _ in self.all_objects]

    @property
    def objects(self) -> list[tuple[Answer, Answer | None]]:
        """References to the replies with a result, to pass them to another call without reading
        them."""
        return self.all_objects[:: self.stride]

    def replies(self, timeout_s: float | None) -> list[Reply]:
        return self._wait(timeout_s)[:: self.stride]

    def spans(self, timeout_s: float | None) -> list[Span]:
        spans = []
        for reply in self._wait(timeout_s):
            process = self.group.processes[reply.span.rank]
            spans.append(reply.span.on_clock(process.clock_ahead_s))
        return spans

    def has_ended(self, within_s: float) -> bool:
        answers = self.all_refs
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=within_s)
        return len(ready) == len(answers)

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
        if timeout_s is None:
            timeout_s = CALL_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        already_broken = self.group.names_of_broken()
        while self._replies is None:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                packed = ray.get(self.all_refs, timeout=min(POLL_S, left_s))
                self._replies = self._unpack(packed)
            except GetTimeoutError:
                self.group.raise_if_broken()
                # The watchdog may have seen a death in a pool whose calls nobody waits for now.
                self.group.raise_if_another_died(already_broken)
                if time.monotonic() >= deadline:
                    raise WorkerError(f"{self.what} has not ended after {timeout_s:g} s") from None
            except RayError as error:
                self._error = self.group.diagnose(error, self)
                raise self._error from None
        return self._replies

    def _unpack(self, packed: Sequence[calls.PackedReply]) -> list[Reply]:
        """The replies of all ranks. From now on the call does not hold its sources, so that their
        results can be freed, and the group knows how long such a call takes."""
        replies = []
        for packed_reply, (_, stored) in zip(packed, self.all_objects, strict=True):
            replies.append(calls.unpack_reply(packed_reply, stored))
        self.sources = ()
        self.group.note_duration(self, max(reply.span.duration_s for reply in replies))
        return replies
