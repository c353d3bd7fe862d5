"""A run that looks for a better placement while it trains, against the same run that does not.

    python benchmarks/rebalance.py [--steps 200] [--rounds 2]

The run is the demo on two CPU slots with a critic that is twice as heavy (two epochs). It starts in
one pool. The run with `placement.rebalance=true` may move; its whole time is compared, with the
search and the moves. Prints seconds of both, their ratio, and what the runs said about placements.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer

ROOT = Path(__file__).parent.parent


class Notices(Observer):
    """Prints what the run says about placements, and notes when training begins."""

    start_s = 0.0

    def on_notice(self, line: str) -> None:
        if "placement" in line or "moved" in line:
            print(f"    {line}", flush=True)

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        self.start_s = self.start_s or time.monotonic()


def seconds(folder: Path, words: list[str], *more: str) -> float:
    """The time from the first row of a run to its end."""
    loaded = load_config(
        [str(ROOT / "recipes" / "demo.yaml")],
        [*words, *more, f"trainer.default_local_dir={folder}"],
    )
    trainer = Trainer(loaded)
    trainer.observer = observer = Notices()
    trainer.run()
    return time.monotonic() - observer.start_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        demo = make_demo(Path(name) / "demo")
        words = [
            f"data.train_files={demo.train_file}",
            f"actor_rollout_ref.model.path={demo.model}",
        ]
        words += [
            "data.val_files=null",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.logger=[]",
        ]
        words += [
            "critic.ppo_epochs=2",
            f"trainer.total_training_steps={options.steps}",
            "trainer.total_epochs=1000",
        ]
        times: dict[str, list[float]] = {"false": [], "true": []}
        for number in range(options.rounds):
            for value, found in times.items():
                folder = Path(name) / f"{value}{number}" / "run"
                found.append(seconds(folder, words, f"placement.rebalance={value}"))
                print(f"placement.rebalance={value}: {found[-1]:.1f} s", flush=True)
    ratio = median(times["true"]) / median(times["false"])
    print(
        f"with rebalance {median(times['true']):.1f} s, without {median(times['false']):.1f} s, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
