"""Runs the user's reward functions in a child process, because only another process can be stopped in any state.

Owns the time limit of a sample, and what happens to samples that fail. Does not know what a function computes.
"""

import pickle
import select
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from rolepool.config.run_keys import CustomRewardFunctionConfig
from rolepool.data.child_process import ChildProcess
from rolepool.data.rewards import RewardError, RewardFunction, Row, SampleError, Scored
from rolepool.errors import logger

FAILED = "failed"


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
