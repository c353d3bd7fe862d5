"""CPU seconds to explain where the time of a long run went: every step's lanes, critical path and
metrics. Also the size of the report's page, and the seconds to read the run, to write the page, and
to open it if chromium is installed.

    python benchmarks/analysis_speed.py [--steps 10000] [--ranks 16]

The spans are made up: two pools of half the ranks each, 8 calls a step on every rank, with jitter.
Goal: 20 s for 10,000 steps on 16 ranks; a page of less than 1 MB that opens in less than 1 s.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rolepool.metrics.run_folder import RunFolder
from rolepool.metrics.spans import DRIVER, Recorded, Span, operation_times, step_bounds
from rolepool.metrics.timeline import Timeline, critical_path, lanes, step_metrics
from rolepool.report.page import render
from rolepool.report.run import read_run

HAND_OVER_S = 0.002


class MadeUpRun:
    """Calls run as they do in a run: in order on a pool, after what they were given, after the
    driver made them."""

    def __init__(self, ranks_per_pool: int) -> None:
        self.ranks_per_pool = ranks_per_pool
        self.random = random.Random(0)
        self.spans: list[Recorded] = []
        self.ends = [0.0]  # of each call
        self.free: dict[tuple[str, int], float] = {}
        self.driver_s = 0.0

    def call(
        self, step: int, operation: str, pool: str, duration_s: float, after: tuple[int, ...] = ()
    ) -> int:
        number = len(self.ends)
        ready_s = max([self.driver_s, *(self.ends[call] for call in after)])
        ends = []
        for rank in range(1 if pool == DRIVER else self.ranks_per_pool):
            start_s = max(ready_s, self.free.get((pool, rank), 0.0)) + HAND_OVER_S
            end_s = start_s + duration_s * self.random.uniform(0.9, 1.1)
            span = Span(
                pool, pool, rank, operation, self.driver_s, start_s, end_s, call=number, after=after
            )
            self.spans.append(Recorded(step, operation, span))
            self.free[pool, rank] = end_s
            ends.append(end_s)
        self.ends.append(max(ends))
        return number

    def step(self, number: int) -> None:
        gen = self.call(number, "gen", "actor_pool", 4.0)
        reward = self.call(number, "reward", "critic_pool", 0.5, (gen,))
        values = self.call(number, "values", "critic_pool", 1.0, (gen,))
        old = self.call(number, "old_log_prob", "actor_pool", 1.0, (gen,))
        ref = self.call(number, "ref", "actor_pool", 1.0, (gen,))
        adv = self.call(number, "adv", DRIVER, 0.1, (gen, reward, values, old, ref))
        self.driver_s = self.ends[adv]
        for _ in range(6):
            self.call(number, "update_critic", "critic_pool", 0.8, (gen,))
        for _ in range(4):
            self.call(number, "update_actor", "actor_pool", 1.0, (gen,))
        self.call(number, "update_weights", "actor_pool", 0.1)


def write_run(
    spans: list[Recorded], bounds: Mapping[int, tuple[float, float]], folder: Path
) -> None:
    """A run folder with these spans, the metrics on the page, and a sample of each rank every
    second."""
    run = RunFolder(folder)
    run.add_spans(spans)
    by_step: dict[int, list[Recorded]] = {}
    for recorded in spans:
        by_step.setdefault(recorded.step, []).append(recorded)
    for step, (start_s, end_s) in bounds.items():
        curves = {
            name: random.random()
            for name in ("critic/score/mean", "actor/ppo_kl", "actor/pg_loss", "actor/entropy")
        }
        row = {
            **curves,
            **operation_times(by_step[step]),
            "timing_s/step": end_s - start_s,
            "perf/throughput": 1000.0,
        }
        run.add_metrics(step, row)
    ranks = sorted({(recorded.span.pool, recorded.span.rank) for recorded in spans})
    process = {"pid": 1, "roles": [], "cpu_percent": 90.0, "memory_bytes": 2**30}
    processes = [{**process, "pool": pool, "rank": rank} for pool, rank in ranks if pool != DRIVER]
    with (folder / "monitor.jsonl").open("w", encoding="utf-8") as file:
        for second in range(int(max(end_s for _, end_s in bounds.values()))):
            sample = {"time_s": float(second), "node": "node0", "gpus": [], "processes": processes}
            file.write(json.dumps(sample) + "\n")


def measure_page(folder: Path) -> None:
    """Print what the page of a run weighs, and how long reading, writing and opening take."""
    begin = time.process_time()
    run = read_run(folder)
    read_s = time.process_time() - begin
    page = folder / "report.html"
    begin = time.process_time()
    page.write_text(render(run), encoding="utf-8")
    print(f"read the run   {read_s:7.2f} s")
    print(
        f"write the page {time.process_time() - begin:7.2f} s, {page.stat().st_size / 1e6:.2f} MB"
    )
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is not None:
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
        ]
        command = [chromium, *options, "--dump-dom", page.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (ready_ms,) = re.findall(r'data-ready-ms="(\d+)"', shown)
        print(f"open the page  {int(ready_ms) / 1000:7.2f} s (wall clock, until all is drawn)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=16)
    options = parser.parse_args()
    run = MadeUpRun(options.ranks // 2)
    for step in range(1, options.steps + 1):
        run.step(step)
    print(f"{options.steps} steps, {options.ranks} ranks, {len(run.spans)} spans")
    begin = previous = time.process_time()
    timeline = Timeline(run.spans)
    print(f"index          {time.process_time() - previous:7.2f} s")
    bounds = step_bounds(timeline)
    for explain in (lanes, critical_path, step_metrics):
        previous = time.process_time()
        for start_s, end_s in bounds.values():
            explain(timeline, start_s, end_s)
        print(f"{explain.__name__:14} {time.process_time() - previous:7.2f} s")
    print(
        f"all            {time.process_time() - begin:7.2f} s (goal: 20 s for 10,000 steps on 16 ranks)"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_run(run.spans, bounds, Path(folder))
        measure_page(Path(folder))


if __name__ == "__main__":
    main()
