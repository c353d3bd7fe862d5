"""What a run does between two steps: validations, checkpoints and moves.

Owns when they are due. Before one of them the last step is finished, because they need the models as
they are after it. If none is due, the last calls of a step may still run in the next one.
"""

import time

from rolepool.cluster import next_call_number
from rolepool.metrics.spans import driver_span
from rolepool.trainer.beginning import StartPoint
from rolepool.trainer.deployment import Deployment
from rolepool.trainer.mover import Mover
from rolepool.trainer.parts import RunParts
from rolepool.trainer.recovery import Recovery
from rolepool.trainer.validation import validate


class BetweenSteps:
    """Validations, checkpoints and moves of a run whose processes have started."""

    def __init__(
        self,
        parts: RunParts,
        deployment: Deployment,
        recovery: Recovery,
        mover: Mover,
        start: StartPoint,
    ) -> None:
        self.deployment = deployment
        self.mover = mover
        self._parts = parts
        self._keys = parts.config.trainer
        self._recovery = recovery
        self._start = start
        self._validated_step = -1

    def validate_and_save(self, number: int, num_steps: int) -> None:
        """Validate and save after this step if it is due. If nothing is due, the last calls of the
        step may still run in the next one."""
        if number == self._start.step:
            self._validate_before_training(number, num_steps)
        else:
            self._validate_and_save(number, is_last=number == num_steps)

    def _validate_before_training(self, number: int, num_steps: int) -> None:
        """Validate if it is due, and say that the training begins."""
        keys = self._keys
        interrupt = self._parts.interrupt
        if keys.val_only or (keys.val_before_train and number == 0):
            self._validate(number)
        if not keys.val_only and not interrupt.in_steps:
            phase = f"training from step {number + 1} to step {num_steps}"
            self._parts.journal.end_start(self.deployment, phase)
            interrupt.in_steps = True

    def _validate_and_save(self, number: int, *, is_last: bool) -> None:
        """After the last step, and if somebody wants the run to stop, the step is finished in any
        case."""
        parts = self._parts
        keys = self._keys
        validates = self._is_due(keys.test_freq, number, is_last=is_last)
        saves = self._is_due(keys.save_freq, number, is_last=is_last)
        # Asked again each time, because a signal can arrive during each of the following waits.
        interrupt = parts.interrupt
        if not (validates or saves or is_last or interrupt.asked):
            return
        parts.journal.finish_step(self.deployment)
        if validates and not interrupt.asked:
            self._validate(number)
        if interrupt.asked and parts.checkpoints.are_saved:
            saves = True
        if saves and not self._save(number):
            reason = parts.bad_steps.reason
            parts.journal.notice(f"step {number} is not saved because {reason}")

    @staticmethod
    def _is_due(every: int | None, number: int, *, is_last: bool) -> bool:
        """Whether something that happens every so many steps happens after this one. -1 is never.
        Without a number it happens once, after the last step."""
        if every is None:
            return is_last
        if every <= 0:
            return False
        return is_last or number % every == 0

    def move_if_asked(self, number: int, *, is_last: bool) -> None:
        """Look for requests to move. If the processes of a move have started, change over to its
        placement. After the last step it is too late."""
        move = self.mover.after_step(number)
        if move is None or is_last or not self.mover.is_wanted(move):
            return
        self.deployment.watchdog.begin("move")
        self.mover.begin_change(number)
        self._parts.journal.finish_step(self.deployment)
        start_s = time.monotonic()
        before = self.deployment.plan
        if not self._can_be_restored(number):
            reason = self._parts.bad_steps.reason
            self.mover.drop(f"step {number} cannot be saved because {reason}")
            return
        try:
            self._recovery.move(self.deployment, move, number)
        finally:  # if a process dies meanwhile, the run continues with the new placement
            seconds = time.monotonic() - start_s
            self.mover.end_change(move, number, before, seconds)

    def _can_be_restored(self, number: int) -> bool:
        """Whether the state after this step can be restored in other processes. It is saved now if
        it was not."""
        deployment = self.deployment
        pipeline = self._parts.pipeline
        state = pipeline.state_after(number)
        groups = deployment.trained_groups
        if deployment.snapshots.complete(deployment.roles, groups, state, pipeline.queue):
            return True
        return self._save(number)

    def _save(self, number: int) -> bool:
        """Save this step, unless it was saved before or is bad. Returns whether it is saved."""
        parts = self._parts
        if parts.checkpoints.saved_step >= number:
            return True
        if parts.bad_steps.reason is not None:
            return False
        self.deployment.watchdog.begin(f"checkpoint of step {number}")
        state = parts.pipeline.state_after(number)
        with driver_span("save_checkpoint", next_call_number()) as ended:
            parts.checkpoints.save(self.deployment.roles, state, parts.pipeline.queue)
        parts.journal.add_checkpoint(number, ended())
        return True

    def _validate(self, number: int) -> None:
        prompts = self._parts.val_prompts
        if prompts is None or self._validated_step >= number:
            return
        if not self._parts.interrupt.in_steps:
            self._parts.journal.begin_phase("validating")
        deployment = self.deployment
        deployment.watchdog.begin(f"validation after step {number}")
        metrics, samples, spans = validate(
            deployment.config,
            deployment.roles,
            prompts,
            self._parts.tokenizer,
        )
        self._parts.journal.add_validation(number, metrics, samples, spans)
        self._validated_step = number

    def last_words(self, number: int) -> str:
        """What somebody who has stopped the run after this step should know."""
        checkpoints = self._parts.checkpoints
        if checkpoints.saved_step == number:
            is_auto = self._keys.resume_mode == "auto"
            key = "" if is_auto else " with trainer.resume_mode=auto"
            return f"step {number} was finished and saved; the same command{key} resumes from it"
        reason: str | None = "trainer.save_freq=-1"
        if checkpoints.are_saved:
            reason = self._parts.bad_steps.reason
        newest = checkpoints.newest_in_words
        return f"step {number} was finished and not saved because {reason}; {newest}"

    def words_about_dropped(self) -> str:
        """What somebody should know who has stopped the run in the middle of a step."""
        last_step = self._parts.journal.last_step
        newest = self._parts.checkpoints.newest_in_words
        return f"the steps after step {last_step} were dropped; {newest}"
