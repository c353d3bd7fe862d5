"""How long training stands still while a run moves to another placement, and that its losses do not
change.

    python benchmarks/moves.py [--every 16]
    python benchmarks/moves.py --device cuda --every 6 --limit 240 --json moves.json

The run is the demo on CPU slots. It asks for the next move some steps after the last one: from one
pool to two and back, from 2 slots to 4, to a critic in a pool of its own, and to a rollout in a
pool of its own. The downtime is the time from the end of the last call of the last step before the
move to the start of the first call after it. Losses and rewards are compared with those of a run
that does not move, in float64.

Another number of ranks adds the same numbers in another order, which changes their last bit.
Training must not make that difference larger, so the learning rate is low and norms are computed in
float64, too (`float64_norms.py`). With a learning rate of 1e-3, two runs that never move and have
different placements differ by 1e-15 in the first steps, by 1e-10 after 24 and completely after 48;
and each time that a norm of transformers, which rounds to float32, rounds another way, 1e-16
becomes 1e-8.

On GPUs the runs have the usual precision and trainer.deterministic=true. They compute in 16 bits,
so another number of ranks soon samples other tokens, and the difference is only shown. That a run
that moves computes what it would compute without a fault is shown by `chaos.py`. Several ranks may
share one GPU (`lanes.py`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from statistics import fmean
from typing import Any

import lanes
import torch
from lanes import Job, Outcome, run_jobs

from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.report.run import read_run
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer
from rolepool.trainer.mover import Move
from rolepool.trainer.moves import moved

KEYS = f"""
data.train_batch_size=64 data.max_prompt_length=8 data.max_response_length=4 data.val_files=null
actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.optim.lr=1e-4 critic.optim.lr=1e-4
actor_rollout_ref.rollout.n=2 algorithm.use_kl_in_reward=true trainer.device=cpu trainer.logger=[]
trainer.total_epochs=1000 trainer.test_freq=-1 trainer.save_freq=-1 trainer.val_before_train=false
placement.strategy=standard trainer.n_gpus_per_node=2 ray_kwargs.ray_init.num_cpus=8
trainer.extensions=[{Path(__file__).with_name("float64_norms.py")}]
"""
KEYS_ON_GPU = """
trainer.device=cuda trainer.deterministic=true trainer.extensions=[]
actor_rollout_ref.rollout.enforce_eager=true
"""
OWN_CRITIC = """placement.strategy=custom placement.pools={a:[1],b:[1]} trainer.n_gpus_per_node=2
placement.roles={actor:a,rollout:a,ref:a,critic:b}"""
OWN_ROLLOUT = """placement.strategy=custom placement.pools={a:[2],b:[1],c:[1]} trainer.n_gpus_per_node=4
placement.roles={actor:a,ref:a,rollout:c,critic:b}"""
MOVES = {
    "standard to split": "placement.strategy=split",
    "split to standard": "placement.strategy=standard",
    "2 to 4 slots": "placement.strategy=standard trainer.n_gpus_per_node=4",
    "4 to 2 slots": "placement.strategy=standard trainer.n_gpus_per_node=2",
    "critic to its own pool": OWN_CRITIC,
    "rollout to its own pool": OWN_ROLLOUT,
    "all together again": "placement.strategy=standard trainer.n_gpus_per_node=2",
}
COMPARED = (
    "actor/pg_loss",
    "critic/vf_loss",
    "actor/entropy",
    "critic/score/mean",
    "actor/grad_norm",
)


class Mover(Observer):
    """Asks for the next move `every` steps after the last one, and ends the run after the last
    move.

    With `waits`, the run does not make another step before the processes of the move have started.
    """

    def __init__(self, moves: Sequence[str], every: int, *, waits: bool) -> None:
        self._moves, self._every, self._waits = list(moves), every, waits
        self._due = every
        self._move: Move | None = None
        self.trainer: Trainer | None = None

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        assert self.trainer is not None
        if self._move is not None and self._move.plan is self.trainer.deployment.plan:
            self._move, self._due = None, step + self._every
        if self._move is None and step >= self._due:
            if not self._moves:
                self.trainer.num_steps = min(self.trainer.num_steps, step + 1)
                return
            plan, loaded = moved(self.trainer.deployment.config, self._moves.pop(0).split())
            self._move = self.trainer.mover.ask(plan, loaded)
            if self._waits:
                wait([self._move.starting])


def run(
    folder: Path,
    keys: Sequence[str],
    moves: Sequence[str] = (),
    every: int = 1,
    *,
    waits: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[int, dict[str, float]]:
    """Train and return the metrics of each step."""
    observer = Mover(moves, every, waits=waits)
    trainer = Trainer(load_config([], [*keys, f"trainer.default_local_dir={folder}"]), dtype=dtype)
    trainer.observer, observer.trainer = observer, trainer
    trainer.run()
    return read_run(folder).metrics


def downtimes(folder: Path, every: int) -> list[tuple[int, float, float]]:
    """For each move: the step before it, the seconds without work, and the mean time of the steps
    after it."""
    spans = read_run(folder).spans
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = []
    for after in (row["move"]["after_step"] for row in rows if "move" in row):
        end_s = max(one.span.end_s for one in spans if one.step == after)
        start_s = min(one.span.start_s for one in spans if one.step == after + 1)
        times = [
            row["timing_s/step"]
            for row in rows
            if after + 2 <= row["step"] <= after + every and len(row) > 2
        ]
        found.append((after, start_s - end_s, fmean(times)))
    return found


def work(argument: tuple[str, list[str], int, str]) -> Any:
    """In a lane: the run that moves, with its downtimes, or the run that does not."""
    folder, keys, every, device = argument
    dtype = torch.float64 if device == "cpu" else torch.float32
    moves = list(MOVES.values()) if folder.endswith("moving") else []
    lanes.start_ray(device)
    metrics = run(Path(folder), keys, moves, every, dtype=dtype)
    return metrics, downtimes(Path(folder), every)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=16, help="steps between two moves")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for both runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit
    if options.device == "cuda":
        lanes.share_one_gpu()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = make_demo(folder / "demo")
        keys = [
            *KEYS.split(),
            f"actor_rollout_ref.model.path={demo.model}",
            f"data.train_files={demo.train_file}",
        ]
        if options.device == "cuda":
            keys += KEYS_ON_GPU.split()

        def run_in_lane(what: str, keys: list[str], every: int) -> Outcome:
            argument = (str(folder / what), keys, every, options.device)
            run_jobs(
                [Job(what, argument)],
                work,
                num_lanes=1,
                folder=folder,
                limit_s=max(1.0, deadline - time.monotonic()),
                job_limit_s=options.limit,
                on_outcome=outcomes.append,
            )
            return outcomes[-1]

        moving = run_in_lane("moving", keys, options.every)
        if moving.problem is None:
            last = max(moving.result[0])
            run_in_lane("still", [*keys, f"trainer.total_training_steps={last}"], last)
        for outcome in outcomes:
            if outcome.problem is not None:
                print(f"{outcome.name}: {outcome.problem}; end of its log:\n{outcome.log[-3000:]}")
    report = report_on(outcomes)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if len(outcomes) == 2 and all(one.problem is None for one in outcomes) else 1


def report_on(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Print the tables that can be made from these outcomes, and return their numbers."""
    report: dict[str, Any] = {"problems": [one.problem for one in outcomes], "moves": []}
    results = [one.result for one in outcomes if one.problem is None]
    if not results:
        return report
    metrics, found = results[0]
    worst: dict[int, float] = {}
    if len(results) > 1:
        for step, row in results[1][0].items():
            worst[step] = max(abs(metrics[step][name] - row[name]) for name in COMPARED)
    print(
        f"{'move':<26} {'after step':>10} {'downtime s':>10} {'step s':>8} {'ratio':>6} {'difference before':>18}"
    )
    for name, (after, seconds, step_s) in zip(MOVES, found, strict=True):
        before = max((worst[step] for step in worst if step <= after), default=float("nan"))
        report["moves"].append(
            {
                "move": name,
                "after_step": after,
                "downtime_s": seconds,
                "step_s": step_s,
                "difference_before": before,
            }
        )
        print(
            f"{name:<26} {after:>10} {seconds:>10.2f} {step_s:>8.3f} {seconds / step_s:>6.1f} {before:>18.1e}"
        )
    if worst:
        report["largest_difference"] = max(worst.values())
        print(
            f"largest difference of {', '.join(COMPARED)} in {len(worst)} steps: {max(worst.values()):.1e}"
        )
    report["longest_s"] = max(seconds for _, seconds, _ in found)
    print(f"longest downtime: {report['longest_s']:.2f} s (goal: at most 3)")
    return report


if __name__ == "__main__":
    raise SystemExit(main())
