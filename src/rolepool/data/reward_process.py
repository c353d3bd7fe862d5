"""Runs the user's reward functions in a child process, because only another process can be stopped in any state.

Owns such children, the time limit of a sample, and what happens to samples that fail. Does not know what a function
computes. The child is forked and kept, so that it has everything that the function's file has loaded.
"""

import ctypes
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from rolepool.config.run_keys import CustomRewardFunctionConfig
from rolepool.data.rewards import Reward, RewardError, Row, SampleError, Scored

logger = logging.getLogger(__name__)

SEND_S = 0.05
"""The child sends its results at most so often, because a message for each sample takes longer than a simple rule."""
FAILED = "failed"
PR_SET_PDEATHSIG = 1

Outcomes = dict[int, Scored | RewardError]
"""The results of samples, by their number in the batch."""


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


class ScoringProcess(ChildProcess, Reward):
    """Scores with another `Reward` in a child process. A child that a sample holds up, or that died, is replaced."""

    def __init__(self, reward: Reward, keys: CustomRewardFunctionConfig) -> None:
        self._reward = reward
        self._timeout_s, self._is_tolerant = keys.timeout_s, keys.on_error == "zero"
        # Memory that the child shares: the number of the sample that it scores, and since when.
        self._progress = memoryview(mmap.mmap(-1, 16)).cast("d")

    def score_rows(self, rows: Sequence[Row]) -> list[Scored]:
        """The scores of a batch. Raises the error of a bad row at once; with on_error=zero, failed rows get score 0."""
        outcomes: Outcomes = {}
        while waiting := {number: row for number, row in enumerate(rows) if number not in outcomes}:
            for number, outcome in self._score_in_child(waiting):
                if isinstance(outcome, RewardError) and not (self._is_tolerant and isinstance(outcome, SampleError)):
                    self._end_child()  # it may score the other rows now
                    raise outcome
                outcomes.setdefault(number, outcome)
        failed = [outcome for _, outcome in sorted(outcomes.items()) if isinstance(outcome, SampleError)]
        if failed:
            what = f"{len(failed)} of {len(rows)} samples failed and got score 0"
            logger.warning("%s (custom_reward_function.on_error=zero); the first: %s", what, failed[0])
        return [self._counted(outcomes[number]) for number in range(len(rows))]

    def _counted(self, outcome: Scored | RewardError) -> Scored:
        """The score, with the number that counts failed samples if they are tolerated."""
        if isinstance(outcome, RewardError):
            return Scored(0.0, {FAILED: 1.0})
        return outcome._replace(numbers=outcome.numbers | {FAILED: 0.0}) if self._is_tolerant else outcome

    def _score_in_child(self, waiting: dict[int, Row]) -> Iterator[tuple[int, Scored | RewardError]]:
        """The outcomes up to the end of the batch, or up to a sample that took too long or ended the child."""
        if self._pid is not None and self._channel.poll():  # nothing but the end of the child can be there to read
            self._end_child()
        if self._pid is None:
            self._start_child()
        self._note(next(iter(waiting)))
        self._channel.send(waiting)
        while True:
            number, began_s = self._progress
            left_s = began_s + self._timeout_s - time.monotonic()
            if self._channel.poll(max(0.0, left_s)):
                try:
                    received: Outcomes | None = self._channel.recv()
                except EOFError:
                    number, problem = self._progress[0], f"the function ended its process ({self._end_child()})"
                    break
                if received is None:
                    return
                yield from received.items()
            elif left_s <= 0:
                self._end_child()
                problem = f"no score after custom_reward_function.timeout_s={self._timeout_s:g}"
                break
        yield int(number), SampleError(f"{self._reward.name}: {problem}, for {waiting[int(number)][0]}")

    # In the child

    def _serve(self, channel: Connection) -> None:
        """Score what arrives, until the parent ends."""
        while True:
            outcomes: Outcomes = {}
            sent_s = time.monotonic()
            for number, (name, inputs) in channel.recv().items():
                if self._note(number) > sent_s + SEND_S:
                    channel.send(outcomes)
                    outcomes, sent_s = {}, time.monotonic()
                try:
                    outcomes[number] = self._reward.score(name, **inputs)
                except RewardError as error:
                    outcomes[number] = error
            sys.stdout.flush()
            channel.send(outcomes)
            channel.send(None)

    def _note(self, number: int) -> float:
        """Note which sample begins now. The time is written first: the parent must not see it with an old time."""
        self._progress[1] = now_s = time.monotonic()
        self._progress[0] = number
        return now_s
