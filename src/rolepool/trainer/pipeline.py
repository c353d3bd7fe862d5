"""The pipeline: when each of the two phases of a step runs, and the queue between them.

Today `learn` follows `generate` at once, so the queue is empty between two steps. Owns the state of
a run outside of its models, because what waits in the queue is a part of it. `plan` runs this code
on paper, so it imports neither torch nor ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rolepool.config import Config
from rolepool.trainer.recorder import NotedCall
from rolepool.trainer.state import TrainState
from rolepool.trainer.step import Roles, Step, StepCalls

if TYPE_CHECKING:
    from rolepool.protocol import DataProto
    from rolepool.trainer.advantages import Estimator


class PromptSource(Protocol):
    """An endless sequence of training batches, with a position that can be saved."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""

    def next_batch(self) -> DataProto: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Waiting:
    """A batch in the queue."""

    prompts: DataProto
    epoch: int
    position: Mapping[str, Any]
    """The position in the prompts before this batch was taken."""
    generated: Any
    """What the first phase of the step has returned."""
    calls: Sequence[NotedCall]
    """The calls of the first phase."""


@dataclass(frozen=True)
class RunningStep:
    """A step whose calls are all queued. The last ones may still run."""

    prompts: DataProto
    epoch: int
    calls: StepCalls


class Pipeline:
    """The two phases of all steps of a run. The roles may be others in each call, because a run can
    move or lose processes."""

    def __init__(self, step: Step[Any], estimator: Estimator, prompts: PromptSource) -> None:
        self._step = step
        self._estimator = estimator
        self._prompts = prompts
        self._queue: deque[Waiting] = deque()

    def generate(self, config: Config, roles: Roles, number: int) -> Sequence[NotedCall]:
        """The first phase: take prompts, and queue the calls that generate and score responses.
        Returns these calls."""
        position = self._prompts.state_dict()
        epoch = self._prompts.epoch
        prompts = self._prompts.next_batch()
        roles.recorder.begin()
        generated = self._step.generate(config, roles, prompts, number)
        calls = roles.recorder.take()
        batch = Waiting(
            prompts=prompts,
            epoch=epoch,
            position=position,
            generated=generated,
            calls=calls,
        )
        self._queue.append(batch)
        return calls

    def learn(self, config: Config, roles: Roles) -> RunningStep:
        """The second phase, with the oldest batch of the queue: wait for its responses, and queue
        the updates."""
        oldest = self._queue.popleft()
        roles.recorder.begin(oldest.calls)
        calls = self._step.learn(config, roles, self._estimator, oldest.generated)
        return RunningStep(oldest.prompts, oldest.epoch, calls)

    def state_after(self, number: int) -> TrainState:
        """The state after the updates of this step are queued."""
        position: Mapping[str, Any]
        if self._queue:
            position = self._queue[0].position
        else:
            position = self._prompts.state_dict()
        kl_controller = self._estimator.kl_controller
        return TrainState(
            step=number,
            data=dict(position),
            kl_controller={"value": kl_controller.value},
        )

    def restore(self, state: TrainState) -> None:
        """Go to a state. What is in the queue was generated with other weights, or by processes
        that have died, so it is dropped and will be generated again."""
        self._queue.clear()
        self._prompts.load_state_dict(state.data)
        self._estimator.kl_controller.restore(state.kl_controller["value"])
