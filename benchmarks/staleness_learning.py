"""Does generation that runs ahead hurt learning? The demo with several values of
`algorithm.max_staleness`, over paired seeds, with two one-sided tests.

    python benchmarks/staleness_learning.py OUT                         k = 0, 1, 2 with 8 seeds
    python benchmarks/staleness_learning.py OUT --sides k0,k2,k2_is,k4  other sides
    python benchmarks/staleness_learning.py OUT --limit 720             stops after 12 minutes
    python benchmarks/staleness_learning.py OUT --device cuda --lanes 8 runs share the first GPU

All sides make the same number of steps with the same seeds and prompts. All roles are in one pool
with one rank: nothing overlaps there, but the numbers do not depend on the placement, and this is
the cheapest one. Several runs are made at a time, in lanes.

What is compared is the held-out reward after the last step (greedy answers to prompts that training
never sees), and as a second number its mean over all validations after the start, which shows
slower learning also if the end is the same. Each side is compared with k0 by the differences of
equal seeds. It counts as equivalent if a difference of 0.02 or more is excluded in both directions
(each test at 5%).

A run that has ended is kept in OUT and not made again, so the same command continues where it was
stopped. Prints tables, and writes all numbers to OUT/staleness_learning.json. Exit code 1 if a run
failed or is missing; what the tests say does not change it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import lanes
import ray
from equivalence import LEVEL, compare
from lanes import Job, Outcome, run_jobs

from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.report.run import read_run
from rolepool.trainer.loop import Trainer

ROOT = Path(__file__).parent.parent
REFERENCE = "k0"
CORRECTED = (
    "actor_rollout_ref.rollout.calculate_log_probs=true "
    "algorithm.rollout_correction.preset=decoupled_token_is"
)
SIDES = {
    "k0": "algorithm.max_staleness=0",
    "k1": "algorithm.max_staleness=1",
    "k2": "algorithm.max_staleness=2",
    "k4": "algorithm.max_staleness=4",
    "k1_is": f"algorithm.max_staleness=1 {CORRECTED}",
    "k2_is": f"algorithm.max_staleness=2 {CORRECTED}",
    "k4_is": f"algorithm.max_staleness=4 {CORRECTED}",
}
"""`_is` is the preset decoupled_token_is, which weights tokens."""
KEYS = """
placement.strategy=standard trainer.n_gpus_per_node=1 trainer.save_freq=-1 trainer.logger=[]
trainer.snapshot_freq=-1
"""
VALIDATION = "val-core/"
MARGIN = 0.02
MEASURES = {"last": "after the last step", "mean": "mean of all validations"}
JOB_LIMIT_S = 1800.0

Results = dict[str, dict[int, dict[str, Any]]]
"""What each side has reached, by seed."""


def train(argument: tuple[str, list[str], str]) -> dict[str, Any]:
    """In a lane: one run. Writes its result beside its folder, and returns it."""
    folder, words, device = argument
    if not ray.is_initialized():
        lanes.start_ray(device)
    lanes.await_free_gpus()
    recipe = str(ROOT / "recipes" / "demo.yaml")
    loaded = load_config([recipe], [*words, f"trainer.default_local_dir={folder}/run"])
    start_s = time.monotonic()
    Trainer(loaded).run()
    result = {
        "words": words,
        "seconds": time.monotonic() - start_s,
        "validations": validations_of(Path(folder) / "run"),
    }
    partial = Path(folder) / "result.tmp"
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(Path(folder) / "result.json")
    return result


def validations_of(folder: Path) -> dict[str, float]:
    """The held-out reward, by step. Steps are texts, as in JSON."""
    found: dict[str, float] = {}
    for step, row in read_run(folder).metrics.items():
        for name, value in row.items():
            if name.startswith(VALIDATION) and "/mean@" in name:
                found[str(step)] = value
    return found


def kept_result(folder: Path, words: Sequence[str]) -> dict[str, Any] | None:
    """The result of a run that has ended before."""
    file = folder / "result.json"
    if not file.exists():
        return None
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if result["words"] != list(words):
        raise SystemExit(f"error: {file} has the result of other keys; use another folder")
    return result


def score(result: Mapping[str, Any], measure: str) -> float:
    """The number of a run that is compared."""
    by_step = {int(step): value for step, value in result["validations"].items()}
    if measure == "last":
        return by_step[max(by_step)]
    after_start = [value for step, value in by_step.items() if step > 0]
    return fmean(after_start)


def tests_of(results: Results, measure: str) -> dict[str, dict[str, Any]]:
    """Each side compared with the reference, over the seeds that both have."""
    tests: dict[str, dict[str, Any]] = {}
    reference = results.get(REFERENCE, {})
    for side, by_seed in results.items():
        seeds = sorted(by_seed.keys() & reference.keys())
        if side == REFERENCE or len(seeds) < 2:
            continue
        differences = []
        for seed in seeds:
            of_side = score(by_seed[seed], measure)
            differences.append(of_side - score(reference[seed], measure))
        tested = compare(differences, MARGIN)
        tests[side] = {
            **asdict(tested),
            "seeds": seeds,
            "differences": differences,
            "is_equivalent": tested.is_equivalent,
            "is_not_worse": tested.is_not_worse,
        }
    return tests


def show(results: Results, measure: str, tests: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\nheld-out reward, {MEASURES[measure]}")
    sides = list(results)
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed})
    print(f"{'seed':>6} " + " ".join(f"{side:>8}" for side in sides))
    for seed in seeds:
        cells = []
        for side in sides:
            result = results[side].get(seed)
            cells.append("       -" if result is None else f"{score(result, measure):8.4f}")
        print(f"{seed:>6} " + " ".join(cells))
    for side, test in tests.items():
        if test["is_equivalent"]:
            verdict = f"equivalent within {MARGIN}"
        elif test["is_not_worse"]:
            verdict = f"not worse by {MARGIN}, but perhaps better"
        elif test["high"] < -MARGIN:
            verdict = f"worse by more than {MARGIN}"
        else:
            verdict = f"not shown to be within {MARGIN}"
        print(
            f"{side} - {REFERENCE}: {test['mean']:+.4f}, {1 - 2 * LEVEL:.0%} interval "
            f"{test['low']:+.4f} to {test['high']:+.4f}, p {test['p_not_worse']:.3f} (not worse) "
            f"and {test['p_not_better']:.3f} (not better), {test['num_pairs']} pairs: {verdict}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for runs and results")
    parser.add_argument("words", nargs="*", help="key=value for all runs")
    parser.add_argument("--sides", default="k0,k1,k2", help=f"some of {', '.join(SIDES)}")
    parser.add_argument("--seeds", type=int, default=8, help="how many")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lanes", type=int, default=2, help="runs at a time")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all runs together")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_intermixed_args()
    unknown = [side for side in options.sides.split(",") if side not in SIDES]
    if unknown:
        parser.error(f"--sides {unknown[0]}: use some of {', '.join(SIDES)}")
    return options


def jobs_of(options: argparse.Namespace, results: Results) -> list[Job]:
    """The runs that are still missing. All sides of a seed come before the next seed, so that a run
    that is stopped early has whole pairs."""
    demo = make_demo(options.out / "demo")
    common = [
        *KEYS.split(),
        f"data.train_files={demo.train_file}",
        f"data.val_files={demo.val_file}",
        f"actor_rollout_ref.model.path={demo.model}",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.device={options.device}",
        *options.words,
    ]
    jobs: list[Job] = []
    for seed in range(1, options.seeds + 1):
        for side in options.sides.split(","):
            words = [*common, *SIDES[side].split(), f"trainer.seed={seed}"]
            folder = options.out / side / str(seed)
            result = kept_result(folder, words)
            if result is not None:
                results[side][seed] = result
                continue
            folder.mkdir(parents=True, exist_ok=True)
            jobs.append(Job(f"{side}/{seed}", (str(folder), words, options.device)))
    return jobs


def main() -> int:
    options = parse()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda":
        lanes.share_one_gpu()
    results: Results = {side: {} for side in options.sides.split(",")}
    jobs = jobs_of(options, results)
    num_missing = 0

    def note(outcome: Outcome) -> None:
        nonlocal num_missing
        side, _, seed = outcome.name.partition("/")
        if outcome.problem is not None:
            num_missing += 1
            print(f"{outcome.name}: {outcome.problem}", flush=True)
            if outcome.log:
                print(outcome.log[-2000:], flush=True)
            return
        results[side][int(seed)] = outcome.result
        reached = score(outcome.result, "last")
        print(f"{outcome.name}: {reached:.4f} ({outcome.seconds:.0f} s)", flush=True)

    run_jobs(
        jobs,
        train,
        num_lanes=options.lanes,
        folder=options.out,
        limit_s=options.limit,
        job_limit_s=JOB_LIMIT_S,
        on_outcome=note,
    )
    report: dict[str, Any] = {"margin": MARGIN, "level": LEVEL, "results": results, "tests": {}}
    for measure in MEASURES:
        tests = tests_of(results, measure)
        show(results, measure, tests)
        report["tests"][measure] = tests
    file = options.out / "staleness_learning.json"
    file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"\nwritten: {os.path.relpath(file)}")
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
