"""Recordings for the planner, read from run folders and console logs.

`rolepool.planner` makes a profile of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rolepool.config import Config, load_config
from rolepool.config.saved import saved_config
from rolepool.errors import ConfigError, first_few
from rolepool.metrics.sharding_times import SHARDING_FILE, ShardingTimes
from rolepool.metrics.spans import DRIVER, RULE_POOL, Recorded, Span
from rolepool.placement import Plan, build_plan
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, Role
from rolepool.planner.profile import SYNC, Recording
from rolepool.report.console_logs import read_logs
from rolepool.report.metrics_by_step import TIMING, MetricsByStep
from rolepool.report.operations import timed_operations
from rolepool.report.run import ReadRun, parts_of, read_run


def read_recordings(paths: Sequence[str | Path], num_gpus: int | None) -> list[Recording]:
    """What runs recorded, one entry for each placement of each run. A console log counts as a run
    on `num_gpus` GPUs of one node, in one pool."""
    recordings: list[Recording] = []
    for path in map(Path, paths):
        if path.is_dir():
            recordings += recordings_of(read_run(path))
        else:
            recordings += _recordings_of_log(path, num_gpus)
    identities = {identity_of(recording.config) for recording in recordings}
    if len(identities) > 1:
        problem = "the runs have different models or devices, so they are not one profile"
        raise ConfigError(f"predict: {problem}; give runs of the same models on the same device")
    return recordings


def recordings_of(run: ReadRun) -> list[Recording]:
    """What a run recorded with each of its placements."""
    parts = [part for part in parts_of(run) if part.plans and part.spans]
    if not run.config or not parts:
        raise ConfigError(
            f"run {run.folder}: has no config, plan or spans, so nothing can be predicted from it"
        )
    loaded = saved_config(run.config, run.folder)
    if loaded.unknown_names:
        names = first_few(loaded.unknown_names, 3)
        fix = "if you trust its extensions, name them: --set trainer.extensions=[...]"
        raise ConfigError(
            f"run {run.folder}: {names}: not known, and what a run names is not imported; {fix}"
        )
    config = loaded.config
    measured = run.read_whole(SHARDING_FILE, ShardingTimes.model_validate_json)
    sharding = measured.times if measured is not None else []
    recordings = []
    for part in parts:
        (planned,) = part.plans
        recording = Recording(
            config=config,
            plan=planned.plan,
            spans=part.spans,
            sharding=sharding,
        )
        recordings.append(recording)
    return recordings


def identity_of(config: Config) -> tuple[str | None, ...]:
    """What runs of one profile have in common: the device, and the paths of all models."""
    paths = [config.at(spec.model).path for spec in ROLE_SPECS.values()]
    return config.trainer.device, *paths


def _recordings_of_log(path: Path, num_gpus: int | None) -> Iterator[Recording]:
    """A console log as recordings, one for each run in it."""
    logs = read_logs([path])
    if num_gpus is None:
        raise ConfigError(
            f"predict {path}: a console log does not tell the number of GPUs; give it with --gpus"
        )
    for metrics in logs.values():
        config = _config_of_log(metrics, num_gpus)
        plan = build_plan(config)
        spans = _spans_of_log(metrics, config, plan, num_gpus)
        yield Recording(config, plan, spans)


def _config_of_log(metrics: MetricsByStep, num_gpus: int) -> Config:
    """A config whose step has the operations that a log has times of."""
    has_reference = any(f"{TIMING}ref" in row for row in metrics.values())
    words = [
        f"trainer.n_gpus_per_node={num_gpus}",
        "trainer.device=cuda",
        f"actor_rollout_ref.actor.use_kl_loss={has_reference}",
    ]
    if "values" not in timed_operations(metrics):
        # Without a critic, groups of responses are compared.
        words += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
    return load_config([], words).config


def _spans_of_log(
    metrics: MetricsByStep,
    config: Config,
    plan: Plan,
    num_gpus: int,
) -> list[Recorded]:
    """One call of each operation in each step, one after another."""
    timed = timed_operations(metrics)
    operations = [name for name in OPERATIONS if name in timed or name == SYNC]
    roles: dict[str, Role] = {}
    for spec_role, spec in ROLE_SPECS.items():
        for operation in spec.operations:
            roles[operation.name] = spec_role
    num_rows = config.rows_of_step // num_gpus

    spans: list[Recorded] = []
    now_s = 0.0
    for step, row in metrics.items():
        if not _is_finite(row):
            continue
        num_tokens_of_step = int(row.get("perf/total_num_tokens", 1.0))
        num_tokens = num_tokens_of_step // num_gpus
        for name in operations:
            seconds = row.get(f"{TIMING}{name}", 0.0)
            role = roles.get(name)
            if role is None:
                pool = DRIVER
            else:
                pool = plan.roles.get(role, RULE_POOL)
            call = len(spans)
            span = Span(
                pool=pool,
                role=role or "trainer",
                rank=0,
                method=name,
                queued_s=now_s,
                start_s=now_s,
                end_s=now_s + seconds,
                call=call,
                after=(call - 1,),
                num_rows=num_rows,
                num_tokens=num_tokens,
            )
            spans.append(Recorded(step, name, span))
            now_s += seconds
    return spans


def _is_finite(row: Mapping[str, float]) -> bool:
    """Whether all times of a step, and its amounts of work, are numbers."""
    for name, value in row.items():
        is_needed = name.startswith((TIMING, "perf/"))
        if is_needed and not math.isfinite(value):
            return False
    return True
