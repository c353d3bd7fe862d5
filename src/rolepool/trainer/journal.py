"""The journal of a run: everything that it writes into its folder and tells its observer.

Owns rows of metrics, spans, events, samples of texts, the plan of each step, and when a row is
written. The row of a step is written when the step's last call has ended, which is after the next
step has begun. Until then the step is unfinished, and its row may be lost with a process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.metrics.loggers import Loggers
from rolepool.metrics.run_folder import RunFolder, write_samples
from rolepool.metrics.sampling import pool_utilization
from rolepool.metrics.sharding_times import SHARDING_FILE
from rolepool.metrics.spans import Recorded, Span, preparation_times
from rolepool.metrics.start_times import START_FILE
from rolepool.protocol.batches import Sizes
from rolepool.trainer.bad_steps import BadSteps
from rolepool.trainer.console import NUM_SHOWN_SAMPLES, Observer, Sample
from rolepool.trainer.paper import schedule_of
from rolepool.trainer.phases import Phases
from rolepool.trainer.pipeline import RunningStep
from rolepool.trainer.rows import (
    group_metrics,
    length_metrics,
    record,
    record_ahead,
    staleness_metrics,
    step_row,
)
from rolepool.trainer.samples import NUM_TRAINING_SAMPLES, records_responses, samples_of
from rolepool.trainer.validation import NUM_SAMPLES

if TYPE_CHECKING:
    from rolepool.trainer.deployment import Deployment
    from rolepool.trainer.supervisor import Death

MIN_TOLD_S = 0.5
"""Compiling or capturing that took less time is only in the spans."""


class Journal:
    """What a run writes and tells. After `begin`, the folder is this run's."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        tokenizer: PreTrainedTokenizerBase,
        bad_steps: BadSteps,
    ) -> None:
        self.folder = folder
        self.observer = Observer()
        self.phases = Phases()
        """Those of the start, until the first step."""
        self.last_step = 0
        """The last step whose row is written, or the step from which the run resumed."""
        self._config = config
        self._tokenizer = tokenizer
        self._bad_steps = bad_steps
        self._loggers: Loggers | None = None
        """None before `begin`."""
        self._unfinished: RunningStep | None = None
        """The last step, if its row is not written yet."""
        self._before: list[Recorded] = []
        """The spans of the step before the unfinished one."""

    def notice(self, line: str) -> None:
        """Tell the observer a line."""
        self.observer.on_notice(line)

    # The run as a whole

    def begin_phase(self, what: str) -> None:
        """The next part of the start begins."""
        self.phases.begin(what)
        self.observer.on_phase(what)

    def end_start(self, deployment: Deployment, what: str) -> None:
        """The steps begin, and `what` says which. Record how long the start took."""
        self.phases.end()
        self.folder.write(START_FILE, self.phases.times(deployment).model_dump_json(indent=2))
        self.observer.on_phase(what)

    def begin(
        self,
        after_step: int | None,
        deployment: Deployment,
        death: Death | None,
    ) -> None:
        """Begin to write. What an earlier run wrote after this step is moved aside; None moves the
        whole run. `death` is that of the driver before this one, if there was one."""
        adds_a_validation = self._config.trainer.val_only and after_step is not None
        if not adds_a_validation:
            aside = self.folder.begin(after_step)
            if aside is not None:
                what = "an earlier run"
                if after_step is not None:
                    what = f"what came after step {after_step}"
                self.notice(f"{what} was moved to {aside}")
            self.add_plan(self.last_step + 1, deployment)
            if deployment.sharding.times:
                self.folder.write(SHARDING_FILE, deployment.sharding.model_dump_json(indent=2))
        if death is not None:
            self._add_driver_restart(death)
        self._loggers = Loggers(self._config, self.folder.path)

    def add_plan(self, first_step: int, deployment: Deployment) -> None:
        """Record the plan, the schedule and the config of the steps that follow."""
        schedule = None
        with suppress(Exception):  # a step that the user wrote may do more than can be run on paper
            schedule = schedule_of(deployment.config)
        self.folder.add_plan(first_step, deployment.plan, schedule)
        self.folder.write("config.yaml", deployment.loaded.to_yaml())

    def close(self) -> None:
        if self._loggers is not None:
            self._loggers.close()

    # Steps

    def add_step(self, step: RunningStep, deployment: Deployment, num_steps: int) -> None:
        """A step whose calls are all queued. It is unfinished from now on. The step before it is
        finished, because its last calls have ended by now."""
        estimated = step.calls.estimated
        self._add_texts(step, num_steps)
        metrics = estimated.metrics
        metrics["training/epoch"] = float(step.epoch)
        metrics["training/num_steps"] = float(num_steps)
        metrics.update(group_metrics(step.groups))
        versions = estimated.sizes.weights_version
        if step.results is not None:
            versions = Sizes.of(step.results.rollouts).weights_version
        metrics.update(
            staleness_metrics(
                step.calls.number,
                versions,
                critic_warmup=self._config.trainer.critic_warmup,
            )
        )
        metrics.update(
            length_metrics(
                self._config,
                estimated.lengths,
                num_ranks=deployment.roles.actor.dp_size,
                step=step.calls.number,
            )
        )
        self.finish_step(deployment, following=step)
        self._unfinished = step

    def _add_texts(self, step: RunningStep, num_steps: int) -> None:
        """Write responses of a step while its updates run: all of them if a key asks for them, and
        a few of them in some steps."""
        number = step.calls.number
        folder = self._config.trainer.rollout_data_dir
        if folder is not None:
            all_samples = self._samples_of(step)
            write_samples("trainer.rollout_data_dir", folder, number, all_samples)
        if not records_responses(number, num_steps):
            return
        few = list(islice(self._samples_of(step), NUM_TRAINING_SAMPLES))
        self.folder.add_samples(number, few, "training_responses")
        is_last = number == num_steps
        if is_last and not self._validates_at_the_end:
            shown = few[:NUM_SHOWN_SAMPLES]
            self.observer.on_training_samples(number, shown)

    def _samples_of(self, step: RunningStep) -> Iterator[Sample]:
        calls = step.calls
        return samples_of(
            prompts=step.prompts,
            rollouts=calls.generation,
            scored=calls.estimated.scored,
            tokenizer=self._tokenizer,
        )

    @property
    def _validates_at_the_end(self) -> bool:
        if not self._config.data.val_files:
            return False
        # None means once, after the last step.
        test_freq = self._config.trainer.test_freq
        return test_freq is None or test_freq > 0

    @property
    def is_finished(self) -> bool:
        """Whether the rows of all steps are written."""
        return self._unfinished is None

    def finish_step(self, deployment: Deployment, following: RunningStep | None = None) -> None:
        """Wait for the last calls of the unfinished step and write its row, unless it was written
        before a death. Raises DivergedError if the training has diverged."""
        if self._unfinished is None:
            return
        step = self._unfinished.calls
        recorded = record(step)
        ahead = record_ahead(self._unfinished)
        after: list[Recorded] = []
        if following is not None:
            operation, first_call = following.calls.first_after(step.last_number)
            for span in first_call.spans():
                after.append(Recorded(step.number + 1, operation, span))
        metrics = step_row(
            step,
            recorded,
            before=self._before,
            after=after,
            plan=deployment.plan,
            ahead=ahead,
        )
        self._before = [*recorded, *ahead]
        self._unfinished = None
        self._tell_preparations(f"step {step.number}", [line.span for line in recorded])
        if step.number <= self.last_step:
            return
        self.folder.add_spans(recorded)
        samples = deployment.monitors.take()
        self.folder.add_monitor(samples)
        utilization = pool_utilization(samples)
        self._write(step.number, {**metrics, **utilization})
        self.last_step = step.number
        self._bad_steps.add(step.number, metrics)

    def _tell_preparations(self, when: str, spans: Sequence[Span]) -> None:
        """Say how much of the time was compiling and capturing, if it was worth a line. Later
        steps do not need it again."""
        times = preparation_times(spans)
        long_times = [
            f"{name} {seconds:.1f} s" for name, seconds in times.items() if seconds >= MIN_TOLD_S
        ]
        if long_times:
            self.notice(f"in {when}, once: {', '.join(long_times)}")

    def drop_step(self) -> None:
        """The unfinished step is lost, and will be repeated."""
        self._unfinished = None

    # Between steps

    def add_validation(
        self,
        number: int,
        metrics: dict[str, float],
        samples: Sequence[Sample],
        spans: Sequence[Span],
    ) -> None:
        """The result of a validation after this step."""
        keys = self._config.trainer
        self._tell_preparations("the validation", spans)
        self.folder.add_spans(Recorded(number, "testing", span) for span in spans)
        folder = keys.validation_data_dir
        if folder is not None:
            write_samples("trainer.validation_data_dir", folder, number, samples)
        few = list(samples[:NUM_SAMPLES])
        self.folder.add_samples(number, few)
        self._write(number, metrics)
        self.observer.on_samples(number, few)
        if self._loggers is not None:
            logged = samples[: keys.log_val_generations]
            self._loggers.log_samples(number, logged)

    def add_checkpoint(self, number: int, span: Span) -> None:
        """A checkpoint was saved after this step."""
        self.folder.add_spans([Recorded(number, "save_checkpoint", span)])
        self._write(number, {"timing_s/save_checkpoint": span.duration_s})

    # Events

    def add_restart(self, step: int, what: str, seconds: float, pools: Sequence[str] = ()) -> None:
        """Something died, and the steps after this one are repeated."""
        next_step = step + 1
        self.folder.add_event(
            "restart",
            next_step,
            what,
            seconds,
            pools,
            repeated_from_step=next_step,
        )

    def _add_driver_restart(self, death: Death) -> None:
        seconds = time.time() - death.time_s
        last_completed_step = max(death.step, self.last_step)
        self.folder.add_event(
            "restart",
            last_completed_step + 1,
            death.what,
            seconds,
            repeated_from_step=self.last_step + 1,
        )

    def add_move(self, step: int, what: str, seconds: float, pools: Sequence[str]) -> None:
        """The run has moved after this step."""
        self.folder.add_event("move", step + 1, what, seconds, pools, after_step=step)

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        self.folder.add_metrics(step, metrics)
        if self._loggers is not None:
            self._loggers.log(step, metrics)
        self.observer.on_row(step, metrics)
