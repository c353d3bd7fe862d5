"""How well one run of the demo predicts the other: demo to split, and split to demo.

    python benchmarks/predict_demo.py                    both demos once, then both predictions
    python benchmarks/predict_demo.py --repeat 3         three times, each time from new runs
    python benchmarks/predict_demo.py --runs FOLDER      keeps the runs there
    python benchmarks/predict_demo.py trainer.total_training_steps=30   shorter runs

Each round trains the two demos one after the other, in new folders and with fresh processes, as
`demo.sh` and `demo_split.sh` do. Further key=value words are passed on to both. Then each run
predicts the step of the other one, without any other recording. Prints predicted step, interval,
measured step (the median of the steps after the first two), the error, and whether the measured
step is inside of the interval. The exit code is 1 if an error is larger than 15%, or if a measured
step is outside.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rolepool.config.fitting import num_cores
from rolepool.planner.predict import Predictor
from rolepool.planner.profile import Profile, Recording
from rolepool.report.recordings import read_recordings
from rolepool.trainer.paper import schedule_of

ROOT = Path(__file__).parent.parent
DEMOS = {"demo": "demo_split", "demo_split": "demo"}
"""Each demo, and the one that it predicts."""
GOAL = 0.15


def train(demo: str, words: list[str], folder: Path) -> Recording:
    """Train a demo in a process of its own, and read what it recorded."""
    keys = [*words, f"trainer.default_local_dir={folder}"]
    ended = subprocess.run(
        [sys.executable, "-m", "rolepool", "train", demo, *keys],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        sys.exit(f"rolepool train {demo} ended with exit code {ended.returncode}:\n{ended.stderr}")
    return read_recordings([folder], None)[0]


def compare(number: int, source: str, recordings: dict[str, Recording]) -> tuple[float, bool]:
    """Predict the other demo from this one and print the result. Returns the error and whether it
    meets the goal."""
    target = recordings[DEMOS[source]]
    predictor = Predictor(Profile([recordings[source]]), schedule_of, num_cores=num_cores())
    predicted = predictor.predict(DEMOS[source], target.config, target.plan)
    measured_s = target.step_s
    error = predicted.step_s / measured_s - 1
    is_inside = predicted.low_s <= measured_s <= predicted.high_s
    times = f"{predicted.step_s:>9.3f} {predicted.low_s:>7.3f} {predicted.high_s:>7.3f} {measured_s:>8.3f}"
    place = "inside" if is_inside else "outside"
    print(
        f"{number:>5}  {source:<10} {DEMOS[source]:<10} {times} {error:>+6.1%}  {place}", flush=True
    )
    return error, is_inside and abs(error) <= GOAL


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=1, help="how many rounds; default: 1")
    parser.add_argument(
        "--runs", type=Path, help="where run folders go; default: a temporary folder"
    )
    parser.add_argument("words", nargs="*", help="key=value words for both demos")
    options = parser.parse_args()
    home = options.runs or Path(tempfile.mkdtemp(prefix="predict_demo_"))
    print(
        f"round  {'from':<10} {'to':<10} {'predicted':>9} {'from':>7} {'to':>7} {'measured':>8} {'error':>6}",
        flush=True,
    )
    errors: list[float] = []
    num_met = 0
    for number in range(1, options.repeat + 1):
        recordings = {demo: train(demo, options.words, home / f"{demo}{number}") for demo in DEMOS}
        for source in DEMOS:
            error, meets_goal = compare(number, source, recordings)
            errors.append(abs(error))
            num_met += meets_goal
    print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    print(
        f"{num_met} of {len(errors)} predictions are inside of their interval and within {GOAL:.0%}; runs: {home}"
    )
    return 0 if num_met == len(errors) else 1


if __name__ == "__main__":
    sys.exit(main())
