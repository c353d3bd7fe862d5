"""When a call of a reward function is tried again: which errors are those of a connection, and how
long to wait.

Does not know how calls are made.
"""

import random
import time

from rolepool.config.run_keys import CustomRewardFunctionConfig
from rolepool.data.rewards import Outcome, SampleError

FIRST_WAIT_S = 0.5
"""The wait after the first attempt. It doubles with each attempt."""
LONGEST_WAIT_S = 8.0
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


class Retries:
    """The attempts to make one call."""

    _jitter = random.Random()
    """Not the generator of the function, whose numbers must not depend on connections."""

    def __init__(
        self,
        keys: CustomRewardFunctionConfig,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._keys = keys
        self._num_attempts = 0
        self._next_wait_s = first_wait_s
        self._begin_s = time.monotonic()
        self._attempt_s = self._begin_s

    def wait_after(self, outcome: Outcome) -> float | None:
        """How long to wait before the next attempt; None if there is none. There is one if the call
        failed at a connection and if another attempt that takes as long would end within the time
        limit."""
        now_s = time.monotonic()
        wait_s = self._next_wait_s * self._jitter.uniform(0.75, 1.25)
        self._next_wait_s = min(2 * self._next_wait_s, LONGEST_WAIT_S)
        self._num_attempts += 1
        attempt_duration_s = now_s - self._attempt_s
        next_end_s = now_s + wait_s + attempt_duration_s
        self._attempt_s = now_s + wait_s
        if not isinstance(outcome, SampleError) or not is_connection_error(outcome.__cause__):
            return None
        if self._num_attempts > self._keys.retries:
            return None
        if next_end_s > self._begin_s + self._keys.timeout_s:
            return None
        return wait_s

    def explained(self, outcome: Outcome) -> Outcome:
        """The outcome. An error after several attempts says how many there were."""
        if isinstance(outcome, SampleError) and self._num_attempts > 1:
            return SampleError(f"{outcome} (tried {self._num_attempts} times)")
        return outcome


def is_connection_error(error: BaseException | None) -> bool:
    """Whether the same call may succeed later: a connection failed, or a server has answered that
    it is busy."""
    if error is None:
        return False
    status = _status_of(error)
    if status is not None:
        return status in BUSY_STATUS
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    for kind in type(error).__mro__:
        package, _, _ = kind.__module__.partition(".")
        if f"{package}.{kind.__name__}" in CONNECTION_ERRORS:
            return True
    return False


def _status_of(error: BaseException) -> int | None:
    """The HTTP status code that an error of a library for HTTP has, under one of the usual
    names."""
    response = getattr(error, "response", None)
    places = (
        (error, "status_code"),
        (error, "status"),
        (error, "code"),
        (response, "status_code"),
    )
    for holder, name in places:
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return None
