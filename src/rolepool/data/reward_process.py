"""Runs the user's reward functions in child processes, because only another process can be stopped
in any state.

Owns such children, how many calls are made at the same time, the time limit of a call, and what
happens to samples that fail. Does not know what a function computes. A child is forked and kept, so
that it has everything that the function's file has loaded.
"""

import asyncio
import math
import pickle
import select
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from multiprocessing.connection import Connection

from rolepool.config.run_keys import CustomRewardFunctionConfig
from rolepool.data.child_process import ChildProcess
from rolepool.data.retries import FIRST_WAIT_S, Retries
from rolepool.data.reward_signatures import ResponseRow
from rolepool.data.rewards import (
    FAILED,
    Outcome,
    RewardError,
    RewardFunction,
    RowsOfCall,
    SampleError,
    Scored,
)
from rolepool.errors import logger

ASYNC_CALLS = 64
"""How many calls of an async function are made at the same time if the key is not set."""
GRACE_S = 5.0
"""How long the child of an async function may be late with stopping a call, unless somebody says
something else."""


class _Scorer(ChildProcess):
    """A child that makes calls of a reward function: one after another, or some at the same time if
    it is async."""

    def __init__(
        self,
        function: RewardFunction,
        keys: CustomRewardFunctionConfig,
        num_at_once: int,
        grace_s: float,
        first_wait_s: float,
    ) -> None:
        self._function = function
        self._keys = keys
        self._num_at_once = num_at_once
        self._first_wait_s = first_wait_s
        self._silence_s = keys.timeout_s
        """Longest time without an outcome. An async function is stopped in the child, without
        losing its other calls, unless it does not let the child run."""
        if function.is_async:
            self._silence_s += grace_s
        self._unfinished: dict[int, RowsOfCall] = {}
        """The calls that the child has got, by number, in the order in which it begins them."""
        self._deadline_s = math.inf

    @property
    def is_idle(self) -> bool:
        return not self._unfinished

    @property
    def left_s(self) -> float:
        """How long it may still take until its next outcome."""
        return self._deadline_s - time.monotonic()

    def fileno(self) -> int:
        return self._channel.fileno()

    def begin(self, calls: dict[int, RowsOfCall]) -> None:
        """Send calls to the child, which has none. A child that has died meanwhile is replaced."""
        # Nothing but the end of the child can be there to read.
        if self._pid is not None and self._channel.poll():
            self._end_child()
        if self._pid is None:
            self._start_child()
        self._unfinished = dict(calls)
        try:
            self._channel.send(list(calls.items()))
        except OSError:  # it died just now
            self._end_child()
            self._start_child()
            self._channel.send(list(calls.items()))
        self._deadline_s = time.monotonic() + self._silence_s

    def receive(self) -> tuple[int, Outcome]:
        """The next outcome and the number of its call. Raises EOFError or OSError if the child has
        ended."""
        number, outcome = self._channel.recv()
        del self._unfinished[number]
        self._deadline_s = time.monotonic() + self._silence_s
        return number, outcome

    def end(self) -> tuple[str, dict[int, RowsOfCall], dict[int, RowsOfCall]]:
        """Stop the child. Returns how it ended, maybe before, the calls that it had begun and the
        others."""
        calls = list(self._unfinished.items())
        self._unfinished = {}
        reason = self._end_child()
        # They begin in order.
        begun = dict(calls[: self._num_at_once])
        others = dict(calls[self._num_at_once :])
        return reason, begun, others

    # In the child

    def _serve(self, channel: Connection) -> None:
        """Make the calls that arrive, until the parent ends."""

        def send(number: int, outcome: Outcome) -> None:
            data = pickle.dumps((number, outcome))
            sys.stdout.flush()
            channel.send_bytes(data)  # as `send` does, but faster

        if not self._function.is_async:
            while True:
                for number, call in channel.recv():
                    send(number, self._outcome(call))
        # One loop for all batches, because connections that the function keeps belong to a loop.
        loop = asyncio.new_event_loop()
        loop.set_default_executor(ThreadPoolExecutor(self._num_at_once))  # for asyncio.to_thread
        asyncio.set_event_loop(loop)
        while True:
            loop.run_until_complete(self._make_calls(channel.recv(), send))

    def _outcome(self, call: RowsOfCall) -> Outcome:
        retries = Retries(self._keys, self._first_wait_s)
        while True:
            outcome = self._attempt(call)
            wait_s = retries.wait_after(outcome)
            if wait_s is None:
                return retries.explained(outcome)
            time.sleep(wait_s)

    def _attempt(self, call: RowsOfCall) -> Outcome:
        try:
            return self._function.score_call(call)
        except RewardError as error:
            return error

    async def _make_calls(
        self,
        calls: list[tuple[int, RowsOfCall]],
        send: Callable[[int, Outcome], None],
    ) -> None:
        """Make the calls, which begin in this order."""
        waiting = iter(calls)

        async def make_some() -> None:
            for number, call in waiting:
                outcome = await self._outcome_async(call)
                send(number, outcome)

        num_workers = min(self._num_at_once, len(calls))
        workers = [make_some() for _ in range(num_workers)]
        await asyncio.gather(*workers)

    async def _outcome_async(self, call: RowsOfCall) -> Outcome:
        """The same as `_outcome`, within the time limit."""
        retries = Retries(self._keys, self._first_wait_s)
        try:
            async with asyncio.timeout(self._keys.timeout_s):
                while True:
                    outcome = await self._attempt_async(call)
                    wait_s = retries.wait_after(outcome)
                    if wait_s is None:
                        return retries.explained(outcome)
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            return self._function.failure(_too_slow(self._keys), call)
        except asyncio.CancelledError:
            return self._function.failure("the function has cancelled itself", call)

    async def _attempt_async(self, call: RowsOfCall) -> Outcome:
        try:
            return await self._function.score_call_async(call)
        except RewardError as error:
            return error


class _Round:
    """The calls for one batch of responses."""

    def __init__(self, calls: Sequence[RowsOfCall]) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._num_calls = len(calls)
        self._waiting = dict(enumerate(calls))
        self._suspects: dict[int, RowsOfCall] = {}
        """Calls of which one has stopped or ended its child. They are repeated, each alone in a
        child."""

    @property
    def is_over(self) -> bool:
        return len(self.outcomes) == self._num_calls

    def next_calls(self, num_children: int) -> dict[int, RowsOfCall]:
        """The calls that one of the children gets next, by number; none if others have got them
        all."""
        if self._suspects:
            return _take(self._suspects, 1)
        portion = len(self._waiting)
        if num_children > 1:  # so few that no child has many calls left when the others have none
            portion = max(1, portion // (2 * num_children))
        return _take(self._waiting, portion)

    def take_back(
        self, begun: dict[int, RowsOfCall], others: dict[int, RowsOfCall]
    ) -> dict[int, RowsOfCall]:
        """The calls of a child that has ended. Returns the one that has ended it, if it was the
        only one."""
        self._waiting = dict(sorted((self._waiting | others).items()))
        if len(begun) == 1:
            return begun
        self._suspects |= begun
        return {}


def _take(calls: dict[int, RowsOfCall], count: int) -> dict[int, RowsOfCall]:
    """Remove the first calls and return them."""
    numbers = list(islice(calls, count))
    return {number: calls.pop(number) for number in numbers}


class ScoringProcesses:
    """Makes the calls of a reward function in child processes. A child that a call holds up, or
    that died, is replaced.

    `num_at_once` is the number of calls at the same time: in one child if the function is async, or
    else in as many children. The result does not depend on which call ends first. The child of an
    async function may be late by `grace_s` with stopping a call. `first_wait_s` is the time before
    a call that has failed at a connection is tried again for the first time.
    """

    def __init__(
        self,
        function: RewardFunction,
        keys: CustomRewardFunctionConfig,
        num_at_once: int = 1,
        *,
        grace_s: float = GRACE_S,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._function = function
        self._keys = keys
        self._is_tolerant = keys.on_error == "zero"
        num_children = num_at_once
        num_in_child = 1
        if function.is_async:
            num_children = 1
            num_in_child = num_at_once
        if function.takes_batches:
            num_children = 1
        self._children: list[_Scorer] = []
        for _ in range(num_children):
            child = _Scorer(function, keys, num_in_child, grace_s, first_wait_s)
            self._children.append(child)

    def score_rows(self, rows: Sequence[ResponseRow]) -> list[Scored]:
        """The scores of a batch. Raises the error of a bad row at once; with on_error=zero, failed
        rows get score 0."""
        calls = self._function.calls_for(rows)
        try:
            outcomes = self._outcomes(calls)
        except BaseException:
            for child in self._children:
                child.end()  # it may make other calls now
            raise
        scored: list[Scored] = []
        failed: list[RewardError] = []
        for call, outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, RewardError):
                failed += [outcome] * len(call)
                scored += [Scored(0.0, {FAILED: 1.0})] * len(call)
            elif self._is_tolerant:
                for row in outcome:
                    scored.append(row._replace(numbers=row.numbers | {FAILED: 0.0}))
            else:
                scored += outcome
        if failed:
            what = f"{len(failed)} of {len(rows)} samples failed and got score 0"
            logger.warning(
                "%s (custom_reward_function.on_error=zero); the first: %s", what, failed[0]
            )
        return scored

    def _outcomes(self, calls: Sequence[RowsOfCall]) -> list[Outcome]:
        """What each call returned, in the order of the calls. With on_error=abort, the first error
        is raised."""
        current = _Round(calls)
        while not current.is_over:
            for child in self._children:
                if not child.is_idle:
                    continue
                next_calls = current.next_calls(len(self._children))
                if next_calls:
                    child.begin(next_calls)
            busy = [child for child in self._children if not child.is_idle]
            for child in _ready(busy):
                self._receive(child, current)
            for child in busy:
                if not child.is_idle and child.left_s <= 0:
                    self._end(child, current, self._why_stopped)
        return [current.outcomes[number] for number in range(len(calls))]

    def _receive(self, child: _Scorer, current: _Round) -> None:
        try:
            number, outcome = child.receive()
        except (EOFError, OSError):
            self._end(child, current)
        else:
            self._store(current, number, outcome)

    def _end(self, child: _Scorer, current: _Round, problem: str | None = None) -> None:
        """End a child that a call holds up, or that has ended by itself."""
        reason, begun, others = child.end()
        what = problem or f"the function ended its process ({reason})"
        for number, call in current.take_back(begun, others).items():
            failure = self._function.failure(what, call)
            self._store(current, number, failure)

    def _store(self, current: _Round, number: int, outcome: Outcome) -> None:
        """Keep the outcome of a call. Raises it if it is an error that ends the run."""
        is_tolerated = self._is_tolerant and isinstance(outcome, SampleError)
        if isinstance(outcome, RewardError) and not is_tolerated:
            raise outcome
        current.outcomes[number] = outcome

    @property
    def _why_stopped(self) -> str:
        reason = _too_slow(self._keys)
        if self._function.is_async:
            fix = "inside async def, wait with await, or use asyncio.to_thread"
            reason += f" (the function blocks: {fix})"
        return reason


def calls_at_once(
    function: RewardFunction, keys: CustomRewardFunctionConfig, rank: int, num_ranks: int
) -> int:
    """How many calls this one of the reward processes makes at the same time: its share of
    `max_concurrency`."""
    num_calls = keys.max_concurrency
    if num_calls is None:
        num_calls = ASYNC_CALLS if function.is_async else num_ranks
    share, num_left = divmod(num_calls, num_ranks)
    # The first ranks make one more, until none is left.
    if rank < num_left:
        share += 1
    return max(share, 1)


def _too_slow(keys: CustomRewardFunctionConfig) -> str:
    return f"no score after custom_reward_function.timeout_s={keys.timeout_s:g}"


def _ready(children: Sequence[_Scorer]) -> list[_Scorer]:
    """The children that have sent something or ended. Waits for one, or until one has taken too
    long."""
    arrival = select.poll()  # much faster than the poll of a channel
    for child in children:
        arrival.register(child, select.POLLIN)
    least_left_s = min(child.left_s for child in children)
    wait_ms = math.ceil(max(least_left_s, 0.0) * 1000)
    events = arrival.poll(wait_ms)
    ready_files = {fd for fd, _ in events}
    return [child for child in children if child.fileno() in ready_files]
