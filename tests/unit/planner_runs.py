"""Recordings for tests of the planner: the schedule of a step, with spans whose times follow costs
that are known."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rolepool.config import Config, load_config
from rolepool.metrics.spans import DRIVER, RULE_POOL, Part, Recorded, Span
from rolepool.placement import Plan, build_plan
from rolepool.placement.roles import ROLE_SPECS
from rolepool.planner.costs import Work
from rolepool.planner.profile import Recording, ranks_of
from rolepool.trainer.paper import schedule_of

PROMPT, RESPONSE = 32, 64
MICRO_ROWS = 4
"""Rows of a micro-batch, as WORDS set them."""
WORDS = f"""
data.train_batch_size=24 data.max_prompt_length={PROMPT} data.max_response_length={RESPONSE}
actor_rollout_ref.model.path=recipes/shapes/qwen2.5-0.5b actor_rollout_ref.actor.use_kl_loss=true
actor_rollout_ref.actor.ppo_mini_batch_size=12 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
critic.ppo_micro_batch_size_per_gpu=4 critic.forward_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
"""
COSTS = {  # in the order of Work.features
    "prefill": (2e-3, 1e-5, 1e-8, 0, 0, 0),
    "decode": (4e-3, 1e-5, 1e-8, 0, 0, 0),
    "forward": (5e-3, 4e-5, 1e-7, 1e-3, 2e-3, 1e-3),
    "backward": (8e-3, 8e-5, 2e-7, 2e-3, 4e-3, 1e-3),
    "optimizer": (2e-2, 0, 0, 5e-3, 1e-2, 2e-3),
    "score": (3e-3, 3e-5, 1e-7, 1e-3, 2e-3, 1e-3),
    "rest": (1e-3, 1e-7, 0, 0, 0, 0),
}
Costs = Mapping[str, Sequence[float]]


def config_of(words: str = "") -> Config:
    return load_config([], [*WORDS.split(), *words.split()]).config


def random_costs(seed: int) -> dict[str, tuple[float, ...]]:
    """Costs of which each is up to ten times as large or as small as usual."""
    chance = random.Random(seed)
    return {
        name: tuple(cost * 10 ** chance.uniform(-1, 1) for cost in costs)
        for name, costs in COSTS.items()
    }


def parts_of_call(operation: str, config: Config, num_rows: int) -> list[tuple[str, Work]]:
    """The work of one call on a rank with so many rows. All prompts and responses have their
    largest length."""
    length = PROMPT + RESPONSE
    tokens = num_rows * length
    if operation == "gen":
        steps = RESPONSE - 1
        decode = Work(steps, steps * num_rows, steps * num_rows * (PROMPT + RESPONSE // 2))
        return [("prefill", Work(1, num_rows * PROMPT, num_rows * PROMPT**2)), ("decode", decode)]
    if operation.startswith("update_") and operation != "update_weights":
        num_batches = (
            config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        )
        pieces = num_batches * -(-num_rows // num_batches // MICRO_ROWS)
        whole = Work(pieces, tokens, tokens * length)
        return [("forward", whole), ("backward", whole), ("optimizer", Work(num_batches))]
    if operation in ("values", "old_log_prob", "ref"):
        return [("score", Work(-(-num_rows // MICRO_ROWS), tokens, tokens * length))]
    return []


def seconds_of(work: Work, costs: Sequence[float], ranks: int) -> float:
    return float(np.dot(work.features(ranks), costs))


def record(
    words: str = "",
    *,
    costs: Costs = COSTS,
    num_steps: int = 4,
    noise: float = 0.0,
    gap_s: float = 0.002,
) -> Recording:
    """A run with these keys, in which every call starts `gap_s` after what it waits for."""
    config = config_of(words)
    plan, schedule, chance = build_plan(config), schedule_of(config), random.Random(0)
    spans: list[Recorded] = []
    free: dict[str, float] = defaultdict(lambda: 1000.0)
    *own, following = schedule.calls
    first_after: list[int] = []
    for step in range(1, num_steps + 1):
        ends: dict[int, float] = {}
        for position, call in enumerate(own):
            number = step * 100 + position
            role = min(call.roles, default=None)
            pools = {plan.roles.get(one, RULE_POOL) for one in call.roles} or {DRIVER}
            after = first_after if position == 0 else [step * 100 + one for one in call.after]
            known = {one.span.call: one.span.end_s for one in spans}
            start_s = (
                max([*(known.get(one, 0.0) for one in after), *(free[pool] for pool in pools)])
                + gap_s
            )
            queued_s = min(
                free[DRIVER], start_s
            )  # the driver makes calls as soon as it has estimated advantages
            for pool in pools:
                for recorded in _ranks(
                    call.operation, role or "trainer", pool, config, plan, costs
                ):
                    factor = 1 + noise * chance.uniform(-1, 1)
                    parts = tuple(
                        part._replace(seconds=part.seconds * factor) for part in recorded.parts
                    )
                    times = {
                        "queued_s": queued_s,
                        "start_s": start_s,
                        "end_s": start_s + recorded.end_s * factor,
                    }
                    span = recorded._replace(call=number, after=tuple(after), parts=parts, **times)
                    spans.append(Recorded(step, call.operation, span))
                    ends[position] = max(ends.get(position, 0.0), span.end_s)
            free.update(dict.fromkeys(pools, ends[position]))
        first_after = [step * 100 + one for one in following.after]
    return Recording(config, plan, spans)


def _ranks(
    operation: str, role: str, pool: str, config: Config, plan: Plan, costs: Costs
) -> list[Span]:
    """A span for each rank of a pool, from 0 s to its duration."""
    num_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    num_ranks = plan.pools[pool].world_size if pool in plan.pools else 1
    owner = next(
        (
            one
            for one, spec in ROLE_SPECS.items()
            if operation in [each.name for each in spec.operations]
        ),
        "",
    )
    role = owner or role
    ranks = ranks_of(config, plan, role, pool, operation)
    num_parts = (
        plan.dims_of(config, role).dp
        if pool in plan.pools and operation != "update_weights"
        else num_ranks
    )
    rows = num_rows // num_parts
    made = []
    for rank in range(num_ranks):
        works = parts_of_call(operation, config, rows)
        rest = Work(1, num_rows if pool == DRIVER else rows * (PROMPT + RESPONSE))
        if operation == "update_weights":
            rest = Work(1)
        parts = [
            Part(name, seconds_of(work, costs[name], ranks), *map(int, work))
            for name, work in works
        ]
        took_s = sum(one.seconds for one in parts) + seconds_of(rest, costs["rest"], ranks)
        num_tokens = 0 if operation == "update_weights" else rows * (PROMPT + RESPONSE)
        times = (0.0, 0.0, took_s)
        counts = {"num_rows": rows, "num_tokens": num_tokens, "num_bytes": 8 * num_tokens}
        made.append(Span(pool, role, rank, operation, *times, parts=tuple(parts), **counts))  # type: ignore[arg-type]
    return made
