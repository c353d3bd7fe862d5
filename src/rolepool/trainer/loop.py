"""The story of a run: its start, its steps, what happens between them, and its end.

A run has a deployment, which has the processes and models of the present plan; a pipeline, which
makes steps; a journal, which writes them down; and a recovery, which brings all of them to a saved
state: at the start, after a death, and in a move.
"""

from contextlib import ExitStack

import torch

from rolepool.cluster import Cluster
from rolepool.config import Config, LoadedConfig
from rolepool.errors import WorkerError
from rolepool.models.checkpoint import remove_unfinished
from rolepool.trainer.beginning import StartPoint, find_start, why_nothing_is_left
from rolepool.trainer.between import BetweenSteps
from rolepool.trainer.build import Reward
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
        self, loaded: LoadedConfig, dtype: torch.dtype = torch.float32, reward: Reward | None = None
    ) -> None:
        """Check and read everything that needs no process."""
        self.parts = RunParts(loaded, dtype, reward)
        self.journal = self.parts.journal
        self.num_steps = self.parts.num_steps
        self.recovery = Recovery(self.parts, self.build_roles)
        self.death: Death | None = None
        """How the driver before this one died, if this one was started in its place."""
        self._start = StartPoint(None, resumes_here=False)
        self._deployment: Deployment | None = None
        """None before the processes have started, as the next two."""
        self._mover: Mover | None = None
        self._between: BetweenSteps | None = None

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
        parts, start = self.parts, self._start
        self.journal.last_step = start.step
        if not parts.checkpoints.are_saved and not parts.config.trainer.val_only:
            lost = "if the driver is killed, all its steps are lost"
            self.journal.notice(f"no checkpoint will be saved (trainer.save_freq=-1): {lost}")
        measures = is_worth_measuring(parts.config, self.num_steps - start.step)
        deployment = self.recovery.start(start, cleanup, measures=measures)
        self._deployment = deployment
        self.journal.begin(start.after_step, deployment, self.recovery.sharding, self.death)
        cleanup.callback(self.journal.close)
        deployment.watchdog.begin("starting")
        self._mover = Mover(
            deployment, self.journal, first_step=start.step, num_steps=self.num_steps
        )
        cleanup.callback(self._mover.drop, "the run has ended")
        self._between = BetweenSteps(parts, deployment, self.recovery, self._mover)

    def train(self) -> None:
        """Make all steps. After a death, continue after the last step whose state was kept."""
        interrupt, newest = self.parts.interrupt, self.parts.checkpoints
        number = self._start.step
        self.deployment.snapshots.save(
            self.deployment.roles, self.parts.pipeline.state_after(number)
        )
        while True:
            is_last = number >= self.num_steps
            try:
                self.end_step(number)
                self.between.move_if_asked(number, is_last=is_last)
                if is_last or self.parts.config.trainer.val_only:
                    return
                is_new = number > self._start.step
                if interrupt.asked and is_new and self.journal.is_finished:
                    break
                self.begin_step(number + 1)
                number += 1
            except WorkerError as error:
                number = self.recovery.recover(self.deployment, error)
            except KeyboardInterrupt:
                if not interrupt.in_steps:
                    raise
                words = f"the steps after step {self.journal.last_step} were dropped"
                raise KeyboardInterrupt(f"{words}; {newest.newest_in_words}") from None
        raise KeyboardInterrupt(self.between.last_words(number))

    def begin_step(self, number: int) -> RunningStep:
        """Queue all calls of a step, and a snapshot of the state after it. The row of the step
        before it is written, because its last calls have ended by now."""
        deployment, pipeline = self.deployment, self.parts.pipeline
        deployment.watchdog.begin(f"step {number}")
        deployment.begin_changing()
        pipeline.generate(deployment.config, deployment.roles, number)
        step = pipeline.learn(deployment.config, deployment.roles)
        deployment.snapshots.save(deployment.roles, pipeline.state_after(number))
        self.journal.add_step(step, deployment, self.num_steps)
        return step

    def end_step(self, number: int) -> None:
        """Validate and save if it is due. Otherwise, the last calls of the step may still run in
        the next one."""
        if number == self._start.step:
            self.between.before_first_step(number, self.num_steps)
        else:
            self.between.after_step(number, is_last=number == self.num_steps)

    def build_roles(self, cluster: Cluster, config: Config) -> Roles:
        """Build every role that its pool does not have yet, and wait until they are ready."""
        return self.parts.build_roles(cluster, config)

    @property
    def observer(self) -> Observer:
        """Is told what happens."""
        return self.journal.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self.journal.observer = observer

    @property
    def deployment(self) -> Deployment:
        """The processes of the run, and what runs in them."""
        assert self._deployment is not None, "the run has not started"
        return self._deployment

    @property
    def mover(self) -> Mover:
        """Is asked to move the run while it trains."""
        assert self._mover is not None, "the run has not started"
        return self._mover

    @property
    def between(self) -> BetweenSteps:
        assert self._between is not None, "the run has not started"
        return self._between
