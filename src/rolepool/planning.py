"""A plan and everything that is known about it before a process starts.

Owns which nodes a plan is made for, and that all reasons why it cannot be trained are reported
together. The checks themselves are in `config`, `placement.checks` and `trainer.start_checks`.
Imports neither torch nor Ray.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from rolepool.config import Config, Draft, LoadedConfig
from rolepool.config.base import lines_of
from rolepool.config.fitting import num_gpus
from rolepool.config.schema import correction_in_words, policy_loss_in_words
from rolepool.config.stop_tokens import read_stop_tokens
from rolepool.errors import PlacementError, RolepoolError
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import (
    Replan,
    advise,
    engines_of,
    find_problems,
    find_snapshot_warnings,
    find_warnings,
)
from rolepool.placement.estimate import estimate_memory, snapshot_bytes
from rolepool.placement.plan import Schedule
from rolepool.placement.render import PlanSummary
from rolepool.placement.roles import Role
from rolepool.placement.transfers import transfer_in_words


@dataclass(frozen=True)
class Hardware:
    """The nodes that a plan is made for."""

    inventory: tuple[int, ...] | None
    """The number of GPUs on each node; None if the config says it."""
    gpu_memory_bytes: int | None
    """The memory of one GPU; None if there is none."""

    def fitted(self, loaded: LoadedConfig) -> Config:
        """The config with the number of GPUs of these nodes, if the user did not set one."""
        config = loaded.config
        if "trainer.n_gpus_per_node" in loaded.set_keys:
            return config
        if self.inventory is not None:
            largest = max(self.inventory)
            return config.with_value("trainer.n_gpus_per_node", largest)
        is_for_gpus = self.gpu_memory_bytes is not None
        if config.trainer.device == "auto" and not is_for_gpus and not num_gpus():
            # The plan is not for another machine, and the default is the number of CPU slots.
            return config.with_value("trainer.device", "cpu")
        return config

    def replan(self, loaded: LoadedConfig) -> Replan:
        """What makes plans on the whole inventory, or only on as many nodes and GPUs as the user
        has set."""
        sets_size = loaded.set_keys & {"trainer.nnodes", "trainer.n_gpus_per_node"}
        take_all = self.inventory is not None and not sets_size
        return partial(build_plan, gpus_per_node=self.inventory, take_all=take_all)

    def is_this_machine(self, config: Config) -> bool:
        """Whether a plan is for this machine, or for one that has no more GPUs."""
        if self.inventory is not None:
            return False
        return config.trainer.device == "cpu" or config.trainer.n_gpus_per_node <= num_gpus()


def checked_for_plan(draft: Draft, hardware: Hardware) -> LoadedConfig:
    """The config of a draft without problems. If it has some, ConfigError also has those of the
    plan, and why training would not start."""
    if not draft.problems:
        return draft.loaded
    loaded = draft.loaded
    more = lines_of(
        _plan_problems(loaded, hardware),
        _why_not_started(loaded, hardware),
    )
    return draft.checked(*more)


def summarise(loaded: LoadedConfig, hardware: Hardware) -> PlanSummary:
    """Make the plan of a config, and find out what is known about it."""
    config = hardware.fitted(loaded)
    is_here = hardware.is_this_machine(config)
    reasons = list(_not_implemented(loaded))
    if is_here:
        reasons.extend(_missing_files(loaded))
    replan = hardware.replan(loaded)
    try:
        plan = replan(config)
    except PlacementError as error:
        raise PlacementError([*error.problems, *reasons]) from None
    # The cores of this machine count only if the plan is for it.
    on_cpus = plan.device == "cpu" and hardware.inventory is None
    warnings = [
        *reasons,
        *loaded.warnings,
        *find_warnings(config, plan, on_cpus=on_cpus),
    ]
    summary = summary_of(config, plan, hardware.gpu_memory_bytes, replan, warnings)
    if is_here:
        warnings.extend(find_snapshot_warnings(summary.snapshot_bytes))
    return replace(summary, warnings=warnings)


def summary_of(
    config: Config,
    plan: Plan,
    gpu_memory_bytes: int | None,
    replan: Replan,
    warnings: Sequence[str],
    schedule: Schedule | None = None,
) -> PlanSummary:
    """The summary of a plan. Without a schedule, the step is run on paper."""
    from rolepool.trainer.paper import schedule_of

    if schedule is None:
        schedule = schedule_of(config)
    memory_of_slot = None if plan.device == "cpu" else gpu_memory_bytes
    memory = estimate_memory(config, plan, memory_of_slot)
    return PlanSummary(
        plan,
        overlaps=schedule.overlaps(plan.roles),
        memory=memory,
        problems=find_problems(config, plan),
        warnings=warnings,
        advice=advise(config, plan, memory, gpu_memory_bytes, replan),
        engines=engines_of(config),
        snapshot_bytes=snapshot_bytes(config, plan),
        settings=_settings_to_show(config, plan),
    )


def _settings_to_show(config: Config, plan: Plan) -> dict[str, str]:
    """What is not written in the config as it is, but follows from it and from the model."""
    settings: dict[str, str] = {}
    with suppress(RolepoolError):  # one of the problems
        stop_tokens = read_stop_tokens(config).in_words()
        if stop_tokens:
            settings["stop tokens"] = stop_tokens
    if config.actor_rollout_ref.actor.policy_loss.loss_mode != "vanilla":
        settings["policy loss"] = policy_loss_in_words(config)
    transfer = transfer_in_words(config, plan)
    if transfer is not None:
        settings["new weights"] = transfer
    if config.bypasses_old_log_prob and config.trainer.step is None:
        settings["old log-probs"] = "those of the rollout engine; there is no old_log_prob"
    correction = correction_in_words(config)
    if correction:
        settings["rollout correction"] = correction
    if config.algorithm.max_staleness:
        settings["staleness"] = _staleness_in_words(config, plan)
    if config.algorithm.filter_groups.enable:
        settings["dynamic sampling"] = _filtering_in_words(config)
    return settings


def _filtering_in_words(config: Config) -> str:
    """What `algorithm.filter_groups` does."""
    keys = config.algorithm.filter_groups
    metric = keys.metric or "score"
    what = f"groups whose responses all have the same {metric} are replaced"
    most = "as many batches as it needs"
    if keys.max_num_gen_batches > 0:
        most = f"at most {keys.max_num_gen_batches} batches"
    return f"{what}; a step generates {most} of {config.prompts_of_generation} prompts"


def _staleness_in_words(config: Config, plan: Plan) -> str:
    """What `algorithm.max_staleness` does under this plan."""
    num_steps = config.algorithm.max_staleness
    plural = "s" if num_steps > 1 else ""
    what = f"generation runs {num_steps} step{plural} ahead of training"
    home = plan.roles[Role.Rollout]
    if home != plan.roles[Role.Actor]:
        return what
    return f"{what}; it does not run beside the actor's updates, because both are in {home}"


def _plan_problems(loaded: LoadedConfig, hardware: Hardware) -> Iterator[str]:
    config = hardware.fitted(loaded)
    plan = hardware.replan(loaded)(config)
    yield from find_problems(config, plan)


def _why_not_started(loaded: LoadedConfig, hardware: Hardware) -> Iterator[str]:
    """Why the config of a draft cannot be trained. Some of its keys have no value, and reading one
    of them ends this check."""
    yield from _not_implemented(loaded)
    if hardware.is_this_machine(hardware.fitted(loaded)):
        yield from _missing_files(loaded)


def _not_implemented(loaded: LoadedConfig) -> Iterator[str]:
    for problem in loaded.why_not_trained():
        yield f"training does not start: {problem}"


def _missing_files(loaded: LoadedConfig) -> Iterator[str]:
    """What this machine does not have."""
    from rolepool.trainer.start_checks import named_files_problems

    for problem in named_files_problems(loaded):
        yield f"training does not start: {problem}"
