"""The pipeline: when each of the two phases of a step runs, and the queue between them.

The responses of step n are generated with the weights after step n - 1 - k, where k is
`algorithm.max_staleness`. This needs nothing but an order of calls: `fill` queues the generation of
step n + k before `learn` queues the updates of step n, because the rollout then has the weights
after step n - 1, and gets the next ones behind that generation. So k batches wait between two
steps. With k = 0 the queue is empty there.

Owns the state of a run outside of its models, because what waits in the queue is a part of it.
`plan` runs this code on paper, so it imports neither torch nor ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rolepool.config import Config
from rolepool.errors import ConfigError
from rolepool.trainer.queue import QueuedBatch, StoredBatch
from rolepool.trainer.state import FilteredGroups, QueuedStep, TrainState
from rolepool.trainer.step import Generated, Roles, Step, StepCalls

if TYPE_CHECKING:
    from rolepool.protocol import DataProto
    from rolepool.trainer.advantages import Estimator
    from rolepool.trainer.results import Results


class PromptSource(Protocol):
    """An endless sequence of training batches, with a position that can be saved."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""

    @property
    def num_batches_per_epoch(self) -> int: ...

    def next_batch(self) -> DataProto: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Groups(Protocol):
    """The groups of a step, with `algorithm.filter_groups`: `GroupsOfStep`, or groups on paper."""

    def add(self, generated: Generated) -> None:
        """Add a batch of responses. Waits for its scores."""

    @property
    def are_enough(self) -> bool: ...

    def check_limit(self) -> None:
        """Raise an error if no further batch may be generated."""

    def joined(self) -> Generated:
        """What the step learns from."""

    @property
    def chosen(self) -> FilteredGroups: ...


def _groups_of_step(config: Config, number: int, num_batches_per_epoch: int) -> Groups:
    from rolepool.trainer.groups import GroupsOfStep  # imports torch

    return GroupsOfStep(config, number, num_batches_per_epoch)


@dataclass(frozen=True)
class RunningStep:
    """A step whose calls are all queued. The last ones may still run."""

    prompts: DataProto
    epoch: int
    calls: StepCalls
    ahead: Sequence[QueuedBatch] = ()
    """The batches of later steps, whose generation may run beside the calls of this step."""
    results: Results | None = None
    """The results of its first phase, if they come from a saved state."""
    groups: FilteredGroups | None = None
    """What was filtered, with `algorithm.filter_groups`."""


class Pipeline:
    """The two phases of all steps of a run. The roles may be others in each call, because a run can
    move or lose processes."""

    def __init__(
        self,
        step: Step[Any],
        estimator: Estimator,
        prompts: PromptSource,
        groups_of_step: Callable[[Config, int, int], Groups] = _groups_of_step,
    ) -> None:
        self._step = step
        self._groups_of_step = groups_of_step
        self._estimator = estimator
        self._prompts = prompts
        self._queue: deque[QueuedBatch] = deque()
        self.notice: str | None = None
        """What somebody should know about the queue since the last `restore`."""

    @property
    def queue(self) -> tuple[QueuedBatch, ...]:
        """What was generated and not learned from."""
        return tuple(self._queue)

    def fill(self, config: Config, roles: Roles, number: int, last_step: int) -> None:
        """Make the first phases that come before the second phase of this step: usually one, and
        several at the start of a run. The rollout has the weights after the step before."""
        last_number = number - 1
        if self._queue:
            last_number = self._queue[-1].number
        end = min(number + config.algorithm.max_staleness, last_step)
        for following in range(last_number + 1, end + 1):
            # Its prompts come after all prompts of the step before.
            self._complete(config, roles)
            self.generate(config, roles, following)
        if config.algorithm.filter_groups.enable and not roles.can_generate_behind_updates:
            self._complete(config, roles)

    def generate(self, config: Config, roles: Roles, number: int) -> None:
        """The first phase: take prompts, and queue the calls that generate and score responses. If
        groups are filtered, this is the first batch, and `_complete` makes the others."""
        position = self._prompts.state_dict()
        epoch = self._prompts.epoch
        roles.recorder.begin()
        prompts, generated = self._generate_batch(config, roles, number)
        calls = roles.recorder.take()
        batch = QueuedBatch(
            number=number,
            prompts=prompts,
            epoch=epoch,
            position=position,
            generated=generated,
            calls=calls,
            is_open=config.algorithm.filter_groups.enable,
        )
        self._queue.append(batch)

    def _generate_batch(self, config: Config, roles: Roles, number: int) -> tuple[DataProto, Any]:
        """The next prompts, and what the first phase of the step returns for them."""
        prompts = self._prompts.next_batch()
        generated = self._step.generate(config, roles, prompts, number)
        if config.algorithm.max_staleness:
            setting = f"algorithm.max_staleness={config.algorithm.max_staleness}"
            fix = "see docs/extending.md, or set algorithm.max_staleness=0"
            _check_is_divided(config, generated, prompts, setting, fix)
        elif config.algorithm.filter_groups.enable:
            setting = "algorithm.filter_groups.enable=true"
            fix = "see docs/extending.md, or set enable to false"
            _check_is_divided(config, generated, prompts, setting, fix)
        return prompts, generated

    def _complete(self, config: Config, roles: Roles) -> None:
        """Generate further batches for the newest step of the queue, until it has enough groups.
        Waits for their scores. The rollout must still have the weights of the first batch."""
        if not self._queue or not self._queue[-1].is_open:
            return
        batch = self._queue[-1]
        groups = self._groups_of_step(config, batch.number, self._prompts.num_batches_per_epoch)
        noted_before = roles.recorder.take()
        roles.recorder.begin(batch.calls)
        groups.add(batch.generated)
        while not groups.are_enough:
            groups.check_limit()
            _, generated = self._generate_batch(config, roles, batch.number)
            groups.add(generated)
        batch.calls = roles.recorder.take()
        roles.recorder.begin(noted_before)
        batch.generated = groups.joined()
        batch.prompts = batch.generated.prompts
        batch.groups = groups.chosen
        batch.is_open = False

    def learn(self, config: Config, roles: Roles) -> RunningStep:
        """The second phase, with the oldest batch of the queue: wait for its responses, and queue
        the updates. If groups are filtered, the batches of the newest step are generated while these
        run, but before the rollout gets new weights."""
        if self._queue[0].is_open:
            self._complete(config, roles)
        oldest = self._queue.popleft()
        roles.recorder.begin(oldest.calls)
        roles.before_new_weights = lambda: self._complete(config, roles)
        try:
            calls = self._step.learn(config, roles, self._estimator, oldest.generated)
        finally:
            roles.before_new_weights = None
        # A step that trains only the critic sends no weights.
        self._complete(config, roles)
        return RunningStep(
            prompts=oldest.prompts,
            epoch=oldest.epoch,
            calls=calls,
            ahead=self.queue,
            results=oldest.results,
            groups=oldest.groups,
        )

    def state_after(self, number: int) -> TrainState:
        """The state after the updates of this step are queued. The results in the queue belong to
        it, too."""
        position = self._prompts.state_dict()
        kl_controller = self._estimator.kl_controller
        return TrainState(
            step=number,
            data=dict(position),
            kl_controller={"value": kl_controller.value},
            queue=tuple(batch.queued for batch in self._queue),
        )

    def restore(
        self,
        config: Config,
        state: TrainState,
        stored: Sequence[StoredBatch] = (),
        last_step: int = 0,
    ) -> None:
        """Go to a state, whose queue has these batches. If one of them does not fit this config,
        it and all that follow it will be generated again. `last_step` is that of the run."""
        self._queue.clear()
        self.notice = None
        self._estimator.kl_controller.restore(state.kl_controller["value"])
        position: Mapping[str, Any] = state.data
        for batch in stored:
            queued = batch.queued
            restored: QueuedBatch | None = None
            reason = _why_prompts_differ(config, queued)
            if reason is None:
                restored = self._read_again(config, batch)
                reason = self._why_not_used(config, restored)
            if restored is None or reason is not None:
                position = queued.data
                again = f"generated again with the weights after step {state.step}"
                which = f"the responses of step {queued.step} and later ones"
                self.notice = f"{which} are {again}: {reason}"
                break
            self._queue.append(restored)
        self._prompts.load_state_dict(position)
        if self.notice is None:
            self.notice = self._notice_about_size(config, state, last_step)

    def _read_again(self, config: Config, batch: StoredBatch) -> QueuedBatch:
        """A batch of a state, with its prompts."""
        from rolepool.trainer.results import generated_from

        queued, results = batch
        self._prompts.load_state_dict(queued.data)
        epoch = self._prompts.epoch
        prompts = self._prompts_of(queued)
        # With synchronous training all responses are compared. These are older, so they differ.
        is_compared = config.algorithm.max_staleness > 0
        generated = generated_from(queued.step, prompts, results, is_compared=is_compared)
        return QueuedBatch(
            number=queued.step,
            prompts=prompts,
            epoch=epoch,
            position=queued.data,
            generated=generated,
            results=results,
            groups=queued.groups,
        )

    def _prompts_of(self, queued: QueuedStep) -> DataProto:
        """The prompts of a batch that begins at the present position."""
        if queued.groups is None:
            return self._prompts.next_batch()
        from rolepool.trainer.groups import joined_prompts, rows_of_groups

        batches = [self._prompts.next_batch() for _ in range(queued.groups.num_batches)]
        num_samples = len(batches[0]) // queued.groups.gen_batch_size
        rows = rows_of_groups(queued.groups.kept, num_samples)
        return joined_prompts(batches, rows)

    def _why_not_used(self, config: Config, batch: QueuedBatch) -> str | None:
        """Why a step with this config cannot learn from a batch that may have been saved with
        another config; None if it can. That the prompts are the same was checked with their
        position."""
        assert batch.results is not None, "it comes from a state"
        rollouts = batch.results.rollouts
        if not self._step.has_two_phases:
            return f"trainer.step={config.trainer.step} generates and learns in one function"
        if len(rollouts) != len(batch.prompts):
            return f"they are {len(rollouts)}, and a step has {len(batch.prompts)}"
        columns = rollouts.columns()
        if config.bypasses_old_log_prob and "old_log_probs" not in columns:
            return "they have no old_log_probs, which bypass_mode needs"
        if config.returns_log_probs and "rollout_log_probs" not in columns:
            return "they have no rollout_log_probs, which are compared now"
        needs_baselines = "reward_baselines" in self._estimator.needs
        if needs_baselines and batch.results.baselines is None:
            return f"they have no baselines, which {config.algorithm.adv_estimator} needs"
        return None

    def _notice_about_size(self, config: Config, state: TrainState, last_step: int) -> str | None:
        """What to say if the state was saved with another `max_staleness`, or at the end of a run
        that is continued now."""
        wanted = min(config.algorithm.max_staleness, last_step - state.step)
        num_queued = len(self._queue)
        setting = f"algorithm.max_staleness={config.algorithm.max_staleness}"
        has = f"the state after step {state.step} has responses for {num_queued} later steps"
        if state.step and num_queued < wanted:
            others = f"those up to step {state.step + wanted + 1} are generated with its weights"
            return f"{has}, and {setting}: {others}"
        if num_queued > wanted:
            return f"{has}, and {setting}: training learns from these responses first"
        return None


def _why_prompts_differ(config: Config, queued: QueuedStep) -> str | None:
    """Why the prompts of a batch of a state cannot be read again with this config; None if they
    can."""
    filters = config.algorithm.filter_groups.enable
    if queued.groups is None:
        return "their groups are not filtered" if filters else None
    if not filters:
        return "their groups are filtered"
    size = queued.groups.gen_batch_size
    if size != config.prompts_of_generation:
        return f"data.gen_batch_size was {size}"
    num_groups = len(queued.groups.kept)
    if num_groups != config.data.train_batch_size:
        return f"they have {num_groups} groups, and a step has {config.data.train_batch_size}"
    return None


def _check_is_divided(
    config: Config, generated: object, prompts: DataProto, setting: str, fix: str
) -> None:
    """Raise ConfigError if what the first phase of a step has returned cannot be held in a state, or
    joined with another batch. `setting` needs that."""
    what = f"trainer.step={config.trainer.step}: its first phase"
    # Not a class that is derived from it, because a state does not hold more fields.
    if type(generated) is not Generated:
        kind = type(generated).__name__
        raise ConfigError(f"{what} returns a {kind}, and {setting} needs a Generated; {fix}")
    if generated.prompts is not prompts:
        raise ConfigError(f"{what} returns other prompts than it got, which {setting} reads; {fix}")
