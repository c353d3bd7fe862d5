"""What recording costs: time spent on spans, their analysis and the monitor, against the time of a
step.

    python benchmarks/recording_cost.py [--steps 20] [recipe]

Trains the split demo for real and counts, on the driver, the time inside what writes spans down,
analyses them and takes the monitor's samples; and on a worker the time to make a span and count
what it handled, measured on a batch of the demo's size and multiplied by the calls of a step.
Prints both as a fraction of the mean step time, which is to be under 1%. The first steps do not
count: the first sample waits for the monitor, which starts beside the run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rolepool.cluster import process
from rolepool.cluster.monitors import Monitors
from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.metrics.run_folder import RunFolder
from rolepool.metrics.spans import Span
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.part_times import PartTimes, part
from rolepool.report.run import read_run
from rolepool.trainer import rows
from rolepool.trainer.loop import Observer, Trainer

ROOT = Path(__file__).parent.parent
NUM_CALLS = 300
NUM_WARM_STEPS = 2


class Stopwatch:
    """Adds up the time spent in functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return timed


class AfterWarmUp(Observer):
    """Starts the watch anew when the first rows are written."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        if step == NUM_WARM_STEPS:
            self.watch.seconds.clear()


def of_a_call(num_rows: int, width: int) -> float:
    """Seconds that a worker spends on the record of one call."""
    lengths = torch.full((num_rows,), width)
    names = ("input_ids", "old_log_probs", "values", "advantages")
    batch = DataProto.from_dict(
        {name: ragged(torch.ones(num_rows * width), lengths) for name in names}
    )
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        with PartTimes() as times:
            for _ in range(12):  # as an update of four mini-batches has
                with part("forward"):
                    pass
        memory = int(os.pread(statm, 100, 0).split()[1]) * process.PAGE_BYTES
        more = 0, (), *process.amounts_of([batch], None), memory, times.added_up(), memory
        Span("pool", "role", 0, "method", 0.0, 0.0, 0.0, "node", "cpu", *more)
    return (time.perf_counter() - start) / NUM_CALLS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "recipes" / "demo_split.yaml"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="recording_cost_"))
    demo = make_demo(folder / "data")
    words = [
        f"data.train_files={demo.train_file}",
        "data.val_files=[]",
        f"actor_rollout_ref.model.path={demo.model}",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.default_local_dir={folder / 'run'}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
    watch = Stopwatch()
    RunFolder.add_spans = watch.around("write spans", RunFolder.add_spans)  # type: ignore[method-assign]
    RunFolder.add_monitor = watch.around("write samples", RunFolder.add_monitor)  # type: ignore[method-assign]
    Monitors.take = watch.around("take samples", Monitors.take)  # type: ignore[method-assign]
    rows.step_metrics = watch.around("analyse spans", rows.step_metrics)
    trainer = Trainer(load_config([options.recipe], words))
    trainer.observer = AfterWarmUp(watch)
    trainer.run()

    run = read_run(folder / "run")
    step_s = [row["timing_s/step"] for step, row in run.metrics.items() if step > NUM_WARM_STEPS]
    mean_s = sum(step_s) / len(step_s)
    calls_a_step = len(run.spans) / len(run.metrics)
    calls_a_rank = calls_a_step / len({(each.span.pool, each.span.rank) for each in run.spans})
    watch.seconds["make spans (on a rank)"] = of_a_call(256, 12) * calls_a_rank * len(step_s)
    print(f"{len(step_s)} steps of {mean_s * 1000:.0f} ms, {calls_a_step:.1f} spans a step")
    for name, seconds in watch.seconds.items():
        print(
            f"{name:24} {seconds / len(step_s) * 1000:8.3f} ms a step {seconds / sum(step_s):8.3%}"
        )
    total = sum(watch.seconds.values()) / sum(step_s)
    print(
        f"{'all':24} {total * mean_s * 1000:8.3f} ms a step {total:8.3%} of the step (goal: under 1%)"
    )


if __name__ == "__main__":
    main()
