"""Runs for tests of the report: one with numbers that can be checked by hand, and a long one, in
memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolepool.config import load_config
from rolepool.metrics.spans import DRIVER, Part, Recorded, Span
from rolepool.placement import build_plan
from rolepool.placement.plan import PlannedSteps
from rolepool.report.operations import in_step_order
from rolepool.report.run import ReadRun

ACTOR, CRITIC = "actor_rollout_ref_pool", "critic_pool"

# Operation, pool, seconds; what it was given, by name; the driver's `adv` waits for the others.
Call = tuple[str, str, float, tuple[str, ...]]
CALLS: list[Call] = [
    ("gen", ACTOR, 4.0, ("update_weights",)),
    ("values", CRITIC, 1.0, ("gen",)),
    ("old_log_prob", ACTOR, 2.0, ("gen",)),
    ("adv", DRIVER, 0.0, ("values", "old_log_prob")),
    ("update_critic", CRITIC, 1.0, ("gen",)),
    ("update_actor", ACTOR, 4.0, ("gen",)),
    ("update_weights", ACTOR, 0.0, ("update_actor",)),
]
"""One step of 10 s in which the critic's pool works 2 s."""


def make_run(
    folder: Path = Path("run"),
    overrides: tuple[str, ...] = (),
    num_steps: int = 6,
    seconds: Mapping[str, float] | None = None,
    late: Mapping[tuple[str, int], float] | None = None,
    first_extra_s: float = 0.0,
    monitor: list[dict[str, Any]] | None = None,
    calls_made: list[Call] = CALLS,
) -> ReadRun:
    """A split run. `seconds` replaces durations by operation, `late` adds to those of one rank of
    an operation."""
    words = ["trainer.n_gpus_per_node=4", "placement.strategy=split", "data.train_batch_size=12"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=12", *overrides]
    loaded = load_config([], words)
    plan = build_plan(loaded.config)
    spans: list[Recorded] = []
    free: dict[str, float] = {}
    ends: dict[str, tuple[int, float]] = {}
    driver_s, number = 1000.0, 0
    rows: dict[int, dict[str, float]] = {}
    for step in range(1, num_steps + 1):
        start_of_step = len(spans)
        for operation, pool, length, fed in calls_made:
            number += 1
            duration = (seconds or {}).get(operation, length) + (
                first_extra_s if (step, operation) == (1, "gen") else 0
            )
            given = [ends[name] for name in fed if name in ends]
            start = max([driver_s, free.get(pool, 0.0), *(end for _, end in given)])
            num_ranks = 1 if pool == DRIVER else plan.pools[pool].world_size
            call_end = start
            for rank in range(num_ranks):
                end = start + duration + (late or {}).get((operation, rank), 0.0)
                after = tuple(call for call, _ in given)
                device = "cpu" if pool == DRIVER else f"cuda:{rank}"
                times = (driver_s, start, end)
                span = Span(
                    pool, "role", rank, operation, *times, device=device, call=number, after=after
                )
                spans.append(Recorded(step, operation, span))
                call_end = max(call_end, end)
            free[pool], ends[operation] = call_end, (number, call_end)
            driver_s = call_end if pool == DRIVER else driver_s
        timings = {
            f"timing_s/{each.operation}": each.span.duration_s for each in spans[start_of_step:]
        }
        rows[step] = {"critic/score/mean": step / num_steps, "timing_s/step": 10.0, **timings}
    config = loaded.config.model_dump(mode="json")
    return ReadRun(
        folder, folder.name, config, [PlannedSteps(1, plan)], spans, rows, monitor or [], {}
    )


def make_long_run(num_steps: int = 10_000) -> ReadRun:
    """16 ranks and ten calls each a step, with the metrics and monitor rows of a long run."""
    more = [
        ("reward", CRITIC, 0.5, ("gen",)),
        ("ref", ACTOR, 0.5, ("gen",)),
        ("update_critic", CRITIC, 1.0, ("gen",)),
    ]
    calls_made = sorted(
        [*CALLS, *more],
        key=lambda call: in_step_order([each[0] for each in CALLS + more]).index(call[0]),
    )
    short = make_run(overrides=("trainer.n_gpus_per_node=16",), num_steps=3, calls_made=calls_made)
    middle = [recorded for recorded in short.spans if recorded.step == 2]
    parts = (Part("fetch", 0.012345), Part("forward", 0.54321))
    spans = []
    for step in range(1, num_steps + 1):
        shift_s, calls = 10.5 * step, len(calls_made) * step
        for _, operation, span in middle:
            times = (span.queued_s + shift_s, span.start_s + shift_s, span.end_s + shift_s)
            after = tuple(call + calls for call in span.after)
            moved = Span(
                *span[:4], *times, call=span.call + calls, after=after, num_rows=64, parts=parts
            )
            spans.append(Recorded(step, operation, moved))
    steps = range(1, num_steps + 1)
    rows = {
        step: {**short.metrics[2], "actor/ppo_kl": 1 / step, "actor/pg_loss": 1.0} for step in steps
    }
    gpus = [
        {
            "index": rank,
            "utilization": 50.0,
            "memory_bytes": 2**34,
            "power_w": 400.0,
            "pools": [ACTOR, CRITIC][rank > 7 :][:1],
        }
        for rank in range(16)
    ]
    monitor = [
        {"time_s": 1000.0 + second, "node": "n", "gpus": gpus, "processes": []}
        for second in range(10 * num_steps)
    ]
    return ReadRun(short.folder, "long", short.config, short.plans, spans, rows, monitor, {})
