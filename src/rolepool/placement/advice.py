"""What to change when a pool does not fit: overrides that were tried on the estimate and help.

Owns the list of things to try. Every piece of advice is one or more `key=value` whose effect was computed, never a
guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolepool.config import Config
from rolepool.config.consistency import contradictions
from rolepool.config.loading import show
from rolepool.errors import RolepoolError
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import MemoryEstimate, estimate_memory
from rolepool.placement.memory import GIB
from rolepool.placement.plan import Plan, build_plan
from rolepool.placement.roles import ROLE_SPECS, Role

MAX_ADVICE = 4
MAX_COMBINED = 4
"""Changes that one piece of advice may combine, when no single one is enough."""
WORTH_SAYING_BYTES = GIB // 10
"""Less than this does not show in the figures printed."""

Changes = dict[str, Any]


@dataclass(frozen=True)
class Advice:
    """Overrides, and the largest excess over the GPU's memory that would be left (0: everything fits)."""

    override: str
    excess: int

    def __str__(self) -> str:
        return f"{self.override}  " + ("fits" if not self.excess else f"still {self.excess / GIB:.1f} GiB too much")


def advise(
    config: Config,
    plan: Plan,
    estimate: MemoryEstimate,
    gpu_memory_bytes: int | None,
    replan: Callable[[Config], Plan],
) -> list[Advice]:
    """What brings the plan closest to fitting, best first and one per key; empty when it fits.

    `replan` makes the plan of a changed config, on the same nodes.
    """
    excess = _excess(estimate)
    if not excess:
        return []
    trial = _Trial(config, plan, estimate, gpu_memory_bytes, replan, frozenset(find_problems(config, plan)))
    best: dict[tuple[str, ...], Advice] = {}
    for advice, changes in trial.helpful({}, excess):
        best.setdefault(tuple(changes), advice)
    singles = list(best.values())[:MAX_ADVICE]
    if singles and all(advice.excess for advice in singles):
        return [*trial.combined(excess), *singles][:MAX_ADVICE]
    return singles


@dataclass(frozen=True)
class _Trial:
    """A plan that does not fit, and what changes would do to it."""

    config: Config
    plan: Plan
    estimate: MemoryEstimate
    gpu_memory_bytes: int | None
    replan: Callable[[Config], Plan]
    problems: frozenset[str]
    """Of the plan as it is."""
    plans: dict[str, Plan | None] = field(default_factory=dict)
    """By placement: nothing else that is changed here moves a role, and a plan of many nodes takes its time."""

    def helpful(self, base: Changes, before: int) -> list[tuple[Advice, Changes]]:
        """Those of the candidates that help on top of `base`, best first."""
        found = []
        for candidate in _candidates(self.config, self.plan):
            changes = {**base, **candidate}
            after = self._excess_with(changes)
            if after is not None and (not after or before - after >= WORTH_SAYING_BYTES):
                found.append((Advice(_words(changes), after), changes))
        return sorted(found, key=lambda item: item[0].excess)

    def combined(self, before: int) -> list[Advice]:
        """Changes added one by one, the most helpful first, until everything fits; none where that is not reached."""
        changes: Changes = {}
        for _ in range(MAX_COMBINED):
            helpful = self.helpful(changes, before)
            if not helpful:
                break
            advice, changes = helpful[0]
            before = advice.excess
            if not before:
                return [advice]
        return []

    def _excess_with(self, changes: Changes) -> int | None:
        """The excess that would be left; None where the changed config is not a plan whose memory can be told."""
        config = _changed(self.config, changes)
        placement = config.placement.model_dump_json()
        if placement not in self.plans:
            self.plans[placement] = _plan_of(config, self.replan)
        plan = self.plans[placement]
        if plan is None or any(contradictions(config)):
            return None
        estimate = estimate_memory(config, plan, self.gpu_memory_bytes)
        new_problems = set(find_problems(config, plan)) - self.problems
        hides_roles = not _roles_known(self.estimate) <= _roles_known(estimate)
        return None if new_problems or hides_roles else _excess(estimate)


def roomier_divisions(config: Config, role: Role) -> list[str]:
    """The division of the same GPUs that takes less than this one where a role works, and no more anywhere else.

    For a role that did not fit, whatever the estimate said. At most one: that with the lowest peak over all pools.
    """
    now = _taken(config, role)
    found = []
    for changes in _divisions(config):
        after = _taken(_changed(config, changes), role)
        if now and after and now[0] - after[0] >= WORTH_SAYING_BYTES and after[1] <= now[1]:
            found.append((after[1], _words(changes)))
    return [override for _, override in sorted(found)[:1]]


def _taken(config: Config, role: Role) -> tuple[int, int] | None:
    """Bytes of one GPU: while the role works, and at most in any pool; None for no plan, or a model that is unknown."""
    plan = _plan_of(config, build_plan)
    if plan is None or any(contradictions(config)):
        return None
    estimate = estimate_memory(config, plan, 0)  # the least that everything can take
    if role not in plan.roles or estimate.unknown or find_problems(config, plan):
        return None
    memory = estimate.pools[plan.roles[role]].roles
    beside = sum(other.idle for key, other in memory.items() if key != role)
    return memory[role].working + beside, max(pool.peak for pool in estimate.pools.values())


def _plan_of(config: Config, make: Callable[[Config], Plan]) -> Plan | None:
    try:
        return make(config)
    except RolepoolError:
        return None


def _changed(config: Config, changes: Changes) -> Config:
    for path, value in changes.items():
        config = _with_value(config, path.split("."), value)
    return config


def _with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a frozen section with one key below it changed."""
    first, *rest = path
    return section.model_copy(update={first: _with_value(getattr(section, first), rest, value) if rest else value})


def _words(changes: Changes) -> str:
    return " ".join(f"{path}={show(value)}" for path, value in changes.items())


def _excess(estimate: MemoryEstimate) -> int:
    """The most bytes by which any pool goes over its limit."""
    return max([0, *(pool.peak - pool.limit for pool in estimate.pools.values() if pool.limit is not None)])


def _roles_known(estimate: MemoryEstimate) -> set[Role]:
    """The roles of pools whose memory is known: a role of unknown size hides the others of its pool."""
    return {role for pool in estimate.pools.values() for role in pool.roles}


def _candidates(config: Config, plan: Plan) -> Iterator[Changes]:
    """Smaller passes, offload, tensor parallelism, less cache, another division."""
    rollout = config.actor_rollout_ref.rollout
    specs = {role: ROLE_SPECS[role] for role in plan.roles}
    for _, keys in (batched for spec in specs.values() for batched in spec.batched):
        key = keys.tokens if config.at(keys.by_tokens) else keys.rows
        size = config.at(key)
        while size is not None and size > 1:
            size //= 2
            yield {key: size}
    for spec in specs.values():
        if spec.is_trained and not config.at(spec.model).enable_gradient_checkpointing:
            yield {f"{spec.model}.enable_gradient_checkpointing": True}
        if spec.is_trained:
            yield {f"{spec.fsdp}.optimizer_offload": True}
            yield {f"{spec.fsdp}.param_offload": True, f"{spec.fsdp}.optimizer_offload": True}
        elif spec.fsdp is not None:
            yield {f"{spec.fsdp}.param_offload": True}
    if not rollout.free_cache_engine:
        yield {"actor_rollout_ref.rollout.free_cache_engine": True}
    for role, spec in specs.items():
        if spec.tensor_parallel is None:
            continue
        on_a_node, parallel = max(plan.pool_of(role).counts_by_node.values()), config.at(spec.tensor_parallel)
        while parallel < min(on_a_node, 8):
            parallel *= 2
            yield {spec.tensor_parallel: parallel}
    for utilization in (0.4, 0.3, 0.2):
        if utilization < rollout.gpu_memory_utilization:
            yield {"actor_rollout_ref.rollout.gpu_memory_utilization": utilization}
    yield from _divisions(config)


def _divisions(config: Config) -> Iterator[Changes]:
    yield {"placement.strategy": "standard"}
    yield {"placement.strategy": "split"}
    for actor_gpus in range(1, min(config.trainer.n_gpus_per_node, 9)):
        yield {"placement.strategy": "split", "placement.split.actor_gpus_per_node": actor_gpus}
