"""Advice for a plan that does not fit in memory: overrides that were tried on the estimate and help.

Owns the list of changes to try. The effect of every override that is advised was computed; none is a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rolepool.config import Config
from rolepool.config.consistency import contradictions
from rolepool.config.loading import show
from rolepool.errors import RolepoolError
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import GIB, MemoryEstimate, estimate_memory, peak_by_role
from rolepool.placement.plan import Plan
from rolepool.placement.roles import ROLE_SPECS, Role
from rolepool.placement.strategies import build_plan

MAX_ADVICE = 4
MAX_COMBINED = 4
"""Most changes that are combined if no single one is enough."""
MIN_SAVED_BYTES = GIB // 10
"""A smaller saving does not show in the printed figures."""

Changes = dict[str, Any]
"""New values by key."""


@dataclass(frozen=True)
class Advice:
    """Changes, and the most bytes by which a pool would still be over its limit (0: everything fits)."""

    changes: Changes
    excess: int

    @property
    def override(self) -> str:
        """The changes as arguments of the command line."""
        return " ".join(f"{key}={show(value)}" for key, value in self.changes.items())


def advise(
    config: Config, plan: Plan, estimate: MemoryEstimate, gpu_memory_bytes: int | None, replan: Callable[[Config], Plan]
) -> list[Advice]:
    """The changes with which the plan comes closest to fitting, best first and one per key; empty if it fits.

    `replan` makes the plan of a changed config on the same nodes. If no single change is enough, changes are added one
    by one, the most helpful first, and the sum is advised if everything fits with it.
    """
    if not estimate.excess:
        return []
    trials = _Trials(config, gpu_memory_bytes, replan, frozenset(find_problems(config, plan)))
    known_roles = _known_roles(estimate)

    def helpful(base: Advice) -> list[Advice]:
        candidates = ({**base.changes, **changes} for changes in _candidates(config, plan))
        most = max(0, base.excess - MIN_SAVED_BYTES)
        found = [
            Advice(changes, trial.excess)
            for changes, trial in trials.of(candidates)
            # A role whose memory becomes unknown would hide that its pool does not fit.
            if trial.excess <= most and known_roles <= _known_roles(trial)
        ]
        return sorted(found, key=lambda advice: advice.excess)

    best = helpful(Advice({}, estimate.excess))
    singles: dict[tuple[str, ...], Advice] = {}
    for advice in best:
        singles.setdefault(tuple(advice.changes), advice)
    for _ in range(MAX_COMBINED - 1):
        if best and best[0].excess:
            best = helpful(best[0])
    combined = [advice for advice in best[:1] if not advice.excess and tuple(advice.changes) not in singles]
    return [*combined, *singles.values()][:MAX_ADVICE]


def roomier_divisions(config: Config, role: Role) -> list[str]:
    """The override that divides the same GPUs so that `role` needs less memory and no pool has a higher peak than now.

    For a role that ran out of memory, whatever the estimate said. At most one: the one with the lowest peak.
    """
    trials = _Trials(config, 0, build_plan, frozenset())  # 0: the least memory that every role needs
    # For each override, the peak while the role computes, and the highest peak of all pools. "" is the config as it is.
    peaks: dict[str, tuple[int, int]] = {}
    for changes, trial in trials.of([{}, *_divisions(config)]):
        for pool in trial.pools.values():
            if role in pool.roles and not trial.unknown:
                highest = max(other.peak for other in trial.pools.values())
                peaks[Advice(changes, 0).override] = peak_by_role(pool.roles)[role], highest
    now = peaks.get("", (0, 0))
    better = [
        (highest, override)
        for override, (of_role, highest) in peaks.items()
        if now[0] - of_role >= MIN_SAVED_BYTES and highest <= now[1]
    ]
    return [override for _, override in sorted(better)[:1]]


@dataclass(frozen=True)
class _Trials:
    """Estimates of a config with changes."""

    config: Config
    gpu_memory_bytes: int | None
    replan: Callable[[Config], Plan]
    problems: frozenset[str]
    """The failed checks of the unchanged plan."""
    plans: dict[str, Plan | None] = field(default_factory=dict)
    """Plans by placement, because a plan of many nodes takes time and no other change moves a role."""

    def of(self, candidates: Iterable[Changes]) -> Iterator[tuple[Changes, MemoryEstimate]]:
        """The estimate with each of the changes. Skips those that contradict other keys or fail another check."""
        for changes in candidates:
            config = self.config
            for key, value in changes.items():
                config = config.with_value(key, value)
            placement = config.placement.model_dump_json()
            if placement not in self.plans:
                self.plans[placement] = None
                with suppress(RolepoolError):
                    self.plans[placement] = self.replan(config)
            plan = self.plans[placement]
            if plan is None or any(contradictions(config)) or set(find_problems(config, plan)) - self.problems:
                continue
            yield changes, estimate_memory(config, plan, self.gpu_memory_bytes)


def _known_roles(estimate: MemoryEstimate) -> set[Role]:
    """The roles of all pools whose memory is known."""
    return {role for pool in estimate.pools.values() for role in pool.roles}


def _candidates(config: Config, plan: Plan) -> Iterator[Changes]:
    """Smaller micro-batches, recomputed activations, offload, tensor parallelism, a smaller cache, other divisions."""
    specs = [ROLE_SPECS[role] for role in plan.roles]
    for _, keys in (batched for spec in specs for batched in spec.batched):
        key = keys.tokens if config.at(keys.by_tokens) else keys.rows
        size = config.at(key) or 1
        while size > 1:
            size //= 2
            yield {key: size}
    for spec in specs:
        if spec.is_trained:
            yield {f"{spec.model}.enable_gradient_checkpointing": True}
            yield {f"{spec.fsdp}.optimizer_offload": True}
            yield {f"{spec.fsdp}.param_offload": True, f"{spec.fsdp}.optimizer_offload": True}
        elif spec.fsdp is not None:
            yield {f"{spec.fsdp}.param_offload": True}
    yield {"actor_rollout_ref.rollout.free_cache_engine": True}
    for spec in specs:
        if spec.tensor_parallel is not None:
            yield from ({spec.tensor_parallel: num_ranks} for num_ranks in (2, 4, 8))
    yield from ({"actor_rollout_ref.rollout.gpu_memory_utilization": part} for part in (0.4, 0.3, 0.2))
    yield from _divisions(config)


def _divisions(config: Config) -> Iterator[Changes]:
    """Other ways to divide the same GPUs."""
    yield {"placement.strategy": "standard"}
    yield {"placement.strategy": "split"}
    for actor_gpus in range(1, min(config.trainer.n_gpus_per_node, 9)):
        yield {"placement.strategy": "split", "placement.split.actor_gpus_per_node": actor_gpus}
