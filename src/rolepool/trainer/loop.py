"""The training loop: steps, validation, metrics, until the prompts or the steps are used up.

Owns the order of things around a step. A step's row is written when its last call has ended, which is after the next
step has begun; saving and validating wait for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rolepool.cluster import Cluster
from rolepool.config import Config, LoadedConfig
from rolepool.data import PromptLoader, PromptSet, train_prompts, val_prompts, validation_batches
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError, PlacementError
from rolepool.metrics.run_folder import RunFolder, console_line
from rolepool.metrics.timing import operation_times, per_token_times
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.trainer.advantages import Estimator, repeated
from rolepool.trainer.build import Roles, build_roles
from rolepool.trainer.step import StepCalls, ppo_step

logger = logging.getLogger(__name__)

Report = Callable[[int, dict[str, float]], None]
"""Called with every row of metrics as it is written."""


@dataclass
class _Unfinished:
    """A step whose last calls may still run, and when its generation began."""

    number: int
    epoch: int
    calls: StepCalls


class Trainer:
    """A run: from a config to its last step."""

    def __init__(self, loaded: LoadedConfig, report: Report | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.loaded = loaded
        self.config: Config = loaded.config
        self.report = report or (lambda step, metrics: None)
        self.dtype = dtype
        self.plan: Plan = build_plan(self.config)
        problems = find_problems(self.config, self.plan)
        if problems:
            raise PlacementError(problems)
        keys = self.config.actor_rollout_ref.model
        tokenizer = load_tokenizer(keys.path, trust_remote_code=keys.trust_remote_code)
        self.loader = self._make_loader(train_prompts(self.config, tokenizer))
        self.val_prompts = val_prompts(self.config, tokenizer) if self.config.data.val_files else None
        self.num_steps = self.config.trainer.total_training_steps or (
            self.config.trainer.total_epochs * self.loader.num_steps_per_epoch
        )
        self.folder = RunFolder(self.config.trainer.default_local_dir)
        self.estimator = Estimator(self.config)

    def _make_loader(self, prompts: PromptSet) -> PromptLoader:
        data = self.config.data
        if len(prompts) < data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size={data.train_batch_size}: there are {len(prompts)} training "
                "prompts; use at most that"
            )
        seed = self.config.trainer.seed if data.seed is None else data.seed
        return PromptLoader(prompts, data.train_batch_size, seed=seed, shuffle=data.shuffle)

    def run(self) -> None:
        """Train to the last step."""
        self.folder.write("config.yaml", self.loaded.to_yaml())
        self.folder.write("plan.json", self.plan.model_dump_json(indent=2))
        ray_init = self.config.ray_kwargs.ray_init
        with Cluster(
            self.plan,
            address=ray_init.address,
            num_cpus=ray_init.num_cpus,
            timeout_s=self.config.placement.timeout_s,
            run_seed=self.config.trainer.seed,
        ) as cluster:
            roles = build_roles(cluster, self.config, self.plan, self.num_steps, self.dtype)
            for call in roles.sync_weights(0):
                call.get()
            self._train(roles)

    def _train(self, roles: Roles) -> None:
        keys = self.config.trainer
        if self.val_prompts is not None and (keys.val_before_train or keys.val_only):
            self._write(0, self.validate(roles))
        if keys.val_only:
            return
        unfinished: _Unfinished | None = None
        for number in range(1, self.num_steps + 1):
            epoch = self.loader.epoch
            prompts = repeated(self.loader.next_batch(), self.config.actor_rollout_ref.rollout.n)
            calls = ppo_step(self.config, roles, self.estimator, prompts, number)
            if unfinished is not None:
                self._finish(unfinished, calls)
            unfinished = _Unfinished(number, epoch, calls)
            is_last = number == self.num_steps
            if self._is_time_to(keys.test_freq, number) or is_last:
                self._finish(unfinished, None)
                unfinished = None
                if self.val_prompts is not None and self._is_time_to(keys.test_freq, number, is_last):
                    self._write(number, self.validate(roles))

    @staticmethod
    def _is_time_to(frequency: int, number: int, is_last: bool = False) -> bool:
        return frequency > 0 and (number % frequency == 0 or is_last)

    def validate(self, roles: Roles) -> dict[str, float]:
        """The mean score of responses to the validation prompts, by data source."""
        assert self.val_prompts is not None
        start = time.monotonic()
        by_source: dict[str, list[float]] = {}
        for batch in validation_batches(self.val_prompts, self.config.data.val_batch_size):
            rows = repeated(batch, self.config.actor_rollout_ref.rollout.val_kwargs.n)
            rollouts = roles.rollout.generate_sequences(rows, purpose="validate")
            scores = roles.reward.compute_scores(rollouts.union(rows)).get(keys=["token_level_scores"])
            for source, score in zip(
                rows.non_tensor_batch["data_source"],
                scores.batch["token_level_scores"].sum(dim=1).tolist(),
                strict=True,
            ):
                by_source.setdefault(source, []).append(score)
        metrics = {f"val-core/{source}/reward/mean": sum(all_) / len(all_) for source, all_ in by_source.items()}
        return {**metrics, "timing_s/testing": time.monotonic() - start}

    def _finish(self, step: _Unfinished, following: StepCalls | None) -> None:
        """Wait for a step's last calls and write its row. It ends where the next step's generation starts."""
        spans = {name: [call.spans() for call in calls] for name, calls in step.calls.calls.items()}
        metrics: dict[str, float] = {"training/global_step": step.number, "training/epoch": step.epoch}
        for name in ("update_critic", "update_actor"):
            rows = [call.get()[0] for call in step.calls.calls[name]]
            for key in rows[0] if rows else ():
                metrics[key] = sum(row[key] for row in rows) / len(rows)
        metrics.update(step.calls.estimated.metrics)
        times = operation_times(spans)
        every = [span for calls in spans.values() for call in calls for span in call]
        start = min(span.start_s for span in every)
        after = [span.start_s for span in following.calls["gen"][0].spans()] if following else []
        times["timing_s/step"] = min(after) - start if after else max(span.end_s for span in every) - start
        tokens = metrics["perf/total_num_tokens"]
        metrics.update(times)
        metrics.update(per_token_times(times, tokens))
        metrics["perf/time_per_step"] = times["timing_s/step"]
        metrics["perf/throughput"] = (
            tokens / times["timing_s/step"] / sum(pool.world_size for pool in self.plan.pools.values())
        )
        for name, calls in spans.items():
            for call in calls:
                self.folder.add_spans(step.number, name, call)
        self._write(step.number, metrics)

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        self.folder.add_metrics(step, metrics)
        self.folder.add_log(console_line(step, metrics))
        self.report(step, metrics)
