"""Findings: what a run's numbers mean, in plain words, and which key to change.

Owns the thresholds above which something is reported. Every finding includes the numbers it is based on; all of them
are in the report.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rolepool.config import Config
from rolepool.errors import RolepoolError, one_line
from rolepool.metrics.spans import DRIVER
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, Role
from rolepool.placement.strategies import ACTOR_POOL, CRITIC_POOL
from rolepool.report.run import Run, value_at
from rolepool.report.summary import SpansByStep, Summary, replayed_step_s

IDLE, IMBALANCE, HAND_OVER, SAVED = 0.3, 0.05, 0.05, 0.02
"""Thresholds, as fractions of a step. A change is suggested only if it saves more than the last one."""
LITTLE_MEMORY_LEFT, MUCH_MEMORY_LEFT = 0.05, 0.4


@dataclass(frozen=True)
class Finding:
    """A sentence or two, the numbers in it, and the keys to change, with a value if the numbers give one."""

    text: str
    numbers: dict[str, float]
    keys: tuple[str, ...]


def find(run: Run, summary: Summary, grouped: SpansByStep) -> list[Finding]:
    """All findings about a run."""
    if not summary.steps:
        return []
    return [
        *_idle_pool(run, summary, grouped),
        *_imbalance(run, summary),
        *_hand_overs(summary),
        *_memory(run),
        *_overlap(summary),
    ]


def _idle_pool(run: Run, summary: Summary, grouped: SpansByStep) -> Iterator[Finding]:
    """The pool that is idle most of the time. Pools that share GPUs do not count: others use their idle time."""
    if run.plan is None:
        return
    pools = [name for name, pool in run.plan.pools.items() if name in summary.pools and pool.share == 1]
    if len(pools) < 2:
        return
    name = min(pools, key=lambda pool: summary.pools[pool].busy_fraction)
    idle = 1 - summary.pools[name].busy_fraction
    if idle < IDLE:
        return
    observation, numbers = f"{name} was idle {idle:.0%} of the time", {"idle_fraction": idle, "step_s": summary.step_s}
    now_s = replayed_step_s(grouped, {}) or 0.0
    then_s = {override: replayed_step_s(grouped, scales) or now_s for override, scales in _divisions(run.plan)}
    shorter = [override for override in then_s if then_s[override] < now_s * (1 - SAVED)]
    if shorter:
        # An override that needs no other change is better than one that does.
        problems = {override: _problem_with(run, override) for override in shorter}
        best = min(shorter, key=lambda override: (bool(problems[override]), then_s[override]))
        problem, estimate_s = problems[best], then_s[best] / now_s * summary.step_s
        yield Finding(
            f"{observation}. With {best} a step would take about {estimate_s:.3g} s instead of {summary.step_s:.3g} s "
            "(an estimate: the measured spans, scaled linearly)."
            + (f" Another change is needed as well: {problem}." if problem else ""),
            {**numbers, "estimated_step_s": estimate_s},
            (best,),
        )
    elif run.plan.pools.keys() == {ACTOR_POOL, CRITIC_POOL}:
        yield Finding(
            f"{observation}, and no other split of these GPUs makes a step shorter (an estimate: the measured spans, "
            "scaled linearly). One pool for all roles leaves no GPU idle; pools that share GPUs use each other's gaps.",
            numbers,
            ("placement.strategy=standard", "placement.split.share=0.5"),
        )
    else:
        yield Finding(f"{observation}: give it fewer GPUs or one more role.", numbers, ("placement.pools",))


def _divisions(plan: Plan) -> Iterator[tuple[str, dict[str, float]]]:
    """Other ways to split the GPUs: the override, and by what factor it changes the time of each pool's calls."""
    if plan.pools.keys() != {ACTOR_POOL, CRITIC_POOL}:
        return
    actor, critic = plan.pools[ACTOR_POOL].counts_by_node, plan.pools[CRITIC_POOL].counts_by_node
    if len({*actor.values()}) > 1 or len({*critic.values()}) > 1:
        return
    if actor.keys().isdisjoint(critic):
        key, mine, rest = "placement.split.actor_nodes", len(actor), len(critic)
    else:
        key, mine, rest = "placement.split.actor_gpus_per_node", max(actor.values()), max(critic.values())
    for new in range(1, mine + rest):
        if new != mine:
            yield f"{key}={new}", {ACTOR_POOL: mine / new, CRITIC_POOL: rest / (mine + rest - new)}


def _problem_with(run: Run, override: str) -> str:
    """The first problem that `rolepool plan` would report for the config with this change; "" if there is none."""
    key, _, value = override.partition("=")
    *parents, leaf = key.split(".")
    changed = copy.deepcopy(run.config)
    try:
        value_at(changed, ".".join(parents))[leaf] = int(value)
        config = Config.model_validate(changed)
        return next(iter(find_problems(config, build_plan(config))), "")
    except (TypeError, ValidationError, RolepoolError) as error:
        return one_line(error)


def _imbalance(run: Run, summary: Summary) -> Iterator[Finding]:
    for pool, use in summary.pools.items():
        for (kind, _, operation), mean_s in use.waits_s.items():
            others = max(1, use.num_ranks - 1)
            waited_s = mean_s * use.num_ranks / others
            if kind == "imbalance" and waited_s > IMBALANCE * summary.step_s:
                yield Finding(
                    f"In {operation} the other {f'{others} ranks' if others > 1 else 'rank'} of {pool} waited "
                    f"{waited_s:.3g} s per step ({waited_s / summary.step_s:.0%}) for the slowest rank.",
                    {"waited_s": waited_s, "step_s": summary.step_s},
                    (_balance_key(run.config, operation),),
                )


def _balance_key(config: Mapping[str, Any], operation: str) -> str:
    """The key that balances an operation's ranks and is not set yet. Response lengths cannot be balanced: they are not
    known before generation."""
    keys = OPERATIONS[operation].micro_batch if operation in OPERATIONS else None
    if keys is None:
        return "data.max_response_length"
    unset = [key for key in ("trainer.balance_batch", keys.by_tokens) if value_at(config, key) is False]
    return f"{unset[0]}=true" if unset else "data.train_batch_size"


def _hand_overs(summary: Summary) -> Iterator[Finding]:
    handed_s = summary.path_s.get(("", ""), 0.0)
    driver_s = sum(seconds for (pool, _), seconds in summary.path_s.items() if pool == DRIVER)
    share = (handed_s + driver_s) / summary.step_s if summary.step_s else 0.0
    if share > HAND_OVER:
        yield Finding(
            f"{share:.0%} of a step's critical path is not work in a pool, but the driver ({driver_s:.3g} s) and "
            f"hand-overs between calls ({handed_s:.3g} s). Larger batches spread this time over more tokens.",
            {"share": share, "driver_s": driver_s, "hand_over_s": handed_s, "step_s": summary.step_s},
            ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        )


def _memory(run: Run) -> Iterator[Finding]:
    """How full the fullest GPU of each pool was, if the monitor recorded the size of its memory."""
    gpus = [gpu for sample in run.monitor for gpu in sample["gpus"] if gpu.get("memory_total_bytes")]
    for name, pool in run.plan.pools.items() if run.plan is not None else ():
        mine = [
            (gpu["memory_bytes"] / 2**30, gpu["memory_total_bytes"] / 2**30) for gpu in gpus if name in gpu["pools"]
        ]
        used, total = max(mine, key=lambda pair: pair[0] / pair[1], default=(0.0, 0.0))
        left = 1 - used / total if total else LITTLE_MEMORY_LEFT
        if LITTLE_MEMORY_LEFT <= left <= MUCH_MEMORY_LEFT:
            continue
        risk, room = "a longer batch may not fit; use smaller micro-batches", "larger micro-batches would be faster"
        yield Finding(
            f"{name} used at most {used:.1f} of {total:.1f} GiB of a GPU ({left:.0%} was free): "
            f"{risk if left < LITTLE_MEMORY_LEFT else room}.",
            {"used_gib": used, "total_gib": total},
            (_memory_key(pool.roles),),
        )


def _memory_key(roles: Sequence[Role]) -> str:
    """The key that decides most about a pool's memory: the micro-batch size of a role that is trained, or else of one
    that scores, or else the rollout's."""
    known = [ROLE_SPECS[role] for role in roles if role in ROLE_SPECS]  # the others are of the run's extensions
    if not known:
        return "placement.roles"
    spec = min(known, key=lambda spec: (not spec.is_trained, not spec.batched))
    return spec.batched[-1][1].rows if spec.batched else spec.memory_key


def _overlap(summary: Summary) -> Iterator[Finding]:
    if summary.saved_s > SAVED * summary.step_s:
        yield Finding(
            f"Pools that worked at the same time saved {summary.saved_s:.3g} s per step; a step took "
            f"{summary.step_s:.3g} s.",
            {"saved_s": summary.saved_s, "step_s": summary.step_s},
            ("placement.strategy",),
        )
