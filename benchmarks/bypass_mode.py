"""What a step costs with the log-probs of the actor, and with those of the engine.

    python benchmarks/bypass_mode.py [--rounds 4] [--steps 40] [recipe] [key=value ...]

Trains a recipe in turn with `algorithm.rollout_correction.bypass_mode=false` and `true`, for some
rounds, and prints the median step of each run, and of all runs. Other work on the machine changes
these times, so it also prints the share of a step that `old_log_prob` takes, which is measured
within a run.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.report.run import read_run
from rolepool.trainer.loop import Trainer

ROOT = Path(__file__).parent.parent
NUM_WARM_STEPS = 4
KEY = "algorithm.rollout_correction.bypass_mode"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "recipes" / "demo.yaml"))
    parser.add_argument("words", nargs="*", help="further keys")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    steps_s: dict[str, list[float]] = {"false": [], "true": []}
    shares: list[float] = []
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
            *options.words,
        ]
        for number in range(options.rounds):
            for value in ("false", "true") if number % 2 else ("true", "false"):
                run = [f"{KEY}={value}", f"trainer.default_local_dir={folder}/{number}_{value}"]
                trainer = Trainer(load_config([options.recipe], [*words, *run]))
                trainer.run()
                rows = read_run(trainer.parts.folder.path).metrics
                late = [row for step, row in rows.items() if step > NUM_WARM_STEPS]
                taken_s = [row["timing_s/step"] for row in late]
                steps_s[value] += taken_s
                print(f"round {number + 1}, {KEY}={value}: {median(taken_s):.4f} s", flush=True)
                if value == "false":
                    of_rows = [row["timing_s/old_log_prob"] / row["timing_s/step"] for row in late]
                    shares.append(median(of_rows))
    computed_s = median(steps_s["false"])
    bypassed_s = median(steps_s["true"])
    saved = 1 - bypassed_s / computed_s
    print(f"all rounds: {computed_s:.4f} s, with bypass_mode {bypassed_s:.4f} s: {saved:.1%} less")
    print(f"old_log_prob takes {median(shares):.1%} of a step")


if __name__ == "__main__":
    main()
