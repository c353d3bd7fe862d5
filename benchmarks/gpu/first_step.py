"""How long a run takes from the command to the end of its first step, and what the first step takes
beyond later ones, with a cold and a warm cache of compiled code.

    python benchmarks/gpu/first_step.py --case smollm2-135m
    python benchmarks/gpu/first_step.py --case smollm2-135m --model FOLDER     the real model and task
    python benchmarks/gpu/first_step.py --case qwen2.5-1.5b [--turns cold,warm] [--steps 3]
    python benchmarks/gpu/first_step.py --case smollm2-135m --tiny      a small model on the CPU

Each turn is one run of GRPO without a critic, one after another. Before `cold` the folder of
compiled code (`trainer.compile_cache_dir`) is removed; `warm` has what the turn before it has
left there. Files that Python and the models are read from may be in the memory of the machine in
both turns, so the very first run after a start of the machine takes longer than `cold`.

    smollm2-135m   64 prompts of 160 tokens, 8 responses of at most 40 tokens, and a validation
                   before the first step: like recipes/smollm2_reasoning.yaml, with random weights.
                   With --model it is that recipe with the model of this folder (extra
                   reasoning-gym)
    qwen2.5-1.5b   64 prompts of 512 tokens, a response of 8,192 tokens to each

Printed are the phases of the driver (start.json), what the processes did beside them, and of each
operation of the first step: its seconds, those of later steps, and how much of the difference is
compiling and capturing of CUDA graphs. `later` is the median of the steps after the second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from step_parts import (
    ROOT,
    WARM_STEPS,
    GpuMemory,
    Work,
    data_of,
    make_data,
    run_process,
    seconds_of,
    words_of,
)

from rolepool.metrics.spans import CAPTURE, COMPILE, step_bounds
from rolepool.report.run import ReadRun, read_run

GRPO = ("algorithm.adv_estimator=grpo",)
COMPILER_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that would count more than `trainer.compile_cache_dir`."""
TURNS = ("cold", "warm")
VALIDATION_ROWS = 256


@dataclass(frozen=True)
class Case:
    work: Work
    goals: dict[str, str]
    words: tuple[str, ...] = GRPO
    recipe: str | None = None
    """The recipe of the real model."""
    validates: bool = False


CASES = {
    "smollm2-135m": Case(
        Work("smollm2-135m", 64, 160, 40, num_samples=8),
        {"cold": "30 s in all", "warm": "15 s in all"},
        (*GRPO, "actor_rollout_ref.actor.ppo_mini_batch_size=16"),
        "smollm2_reasoning",
        validates=True,
    ),
    "qwen2.5-1.5b": Case(
        Work("qwen2.5-1.5b", 64, 512, 8192),
        {"cold": "the first step at most 1.3 times a later one"},
    ),
}
TINY = Case(
    Work("qwen2-tiny", 8, 16, 16, num_samples=2), {}, (*GRPO, "trainer.device=cpu"), validates=True
)


@dataclass
class Operation:
    """Seconds of an operation."""

    first_s: float
    later_s: float
    compile_s: float = 0.0
    """The seconds that the first step compiled."""
    capture_s: float = 0.0


@dataclass
class Turn:
    """What one run took. Times are seconds since the command."""

    to_training_s: float
    """Until the first step began."""
    to_first_step_s: float
    """Until the first step had ended."""
    steps_s: list[float]
    phases: list[tuple[str, float]]
    """What the driver did, and for how long."""
    processes: list[tuple[str, float]] = field(default_factory=list)
    """What processes did beside it."""
    operations: dict[str, Operation] = field(default_factory=dict)

    @property
    def later_s(self) -> float:
        return statistics.median(self.steps_s[WARM_STEPS:])

    @property
    def ratio(self) -> float:
        return self.steps_s[0] / self.later_s


def make_validation(data: Path) -> Path:
    """A file with the first prompts."""
    file = data / "val.jsonl"
    with (data / "train.jsonl").open(encoding="utf-8") as lines:
        file.write_text("".join(islice(lines, VALIDATION_ROWS)), encoding="utf-8")
    return file


def words(case: Case, options: argparse.Namespace, gpu: GpuMemory) -> list[str]:
    if options.model is not None:
        return [
            str(ROOT / "recipes" / f"{case.recipe}.yaml"),
            f"actor_rollout_ref.model.path={options.model.absolute()}",
            "trainer.save_freq=-1",
        ]
    data = (options.data or data_of(case.work)).absolute()
    make_data(data, case.work, gpu.device)
    keys = [*words_of(case.work, data), *case.words]
    keys += ["trainer.n_gpus_per_node=1", "trainer.nnodes=1"]
    if case.validates:
        keys += [f"data.val_files={make_validation(data)}", "trainer.test_freq=-1"]
    return keys


def read_turn(run: ReadRun, began_s: float) -> Turn:
    assert run.start is not None, f"{run.folder} has no start.json"
    rows = [row for _, row in sorted(run.metrics.items()) if "timing_s/step" in row]
    first_start_s, first_end_s = step_bounds(run.spans)[1]
    phases = [("before the first phase", run.start.phases[0].start_s - began_s)]
    phases += [(entry.what, entry.duration_s) for entry in run.start.phases]
    processes = [
        (f"{entry.who}: {entry.what}", entry.duration_s)
        for entry in run.start.in_order[len(run.start.phases) :]
    ]
    return Turn(
        to_training_s=first_start_s - began_s,
        to_first_step_s=first_end_s - began_s,
        steps_s=[row["timing_s/step"] for row in rows],
        phases=phases,
        processes=processes,
        operations=read_operations(run, [seconds_of(row) for row in rows]),
    )


def read_operations(run: ReadRun, steps: list[dict[str, float]]) -> dict[str, Operation]:
    """The operations of the first step, and what each of them prepared."""
    prepared: dict[tuple[str, str], float] = defaultdict(float)
    for step, operation, span in run.spans:
        if step == 1:
            for name, seconds in span.part_seconds.items():
                prepared[operation, name] += seconds
    operations = {}
    for name, first_s in steps[0].items():
        later = [step[name] for step in steps[WARM_STEPS:] if name in step]
        operations[name] = Operation(
            first_s,
            statistics.median(later) if later else 0.0,
            prepared[name, COMPILE],
            prepared[name, CAPTURE],
        )
    return operations


def show(name: str, turn: Turn, case: Case) -> None:
    print(
        f"\n{name}: {turn.to_training_s:.1f} s to the first step, {turn.to_first_step_s:.1f} s to "
        f"its end (goal: {case.goals.get(name, 'none')})"
    )
    steps = "  ".join(f"{seconds:.2f}" for seconds in turn.steps_s)
    print(f"steps in s: {steps}; the first is {turn.ratio:.2f} times a later one")
    for what, seconds in turn.phases:
        print(f"  {seconds:7.2f} s  {what}")
    print("  beside them:")
    for what, seconds in turn.processes:
        print(f"  {seconds:7.2f} s  {what}")
    columns = ("first", "later", "more", "compile", "capture")
    print(f"  {'seconds':18}" + "".join(f"{column:>10}" for column in columns))
    for operation, one in turn.operations.items():
        more_s = one.first_s - one.later_s
        values = (one.first_s, one.later_s, more_s, one.compile_s, one.capture_s)
        print(f"  {operation:18}" + "".join(f"{value:10.3f}" for value in values))
    sys.stdout.flush()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--model", type=Path, help="smollm2-135m: a folder with the real model")
    parser.add_argument("--turns", default=",".join(TURNS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="default: 3")
    parser.add_argument("--data", type=Path, help="model and prompts; default: a folder of runs/")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "first_step", help="where run folders go"
    )
    parser.add_argument("--timeout-s", type=float, default=300, help="for each turn; default: 300")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    options.turns = options.turns.split(",")
    if unknown := set(options.turns) - set(TURNS):
        parser.error(f"--turns: {', '.join(sorted(unknown))}; give cold, warm, or both")
    if options.steps <= WARM_STEPS:
        parser.error(f"--steps must be over {WARM_STEPS}, because later steps are compared")
    if options.model is not None and CASES[options.case].recipe is None:
        parser.error(f"--model: the case {options.case} has no recipe of a real model")
    return options


def run_turn(
    name: str, keys: list[str], options: argparse.Namespace, gpu: GpuMemory
) -> Turn | None:
    """None if the run failed."""
    folder = options.runs.absolute() / options.case
    compiled = folder / "compiled"
    if name == "cold":
        shutil.rmtree(compiled, ignore_errors=True)
    run = folder / name
    command = [
        "-m",
        "rolepool",
        "train",
        *keys,
        *options.overrides,
        f"trainer.total_training_steps={options.steps}",
        f"trainer.compile_cache_dir={compiled}",
        f"trainer.default_local_dir={run}",
    ]
    ended = run_process(name, command, run, options.timeout_s, gpu)
    if not ended.fine:
        return None
    return read_turn(read_run(run), ended.began_s)


def write_json(file: Path | None, turns: dict[str, Turn]) -> None:
    """The turns so far."""
    if file is None:
        return
    content = {
        name: {**asdict(turn), "later_s": turn.later_s, "ratio": turn.ratio}
        for name, turn in turns.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> int:
    options = parse_options()
    for variable in COMPILER_FOLDERS:
        os.environ.pop(variable, None)
    case = TINY if options.tiny else CASES[options.case]
    gpu = GpuMemory()
    keys = words(case, options, gpu)
    turns: dict[str, Turn] = {}
    start_s = time.monotonic()
    for name in options.turns:
        turn = run_turn(name, keys, options, gpu)
        if turn is not None:
            turns[name] = turn
            show(name, turn, case)
            write_json(options.json, turns)
    print(f"{time.monotonic() - start_s:.0f} s for all turns")
    return 0 if len(turns) == len(options.turns) else 1


if __name__ == "__main__":
    sys.exit(main())
