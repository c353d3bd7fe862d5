"""Run folders as training would have written them, made in milliseconds: a small event simulation
of the PPO step.

Calls on a pool run one after another, pools side by side, the driver waits for the advantages, and
the critic's update runs on into the next generation; so spans, metrics and console lines of both
placements look as those of real runs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from rolepool.config import LoadedConfig, load_config
from rolepool.metrics.run_folder import RunFolder
from rolepool.metrics.spans import DRIVER, Part, Recorded, Span
from rolepool.placement import Plan, build_plan
from rolepool.trainer.paper import schedule_of

GPU_SECONDS = {  # of one call, over all GPUs of its pool together
    "gen": 4.0,
    "values": 1.2,
    "old_log_prob": 1.2,
    "ref": 1.2,
    "update_critic": 8.0,
    "update_actor": 8.8,
    "update_weights": 0.1,
}
ROLE_AND_METHOD = {
    "gen": ("rollout", "generate_sequences"),
    "reward": ("reward", "compute_scores"),
    "values": ("critic", "compute_values"),
    "old_log_prob": ("actor", "compute_log_prob"),
    "ref": ("ref", "compute_ref_log_prob"),
    "update_critic": ("critic", "update_critic"),
    "update_actor": ("actor", "update_actor"),
    "update_weights": ("rollout", "update_weights"),
}
NUM_TOKENS = 64 * 96
MOVE_S = 3.0
"""How long a move takes."""


def write_run(
    folder: Path,
    strategy: str = "standard",
    num_steps: int = 12,
    seed: int = 0,
    slower: Mapping[str, float] | None = None,
    overrides: tuple[str, ...] = (),
    moves: Mapping[int, str] | None = None,
) -> Path:
    """A run folder. `slower` multiplies the time of operations by name; `overrides` are config
    keys; `moves` are the strategies that the run moved to, by their first step."""
    loaded = _load(strategy, overrides)
    plans = {1: build_plan(loaded.config)}
    for first_step, moved_to in (moves or {}).items():
        plans[first_step] = build_plan(_load(moved_to, overrides).config)
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder(folder)
    run.write("config.yaml", loaded.to_yaml())
    steps = _simulate(plans, num_steps, random.Random(seed), slower or {})
    _write_row(run, 0, {"val-core/demo/reward/mean": 0.1, "timing_s/testing": 0.5})
    for number, spans in steps.items():
        plan = _plan_of(plans, number)
        if number in plans:
            run.add_plan(number, plan, schedule_of(loaded.config))
        if number in plans and number > 1:
            what = f"{_plan_of(plans, number - 1).in_words} -> {plan.in_words}"
            run.add_event("move", number, what, MOVE_S, list(plan.pools), after_step=number - 1)
        for operation, recorded in spans.items():
            run.add_spans(Recorded(number, operation, span) for span in recorded)
        following = steps.get(number + 1) if number + 1 not in plans else None
        ends = following["gen"] if following else []
        end_s = min(
            (span.start_s for span in ends), default=max(span.end_s for span in _all(spans))
        )
        reward = number / (number + 5)
        _write_row(run, number, _row(plan, number, spans, steps, end_s, reward))
    _write_row(run, num_steps, {"val-core/demo/reward/mean": reward, "timing_s/testing": 0.5})
    _write_monitor(folder, plans, steps)
    return folder


def _plan_of(plans: Mapping[int, Plan], step: int) -> Plan:
    return plans[max(first_step for first_step in plans if first_step <= step)]


def _load(strategy: str, overrides: tuple[str, ...]) -> LoadedConfig:
    return load_config(
        [],
        [
            "data.train_files=train.jsonl",
            "data.train_batch_size=64",
            "actor_rollout_ref.model.path=recipes/shapes/qwen2.5-0.5b",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "trainer.n_gpus_per_node=4",
            f"placement.strategy={strategy}",
            *overrides,
        ],
    )


def _simulate(
    plans: Mapping[int, Plan], num_steps: int, chance: random.Random, slower: Mapping[str, float]
) -> dict[int, dict[str, list[Span]]]:
    """Spans by step and operation."""
    free: dict[tuple[str, int], float] = {}
    ends: dict[int, float] = {}
    driver_s, calls, steps = 1_700_000_000.0, 0, {}
    plan = plans[1]

    def call(operation: str, after: tuple[int, ...]) -> int:
        nonlocal calls, driver_s
        calls += 1
        driver_s += 0.002
        role, method = ROLE_AND_METHOD[operation]
        pool = "reward_cpu" if operation == "reward" else plan.roles[role]
        slots = () if operation == "reward" else plan.pools[pool].slots
        seconds = 0.05 if operation == "reward" else GPU_SECONDS[operation] / len(slots)
        step_factor = chance.uniform(0.95, 1.05) * slower.get(operation, 1.0)
        spans = []
        for rank in range(max(1, len(slots))):
            ready_s = max(
                [driver_s, free.get((pool, rank), 0.0), *(ends[number] for number in after)]
            )
            duration_s = seconds * step_factor * chance.uniform(0.97, 1.03)
            start_s = ready_s + 0.001
            spans.append(
                Span(
                    *(pool, role, rank, method, driver_s, start_s, start_s + duration_s),
                    node=f"node{slots[rank].node}" if slots else "node0",
                    device=f"cuda:{slots[rank].gpu}" if slots else "cpu",
                    call=calls,
                    after=after,
                    num_rows=64 // max(1, len(slots)),
                    num_tokens=NUM_TOKENS // max(1, len(slots)),
                    num_bytes=8 * NUM_TOKENS // max(1, len(slots)),
                    peak_memory_bytes=int(2e9 + 3e9 * chance.random()),
                    parts=_parts(operation, duration_s, max(1, len(slots))),
                )
            )
            free[pool, rank] = spans[-1].end_s
        ends[calls] = max(span.end_s for span in spans)
        recorded.setdefault(operation, []).extend(spans)
        return calls

    weights: tuple[int, ...] = ()
    for number in range(1, num_steps + 1):
        recorded: dict[str, list[Span]] = {}
        if number in plans:
            plan, weights = plans[number], ()
            driver_s = max([driver_s, *(end_s + MOVE_S for end_s in ends.values())])
        rollouts = call("gen", weights)
        inputs = [call(name, (rollouts,)) for name in ("reward", "values", "old_log_prob", "ref")]
        start_s = max(ends[name] for name in inputs) + 0.002
        driver_s = start_s + 0.02
        calls += 1
        after = (rollouts, *inputs)
        recorded["adv"] = [
            Span(DRIVER, "trainer", 0, "adv", start_s, start_s, driver_s, call=calls, after=after)
        ]
        call("update_critic", (rollouts,))
        weights = (call("update_weights", (call("update_actor", (rollouts,)),)),)
        driver_s = max(driver_s, start_s + 0.05)
        steps[number] = recorded
    return steps


def _parts(operation: str, duration_s: float, num_ranks: int) -> tuple[Part, ...]:
    """The parts of a call on one rank: 64 rows of 32 prompt and 64 response tokens are divided
    among the ranks."""
    fetch, num_rows = Part("fetch", 0.01 * duration_s), 64 // num_ranks
    if operation == "gen":
        prefill = Part("prefill", 0.1 * duration_s, 1, 32 * num_rows, 32 * 32 * num_rows)
        return (
            fetch,
            prefill,
            Part("decode", 0.8 * duration_s, 63, 63 * num_rows, 63 * 64 * num_rows),
        )
    if operation in ("reward", "update_weights"):
        return (fetch,)
    num_batches = 2 if operation.startswith("update_") else 1
    return fetch, Part("forward", 0.9 * duration_s, num_batches, 96 * num_rows, 96 * 96 * num_rows)


def _all(spans: Mapping[str, list[Span]]) -> list[Span]:
    return [span for recorded in spans.values() for span in recorded]


def _row(
    plan: Plan,
    number: int,
    spans: Mapping[str, list[Span]],
    steps: Mapping[int, Mapping[str, list[Span]]],
    end_s: float,
    reward: float,
) -> dict[str, float]:
    start_s = min(span.start_s for span in spans["gen"])
    step_s = end_s - start_s
    row = {
        "training/global_step": number,
        "critic/score/mean": reward,
        "perf/total_num_tokens": NUM_TOKENS,
    }
    for operation, recorded in spans.items():
        by_call: dict[int, float] = {}
        for span in recorded:
            by_call[span.call] = max(by_call.get(span.call, 0.0), span.duration_s)
        row[f"timing_s/{operation}"] = sum(by_call.values())
    row["timing_s/step"] = row["perf/time_per_step"] = step_s
    row["timing_per_token_ms/gen"] = row["timing_s/gen"] * 1000 / NUM_TOKENS
    row["perf/throughput"] = (
        NUM_TOKENS / step_s / sum(pool.world_size for pool in plan.pools.values())
    )
    row["perf/max_memory_allocated_gb"] = max(span.peak_memory_bytes for span in _all(spans)) / 1e9
    everything = [span for recorded in steps.values() for span in _all(recorded)]
    for name, pool in plan.pools.items():
        here = [span for span in everything if span.pool == name]
        busy_s = (
            sum(max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s)) for span in here)
            / pool.world_size
        )
        row[f"pool/{name}/busy_s"] = busy_s
        row[f"pool/{name}/idle_s"] = step_s - busy_s
        row[f"pool/{name}/busy_fraction"] = busy_s / step_s
        row[f"pool/{name}/utilization"] = 100 * busy_s / step_s
        row[f"pool/{name}/peak_memory_gb"] = max(span.peak_memory_bytes for span in here) / 1e9
    busy_s = sum(row[f"pool/{name}/busy_s"] for name in plan.pools)
    row["overlap/saved_s"] = max(0.0, busy_s - step_s)
    row["overlap/fraction"] = row["overlap/saved_s"] / step_s
    return row


def _write_row(run: RunFolder, step: int, row: dict[str, float]) -> None:
    run.add_metrics(step, row)


def _write_monitor(
    folder: Path, plans: Mapping[int, Plan], steps: Mapping[int, Mapping[str, list[Span]]]
) -> None:
    """One row a second; a GPU is used as much as its process was busy in that second."""
    spans = [span for recorded in steps.values() for span in _all(recorded)]
    start_s, end_s = min(span.start_s for span in spans), max(span.end_s for span in spans)
    lines = []
    for second in range(int(end_s - start_s) + 1):
        time_s = start_s + second
        gpus, processes = [], []
        begun = [
            number for number, recorded in steps.items() if recorded["gen"][0].start_s <= time_s
        ]
        plan = _plan_of(plans, max(begun, default=1))
        for name, pool in plan.pools.items():
            for rank, slot in enumerate(pool.slots):
                mine = [span for span in spans if (span.pool, span.rank) == (name, rank)]
                busy_s = sum(
                    max(0.0, min(span.end_s, time_s + 1) - max(span.start_s, time_s))
                    for span in mine
                )
                gpu = {
                    "index": slot.gpu,
                    "utilization": 100 * min(1.0, busy_s),
                    "memory_bytes": int(20e9),
                }
                gpus.append({**gpu, "power_w": 100 + 500 * min(1.0, busy_s), "pools": [name]})
                process = {
                    "pid": 1000 + len(processes),
                    "pool": name,
                    "rank": rank,
                    "roles": list(pool.roles),
                }
                processes.append({**process, "cpu_percent": 100 * busy_s, "memory_bytes": int(3e9)})
        lines.append(
            json.dumps({"time_s": time_s, "node": "node0", "gpus": gpus, "processes": processes})
        )
    (folder / "monitor.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
