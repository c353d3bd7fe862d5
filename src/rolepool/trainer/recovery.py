"""The way back to a state: what happened to a run, and the deployment that has the newest state then.

There is one way for a start, the death of a process, the loss of a node, and a move: open or keep
the pools of a plan, find the newest complete state, and restore it. Owns how often a run may die
without a new step. A driver that died is a start, from a checkpoint. A stalled process is killed by
the watchdog, and then it is a death.
"""

import time
from contextlib import ExitStack, suppress

from rolepool.cluster.begin import Begun
from rolepool.errors import WorkerError
from rolepool.trainer.beginning import StartPoint
from rolepool.trainer.deployment import Build, Deployment
from rolepool.trainer.mover import Move
from rolepool.trainer.parts import RunParts
from rolepool.trainer.stores import Beginning, Saved


class Recovery:
    """Brings the driver and a deployment to a state, together."""

    def __init__(self, parts: RunParts, build: Build, begun: Begun | None = None) -> None:
        self._parts = parts
        self._build = build
        self._begun = begun
        """Processes that are starting already; None if there are none, or none any more."""
        self._keys = parts.config.trainer
        self._pipeline = parts.pipeline
        self._checkpoints = parts.checkpoints
        self._journal = parts.journal
        self._num_deaths = 0
        """Since the last new row."""
        self._last_step = 0
        """The step of that row."""

    # What can happen

    def start(self, start: StartPoint, cleanup: ExitStack, *, measures: bool) -> Deployment:
        """Start all processes. If one dies meanwhile, all are started again. With `measures`, they
        measure what sharding costs before they load models."""
        try:
            deployment = cleanup.enter_context(self._open())
            if measures:
                deployment.measure_sharding()
            self._journal.begin_phase("loading models")
            checkpoint = start.checkpoint
            if self._checkpoints.are_saved or checkpoint is not None:
                self._checkpoints.check_folder_is_shared(deployment.trained_groups)
            if checkpoint is not None:
                self._journal.notice(f"resuming from step {start.step} ({checkpoint.path})")
            state = checkpoint or Beginning(self._pipeline.state_after(0))
            self._restore(deployment, state)
            return deployment
        except WorkerError as error:
            self._count(error)
            cleanup.close()
            self._journal.notice(f"{error.problems[0]}; starting all processes again")
            return self.start(start, cleanup, measures=measures)

    def recover(self, deployment: Deployment, error: WorkerError) -> int:
        """Replace the processes that died, and go back to the newest complete state. Returns its
        step.

        Raises the error if the work would fail again, if it failed too often, or if there is no
        such state.
        """
        start_s = time.monotonic()
        if not error.is_death:
            # It may be a consequence of a death, such as weights that did not arrive.
            error = deployment.cluster.find_death() or error
        self._count(error)
        pools: list[str] = []
        try:
            state = self._replace(deployment, pools)
        except WorkerError as another:  # another process has died meanwhile
            step = self.recover(deployment, another)
        else:
            if state is None:
                raise error
            step = state.state.step
        what = error.problems[0]
        seconds = time.monotonic() - start_s
        names = " and ".join(pools)
        replaced = f"replaced {names}, and training resumes after step {step}"
        self._journal.notice(f"{what}; {replaced} ({seconds:.1f} s)")
        self._journal.add_restart(step, what, seconds, pools)
        return step

    def _replace(self, deployment: Deployment, pools: list[str]) -> Saved | None:
        """Replace the processes that died. Adds the names of their pools to `pools`, also if
        another process dies meanwhile. Returns the state that was restored, if there is one."""
        journal = self._journal
        deployment.watchdog.begin("replacing processes")
        plan_before = deployment.plan
        pools += deployment.repair()
        if deployment.plan is not plan_before:
            journal.add_plan(journal.last_step + 1, deployment)
        # The step's last calls may be lost. Then the step is repeated.
        with suppress(WorkerError):
            journal.finish_step(deployment)
        journal.drop_step()
        state = self._newest(deployment, journal.last_step)
        if state is not None:
            self._restore(deployment, state)
        return state

    def move(self, deployment: Deployment, move: Move, step: int) -> None:
        """Change to the plan of a move after this step, whose state is saved. Roles in the pools
        that are kept have this state already."""
        prepared = move.starting.result()
        deployment.switch(prepared, move.loaded)
        self._journal.add_plan(step + 1, deployment)
        state = self._newest(deployment, step)
        if state is None or state.state.step != step:
            problem = f"the snapshot of step {step} was lost during a move"
            raise WorkerError(problem, is_death=True)
        self._restore(deployment, state)

    def _open(self) -> Deployment:
        """Start the processes that the config asks for."""
        parts = self._parts
        num_processes = sum(pool.world_size for pool in parts.plan.pools.values())
        plural = "es" if num_processes > 1 else ""
        begun = self._begun
        self._begun = None  # if one of them dies, all are started again
        verb = "starting" if begun is None else "waiting for"
        self._journal.begin_phase(f"{verb} {num_processes} process{plural}")
        return Deployment(
            parts.loaded,
            build=self._build,
            run_folder=parts.folder.path,
            tell=self._journal.notice,
            helpers=parts.helpers,
            begun=begun,
        )

    # The way back

    def _newest(self, deployment: Deployment, at_most: int) -> Saved | None:
        """The newest complete state of a step up to `at_most`: a snapshot, or a checkpoint that is
        newer."""
        groups = deployment.trained_groups
        snapshot = deployment.snapshots.newest(groups, at_most)
        if snapshot is not None and snapshot.state.step >= self._checkpoints.saved_step:
            return snapshot
        return self._checkpoints.newest(groups, at_most) or snapshot

    def _restore(self, deployment: Deployment, saved: Saved) -> None:
        """Bring the models and the driver to a state."""
        deployment.restore(saved)
        pipeline = self._pipeline
        last_step = self._parts.num_steps
        pipeline.restore(deployment.config, saved.state, saved.queue, last_step)
        if pipeline.notice is not None:
            self._journal.notice(pipeline.notice)

    def _count(self, error: WorkerError) -> None:
        """Count a death. Raises the error if it is none, or one too many without a new row."""
        last_step = self._journal.last_step
        if last_step > self._last_step:
            self._last_step = last_step
            self._num_deaths = 0
        self._num_deaths += 1
        if not error.is_death or self._num_deaths > self._keys.max_restarts:
            raise error
