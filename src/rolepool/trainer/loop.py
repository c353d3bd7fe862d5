"""The story of a run: its start, its steps, what happens between them, and its end.

A run has a deployment, which has the processes and models of the present plan; a pipeline, which
makes steps; a journal, which writes them down; and a recovery, which brings all of them to a saved
state: at the start, after a death, and in a move.
"""

from contextlib import ExitStack

import torch

from rolepool.cluster import Cluster
from rolepool.cluster.begin import Begun
from rolepool.config import Config, LoadedConfig
from rolepool.data.reward_signatures import UserFunction
from rolepool.errors import WorkerError
from rolepool.models.checkpoint import remove_unfinished
from rolepool.trainer.beginning import StartPoint, find_start, why_nothing_is_left
from rolepool.trainer.between import BetweenSteps
from rolepool.trainer.console import Observer as Observer
from rolepool.trainer.deployment import Deployment
from rolepool.trainer.mover import Mover
from rolepool.trainer.parts import RunParts
from rolepool.trainer.pipeline import RunningStep
from rolepool.trainer.rebalancer import is_worth_measuring
from rolepool.trainer.recovery import Recovery
from rolepool.trainer.step import Roles
from rolepool.trainer.supervisor import Death


class Trainer:
    """A training run, from the config to the last step."""

    def __init__(
        self,
        loaded: LoadedConfig,
        dtype: torch.dtype = torch.float32,
        reward: UserFunction | None = None,
        begun: Begun | None = None,
    ) -> None:
        """Check and read everything that needs no process. If the start of the processes has
        `begun` already, `run` finishes it."""
        self.parts = RunParts(loaded, dtype, reward)
        self.journal = self.parts.journal
        self.num_steps = self.parts.num_steps
        self.recovery = Recovery(self.parts, self.build_roles, begun)
        self.death: Death | None = None
        """How the driver before this one died, if this one was started in its place."""
        self._start = StartPoint(None, resumes_here=False)
        self._between: BetweenSteps | None = None
        """None before the processes have started."""

    def run(self) -> None:
        """Train until the last step. Resumes from a checkpoint if there is one."""
        parts = self.parts
        with parts.interrupt.watch(), parts.folder.hold():
            self._start = find_start(parts.config, parts.checkpoints, parts.folder)
            reason = why_nothing_is_left(parts.config, self._start, self.num_steps)
            if reason is not None:
                self.journal.notice(reason)
                return
            try:
                with ExitStack() as cleanup:
                    self._begin(cleanup)
                    self.train()
            finally:  # no process of the run is writing any more
                remove_unfinished(parts.folder.path)

    def _begin(self, cleanup: ExitStack) -> None:
        """Start the processes, then write the first files. An earlier run is not touched before
        everything has started."""
        parts = self.parts
        start = self._start
        self.journal.last_step = start.step
        trains = not parts.config.trainer.val_only
        if trains and not parts.checkpoints.are_saved:
            lost = "if the driver is killed, all its steps are lost"
            self.journal.notice(f"no checkpoint will be saved (trainer.save_freq=-1): {lost}")

        num_steps_left = self.num_steps - start.step
        measures = is_worth_measuring(parts.config, num_steps_left)
        deployment = self.recovery.start(start, cleanup, measures=measures)
        self.journal.begin(start.after_step, deployment, self.death)
        cleanup.callback(self.journal.close)
        deployment.watchdog.begin("starting")
        mover = Mover(
            deployment,
            self.journal,
            first_step=start.step,
            num_steps=self.num_steps,
        )
        cleanup.callback(mover.drop, "the run has ended")
        self._between = BetweenSteps(
            parts=parts,
            deployment=deployment,
            recovery=self.recovery,
            mover=mover,
            start=start,
        )

    def train(self) -> None:
        """Make all steps. After a death, continue after the last step whose state was kept."""
        interrupt = self.parts.interrupt
        only_validates = self.parts.config.trainer.val_only
        first_step = self._start.step
        number = first_step
        self._take_snapshot(number)
        while True:
            is_last = number >= self.num_steps
            try:
                self.between.validate_and_save(number, self.num_steps)
                self.between.move_if_asked(number, is_last=is_last)
                if is_last or only_validates:
                    return
                # Somebody has stopped the run. It ends with a step whose row is written.
                has_new_step = number > first_step
                if interrupt.asked and has_new_step and self.journal.is_finished:
                    break
                self.begin_step(number + 1)
                number += 1
            except WorkerError as error:
                number = self.recovery.recover(self.deployment, error)
            except KeyboardInterrupt:
                # It came before the first step, or it is the second one in a step.
                if not interrupt.in_steps:
                    raise
                raise KeyboardInterrupt(self.between.words_about_dropped()) from None
        raise KeyboardInterrupt(self.between.last_words(number))

    def begin_step(self, number: int) -> RunningStep:
        """Queue all calls of a step, and a snapshot of the state after it. The row of the step
        before it is written, because its last calls have ended by now."""
        deployment = self.deployment
        config = deployment.config
        roles = deployment.roles
        pipeline = self.parts.pipeline
        deployment.watchdog.begin(f"step {number}")
        pipeline.fill(config, roles, number, self.num_steps)
        step = pipeline.learn(config, roles)
        deployment.hold(number)
        self._take_snapshot(number)
        self.journal.add_step(step, deployment, self.num_steps)
        return step

    def _take_snapshot(self, number: int) -> None:
        deployment = self.deployment
        pipeline = self.parts.pipeline
        state = pipeline.state_after(number)
        deployment.snapshots.save(deployment.roles, state, pipeline.queue)

    def build_roles(self, cluster: Cluster, config: Config, reads_weights: bool) -> Roles:
        """Build every role that its pool does not have yet, and wait until they are ready."""
        return self.parts.build_roles(cluster, config, reads_weights)

    @property
    def observer(self) -> Observer:
        """Is told what happens."""
        return self.journal.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self.journal.observer = observer

    @property
    def between(self) -> BetweenSteps:
        """What the run does between two steps."""
        assert self._between is not None, "the run has not started"
        return self._between

    @property
    def deployment(self) -> Deployment:
        """The processes of the run, and what runs in them."""
        return self.between.deployment

    @property
    def mover(self) -> Mover:
        """Is asked to move the run while it trains."""
        return self.between.mover
