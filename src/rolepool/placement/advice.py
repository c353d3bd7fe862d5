"""What to change when a pool does not fit: overrides that were tried on the estimate and help.

Owns the list of things to try. Every piece of advice is a `key=value` whose effect was computed, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rolepool.config import Config, LoadedConfig
from rolepool.errors import RolepoolError
from rolepool.placement.checks import find_problems
from rolepool.placement.memory import GIB, MemoryEstimate, estimate_memory
from rolepool.placement.plan import Plan, build_plan
from rolepool.placement.roles import Role

MAX_ADVICE = 4


@dataclass(frozen=True)
class Advice:
    """An override, and the largest excess over the GPU's memory that would be left (0: everything fits)."""

    override: str
    excess: int

    def __str__(self) -> str:
        return f"{self.override}  " + ("fits" if not self.excess else f"still {self.excess / GIB:.1f} GiB too much")


def advise(
    loaded: LoadedConfig,
    plan: Plan,
    estimate: MemoryEstimate,
    gpu_memory_bytes: int | None,
    gpus_per_node: Sequence[int] | None,
    *,
    take_all: bool,
) -> list[Advice]:
    """The overrides that bring the plan closest to fitting, best first and one per key; empty when it fits."""
    before = _excess(estimate)
    if not before:
        return []
    tried: list[Advice] = []
    for override in _candidates(loaded.config, plan):
        try:
            config = loaded.with_overrides(*override.split()).config
            changed = build_plan(config, gpus_per_node, take_all=take_all)
        except RolepoolError:
            continue
        if find_problems(config, changed):
            continue
        after = _excess(estimate_memory(config, changed, gpu_memory_bytes))
        if after < before:
            tried.append(Advice(override, after))
    best: dict[tuple[str, ...], Advice] = {}
    for advice in sorted(tried, key=lambda advice: advice.excess):
        best.setdefault(tuple(part.partition("=")[0] for part in advice.override.split()), advice)
    return list(best.values())[:MAX_ADVICE]


def _excess(estimate: MemoryEstimate) -> int:
    """The most bytes by which any pool goes over its limit."""
    return max([0, *(pool.peak - pool.limit for pool in estimate.pools.values() if pool.limit is not None)])


def _candidates(config: Config, plan: Plan) -> Iterator[str]:
    """Smaller passes, offload, tensor parallelism, less cache, another division."""
    models = config.actor_rollout_ref
    for section, micro in (
        ("actor_rollout_ref.actor", models.actor.ppo_micro_batch_size_per_gpu),
        ("critic", config.critic.ppo_micro_batch_size_per_gpu),
    ):
        while micro is not None and micro > 1:
            micro //= 2
            yield f"{section}.ppo_micro_batch_size_per_gpu={micro}"
    ref_micro = models.ref.log_prob_micro_batch_size_per_gpu
    if ref_micro is not None and ref_micro > 1:
        yield f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={ref_micro // 2}"
    if not models.model.enable_gradient_checkpointing:
        yield "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    if not config.critic.model.enable_gradient_checkpointing:
        yield "critic.model.enable_gradient_checkpointing=true"
    for section in ("actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config"):
        yield f"{section}.optimizer_offload=true"
        yield f"{section}.param_offload=true {section}.optimizer_offload=true"
    yield "actor_rollout_ref.ref.fsdp_config.param_offload=true"
    if not models.rollout.free_cache_engine:
        yield "actor_rollout_ref.rollout.free_cache_engine=true"
    on_a_node = max(plan.pool_of(Role.Rollout).counts_by_node.values())
    parallel = models.rollout.tensor_model_parallel_size
    while parallel < min(on_a_node, 8):
        parallel *= 2
        yield f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}"
    for utilization in (0.4, 0.3, 0.2):
        if utilization < models.rollout.gpu_memory_utilization:
            yield f"actor_rollout_ref.rollout.gpu_memory_utilization={utilization}"
    yield "placement.strategy=standard"
    yield "placement.strategy=split"
    for actor_gpus in range(1, min(config.trainer.n_gpus_per_node, 9)):
        yield f"placement.strategy=split placement.split.actor_gpus_per_node={actor_gpus}"
