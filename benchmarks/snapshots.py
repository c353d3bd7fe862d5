"""What snapshots in shared memory cost: the step with a snapshot after every step, against the step
without any.

    python benchmarks/snapshots.py [--rounds 4] [--steps 40] [recipe]

Trains the demo in turn with `trainer.snapshot_freq=1` and `-1`, for some rounds, and prints the
median time of a step of each run and of all runs, and their ratio. Other work on the machine
changes these times, so it also prints what does not depend on it as much, as a share of the step:
the time that a rank spends in its `take_snapshot` calls, and the time that the driver spends on
them while the ranks work. The first steps do not count, because the memory of the two snapshots is
new in them; `benchmarks/first_snapshots.py` measures these.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rolepool.cluster.keepers import Keepers
from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.protocol.futures import CallFuture
from rolepool.report.run import read_run
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer
from rolepool.trainer.snapshots import Snapshots

ROOT = Path(__file__).parent.parent
NUM_WARM_STEPS = 4
GOAL = 1.02


class Meter(Observer):
    """Notes the snapshots that a run takes: the seconds of the calls on each rank, and of the
    driver to queue them."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._calls: list[CallFuture] = []
        self._seconds: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        self._driver_s: list[float] = []

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        if step == self._last_step - 1:  # the spans are in the replies, which end with the run
            for span in (span for call in self._calls if call.done() for span in call.spans()):
                self._seconds[span.pool, span.rank, span.role].append(span.end_s - span.start_s)

    @contextmanager
    def watch(self) -> Iterator[None]:
        copy, take = Keepers.copy, Snapshots._take

        def noted_copy(keepers: Keepers, number: int, ranks: Any, written: CallFuture) -> None:
            self._calls.append(written)
            copy(keepers, number, ranks, written)

        def timed_take(snapshots: Snapshots, *args: Any) -> None:
            start_s = time.perf_counter()
            take(snapshots, *args)
            self._driver_s.append(time.perf_counter() - start_s)

        Keepers.copy, Snapshots._take = noted_copy, timed_take  # type: ignore[method-assign]
        try:
            yield
        finally:
            Keepers.copy, Snapshots._take = copy, take  # type: ignore[method-assign]

    @property
    def rank_s(self) -> float:
        """The seconds of a rank for a snapshot of all its roles: medians over the steps, and the
        slowest rank."""
        ranks: dict[tuple[str, int], float] = defaultdict(float)
        for (pool, rank, _), seconds in self._seconds.items():
            ranks[pool, rank] += median(seconds[NUM_WARM_STEPS:])
        return max(ranks.values())

    @property
    def driver_s(self) -> float:
        return median(self._driver_s[NUM_WARM_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "recipes" / "demo.yaml"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    times: dict[int, list[float]] = {1: [], -1: []}
    rank_s, driver_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        demo = make_demo(Path(folder) / "data")
        words = [
            f"data.train_files={demo.train_file}",
            "data.val_files=[]",
            f"actor_rollout_ref.model.path={demo.model}",
            f"trainer.total_training_steps={options.steps}",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.logger=[]",
        ]
        for number in range(options.rounds):
            for every in (1, -1) if number % 2 else (-1, 1):
                run = [
                    f"trainer.snapshot_freq={every}",
                    f"trainer.default_local_dir={folder}/run_{number}_{every}",
                ]
                trainer = Trainer(load_config([options.recipe], [*words, *run]))
                trainer.observer = meter = Meter(options.steps)
                with meter.watch():
                    trainer.run()
                rows = read_run(trainer.parts.folder.path).metrics
                taken = [
                    row["timing_s/step"] for step, row in rows.items() if step > NUM_WARM_STEPS
                ]
                times[every] += taken
                print(
                    f"round {number + 1}, trainer.snapshot_freq={every:>2}: {median(taken):.4f} s a step",
                    flush=True,
                )
                if every > 0:
                    rank_s.append(meter.rank_s)
                    driver_s.append(meter.driver_s)
    with_s, without_s = median(times[1]), median(times[-1])
    print(f"all rounds: {with_s:.4f} s with snapshots, {without_s:.4f} s without")
    print(f"ratio of the medians: {with_s / without_s:.3f} (goal: at most {GOAL})")
    for name, seconds in {
        "a rank in take_snapshot": rank_s,
        "the driver, beside the ranks": driver_s,
    }.items():
        print(
            f"{name}: {median(seconds) * 1000:.2f} ms a step, {median(seconds) / without_s:.2%} of it"
        )


if __name__ == "__main__":
    main()
