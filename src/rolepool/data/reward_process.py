"""Runs the user's reward functions in child processes, because only another process can be stopped in any state.

Owns such children, how many calls are made at the same time, the time limit of a call, which failures are tried again,
and what happens to samples that fail. Does not know what a function computes. A child is forked and kept, so that it
has everything that the function's file has loaded.
"""

import asyncio
import math
import pickle
import random
import select
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from multiprocessing.connection import Connection

from rolepool.config.run_keys import CustomRewardFunctionConfig
from rolepool.data.child_process import ChildProcess
from rolepool.data.reward_signatures import Row
from rolepool.data.rewards import FAILED, Call, RewardError, RewardFunction, SampleError, Scored
from rolepool.errors import logger

ASYNC_CALLS = 64
"""How many calls of an async function are made at the same time if the key is not set."""
GRACE_S = 5.0
"""How long the child of an async function may be late with stopping a call."""


Outcome = list[Scored] | RewardError
"""The scores of the rows of one call, or why it failed."""


class _Scorer(ChildProcess):
    """A child that makes calls of a reward function: one after another, or some at the same time if it is async."""

    def __init__(self, function: RewardFunction, keys: CustomRewardFunctionConfig, num_at_once: int) -> None:
        self._function, self._keys, self._num_at_once = function, keys, num_at_once
        self._silence_s = keys.timeout_s + (GRACE_S if function.is_async else 0.0)
        """Longest time without an outcome. An async function is stopped in the child, without losing its other calls,
        unless it does not let the child run."""
        self._unfinished: dict[int, Call] = {}
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

    def begin(self, calls: dict[int, Call]) -> None:
        """Send calls to the child, which has none. A child that has died meanwhile is replaced."""
        if self._pid is not None and self._channel.poll():  # nothing but the end of the child can be there to read
            self._end_child()
        if self._pid is None:
            self._start_child()
        self._unfinished = dict(calls)
        self._channel.send(list(calls.items()))
        self._deadline_s = time.monotonic() + self._silence_s

    def receive(self) -> tuple[int, Outcome]:
        """The next outcome and the number of its call. Raises EOFError if the child has ended."""
        number, outcome = self._channel.recv()
        del self._unfinished[number]
        self._deadline_s = time.monotonic() + self._silence_s
        return number, outcome

    def end(self) -> tuple[str, dict[int, Call], dict[int, Call]]:
        """Stop the child. Returns how it ended, maybe before, the calls that it had begun and the others."""
        calls, self._unfinished = list(self._unfinished.items()), {}
        reason = self._end_child()
        return reason, dict(calls[: self._num_at_once]), dict(calls[self._num_at_once :])

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

    def _outcome(self, call: Call) -> Outcome:
        retries = _Retries(self._keys)
        while True:
            outcome = self._attempt(call)
            wait_s = retries.wait_after(outcome)
            if wait_s is None:
                return retries.explained(outcome)
            time.sleep(wait_s)

    def _attempt(self, call: Call) -> Outcome:
        try:
            return self._function.score_call(call)
        except RewardError as error:
            return error

    async def _make_calls(self, calls: list[tuple[int, Call]], send: Callable[[int, Outcome], None]) -> None:
        """Make the calls, which begin in this order."""
        waiting = iter(calls)

        async def make_some() -> None:
            for number, call in waiting:
                send(number, await self._outcome_async(call))

        num_workers = min(self._num_at_once, len(calls))
        await asyncio.gather(*(make_some() for _ in range(num_workers)))

    async def _outcome_async(self, call: Call) -> Outcome:
        """The same as `_outcome`, within the time limit."""
        retries = _Retries(self._keys)
        try:
            async with asyncio.timeout(self._keys.timeout_s):
                while True:
                    outcome = await self._attempt_async(call)
                    wait_s = retries.wait_after(outcome)
                    if wait_s is None:
                        return retries.explained(outcome)
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            return self._function.failure(self._too_slow, call)
        except asyncio.CancelledError:
            return self._function.failure("the function has cancelled itself", call)

    async def _attempt_async(self, call: Call) -> Outcome:
        try:
            return await self._function.score_call_async(call)
        except RewardError as error:
            return error

    @property
    def _too_slow(self) -> str:
        return f"no score after custom_reward_function.timeout_s={self._keys.timeout_s:g}"


class ScoringProcesses:
    """Makes the calls of a reward function in child processes. A child that a call holds up, or that died, is replaced.

    `num_at_once` is the number of calls at the same time: in one child if the function is async, or else in as many
    children. The result does not depend on which call ends first.
    """

    def __init__(self, function: RewardFunction, keys: CustomRewardFunctionConfig, num_at_once: int = 1) -> None:
        self._function, self._keys, self._is_tolerant = function, keys, keys.on_error == "zero"
        num_children, num_in_child = (1, num_at_once) if function.is_async else (num_at_once, 1)
        if function.takes_batches:
            num_children = 1
        self._children = [_Scorer(function, keys, num_in_child) for _ in range(num_children)]

    def score_rows(self, rows: Sequence[Row]) -> list[Scored]:
        """The scores of a batch. Raises the error of a bad row at once; with on_error=zero, failed rows get score 0."""
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
            else:
                failures = {FAILED: 0.0} if self._is_tolerant else {}
                scored += [row._replace(numbers=row.numbers | failures) for row in outcome]
        if failed:
            what = f"{len(failed)} of {len(rows)} samples failed and got score 0"
            logger.warning("%s (custom_reward_function.on_error=zero); the first: %s", what, failed[0])
        return scored

    def _outcomes(self, calls: Sequence[Call]) -> list[Outcome]:
        """What each call returned, in the order of the calls. With on_error=abort, the first error is raised."""
        outcomes: dict[int, Outcome] = {}
        waiting = dict(enumerate(calls))
        suspects: dict[int, Call] = {}
        """Calls of which one has ended or stopped its child. They are repeated, each alone in a child."""

        def store(number: int, outcome: Outcome) -> None:
            if isinstance(outcome, RewardError) and not (self._is_tolerant and isinstance(outcome, SampleError)):
                raise outcome
            outcomes[number] = outcome

        def end(child: _Scorer, problem: str | None = None) -> None:
            nonlocal waiting
            reason, begun, others = child.end()
            waiting = dict(sorted((waiting | others).items()))
            if len(begun) > 1:
                suspects.update(begun)
                return
            for number, call in begun.items():
                what = problem or f"the function ended its process ({reason})"
                store(number, self._function.failure(what, call))

        while len(outcomes) < len(calls):
            for child in self._children:
                if child.is_idle and (suspects or waiting):
                    child.begin(_take(suspects, 1) if suspects else _take(waiting, self._portion(len(waiting))))
            busy = [child for child in self._children if not child.is_idle]
            for child in _ready(busy):
                try:
                    store(*child.receive())
                except EOFError:
                    end(child)
            for child in busy:
                if not child.is_idle and child.left_s <= 0:
                    end(child, self._why_stopped)
        return [outcomes[number] for number in range(len(calls))]

    def _portion(self, num_waiting: int) -> int:
        """How many calls a child gets at once: all if it is the only one, or else few enough that no child has calls
        left when the others have none."""
        if len(self._children) == 1:
            return num_waiting
        return max(1, num_waiting // (2 * len(self._children)))

    @property
    def _why_stopped(self) -> str:
        why = f"no score after custom_reward_function.timeout_s={self._keys.timeout_s:g}"
        if self._function.is_async:
            why += " (the function blocks: inside async def, wait with await, or use asyncio.to_thread)"
        return why


def calls_at_once(function: RewardFunction, keys: CustomRewardFunctionConfig, rank: int, num_ranks: int) -> int:
    """How many calls this one of the reward processes makes at the same time: its share of `max_concurrency`."""
    num_calls = keys.max_concurrency
    if num_calls is None:
        num_calls = ASYNC_CALLS if function.is_async else num_ranks
    num_calls, num_left = divmod(num_calls, num_ranks)
    return max(num_calls + int(rank < num_left), 1)


def _take(calls: dict[int, Call], count: int) -> dict[int, Call]:
    """Remove the first calls and return them."""
    return {number: calls.pop(number) for number in list(islice(calls, count))}


def _ready(children: Sequence[_Scorer]) -> list[_Scorer]:
    """The children that have sent something or ended. Waits for one, or until one has taken too long."""
    arrival = select.poll()  # much faster than the poll of a channel
    for child in children:
        arrival.register(child, select.POLLIN)
    wait_s = max(min(child.left_s for child in children), 0.0)
    ready = {fd for fd, _ in arrival.poll(math.ceil(wait_s * 1000))}
    return [child for child in children if child.fileno() in ready]


# --- connections --------------------------------------------------------------------------------------------------

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 8.0
"""The wait after the first attempt, which doubles with each attempt, and its limit."""
CONNECTION_ERRORS = (
    "aiohttp.ClientConnectionError",
    "aiohttp.ClientPayloadError",
    "anthropic.APIConnectionError",
    "http.HTTPException",
    "httpx.TransportError",
    "httpx2.TransportError",
    "openai.APIConnectionError",
    "requests.ConnectionError",
    "requests.Timeout",
    "urllib.URLError",
    "urllib3.HTTPError",
)
"""Errors of libraries, by package and class, which need not be installed."""
BUSY_STATUS = (408, 425, 429, 500, 502, 503, 504)
"""HTTP status codes after which the same request may succeed."""


class _Retries:
    """The attempts to make one call."""

    _jitter = random.Random()
    """Not the generator of the function, whose numbers must not depend on connections."""

    def __init__(self, keys: CustomRewardFunctionConfig) -> None:
        self._keys, self._num_attempts = keys, 0
        self._begin_s = self._attempt_s = time.monotonic()

    def wait_after(self, outcome: Outcome) -> float | None:
        """How long to wait before the next attempt; None if there is none. There is one if the call failed at a
        connection and if another attempt that takes as long would end within the time limit."""
        now_s = time.monotonic()
        wait_s = min(FIRST_WAIT_S * 2**self._num_attempts, LONGEST_WAIT_S) * self._jitter.uniform(0.75, 1.25)
        self._num_attempts += 1
        next_end_s = now_s + wait_s + (now_s - self._attempt_s)
        self._attempt_s = now_s + wait_s
        if not isinstance(outcome, SampleError) or not is_connection_error(outcome.__cause__):
            return None
        is_last = self._num_attempts > self._keys.retries or next_end_s > self._begin_s + self._keys.timeout_s
        return None if is_last else wait_s

    def explained(self, outcome: Outcome) -> Outcome:
        """The outcome. An error after several attempts says how many there were."""
        if isinstance(outcome, SampleError) and self._num_attempts > 1:
            return SampleError(f"{outcome} (tried {self._num_attempts} times)")
        return outcome


def is_connection_error(error: BaseException | None) -> bool:
    """Whether the same call may succeed later: a connection failed, or a server has answered that it is busy."""
    if error is None:
        return False
    status = _status_of(error)
    if status is not None:
        return status in BUSY_STATUS
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or not kinds.isdisjoint(CONNECTION_ERRORS)


def _status_of(error: BaseException) -> int | None:
    """The HTTP status code that an error of a library for HTTP has, under one of the usual names."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status_code"), (error, "status"), (error, "code"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return None
