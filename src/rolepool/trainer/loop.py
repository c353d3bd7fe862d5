"""The training loop: steps, validation, checkpoints and metrics, until the last step or epoch.

Owns the order of things around a step. A step's row is written when its last call has ended, which
is after the next step has begun. Saving and validating wait for that.
"""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from rolepool.cluster import Cluster, Prepared, next_call_number
from rolepool.config import Config, LoadedConfig
from rolepool.data.prompts import PromptLoader, PromptSet, load_tokenizer
from rolepool.errors import ConfigError, PlacementError, WorkerError, one_line
from rolepool.metrics.loggers import Loggers
from rolepool.metrics.run_folder import RunFolder, write_samples
from rolepool.metrics.sampling import pool_utilization
from rolepool.metrics.sharding_times import SHARDING_FILE, ShardingTimes
from rolepool.metrics.spans import Recorded, driver_span
from rolepool.models.checkpoint import remove_unfinished
from rolepool.models.sharding_times import measure_sharding
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.roles import FIRST_OPERATION, ROLE_SPECS
from rolepool.trainer.advantages import Estimator, RepeatedPrompts
from rolepool.trainer.bad_steps import BadSteps
from rolepool.trainer.build import Reward, build_roles, check_inputs, check_prompts
from rolepool.trainer.checkpoint import Checkpoints, Source
from rolepool.trainer.console import NUM_SHOWN_SAMPLES
from rolepool.trainer.console import Observer as Observer
from rolepool.trainer.interrupt import Interrupt
from rolepool.trainer.moves import (
    NUM_CALIBRATION_STEPS,
    Move,
    Rebalancer,
    answer_request,
    changed_pools,
    check_move,
    moved,
    show_progress,
    take_request,
)
from rolepool.trainer.paper import schedule_of, step_of
from rolepool.trainer.pipeline import Pipeline, RunningStep
from rolepool.trainer.rows import (
    NUM_SAMPLES,
    NUM_TRAINING_SAMPLES,
    length_metrics,
    record,
    records_responses,
    samples_of,
    step_row,
    validate,
)
from rolepool.trainer.snapshots import Snapshots
from rolepool.trainer.state import TrainState
from rolepool.trainer.step import TrainedCalls
from rolepool.trainer.supervisor import Death


class Trainer:
    """A training run, from the config to the last step."""

    def __init__(
        self, loaded: LoadedConfig, dtype: torch.dtype = torch.float32, reward: Reward | None = None
    ) -> None:
        self.loaded, self.dtype, self.reward = loaded, dtype, reward
        self.config: Config = loaded.config
        self.observer = Observer()
        self.plan: Plan = build_plan(self.config)
        PlacementError.raise_if_any(find_problems(self.config, self.plan))
        inputs = check_inputs(self.config, self.plan, reward)
        self.num_helpers = inputs.num_helpers
        keys, data = self.config.trainer, self.config.data
        self.tokenizer = load_tokenizer(self.config.actor_rollout_ref.model)
        seed = keys.seed if data.seed is None else data.seed
        prompts = PromptSet("train", self.config, self.tokenizer, reward)
        self.loader = PromptLoader(prompts, data.train_batch_size, seed=seed, shuffle=data.shuffle)
        self.val_prompts = (
            PromptSet("val", self.config, self.tokenizer, reward) if data.val_files else None
        )
        if self.val_prompts is not None:
            self.val_prompts.leave_out(prompts)
        check_prompts(
            self.config, inputs.models, [prompts, *([self.val_prompts] if self.val_prompts else [])]
        )
        self.num_steps = (
            keys.total_training_steps or keys.total_epochs * self.loader.num_steps_per_epoch
        )
        # -1 stays -1, which means never. Without a number it happens once, after the last step.
        self.save_freq = keys.save_freq or self.num_steps
        self.test_freq = keys.test_freq or self.num_steps
        self.estimator = Estimator(self.config)
        self.step = step_of(self.config, self.estimator.needs)
        repeated_prompts = RepeatedPrompts(self.loader, self.config.actor_rollout_ref.rollout.n)
        self.pipeline = Pipeline(self.step, self.estimator, repeated_prompts)
        self.folder = RunFolder(keys.default_local_dir)
        self.checkpoints = Checkpoints(self.config, self.folder, self.plan.roles)
        self.bad_steps = BadSteps(loaded, self.checkpoints)
        self.interrupt = Interrupt()
        self.start_step = self.saved_step = self.num_restarts = 0
        self.validated_step = -1
        self._before: list[Recorded] = []
        self._unfinished: RunningStep | None = None
        """The last step, if its row is not written yet."""
        self._last_row = 0
        self._starter = ThreadPoolExecutor(1)
        self._move: Move | None = None
        """The move whose processes are starting or have started."""
        self.death: Death | None = None
        """How the driver before this one died, if this one was started in its place."""

    def run(self) -> None:
        """Train until the last step. Resumes from a checkpoint if there is one."""
        with self.interrupt.watch(), self.folder.hold():
            saved, position = self.checkpoints.find() or (None, self._position(0))
            self.start_step = position.step
            resumes_here = (
                saved is not None
                and saved.resolve().parent == (self.folder.path / "checkpoints").resolve()
            )
            if not resumes_here:
                self.folder.check_is_ours()
                if self.config.trainer.val_only and self.folder.holds_a_run:
                    what = saved or self.config.actor_rollout_ref.model.path
                    raise ConfigError(
                        f"trainer.val_only=true: {what} would be validated, and trainer.default_local_dir="
                        f"{self.folder.path} holds a run; name another folder, or validate the newest checkpoint of "
                        "that run with trainer.resume_mode=auto"
                    )
            if (
                saved is not None
                and self.start_step >= self.num_steps
                and not self.config.trainer.val_only
            ):
                name = (
                    "total_training_steps"
                    if self.config.trainer.total_training_steps
                    else "total_epochs"
                )
                self.observer.on_notice(
                    f"nothing left to do: {saved} is the checkpoint of step {self.start_step}, and "
                    f"trainer.{name}={self.config.at(f'trainer.{name}')} ends with step {self.num_steps}; raise it to "
                    "continue, or set trainer.resume_mode=disable to start a new run"
                )
                return
            self._last_row = self.start_step
            self.rebalancer = Rebalancer(self)
            try:
                self._run(saved, position, after_step=self.start_step if resumes_here else None)
            finally:  # no process of the run is writing any more
                remove_unfinished(self.folder.path)

    def _run(self, saved: Path | None, position: TrainState, after_step: int | None) -> None:
        """Start the processes, then train. An earlier run is not touched before everything has
        started."""
        if self.save_freq < 0 and not self.config.trainer.val_only:
            lost = "if the driver is killed, all its steps are lost"
            self.observer.on_notice(f"no checkpoint will be saved (trainer.save_freq=-1): {lost}")
        with ExitStack() as cleanup:
            self._start(saved, position, cleanup)
            if (
                after_step is None or not self.config.trainer.val_only
            ):  # a validation is added to its run
                aside = self.folder.begin(after_step)
                if aside is not None:
                    what = (
                        "an earlier run"
                        if after_step is None
                        else f"what came after step {after_step}"
                    )
                    self.observer.on_notice(f"{what} was moved to {aside}")
                self._add_plan(self.start_step + 1)
                if self._sharding.times:
                    self.folder.write(SHARDING_FILE, self._sharding.model_dump_json(indent=2))
            if self.death is not None:
                step = max(self.death.step, self.start_step) + 1
                seconds = time.time() - self.death.time_s
                self.folder.add_event(
                    "restart",
                    step,
                    self.death.what,
                    seconds,
                    repeated_from_step=self.start_step + 1,
                )
            self.loggers = Loggers(self.config, self.folder.path)
            cleanup.callback(self.loggers.close)
            self.watchdog.begin("starting")
            cleanup.callback(self._end_move, "the run has ended")
            self._train()

    def _start(self, saved: Path | None, position: TrainState, cleanup: ExitStack) -> None:
        """Start all processes and build the roles. If a process dies meanwhile, all are started
        again."""
        try:
            self._start_once(saved, position, cleanup)
        except WorkerError as error:
            self.num_restarts += 1
            if not error.is_death or self.num_restarts > self.config.trainer.max_restarts:
                raise
            cleanup.close()
            self.observer.on_notice(f"{error.problems[0]}; starting all processes again")
            self._start(saved, position, cleanup)

    def _start_once(self, saved: Path | None, position: TrainState, cleanup: ExitStack) -> None:
        """Start all processes and build the roles, with the weights of a checkpoint if there is
        one."""
        num_processes = sum(pool.world_size for pool in self.plan.pools.values())
        self.observer.on_phase(
            f"starting {num_processes} process{'es' if num_processes > 1 else ''}"
        )
        keys, ray_init = self.config.trainer, self.config.ray_kwargs.ray_init.model_dump()
        self.cluster = Cluster(
            self.plan,
            **ray_init,
            timeout_s=self.config.placement.timeout_s,
            run_seed=keys.seed,
            deterministic=keys.deterministic,
        )
        cleanup.enter_context(self.cluster)
        self.watchdog = self.cluster.start_watchdog(keys, self.folder.path, self.observer.on_notice)
        self.snapshots = Snapshots(self.config, self.cluster)
        cleanup.callback(self.snapshots.keepers.close)
        self._sharding = self._measure_sharding()
        self.observer.on_phase("loading models")
        self._build_roles()
        self.monitors = self.cluster.start_monitors()  # early, because starting them takes a while
        if self.save_freq > 0 or saved is not None:
            self.checkpoints.check_folder_is_shared(self.roles)
        if saved is not None:
            self.observer.on_notice(f"resuming from step {self.start_step} ({saved})")
        self._load(self.roles.trained, saved, position)

    def _load(
        self, trained: Mapping[str, TrainedCalls], source: Source | None, position: TrainState
    ) -> None:
        """Load a saved state, if there is one, into these roles and the driver. The rollout gets
        its weights, too."""
        if source is not None:
            self.checkpoints.load(trained, source)
        self.pipeline.restore(position)
        for call in self.roles.sync_weights(position.step):
            call.get()

    def _build_roles(self) -> None:
        self.roles = build_roles(
            self.cluster,
            self.config,
            self.num_steps,
            self.dtype,
            self.reward,
            self.num_helpers,
            tell=self.observer.on_notice,
        )

    def _train(self) -> None:
        """Train until the last step. After a death, go on after the last step whose weights were
        kept."""
        number = self.start_step
        self.snapshots.take(self.roles, self._position(number))
        while True:
            try:
                self._end_step(number)
                self._move_if_asked(number)
                if self.config.trainer.val_only or number >= self.num_steps:
                    return
                if self.interrupt.asked and self._unfinished is None and number > self.start_step:
                    break
                self._begin_step(number + 1)
                number += 1
            except WorkerError as error:
                number = self._recover(error)
            except KeyboardInterrupt:
                if not self.interrupt.in_steps:
                    raise
                words = f"the steps after step {self._last_row} were dropped; {self.checkpoints.newest_in_words}"
                raise KeyboardInterrupt(words) from None
        raise KeyboardInterrupt(self._ended_in_words(number))

    def _ended_in_words(self, number: int) -> str:
        if self.saved_step == number:
            key = (
                ""
                if self.config.trainer.resume_mode == "auto"
                else " with trainer.resume_mode=auto"
            )
            return f"step {number} was finished and saved; the same command{key} resumes from it"
        reason = "trainer.save_freq=-1" if self.save_freq < 0 else self.bad_steps.reason
        return f"step {number} was finished and not saved because {reason}; {self.checkpoints.newest_in_words}"

    def _begin_step(self, number: int) -> None:
        """Queue all calls of a step and write the row of the step before it, whose last calls have
        ended by now."""
        self.watchdog.begin(f"step {number}")
        self.pipeline.generate(self.config, self.roles, number)
        running = self.pipeline.learn(self.config, self.roles)
        step, prompts = running.calls, running.prompts
        self.snapshots.take(self.roles, self._position(number))
        if (folder := self.config.trainer.rollout_data_dir) is not None:  # while the updates run
            samples = samples_of(prompts, step.generation, step.estimated.scored, self.tokenizer)
            write_samples("trainer.rollout_data_dir", folder, number, samples)
        if records_responses(number, self.num_steps):
            samples = samples_of(prompts, step.generation, step.estimated.scored, self.tokenizer)
            recorded = list(islice(samples, NUM_TRAINING_SAMPLES))
            self.folder.add_samples(number, recorded, "training_responses")
            if number == self.num_steps and not self._validates_at_the_end:
                self.observer.on_training_samples(number, recorded[:NUM_SHOWN_SAMPLES])
        step.estimated.metrics.update(
            {"training/epoch": float(running.epoch), "training/num_steps": float(self.num_steps)}
        )
        lengths = step.estimated.lengths
        step.estimated.metrics.update(
            length_metrics(self.config, lengths, self.roles.actor.dp_size, number)
        )
        self._finish(following=running)
        self._unfinished = running

    def _end_step(self, number: int) -> None:
        """Validate and save if it is time. Otherwise, the step's last calls may still run in the
        next step."""
        keys = self.config.trainer
        if number == self.start_step:
            if keys.val_only or (
                keys.val_before_train and number == 0 and self.val_prompts is not None
            ):
                self._validate(number)
            if not keys.val_only and not self.interrupt.in_steps:
                self.observer.on_phase(f"training from step {number + 1} to step {self.num_steps}")
                self.interrupt.in_steps = True
            return
        is_last = number == self.num_steps

        def is_due(every: int) -> bool:
            """Whether something that happens every so many steps happens after this one."""
            return every > 0 and (number % every == 0 or is_last)

        validates, saves = is_due(self.test_freq), is_due(self.save_freq)
        if not (validates or saves or is_last or self.interrupt.asked):
            return
        self._finish()
        if validates and not self.interrupt.asked:
            self._validate(number)
        if (saves or (self.save_freq > 0 and self.interrupt.asked)) and not self._save(number):
            self.observer.on_notice(f"step {number} is not saved because {self.bad_steps.reason}")

    @property
    def _validates_at_the_end(self) -> bool:
        return self.val_prompts is not None and self.test_freq > 0

    def _position(self, number: int) -> TrainState:
        return self.pipeline.state_after(number)

    def _recover(self, error: WorkerError) -> int:
        """Replace the processes that died, and load the last state that is complete. Returns its
        step.

        Raises the error if the work would fail again, if it failed too often, or if there is no
        such state.
        """
        start_s, pools = time.monotonic(), list[str]()
        self.num_restarts += 1
        if (
            not error.is_death
        ):  # it may be a consequence of a death, such as weights that did not arrive
            error = self.cluster.find_death() or error
        if not error.is_death or self.num_restarts > self.config.trainer.max_restarts:
            raise error
        try:
            step = self._restore(pools)
        except WorkerError as again:  # another process has died meanwhile
            step = self._recover(again)
        if step is None:
            raise error
        what, seconds = error.problems[0], time.monotonic() - start_s
        replaced = f"replaced {' and '.join(pools)}, and training resumes after step {step}"
        self.observer.on_notice(f"{what}; {replaced} ({seconds:.1f} s)")
        self.folder.add_event(
            "restart", step + 1, what, seconds, pools, repeated_from_step=step + 1
        )
        return step

    def _restore(self, pools: list[str]) -> int | None:
        """Replace the processes that died, and load the last state that is complete. Returns its
        step; None if there is none. Adds the names of the pools that have new processes to
        `pools`."""
        self.watchdog.begin("replacing processes")
        if self.cluster.has_all_nodes:
            pools += self.cluster.repair()
        else:
            self.observer.on_notice(
                f"a node was lost; placement.on_node_loss={self.config.placement.on_node_loss}"
            )
            pools += self._replace_nodes()
        self._build_roles()
        with suppress(WorkerError):  # the step's last calls may be lost; then the step is repeated
            self._finish()
        self._unfinished = None
        return self._load_newest(self.roles.trained, self._last_row)

    def _load_newest(self, trained: Mapping[str, TrainedCalls], most: int) -> int | None:
        """Load the newest complete snapshot of a step up to `most`, or a newer checkpoint, into
        these roles. Returns its step; None if there is none."""
        found: tuple[Source, TrainState] | None = self.snapshots.newest(self.roles, most)
        if found is None or found[1].step < self.saved_step <= most:
            found = self.checkpoints.newest() or found
        if found is None:
            return None
        self._load(trained, *found)
        self.monitors.watch()
        return found[1].step

    def _replace_nodes(self) -> list[str]:
        """Start processes instead of those that were on lost nodes. Returns the names of the pools
        that are new."""
        if self.config.placement.on_node_loss == "wait":
            self.cluster.replace_nodes()
            return self.cluster.repair()
        config = self.config.with_value("trainer.nnodes", self.cluster.num_live_nodes)
        plan = build_plan(config)
        check_move(config, plan, self.cluster.gpu_memory_bytes)
        prepared = self.cluster.prepare(plan, list(plan.pools), ())
        self._switch(prepared, replace(self.loaded, config=config), self._last_row + 1)
        return list(plan.pools)

    def _switch(self, prepared: Prepared, loaded: LoadedConfig, first_step: int) -> None:
        """Go over to the pools of another plan, which holds from this step on."""
        self.cluster.switch(prepared)
        self.loaded, self.config, self.plan = loaded, loaded.config, self.cluster.plan
        self.snapshots.have_moved()
        self._add_plan(first_step)

    def _measure_sharding(self) -> ShardingTimes:
        """Measure what sharding costs on these processes, unless the run is too short to predict
        anything from it.

        On GPUs it is not measured yet: nobody has seen it there, and ranks that wait for a failed
        one would hang.
        """
        is_short = (
            self.config.trainer.val_only
            or self.num_steps - self.start_step <= NUM_CALIBRATION_STEPS
        )
        if is_short or self.cluster.gpu_memory_bytes is not None:
            return ShardingTimes(times=[])
        measured = self.cluster.measure(measure_sharding)
        return ShardingTimes(times=[time for of_group in measured for time in of_group])

    def _add_plan(self, first_step: int) -> None:
        """Record the plan, the schedule and the config of the steps that follow."""
        schedule = None
        with suppress(Exception):  # a step that the user wrote may do more than can be run on paper
            schedule = schedule_of(self.config)
        self.folder.add_plan(first_step, self.plan, schedule)
        self.folder.write("config.yaml", self.loaded.to_yaml())

    def move(self, plan: Plan, loaded: LoadedConfig | None = None) -> Move:
        """Change to another placement after a step, as soon as its processes have started. Training
        goes on meanwhile.

        `loaded` is the config of the plan, if it differs from that of the run. Call it while the
        run trains, from `Observer.on_row` or from another thread. Raises PlacementError if the run
        cannot move there; the run goes on.
        """
        loaded = loaded or self.loaded
        if self._move is not None:
            raise PlacementError("a move is under way; wait until it has ended")
        if plan.pools == self.plan.pools:
            raise PlacementError(f"the run has this placement already ({plan.in_words})")
        check_move(loaded.config, plan, self.cluster.gpu_memory_bytes, before=self.plan)
        names = changed_pools(self.config, self.plan, loaded.config, plan)
        workers = [ROLE_SPECS[role].worker for role in plan.roles]
        self._move = Move(
            loaded, plan, self._starter.submit(self.cluster.prepare, plan, names, workers)
        )
        self.observer.on_notice(f"starting processes for a move to {plan.in_words}")
        return self._move

    def _move_if_asked(self, number: int) -> None:
        """After a step: begin the move that a file or the planner asks for, or change over if its
        processes have started."""
        if self._move is None and number > self.start_step:
            self.rebalancer.after_step(number)
        if self._move is None and (request := take_request(self.folder.path)) is not None:
            try:
                asked = self.move(*moved(self.config, request.words))
                asked.has_request = True
                show_progress(self.folder.path, f"starting processes for {asked.plan.in_words}")
            except Exception as error:  # a strategy or an extension of the user may raise anything
                self._end_move(one_line(error))
        move = self._move
        if move is None or not move.starting.done() or number >= self.num_steps:
            return
        problem = move.starting.exception()
        if problem is not None or (move.has_request and take_request(self.folder.path) is None):
            self._end_move("the request was taken back" if problem is None else one_line(problem))
            return
        prepared = move.starting.result()
        self.watchdog.begin("move")
        show_progress(self.folder.path, f"changing over after step {number}")
        self._finish()
        start_s, before = time.monotonic(), self.plan.in_words
        if not (
            self.snapshots.is_complete(self.roles, self._position(number)) or self._save(number)
        ):
            self._end_move(f"step {number} cannot be saved because {self.bad_steps.reason}")
            return
        self._move = None
        try:
            self._change_over(prepared, move.loaded, number)
        finally:  # if a process dies meanwhile, the run goes on with the new placement
            seconds, what = time.monotonic() - start_s, f"{before} -> {move.plan.in_words}"
            self.folder.add_event(
                "move", number + 1, what, seconds, list(prepared.processes), after_step=number
            )
            self.rebalancer.has_moved(number + 1, seconds)
            words = f"moved after step {number}: {what} ({seconds:.1f} s)"
            self.observer.on_notice(words)
            answer_request(self.folder.path, words)

    def _change_over(self, prepared: Prepared, loaded: LoadedConfig, number: int) -> None:
        """Replace the pools that the move changes. Their models load the state after this step,
        from its snapshot or from a checkpoint."""
        before = self.roles.trained
        self._switch(prepared, loaded, number + 1)
        self._build_roles()
        new = {
            name: role
            for name, role in self.roles.trained.items()
            if role.group is not before[name].group
        }
        if self._load_newest(new, number) != number:
            raise WorkerError(
                f"the snapshot of step {number} was lost during a move", is_death=True
            )

    def _end_move(self, reason: str) -> None:
        """Give up the move that was asked for, and say why."""
        answer_request(self.folder.path, reason, is_refused=True)
        if self._move is not None:
            self.observer.on_notice(f"the run did not move: {reason}")
            self._move.close()
            self._move = None

    def _validate(self, number: int) -> None:
        if self.val_prompts is None or self.validated_step >= number:
            return
        keys = self.config.trainer
        if not self.interrupt.in_steps:
            self.observer.on_phase("validating")
        self.watchdog.begin(f"validation after step {number}")
        metrics, samples, spans = validate(
            self.config, self.roles, self.val_prompts, self.tokenizer
        )
        self.folder.add_spans(Recorded(number, "testing", span) for span in spans)
        if keys.validation_data_dir is not None:
            write_samples("trainer.validation_data_dir", keys.validation_data_dir, number, samples)
        self.folder.add_samples(number, samples[:NUM_SAMPLES])
        self._write(number, metrics)
        self.observer.on_samples(number, samples[:NUM_SAMPLES])
        self.loggers.log_samples(number, samples[: keys.log_val_generations])
        self.validated_step = number

    def _save(self, number: int) -> bool:
        """Save this step, unless it was saved before or is bad. Returns whether it is saved."""
        if self.saved_step >= number or self.bad_steps.reason is not None:
            return self.saved_step >= number
        self.watchdog.begin(f"checkpoint of step {number}")
        with driver_span("save_checkpoint", next_call_number()) as ended:
            self.checkpoints.save(self.roles, self._position(number))
        self.saved_step = number
        self.folder.add_spans([Recorded(number, "save_checkpoint", ended())])
        self._write(number, {"timing_s/save_checkpoint": ended().duration_s})
        return True

    def _finish(self, following: RunningStep | None = None) -> None:
        """Wait for the last calls of the unfinished step and write its row, unless it was written
        before a death."""
        if self._unfinished is None:
            return
        step = self._unfinished.calls
        recorded = record(step)
        generation = following.calls.generation.spans() if following else []
        after = [Recorded(step.number + 1, FIRST_OPERATION, span) for span in generation]
        metrics = step_row(step, recorded, self._before, after, self.plan)
        self._before, self._unfinished = recorded, None
        if step.number <= self._last_row:
            return
        self.folder.add_spans(recorded)
        samples = self.monitors.take()
        self.folder.add_monitor(samples)
        self._write(step.number, {**metrics, **pool_utilization(samples)})
        self._last_row, self.num_restarts = step.number, 0
        self.bad_steps.add(step.number, metrics)

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        self.folder.add_metrics(step, metrics)
        self.loggers.log(step, metrics)
        self.observer.on_row(step, metrics)
