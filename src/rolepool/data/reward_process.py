"""Runs the user's reward functions in a child process, because only another process can be stopped in any state.

Owns such children, the time limit of a sample, and what happens to samples that fail. Does not know what a function
computes. The child is forked and kept, so that it has everything that the function's file has loaded.
"""

import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from rolepool.config.run_keys import CustomRewardFunctionConfig
from rolepool.data.rewards import RewardError, RewardFunction, Row, SampleError, Scored
from rolepool.errors import logger

FAILED = "failed"
PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A forked child that answers messages of its parent. It ends with its parent, and with it all that it started."""

    _pid: int | None = None
    _channel: Connection

    def _serve(self, channel: Connection) -> None:
        """What the child does. It must not return."""
        raise NotImplementedError

    def _end_child(self) -> str:
        """Kill the child, if there is one, and what it has started. Returns how it ended, maybe before."""
        reason = "unknown reason"
        if self._pid is None:
            return reason
        with suppress(ProcessLookupError, ChildProcessError):  # somebody else may have waited for it
            os.killpg(self._pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._pid = None
        self._channel.close()
        return reason

    def _start_child(self) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._channel.close()
                # Also if the parent is killed while a function runs.
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                os.setsid()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._serve(theirs)
            finally:
                os._exit(1)
        theirs.close()


class ScoringProcess(ChildProcess):
    """Calls a reward function in a child process. A child that a sample holds up, or that died, is replaced."""

    def __init__(self, reward: RewardFunction, keys: CustomRewardFunctionConfig) -> None:
        self._reward = reward
        self._timeout_s, self._is_tolerant = keys.timeout_s, keys.on_error == "zero"

    def score_rows(self, rows: Sequence[Row]) -> list[Scored]:
        """The scores of a batch. Raises the error of a bad row at once; with on_error=zero, failed rows get score 0."""
        scored: list[Scored] = []
        failed: list[SampleError] = []
        while len(scored) < len(rows):
            for outcome in self._score_in_child(rows[len(scored) :]):
                if isinstance(outcome, Scored):
                    failures = {FAILED: 0.0} if self._is_tolerant else {}
                    scored.append(outcome._replace(numbers=outcome.numbers | failures))
                elif self._is_tolerant and isinstance(outcome, SampleError):
                    failed.append(outcome)
                    scored.append(Scored(0.0, {FAILED: 1.0}))
                else:
                    self._end_child()  # it may score the other rows now
                    raise outcome
        if failed:
            what = f"{len(failed)} of {len(rows)} samples failed and got score 0"
            logger.warning("%s (custom_reward_function.on_error=zero); the first: %s", what, failed[0])
        return scored

    def _score_in_child(self, rows: Sequence[Row]) -> Iterator[Scored | RewardError]:
        """The outcomes of the rows in their order, up to a sample that takes too long or ends the child. The child
        begins a row when it has sent the outcome of the row before, so the time without a message is that of a row."""
        if self._pid is not None and self._channel.poll():  # nothing but the end of the child can be there to read
            self._end_child()
        if self._pid is None:
            self._start_child()
        self._channel.send(rows)
        arrival = select.poll()  # much faster than the poll of the channel
        arrival.register(self._channel, select.POLLIN)
        for name, _ in rows:
            try:
                if arrival.poll(self._timeout_s * 1000):
                    yield self._channel.recv()
                    continue
                problem = f"no score after custom_reward_function.timeout_s={self._timeout_s:g}"
                self._end_child()
            except EOFError:
                problem = f"the function ended its process ({self._end_child()})"
            yield SampleError(f"{self._reward.name}: {problem}, for {name}")
            return

    def _serve(self, channel: Connection) -> None:
        """Score what arrives, until the parent ends."""
        while True:
            for name, inputs in channel.recv():
                try:
                    outcome = pickle.dumps(self._reward.score(name, **inputs))
                except RewardError as error:
                    outcome = pickle.dumps(error)
                sys.stdout.flush()
                channel.send_bytes(outcome)  # as `send` does, but faster
