"""The profiled run of ppo_step.py, which starts it: how much of a step no kernel runs on the GPU,
and what keeps it.

    python benchmarks/gpu/ppo_step_profile.py RECIPE key=value ... trainer.default_local_dir=RUN

Trains with all roles on one GPU, so that one process runs every kernel, and turns torch's profiler
on and off in it between steps. One step is recorded with the GPU's activity only, which slows it
least, and gives the figures; another with torch's operators as well, which tell what the process
did while the GPU had nothing to do. Writes RUN/idle.txt, and both traces for Perfetto. On a CPU,
operators stand in for kernels: good for nothing but to try the program out.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from rolepool.config import load_config
from rolepool.metrics.spans import DRIVER, RULE_POOL, Recorded, step_bounds
from rolepool.report.run import read_run
from rolepool.trainer.loop import Observer, Trainer

CLEAN_STEPS = (3, 4)
"""Warm, and before the first profile."""
GPU_STEP, ALL_STEP, LAST_STEP = 6, 8, 9
"""Steps that are recorded. Each is followed by one that is recorded too and not looked at, so that
it ends as any."""
GOAL = 0.10
NUM_GAPS = 10
GAP_LIMITS_US = (10.0, 100.0, 1000.0, float("inf"))
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
TRACE_TIMEOUT_S = 120


# In the worker process


def start_profiler(process: Any, activities: Sequence[str]) -> None:
    chosen = [getattr(torch.profiler.ProfilerActivity, name) for name in activities]
    process.profile_of_benchmark = torch.profiler.profile(activities=chosen)
    process.profile_of_benchmark.start()


def stop_profiler(process: Any, file: str) -> None:
    process.profile_of_benchmark.stop()
    process.profile_of_benchmark.export_chrome_trace(file)


# In the driver


class ProfiledTrainer(Trainer):
    """Lets its observer at the processes that its actor runs in."""

    workers: list[Any]

    def train(self) -> None:
        group = self.deployment.roles.actor.group
        self.workers = [process.actor for process in group.processes]
        super().train()


class Switch(Observer):
    """Turns the profiler on and off.

    When the row of a step is written all calls of the next one are queued, and a process runs what
    it is given in order: what is queued here runs between the next step and the one after it.
    """

    def __init__(self, trainer: ProfiledTrainer, on_gpu: bool) -> None:
        self.trainer = trainer
        self.on_gpu = on_gpu
        self.queued: list[Any] = []

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        if step == GPU_STEP - 2:
            self.queue(start_profiler, ["CUDA"] if self.on_gpu else ["CPU"])
        elif step == ALL_STEP - 2:
            self.queue(stop_profiler, str(trace_of(self.trainer.parts.folder.path, GPU_STEP)))
            self.queue(start_profiler, ["CPU", "CUDA"] if self.on_gpu else ["CPU"])
        elif step == ALL_STEP:
            self.queue(stop_profiler, str(trace_of(self.trainer.parts.folder.path, ALL_STEP)))
        elif step == LAST_STEP:
            ray.wait(self.queued, num_returns=len(self.queued), timeout=TRACE_TIMEOUT_S)

    def queue(self, function: Any, argument: Any) -> None:
        (worker,) = self.trainer.workers
        self.queued.append(worker.__ray_call__.remote(function, argument))


def trace_of(folder: Path, step: int) -> Path:
    return folder / f"trace_of_step_{step}.json"


# What the traces say


@dataclass(frozen=True)
class Activity:
    """Something that ran, in microseconds from the start of its step."""

    start_us: float
    end_us: float
    kind: str
    name: str


@dataclass(frozen=True)
class Gap:
    """A time without a kernel, and the kernels around it."""

    start_us: float
    end_us: float
    after: str
    before: str

    @property
    def length_us(self) -> float:
        return self.end_us - self.start_us


def read_trace(file: Path, start_s: float) -> list[Activity]:
    """In the order they began."""
    trace = json.loads(
        file.read_text(encoding="utf-8", errors="replace"), strict=False
    )  # it escapes not every name
    offset_us = trace.get("baseTimeNanoseconds", 0) / 1e3 - start_s * 1e6
    found = [
        Activity(
            event["ts"] + offset_us,
            event["ts"] + event["dur"] + offset_us,
            event["cat"],
            event["name"],
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in (*ON_GPU, *ON_CPU)
    ]
    return sorted(found, key=lambda activity: activity.start_us)


def find_gaps(kernels: Sequence[Activity], end_us: float) -> Iterator[Gap]:
    """Of kernels in the order they began, the times from 0 to `end_us` in which none runs."""
    filled_us, last = 0.0, "the step's start"
    for kernel in kernels:
        if kernel.end_us <= filled_us:
            continue
        if kernel.start_us >= end_us:
            break
        if kernel.start_us > filled_us:
            yield Gap(filled_us, kernel.start_us, last, kernel.name)
        filled_us, last = kernel.end_us, kernel.name
    if filled_us < end_us:
        yield Gap(filled_us, end_us, last, "the step's end")


def within(gaps: Sequence[Gap], start_us: float, end_us: float) -> float:
    """How much of a time is in gaps."""
    first = bisect_left(gaps, start_us, key=lambda gap: gap.end_us)
    total_us = 0.0
    for gap in gaps[first:]:
        if gap.start_us >= end_us:
            break
        total_us += min(gap.end_us, end_us) - max(gap.start_us, start_us)
    return total_us


def meanwhile(gap: Gap, activities: Sequence[Activity]) -> str:
    """The innermost operator that went on for most of a gap."""
    candidates = [
        one
        for one in activities
        if one.kind in ON_CPU
        and min(one.end_us, gap.end_us) - max(one.start_us, gap.start_us) > gap.length_us / 2
    ]
    if not candidates:
        return "no operator of torch's"
    return min(candidates, key=lambda one: one.end_us - one.start_us).name


@dataclass(frozen=True)
class ProfiledStep:
    """A recorded step: its length, what ran in it, when no kernel did, and its operations in the
    GPU's process."""

    length_us: float
    activities: list[Activity]
    gaps: list[Gap]
    operations: list[Activity]

    @property
    def idle_us(self) -> float:
        return sum(gap.length_us for gap in self.gaps)


def read_step(
    folder: Path, spans: Sequence[Recorded], step: int, kinds: Sequence[str]
) -> ProfiledStep | None:
    """None where the profiler did not work: kernels under CUDA graphs are more than some versions
    of it can bear."""
    if not trace_of(folder, step).is_file() or step not in step_bounds(spans):
        return None
    start_s, end_s = step_bounds(spans)[step]
    length_us = (end_s - start_s) * 1e6
    activities = read_trace(trace_of(folder, step), start_s)
    kernels = [one for one in activities if one.kind in kinds]
    if not any(one.start_us < length_us and one.end_us > 0 for one in kernels):
        return None
    operations = [
        Activity(
            (span.start_s - start_s) * 1e6, (span.end_s - start_s) * 1e6, "operation", operation
        )
        for _, operation, span in spans
        if span.pool not in (DRIVER, RULE_POOL) and span.start_s < end_s and span.end_s > start_s
    ]
    return ProfiledStep(length_us, activities, list(find_gaps(kernels, length_us)), operations)


def summary(profiled: ProfiledStep, clean_s: float) -> Iterator[str]:
    length_s, idle_s = profiled.length_us / 1e6, profiled.idle_us / 1e6
    busy_s = length_s - idle_s
    yield (
        f"no kernel runs in {idle_s / length_s:.1%} (goal: under {GOAL:.0%}) of a step of {length_s:.3f} s under the "
        f"profiler; without it a step takes {clean_s:.3f} s, of which the same kernels leave {1 - busy_s / clean_s:.1%}"
    )
    shortest = 0.0
    for longest in GAP_LIMITS_US:
        gaps = [gap.length_us for gap in profiled.gaps if shortest <= gap.length_us < longest]
        limits = (
            f"{shortest:.0f} to {longest:.0f} us"
            if longest < float("inf")
            else f"over {shortest:.0f} us"
        )
        yield f"    gaps {limits:15} {len(gaps):8} {sum(gaps) / 1e6:10.4f} s"
        shortest = longest


def by_operation(profiled: ProfiledStep) -> Iterator[str]:
    yield f"\n{'':20}{'s':>10}{'idle s':>10}{'share':>8}"
    rows: dict[str, tuple[float, float]] = {}
    for one in profiled.operations:
        start_us, end_us = max(one.start_us, 0.0), min(one.end_us, profiled.length_us)
        length_us, idle_us = rows.get(one.name, (0.0, 0.0))
        rows[one.name] = (
            length_us + end_us - start_us,
            idle_us + within(profiled.gaps, start_us, end_us),
        )
    at_work_us, idle_us = (sum(column) for column in zip(*rows.values(), strict=True))
    rows["between operations"] = profiled.length_us - at_work_us, profiled.idle_us - idle_us
    for name, (length_us, idle_us) in rows.items():
        share = f"{idle_us / length_us:.1%}" if length_us > 0 else "-"
        yield f"{name:20}{length_us / 1e6:>10.4f}{idle_us / 1e6:>10.4f}{share:>8}"


def largest_gaps(profiled: ProfiledStep) -> Iterator[str]:
    yield f"\nthe largest gaps, with operators recorded too ({profiled.length_us / 1e6:.3f} s a step)"
    yield f"{'ms':>9} {'at ms':>9}  {'operation':18}{'meanwhile':34}after -> before"
    for gap in sorted(profiled.gaps, key=lambda gap: -gap.length_us)[:NUM_GAPS]:
        covering = [
            one.name
            for one in profiled.operations
            if one.start_us < gap.end_us and one.end_us > gap.start_us
        ]
        operation = ", ".join(dict.fromkeys(covering)) or "between operations"
        what = meanwhile(gap, profiled.activities)
        around = f"{gap.after[:40]} -> {gap.before[:40]}"
        yield f"{gap.length_us / 1e3:9.3f} {gap.start_us / 1e3:9.1f}  {operation[:17]:18}{what[:33]:34}{around}"


def report(folder: Path, *, on_gpu: bool) -> str:
    run = read_run(folder)
    bounds = step_bounds(run.spans)
    clean_s = sum(bounds[step][1] - bounds[step][0] for step in CLEAN_STEPS) / len(CLEAN_STEPS)
    kinds = ON_GPU if on_gpu else ("cpu_op",)
    lines: list[str] = []
    gpu_only, everything = (
        read_step(folder, run.spans, step, kinds) for step in (GPU_STEP, ALL_STEP)
    )
    if gpu_only is not None:
        lines += [*summary(gpu_only, clean_s), *by_operation(gpu_only)]
    if everything is not None:
        lines += largest_gaps(everything)
    for step, found in ((GPU_STEP, gpu_only), (ALL_STEP, everything)):
        if found is None:
            lines.append(
                f"step {step}: the profiler recorded no kernels in it; see what it printed and {trace_of(folder, step)}"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    words = [*sys.argv[1:], f"trainer.total_training_steps={LAST_STEP}"]
    files = [word for word in words if "=" not in word]
    loaded = load_config(files, [word for word in words if "=" in word])
    on_gpu = loaded.config.trainer.device != "cpu"
    trainer = ProfiledTrainer(loaded)
    trainer.observer = Switch(trainer, on_gpu)
    folder = trainer.parts.folder.path
    try:
        trainer.run()
    finally:  # a process that the second profile ended leaves the first
        if trace_of(folder, GPU_STEP).is_file():
            (folder / "idle.txt").write_text(report(folder, on_gpu=on_gpu), encoding="utf-8")


if __name__ == "__main__":
    main()
