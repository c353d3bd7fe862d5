"""What a run does between two steps: validations, checkpoints and moves.

Owns when they are due. Before one of them the last step is finished, because they need the models as
they are after it. If none is due, the last calls of a step may still run in the next one.
"""

import time

from rolepool.cluster import next_call_number
from rolepool.metrics.spans import driver_span
from rolepool.trainer.deployment import Deployment
from rolepool.trainer.mover import Mover
from rolepool.trainer.parts import RunParts
from rolepool.trainer.recovery import Recovery
from rolepool.trainer.rows import validate


class BetweenSteps:
    """Validations, checkpoints and moves of a run whose processes have started."""

    def __init__(
        self, parts: RunParts, deployment: Deployment, recovery: Recovery, mover: Mover
    ) -> None:
        self._parts = parts
        self._keys = parts.config.trainer
        self._deployment = deployment
        self._recovery = recovery
        self._mover = mover
        self._validated_step = -1

    def before_first_step(self, number: int, num_steps: int) -> None:
        """Validate if it is due, and say that the training begins. `number` is the step after which
        the run began."""
        keys = self._keys
        if keys.val_only or (keys.val_before_train and number == 0):
            self._validate(number)
        if not keys.val_only and not self._parts.interrupt.in_steps:
            phase = f"training from step {number + 1} to step {num_steps}"
            self._parts.journal.observer.on_phase(phase)
            self._parts.interrupt.in_steps = True

    def after_step(self, number: int, *, is_last: bool) -> None:
        """Validate and save if it is due. After the last step, and if somebody wants the run to
        stop, the step is finished in any case."""
        validates = self._is_due(self._keys.test_freq, number, is_last=is_last)
        saves = self._is_due(self._keys.save_freq, number, is_last=is_last)
        stops = self._parts.interrupt.asked
        if not (validates or saves or is_last or stops):
            return
        self._parts.journal.finish_step(self._deployment)
        if validates and not stops:
            self._validate(number)
        if saves or (stops and self._parts.checkpoints.are_saved):
            if not self._save(number):
                reason = self._parts.bad_steps.reason
                self._parts.journal.notice(f"step {number} is not saved because {reason}")

    @staticmethod
    def _is_due(every: int | None, number: int, *, is_last: bool) -> bool:
        """Whether something that happens every so many steps happens after this one. -1 is never.
        Without a number it happens once, after the last step."""
        if every is None:
            return is_last
        return every > 0 and (number % every == 0 or is_last)

    def move_if_asked(self, number: int, *, is_last: bool) -> None:
        """Look for requests to move. If the processes of a move have started, change over to its
        placement. After the last step it is too late."""
        move = self._mover.after_step(number)
        if move is None or is_last or not self._mover.is_wanted(move):
            return
        self._deployment.watchdog.begin("move")
        self._mover.begin_change(number)
        self._parts.journal.finish_step(self._deployment)
        start_s = time.monotonic()
        before = self._deployment.plan
        if not self._can_be_restored(number):
            self._mover.drop(
                f"step {number} cannot be saved because {self._parts.bad_steps.reason}"
            )
            return
        try:
            self._recovery.move(self._deployment, move, number)
        finally:  # if a process dies meanwhile, the run goes on with the new placement
            self._mover.end_change(move, number, before, time.monotonic() - start_s)

    def _can_be_restored(self, number: int) -> bool:
        """Whether the state after this step can be restored in other processes. It is saved now if
        it was not."""
        state = self._parts.pipeline.state_after(number)
        snapshots = self._deployment.snapshots
        groups = self._deployment.trained_groups
        return snapshots.complete(self._deployment.roles, groups, state) or self._save(number)

    def _save(self, number: int) -> bool:
        """Save this step, unless it was saved before or is bad. Returns whether it is saved."""
        if self._parts.checkpoints.saved_step >= number:
            return True
        if self._parts.bad_steps.reason is not None:
            return False
        self._deployment.watchdog.begin(f"checkpoint of step {number}")
        with driver_span("save_checkpoint", next_call_number()) as ended:
            self._parts.checkpoints.save(
                self._deployment.roles, self._parts.pipeline.state_after(number)
            )
        self._parts.journal.add_checkpoint(number, ended())
        return True

    def _validate(self, number: int) -> None:
        prompts = self._parts.val_prompts
        if prompts is None or self._validated_step >= number:
            return
        if not self._parts.interrupt.in_steps:
            self._parts.journal.observer.on_phase("validating")
        deployment = self._deployment
        deployment.watchdog.begin(f"validation after step {number}")
        result = validate(deployment.config, deployment.roles, prompts, self._parts.tokenizer)
        self._parts.journal.add_validation(number, *result)
        self._validated_step = number

    def last_words(self, number: int) -> str:
        """What somebody who has stopped the run after this step should know."""
        if self._parts.checkpoints.saved_step == number:
            is_auto = self._keys.resume_mode == "auto"
            key = "" if is_auto else " with trainer.resume_mode=auto"
            return f"step {number} was finished and saved; the same command{key} resumes from it"
        reason = (
            self._parts.bad_steps.reason
            if self._parts.checkpoints.are_saved
            else "trainer.save_freq=-1"
        )
        newest = self._parts.checkpoints.newest_in_words
        return f"step {number} was finished and not saved because {reason}; {newest}"
