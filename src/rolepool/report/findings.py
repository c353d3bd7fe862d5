"""What a run's numbers say, in plain words, and which key to change.

Owns when something is worth saying. Every finding carries the numbers it rests on, all of them in the summary.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rolepool.config import Config
from rolepool.errors import RolepoolError
from rolepool.metrics.analysis import Recorded
from rolepool.metrics.spans import DRIVER
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.roles import Role
from rolepool.placement.strategies import ACTOR_POOL, CRITIC_POOL
from rolepool.report.run import Run
from rolepool.report.summary import HAND_OVER, Summary, replayed_step_s

IDLE_FRACTION = 0.3
WORTH_CHANGING = 0.02
"""A new division must save this fraction of a step, or it is not named."""
IMBALANCE_FRACTION = 0.05
HAND_OVER_FRACTION = 0.05
LITTLE_MEMORY_LEFT, MUCH_MEMORY_LEFT = 0.05, 0.4
SLOW_FIRST_STEP = 1.5

PASS_SIZE_KEYS = {
    Role.Actor: "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    Role.Critic: "critic.ppo_micro_batch_size_per_gpu",
    Role.RefPolicy: "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    Role.RewardModel: "reward_model.micro_batch_size_per_gpu",
    Role.Rollout: "actor_rollout_ref.rollout.gpu_memory_utilization",
}
"""The key that sets how much memory a role's passes take; a pool is given that of its first role here."""


@dataclass(frozen=True)
class Finding:
    """A sentence or two, the numbers in it, and the keys (with a value where one follows) to change."""

    text: str
    numbers: dict[str, float]
    keys: tuple[str, ...]


def find(run: Run, summary: Summary, grouped: Mapping[int, list[Recorded]]) -> list[Finding]:
    """Everything worth saying about a run."""
    if not summary.steps:
        return []
    return [
        *_idle_pools(run, summary, grouped),
        *_imbalance(run, summary),
        *_hand_overs(summary),
        *_memory(run, summary),
        *_overlap(summary),
        *_first_step(summary),
    ]


def _idle_pools(run: Run, summary: Summary, grouped: Mapping[int, list[Recorded]]) -> Iterator[Finding]:
    """Pools of GPUs that have little to do while another works."""
    planned = run.plan.pools if run.plan is not None else {}
    uses = {name: summary.pools[name] for name in planned if name in summary.pools}
    for name, use in uses.items():
        idle = 1 - use.busy_fraction
        is_idlest = idle == max(1 - other.busy_fraction for other in uses.values())
        if len(uses) < 2 or idle < IDLE_FRACTION or not is_idlest:
            continue
        said = f"{name} was idle {idle:.0%} of the time"
        numbers = {"idle_fraction": idle, "step_s": summary.step_s}
        assert run.plan is not None
        divisions = list(_divisions(run.plan))
        better = _best_division(run, summary, grouped)
        if better is not None:
            override, step_s, counts, problem = better
            yield Finding(
                f"{said}: divide the GPUs {counts} ({override}). Step time by linear scaling of the measured spans: "
                f"{step_s:.3g} s instead of {summary.step_s:.3g} s (an estimate){problem}.",
                {**numbers, "estimated_step_s": step_s},
                (override,),
            )
        elif divisions:
            yield Finding(
                f"{said}, and by linear scaling of the measured spans no other division of the GPUs makes a step "
                "shorter: one pool for everything has nothing idle.",
                numbers,
                ("placement.strategy=standard",),
            )
        elif set(planned) == {ACTOR_POOL, CRITIC_POOL} and all(pool.share == 1 for pool in planned.values()):
            yield Finding(
                f"{said}, and with so few GPUs there is no other division: put everything in one pool, or both pools "
                "on the same GPUs.",
                numbers,
                ("placement.strategy=standard", "placement.split.share=0.5"),
            )
        else:
            yield Finding(
                f"{said}: give it fewer GPUs, or one more role.", numbers, ("placement.pools", "placement.strategy")
            )


def _divisions(plan: Plan) -> Iterator[tuple[str, Any, str, dict[str, float]]]:
    """Other ways to divide a split's GPUs: key, value, the division in words, and the scale of each pool's spans."""
    pools = plan.pools
    if set(pools) != {ACTOR_POOL, CRITIC_POOL} or any(pool.share != 1 for pool in pools.values()):
        return
    actor, critic = pools[ACTOR_POOL].counts_by_node, pools[CRITIC_POOL].counts_by_node
    if len({*actor.values()}) > 1 or len({*critic.values()}) > 1:
        return
    if actor.keys().isdisjoint(critic):
        key, now, rest, unit = "placement.split.actor_nodes", len(actor), len(critic), "nodes"
    else:
        now, rest = max(actor.values()), max(critic.values())
        key, unit = "placement.split.actor_gpus_per_node", "of every node"
    for new in range(1, now + rest):
        left = now + rest - new
        if new != now:
            yield key, new, f"{new}:{left} {unit}", {ACTOR_POOL: now / new, CRITIC_POOL: rest / left}


def _best_division(
    run: Run, summary: Summary, grouped: Mapping[int, list[Recorded]]
) -> tuple[str, float, str, str] | None:
    """The division with the shortest step, one that the config allows before one that it does not."""
    now = replayed_step_s(grouped, {})
    assert run.plan is not None
    found = []
    for key, value, words, scales in _divisions(run.plan):
        then = replayed_step_s(grouped, scales)
        if now and then is not None and then < now * (1 - WORTH_CHANGING):
            problem = _problem_with(run, key, value)
            found.append((bool(problem), then / now * summary.step_s, f"{key}={value}", words, problem))
    if not found:
        return None
    _, step_s, override, words, problem = min(found)
    return override, step_s, f"{words} (actor:critic)", f"; it needs another change, too: {problem}" if problem else ""


def _problem_with(run: Run, key: str, value: Any) -> str:
    """The first thing that `rolepool plan` would say about a changed config."""
    changed = copy.deepcopy(run.config)
    *parents, leaf = key.split(".")
    section = changed
    try:
        for parent in parents:
            section = section[parent]
        section[leaf] = value
        config = Config.model_validate(changed)
        plan = build_plan(config)
        return next(iter(find_problems(config, plan)), "")
    except (KeyError, TypeError, ValidationError, RolepoolError) as error:
        return str(error).splitlines()[0]


def _imbalance(run: Run, summary: Summary) -> Iterator[Finding]:
    for pool, use in summary.pools.items():
        for operation, mean_s in use.imbalance_s.items():
            others = use.num_ranks - 1
            waited_s = mean_s * use.num_ranks / max(1, others)
            if waited_s < IMBALANCE_FRACTION * summary.step_s:
                continue
            ranks = f"the other {others} ranks" if others > 1 else "the other rank"
            yield Finding(
                f"In {operation} the slowest rank of {pool} kept {ranks} waiting {waited_s:.3g} s of every step "
                f"({waited_s / summary.step_s:.0%}): {_imbalance_words(operation)}.",
                {"waited_s": waited_s, "waited_fraction": waited_s / summary.step_s, "step_s": summary.step_s},
                (_imbalance_key(run.config, operation),),
            )


def _imbalance_words(operation: str) -> str:
    generates = operation in ("gen", "baseline", "testing")
    return "its longest sequence decides" if generates else "even out the tokens of its ranks"


def _imbalance_key(config: Mapping[str, Any], operation: str) -> str:
    """What makes the ranks of an operation more alike and is not in force yet."""
    dynamic = {
        "old_log_prob": "actor_rollout_ref.actor.use_dynamic_bsz",
        "update_actor": "actor_rollout_ref.actor.use_dynamic_bsz",
        "ref": "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        "values": "critic.use_dynamic_bsz",
        "update_critic": "critic.use_dynamic_bsz",
        "reward": "reward_model.use_dynamic_bsz",
    }
    if operation not in dynamic:
        return "data.max_response_length"
    for key in ("trainer.balance_batch", dynamic[operation]):
        if value_at(config, key) is False:
            return f"{key}=true"
    return "data.train_batch_size"


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where the config has no such key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _hand_overs(summary: Summary) -> Iterator[Finding]:
    handed_s = summary.path_s.get((HAND_OVER, ""), 0.0)
    driver_s = sum(seconds for (pool, _), seconds in summary.path_s.items() if pool == DRIVER)
    share = (handed_s + driver_s) / summary.step_s if summary.step_s else 0.0
    if share > HAND_OVER_FRACTION:
        yield Finding(
            f"{share:.0%} of a step's critical path is the driver ({driver_s:.3g} s) and handing over between calls "
            f"({handed_s:.3g} s), not work on a GPU. Larger batches spread it over more tokens.",
            {"share": share, "driver_s": driver_s, "hand_over_s": handed_s, "step_s": summary.step_s},
            ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        )


def _memory(run: Run, summary: Summary) -> Iterator[Finding]:
    for pool, memory in summary.memory.items():
        left = 1 - memory.used_fraction
        planned = run.plan.pools.get(pool) if run.plan is not None else None
        if planned is None or LITTLE_MEMORY_LEFT <= left <= MUCH_MEMORY_LEFT:
            continue
        key = next(key for role, key in PASS_SIZE_KEYS.items() if role in planned.roles)
        used = f"{pool} used {memory.used_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB of a GPU at most"
        risk = f"{used}, which leaves {left:.1%}: a longer batch may run out of memory. Make its passes smaller."
        room = f"{used}: {left:.0%} is free. Larger passes are faster while they fit."
        numbers = {"used_gib": memory.used_bytes / 2**30, "total_gib": memory.total_bytes / 2**30}
        yield Finding(risk if left < LITTLE_MEMORY_LEFT else room, numbers, (key,))


def _overlap(summary: Summary) -> Iterator[Finding]:
    if summary.saved_s > WORTH_CHANGING * summary.step_s:
        yield Finding(
            f"Pools working at the same time saved {summary.saved_s:.3g} s a step, which took {summary.step_s:.3g} s.",
            {"saved_s": summary.saved_s, "step_s": summary.step_s},
            ("placement.strategy",),
        )


def _first_step(summary: Summary) -> Iterator[Finding]:
    first, *others = summary.step_times
    if not others:
        return
    first_s, usual_s = summary.step_times[first], statistics.median(summary.step_times[step] for step in others)
    if first_s > SLOW_FIRST_STEP * usual_s:
        yield Finding(
            f"Step {first} took {first_s:.3g} s, the others {usual_s:.3g} s (median): it warms up, and averages here "
            "leave it out. Compare runs of several steps.",
            {"first_s": first_s, "median_s": usual_s},
            ("trainer.total_training_steps",),
        )
