"""Learning curves of rolepool, and of TRL's GRPOTrainer with the same data, model and settings.

    python benchmarks/learning.py OUT RECIPE [key=value...] [--seeds 1,2,3] [--variant "NAME:key=value;key=value"]
        [--sides rolepool,trl] [--at-once 4] [--limit 600]

Each variant, with each seed, is a run of its own: `rolepool train RECIPE key=value...`. With the
side `trl`, `learning_trl.py` trains the same; TRL has no PPO with a critic, so this is for GRPO.
Prints the validation at the beginning and at the end, and writes curves.json and curves.png to OUT.
Runs that are not done after `--limit` seconds are stopped, and what they had is kept. With
`--from OTHER`, the curves in another OUT are added.

Needs the package trl for the side `trl`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROLEPOOL, TRL = "rolepool", "trl"
SMOOTHED = 5
"""Steps in one point of the training curve."""
STOP_S = 15
"""How long a run that is told to stop may take."""


@dataclass
class Curve:
    """What was seen of one run."""

    name: str
    seed: int
    side: str
    validations: dict[int, float] = field(default_factory=dict)
    """The mean over the data sources, by step."""
    by_source: dict[str, dict[int, float]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """When a validation was there, from the start of training."""
    rewards: list[float] = field(default_factory=list)
    others: dict[str, list[float]] = field(default_factory=dict)
    ended: str = ""
    """How the run ended."""
    wall_s: float = 0.0
    """From the start of its processes to its end, beside what else ran."""

    @property
    def gain(self) -> float:
        values = list(self.validations.values())
        return values[-1] - values[0] if values else float("nan")


@dataclass
class Run:
    """A process that trains."""

    name: str
    seed: int
    side: str
    words: Sequence[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    start_s: float = 0.0
    end_s: float = 0.0

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [*self.words, f"trainer.seed={self.seed}"]
        if self.side == TRL:
            script = str(Path(__file__).with_name("learning_trl.py"))
            command = [sys.executable, script, str(self.folder / "trl.json"), *words]
        else:
            extra = [f"trainer.default_local_dir={self.folder / 'run'}", "trainer.save_freq=-1"]
            command = [sys.executable, "-m", "rolepool", "train", *words, *extra]
        self.start_s = time.monotonic()
        log = (self.folder / f"{self.side}.log").open("wb")
        self.process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def stop(self) -> None:
        """Interrupt a run that is too late, and its processes."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(STOP_S)

    def curve(self) -> Curve:
        found = Curve(self.name, self.seed, self.side)
        code = self.process.poll() if self.process is not None else None
        found.ended = "did not start" if self.process is None else f"exit code {code}"
        found.wall_s = self.end_s - self.start_s
        reader = _read_trl if self.side == TRL else _read_rolepool
        reader(self.folder, found)
        return found


def _read_trl(folder: Path, found: Curve) -> None:
    file = folder / "trl.json"
    if file.exists():
        content = json.loads(file.read_text(encoding="utf-8"))
        found.rewards, found.others = content["rewards"], content["logged"]
        found.validations = {int(step): value for step, value in content["validations"].items()}
        found.seconds = {int(step): value for step, value in content["seconds"].items()}


def _read_rolepool(folder: Path, found: Curve) -> None:
    file = folder / "run" / "metrics.jsonl"
    if not file.exists():
        return
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = {"actor/grad_norm", "actor/entropy", "actor/pg_loss", "critic/vf_explained_var"}
    names |= {"response_length/mean", "response_length/clip_ratio", "perf/time_per_step"}
    names |= {"training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"}
    for row in rows:
        step = row.get("training/global_step", row.get("step"))
        means = {name: value for name, value in row.items() if _is_validation(name)}
        if means:
            found.validations[step] = sum(means.values()) / len(means)
            for name, value in means.items():
                found.by_source.setdefault(name, {})[step] = value
        if "critic/score/mean" in row:
            found.rewards.append(row["critic/score/mean"])
        for name in names & row.keys():
            found.others.setdefault(name, []).append(row[name])


def _is_validation(name: str) -> bool:
    return name.startswith("val-core/") and "/mean@" in name


def _curve_of(entry: dict[str, Any]) -> Curve:
    """A curve from JSON, which has texts for the steps."""
    curve = Curve(**entry)
    curve.validations = {int(step): value for step, value in curve.validations.items()}
    curve.seconds = {int(step): value for step, value in curve.seconds.items()}
    return curve


def run_all(runs: Sequence[Run], at_once: int, limit_s: float, out: Path) -> list[Curve]:
    """Start the runs, `at_once` of them at a time, and wait for them until the limit."""
    end_s = time.monotonic() + limit_s
    waiting, running = list(runs), list[Run]()
    while (waiting or running) and time.monotonic() < end_s:
        for run in running:
            run.end_s = time.monotonic()
        running = [run for run in running if run.process and run.process.poll() is None]
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
            running[-1].start()
        time.sleep(1)
    for run in running:
        if run.process is not None and run.process.poll() is None:
            print(f"{run.name} seed {run.seed} {run.side}: stopped after {limit_s:.0f} s")
            run.stop()
    curves = [run.curve() for run in runs]
    partial = out / "curves.tmp"
    partial.write_text(json.dumps([asdict(curve) for curve in curves]), encoding="utf-8")
    partial.replace(out / "curves.json")
    return curves


def show(curves: Iterable[Curve]) -> None:
    print("run | seed | side | validation | first and last ten training rewards | ended")
    for curve in curves:
        steps = [f"{step}: {value:.3f}" for step, value in curve.validations.items()]
        first, last = curve.rewards[:10], curve.rewards[-10:]
        rewards = f"{_mean(first):.3f} {_mean(last):.3f} of {len(curve.rewards)}"
        shown = ", ".join([*steps[:1], *steps[1:][-6:]])
        print(
            f"{curve.name} | {curve.seed} | {curve.side} | {shown} (gain {curve.gain:+.3f}) | "
            f"{rewards} | {curve.wall_s:.0f} s, {curve.ended}"
        )
        for name, values in curve.by_source.items():
            ends = list(values.values())
            print(f"    {name}: {ends[0]:.3f} to {ends[-1]:.3f}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _smooth(rewards: Sequence[float]) -> tuple[list[int], list[float]]:
    """The steps, and the mean of each step's reward and those before it."""
    steps = list(range(SMOOTHED, len(rewards) + 1))
    return steps, [_mean(rewards[step - SMOOTHED : step]) for step in steps]


def draw(curves: Sequence[Curve], file: Path) -> None:
    """Validation and training reward by step, one line for each run, one color for each kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    labels = list(dict.fromkeys(f"{curve.name}, {curve.side}" for curve in curves))
    is_first = dict.fromkeys(labels, True)
    for curve in curves:
        label = f"{curve.name}, {curve.side}"
        style: dict[str, Any] = {
            "color": f"C{labels.index(label)}",
            "linestyle": "--" if curve.side == TRL else "-",
            "label": label if is_first[label] else None,
        }
        is_first[label] = False
        left.plot(list(curve.validations), list(curve.validations.values()), **style)
        right.plot(*_smooth(curve.rewards), **style)
    left.set(title="held-out items, greedy", xlabel="step", ylabel="score")
    right.set(title=f"training responses, mean of {SMOOTHED} steps", xlabel="step")
    left.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("words", nargs="+", help="a recipe, and key=value")
    parser.add_argument("--seeds", default="1", help="numbers with commas between them")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME:key=value;...", dest="variants"
    )
    parser.add_argument("--sides", default=ROLEPOOL, help="rolepool, trl, or rolepool,trl")
    parser.add_argument("--from", action="append", default=[], type=Path, dest="others")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit", type=float, default=600, help="seconds for all runs together")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    for variant in options.variants or ["run:"]:
        name, _, keys = variant.partition(":")
        for seed in map(int, options.seeds.split(",")):
            words = [*options.words, *filter(None, keys.split(";"))]
            for side in options.sides.split(","):
                runs.append(Run(name, seed, side, words, options.out / name / str(seed)))
    curves = run_all(runs, options.at_once, options.limit, options.out)
    for other in options.others:
        content = json.loads((other / "curves.json").read_text(encoding="utf-8"))
        curves += [_curve_of(entry) for entry in content]
    show(curves)
    draw(curves, options.out / "curves.png")
    return int(any(not curve.validations for curve in curves))


if __name__ == "__main__":
    sys.exit(main())
