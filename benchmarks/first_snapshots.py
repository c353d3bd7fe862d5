"""What the first snapshots of a run cost, whose memory is new, in this working tree and in other
commits.

    python benchmarks/first_snapshots.py [main ...] [--rounds 3] [--steps 8]

Trains the demo with a model of a few hundred MB and random weights. In each round every side trains
once with `trainer.snapshot_freq=1`, and the working tree once more without snapshots. Prints the
seconds before the first step, of each of the first steps, and the median of the later ones. The
cost of the first snapshots is what these take longer than as many steps without snapshots. Other
work on the machine changes these times, so it also prints how long the rank is in its first calls
of `take_snapshot`, in which it does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

from compare_commits import ROOT, TIMEOUT_S, Side, checked_out

NUM_FIRST = 3
"""The steps in which memory of snapshots may be new."""
HIDDEN_SIZE = 1024
NUM_LAYERS = 6


class Times(NamedTuple):
    """Seconds of a run."""

    before_s: float
    """From the first snapshot to the first step."""
    steps_s: list[float]
    calls_s: list[float]
    """The first calls of `take_snapshot`."""

    @property
    def first_s(self) -> float:
        """Everything until the memory of all snapshots is used."""
        return self.before_s + sum(self.steps_s[:NUM_FIRST])

    @property
    def later_s(self) -> float:
        return median(self.steps_s[NUM_FIRST:])


def train(folder: Path, data: Path, every: int, num_steps: int) -> None:
    """Train in this process, with the rolepool that Python finds, and print the times as JSON."""
    from rolepool.cluster.keepers import Keepers
    from rolepool.config import load_config
    from rolepool.report.run import read_run
    from rolepool.trainer.console import Observer
    from rolepool.trainer.loop import Trainer
    from rolepool.trainer.snapshots import Snapshots

    began_s: list[float] = []
    save = Snapshots.save

    def noted(snapshots: Snapshots, *arguments: object) -> None:
        began_s.append(time.time())
        save(snapshots, *arguments)  # type: ignore[arg-type]

    calls: list[Any] = []
    copy = Keepers.copy

    def noted_copy(keepers: Keepers, number: int, ranks: Any, written: Any) -> None:
        calls.append(written)
        copy(keepers, number, ranks, written)

    class Meter(Observer):
        """Reads the spans of calls while their processes live."""

        calls_s: ClassVar[list[float]] = []

        def on_row(self, step: int, metrics: dict[str, float]) -> None:
            if step == NUM_FIRST + 1:
                for call in calls[:NUM_FIRST]:
                    (span,) = call.spans()
                    self.calls_s.append(span.end_s - span.start_s)

    Snapshots.save = noted  # type: ignore[method-assign]
    Keepers.copy = noted_copy  # type: ignore[method-assign]
    words = [
        f"data.train_files={data / 'train.jsonl'}",
        "data.val_files=[]",
        f"actor_rollout_ref.model.path={data / 'large'}",
        f"actor_rollout_ref.model.tokenizer_path={data / 'model'}",
        "data.train_batch_size=2",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        f"trainer.total_training_steps={num_steps}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[]",
        f"trainer.snapshot_freq={every}",
        f"trainer.default_local_dir={folder}",
    ]
    trainer = Trainer(load_config([], words))
    trainer.observer = Meter()
    trainer.run()
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for number, _, span in read_run(folder).spans:
        starts[number] = min(starts.get(number, span.start_s), span.start_s)
        ends[number] = max(ends.get(number, span.end_s), span.end_s)
    marks = [starts[number] for number in sorted(starts)]
    marks.append(ends[max(ends)])
    steps_s = [end - start for start, end in pairwise(marks)]
    print(json.dumps([marks[0] - began_s[0], steps_s, Meter.calls_s]))


def make_model(data: Path) -> float:
    """Make a large model of the demo's kind. Returns the GB of one snapshot of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rolepool.placement.estimate import SNAPSHOT_BYTES_PER_PARAM

    config = AutoConfig.from_pretrained(data / "model")
    config.hidden_size = HIDDEN_SIZE
    config.intermediate_size = 4 * HIDDEN_SIZE
    config.num_hidden_layers = NUM_LAYERS
    config.num_attention_heads = config.num_key_value_heads = 8
    config.head_dim = HIDDEN_SIZE // 8
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(data / "large")
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return SNAPSHOT_BYTES_PER_PARAM * num_params / 1e9


def times_of(side: Side, folder: Path, data: Path, every: int, num_steps: int) -> Times:
    """Train in another process, with the source of this side."""
    environment = {**os.environ, "PYTHONPATH": str(side.source / "src")}
    words = ["--train", str(folder), str(data), str(every), str(num_steps)]
    done = subprocess.run(
        [sys.executable, __file__, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise SystemExit(f"error: {side.name}: exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return Times(*json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="*", help="other commits to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with ExitStack() as cleanup:
        parent = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        data = parent / "data"
        sides: list[tuple[str, Side, int]] = []
        here = Side("working tree", ROOT)
        for commit in options.commits:
            side = cleanup.enter_context(checked_out(commit, parent))
            sides.append((commit, side, 1))
        sides += [("working tree", here, 1), ("without snapshots", here, -1)]

        from rolepool.data.demo import make_demo

        make_demo(data)
        snapshot_gb = make_model(data)
        print(f"one snapshot has {snapshot_gb:.2f} GB", flush=True)
        times: dict[str, list[Times]] = {name: [] for name, _, _ in sides}
        for number in range(options.rounds):
            for name, side, every in sides if number % 2 else sides[::-1]:
                folder = parent / f"run_{number}_{name.replace('/', '_')}"
                taken = times_of(side, folder, data, every, options.steps)
                times[name].append(taken)
                first = _in_words(taken.steps_s[:NUM_FIRST])
                print(
                    f"round {number + 1}, {name}: before {taken.before_s:.2f} s, first steps {first} s, "
                    f"later {taken.later_s:.2f} s, take_snapshot {_in_words(taken.calls_s)} s",
                    flush=True,
                )
        reference_s = median(taken.first_s for taken in times["without snapshots"])
        for name, all_taken in times.items():
            first_s = median(taken.first_s for taken in all_taken)
            later_s = median(taken.later_s for taken in all_taken)
            print(
                f"{name}: {first_s:.2f} s until the end of step {NUM_FIRST}, {first_s - reference_s:+.2f} s; "
                f"a later step {later_s:.2f} s"
            )


def _in_words(seconds: Sequence[float]) -> str:
    return " ".join(f"{each:.2f}" for each in seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        run_folder, run_data, run_every, run_steps = sys.argv[2:]
        train(Path(run_folder), Path(run_data), int(run_every), int(run_steps))
    else:
        main()
