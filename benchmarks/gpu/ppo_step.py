"""A PPO step on one GPU: rolepool in one pool and in two that share the GPU, without and with CUDA
MPS, and TRL.

    python benchmarks/gpu/ppo_step.py [--parts standard,split,mps,trl,idle] [--steps 8] [--trl-steps 3]
    python benchmarks/gpu/ppo_step.py --parts standard,no_snapshots      what snapshots in shared memory cost
    python benchmarks/gpu/ppo_step.py --parts standard --prompt-tokens 512 --new-tokens 512
    python benchmarks/gpu/ppo_step.py --tiny      a small model on the CPU, to try the script out

The third line is the setting of verl's quickstart.

The same work for all: policy, value model, reference and a rule for a reward; 256 prompts of 128
tokens, 256 new tokens each (none ends early) at temperature 1, one epoch of four mini-batches.
Model and prompts are made by scripts/make_shape_model.py: the shape of Qwen2.5-0.5B, random
weights, saved in bf16. rolepool trains fp32 weights with bf16 arithmetic; TRL trains bf16 weights,
which is what loading gives it and the cheaper of the two. TRL's reward model is a comparison of one
token, so that it is not charged for a network. `idle` is a run of the standard placement of its
own, under the profiler. rolepool in one pool trains a mini-batch in one pass; in two, which train
at the same time and fill each other's gaps, in passes of 16 rows, so that the activations of both
take less than those of one.

Medians of the steps after the first two, which compile; of TRL's after the first. A step is from
the start of a generation to that of the next. GPU memory is the most that NVML saw of the whole
GPU, 20 times a second, less what was in use when the script began; torch's is the most that it had
allocated, in all processes together. Of a step of rolepool's, `controller` is the share in which no
worker process runs an operation, and `fetch` the share in which they fetch what one was given, both
from spans.jsonl; `kernels` is the share in which NVML sees a kernel run.

Each part is a process of its own, and a failed one does not stop the others. On an H200: standard
and idle 85 to 110 s, most of it compiling, split and mps 70 to 95 s, a step of TRL's 22 to 60 s;
with passes of 64 rows TRL runs out of 140 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import pynvml

from rolepool.metrics.spans import DRIVER, RULE_POOL, step_bounds
from rolepool.report.run import ReadRun, read_run

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RECIPE = ROOT / "recipes" / "qwen0.5b_h200.yaml"
SPLIT_ROWS = 16
SPLIT = (
    "placement.strategy=split",
    "placement.split.share=0.5",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={SPLIT_ROWS}",
    f"critic.ppo_micro_batch_size_per_gpu={SPLIT_ROWS}",
)
PLACEMENTS = {
    "standard": ("placement.strategy=standard",),
    "no_snapshots": ("placement.strategy=standard", "trainer.snapshot_freq=-1"),
    "split": SPLIT,
    "mps": (*SPLIT, "placement.mps=true"),
}
PARTS = (*PLACEMENTS, "trl", "idle")
GOALS = "goals: 8 times TRL's samples/s, a third of its memory; in standard placement a controller under 3%"
MINI_BATCHES = 4
WARM_STEPS, TRL_WARM_STEPS = 2, 1
SAMPLES_PER_S = 20
SECONDS_TO_CLOSE = 60
SECONDS_TO_SETTLE = 20
LINES_OF_A_FAILURE = 25
GIB = 2**30


@dataclass(frozen=True)
class Work:
    """What every part does in a step."""

    shape: str
    num_prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def rows_per_mini_batch(self) -> int:
        return self.num_prompts // MINI_BATCHES


FULL = Work("qwen2.5-0.5b", 256, 128, 256)
TINY = Work("qwen2-tiny", MINI_BATCHES * SPLIT_ROWS, 16, 16)


@dataclass(frozen=True)
class Shares:
    """Of a step of rolepool's."""

    controller: float
    """No worker process, helpers included, runs an operation."""
    fetch: float
    """Worker processes fetch what an operation was given, added up."""
    kernels: float
    """A kernel runs on the GPU, by NVML's utilization, once a second: coarse, but without a
    profiler."""


@dataclass(frozen=True)
class Measured:
    """Of one part: seconds by what took them, `step` among them, and memory where it was seen."""

    seconds: dict[str, float]
    torch_gib: float
    gpu_gib: float | None
    shares: Shares | None = None


@dataclass
class Ended:
    """How a process ended, and the most GPU memory while it ran."""

    fine: bool = False
    gpu_gib: float | None = None


@dataclass
class GpuMemory:
    """Of the whole GPU, as NVML sees it; None on a machine without one."""

    before_bytes: int | None = None
    _handle: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError:
            return
        self.before_bytes = self._used()

    def _used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    @contextmanager
    def watch(self, ended: Ended) -> Iterator[None]:
        """Note the peak while the block runs."""
        if self.before_bytes is None:
            yield
            return
        self._settle(self.before_bytes)
        peak, stop = self.before_bytes, threading.Event()

        def look() -> None:
            nonlocal peak
            while not stop.wait(1 / SAMPLES_PER_S):
                peak = max(peak, self._used())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            ended.gpu_gib = (peak - self.before_bytes) / GIB

    def _settle(self, before_bytes: int) -> None:
        """Processes of the part before may still be giving their memory back."""
        until_s = time.monotonic() + SECONDS_TO_SETTLE
        while self._used() > before_bytes + GIB // 2 and time.monotonic() < until_s:
            time.sleep(0.2)


# Running a part


def make_data(folder: Path, work: Work) -> None:
    if (folder / "train.jsonl").exists():  # written last
        return
    script = [
        str(ROOT / "scripts" / "make_shape_model.py"),
        str(ROOT / "recipes" / "shapes" / work.shape),
        str(folder),
    ]
    size = ["--num-prompts", str(8 * work.num_prompts), "--prompt-tokens", str(work.prompt_tokens)]
    subprocess.run([sys.executable, *script, *size], check=True)


def run_process(
    name: str, command: Sequence[str], run: Path, timeout_s: float, gpu: GpuMemory
) -> Ended:
    """A part in a process of its own. Says why, where it fails."""
    ended = Ended()
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    log = run / "output.txt"
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    start_s = time.monotonic()
    with log.open("w", encoding="utf-8") as output, gpu.watch(ended):
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        )
        try:
            how = f"ended with {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            how = f"was stopped after {timeout_s:.0f} s"
            process.send_signal(signal.SIGINT)  # it closes its worker processes
            try:
                process.wait(SECONDS_TO_CLOSE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    ended.fine = process.returncode == 0
    if ended.fine:
        print(f"{name}: {time.monotonic() - start_s:.0f} s in all", flush=True)
        return ended
    print(f"{name} {how}; the end of {log}:")
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[
        -LINES_OF_A_FAILURE:
    ]:
        print(f"    {line}")
    sys.stdout.flush()
    return ended


def rolepool_words(work: Work, data: Path, *, tiny: bool) -> list[str]:
    words = [
        f"data.train_files={data / 'train.jsonl'}",
        f"data.train_batch_size={work.num_prompts}",
        f"data.max_prompt_length={work.prompt_tokens}",
        f"data.max_response_length={work.new_tokens}",
        f"actor_rollout_ref.model.path={data / 'model'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work.rows_per_mini_batch}",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.rollout.temperature=1.0",
        "actor_rollout_ref.rollout.ignore_eos=true",
    ]
    if tiny:
        rows = work.rows_per_mini_batch
        words += [
            "trainer.device=cpu",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows}",
            f"critic.ppo_micro_batch_size_per_gpu={rows}",
        ]
    return words


def run_trl(
    options: argparse.Namespace, work: Work, data: Path, run: Path, gpu: GpuMemory
) -> Ended:
    """With half the rows at a time, and again, as long as memory does not do."""
    rows, rollout_rows = (
        min(options.trl_rows, work.rows_per_mini_batch),
        min(options.trl_rollout_rows, work.num_prompts),
    )
    while True:
        command = [str(HERE / "ppo_step_trl.py"), str(data), str(run / "trl.json")]
        for name, value in (
            ("steps", options.trl_steps),
            ("num-prompts", work.num_prompts),
            ("new-tokens", work.new_tokens),
            ("mini-batches", MINI_BATCHES),
            ("rows", rows),
            ("rollout-rows", rollout_rows),
        ):
            command += [f"--{name}", str(value)]
        ended = run_process(
            "trl", [*command, *(["--cpu"] if options.tiny else [])], run, options.timeout_s, gpu
        )
        log = (run / "output.txt").read_text(encoding="utf-8", errors="replace")
        if ended.fine or rows < 2 or "OutOfMemoryError" not in log:
            return ended
        rows, rollout_rows = rows // 2, rollout_rows // 2
        print(f"trl: again with {rows} rows a pass, {rollout_rows} in rollouts", flush=True)


# What comes out


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: statistics.median(row[key] for row in rows if key in row) for key in keys}


def read_rolepool(folder: Path, gpu_gib: float | None) -> Measured:
    run = read_run(folder)
    rows = [
        row for step, row in run.metrics.items() if step > WARM_STEPS and "timing_s/step" in row
    ]
    peaks: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.endswith("/peak_memory_gb") and RULE_POOL not in key:
                peaks[key] = max(peaks.get(key, 0.0), value)
    seconds = [
        {
            key.removeprefix("timing_s/"): value
            for key, value in row.items()
            if key.startswith("timing_s/")
        }
        for row in rows
    ]
    return Measured(medians(seconds), sum(peaks.values()), gpu_gib, read_shares(run, rows))


def read_shares(run: ReadRun, rows: Sequence[dict[str, float]]) -> Shares:
    controller, fetch = [], []
    for step, (start_s, end_s) in step_bounds(run.spans).items():
        if step <= WARM_STEPS:
            continue
        at_work_s, fetch_s, filled_s = 0.0, 0.0, start_s
        for of_step, _, span in sorted(run.spans, key=lambda recorded: recorded.span.start_s):
            if span.pool == DRIVER:
                continue
            if of_step == step:
                fetch_s += span.part_seconds.get("fetch", 0.0)
            if span.end_s > filled_s and span.start_s < end_s:
                at_work_s += min(span.end_s, end_s) - max(span.start_s, filled_s)
                filled_s = min(span.end_s, end_s)
        controller.append(1 - at_work_s / (end_s - start_s))
        fetch.append(fetch_s / (end_s - start_s))
    used = [
        value
        for row in rows
        for key, value in row.items()
        if key.endswith("/utilization") and RULE_POOL not in key
    ]
    return Shares(
        statistics.median(controller),
        statistics.median(fetch),
        statistics.mean(used) / 100 if used else 0.0,
    )


def read_trl(folder: Path, gpu_gib: float | None) -> Measured:
    found = json.loads((folder / "trl.json").read_text(encoding="utf-8"))
    print(f"trl: {found['setting']}")
    return Measured(medians(found["steps"][TRL_WARM_STEPS:]), found["torch_gib"], gpu_gib)


def of(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value and other else "-"


def print_summary(results: dict[str, Measured], work: Work) -> None:
    trl = results.get("trl", Measured({"step": 0.0}, 0.0, None))
    memory = ("GPU GiB", "of TRL's", "torch GiB", "of TRL's")
    columns = ("step s", "samples/s", "x TRL's", *memory, "controller", "fetch", "kernels")
    print(f"\n{'':10}" + "".join(f"{column:>11}" for column in columns))
    for name, one in results.items():
        step_s = one.seconds["step"]
        cells = (
            f"{step_s:.3f}",
            f"{work.num_prompts / step_s:.1f}",
            of(trl.seconds["step"], step_s),
            "-" if one.gpu_gib is None else f"{one.gpu_gib:.1f}",
            of(one.gpu_gib, trl.gpu_gib),
            f"{one.torch_gib:.1f}",
            of(one.torch_gib, trl.torch_gib),
            *(
                ("-",) * 3
                if one.shares is None
                else (f"{share:.1%}" for share in astuple(one.shares))
            ),
        )
        print(f"{name:10}" + "".join(f"{cell:>11}" for cell in cells))
    print(GOALS)


def print_times(results: dict[str, Measured]) -> None:
    """Where each spends its time. Operations of pools side by side overlap, and then add up to more
    than the step."""
    placements = {name: one for name, one in results.items() if name in PLACEMENTS}
    for sides in (
        placements,
        {name: one for name, one in results.items() if name not in PLACEMENTS},
    ):
        if not sides:
            continue
        print(f"\n{'seconds':20}" + "".join(f"{name:>11}" for name in sides))
        for key in dict.fromkeys(key for one in sides.values() for key in one.seconds):
            values = [one.seconds.get(key) for one in sides.values()]
            print(
                f"{key:20}"
                + "".join(f"{'-' if value is None else f'{value:.4f}':>11}" for value in values)
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=8, help="of rolepool's parts; default: %(default)s"
    )
    parser.add_argument("--trl-steps", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--trl-rows", type=int, default=32, help="of a training pass of TRL's; default: %(default)s"
    )
    parser.add_argument(
        "--trl-rollout-rows", type=int, default=64, help="of its rollouts; default: %(default)s"
    )
    parser.add_argument("--prompt-tokens", type=int, help=f"default: {FULL.prompt_tokens}")
    parser.add_argument("--new-tokens", type=int, help=f"default: {FULL.new_tokens}")
    parser.add_argument("--data", type=Path, help="default: runs/qwen0.5b_data, or runs/tiny_data")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "ppo_step", help="where run folders go"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=240, help="for each part; default: %(default)s"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for all of rolepool's parts"
    )
    options = parser.parse_intermixed_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.steps <= WARM_STEPS or options.trl_steps <= TRL_WARM_STEPS:
        parser.error(
            f"--steps must be over {WARM_STEPS} and --trl-steps over {TRL_WARM_STEPS}, which are not counted"
        )
    work = TINY if options.tiny else FULL
    if options.prompt_tokens is not None:
        work = replace(work, prompt_tokens=options.prompt_tokens)
    if options.new_tokens is not None:
        work = replace(work, new_tokens=options.new_tokens)
    data = (
        options.data or ROOT / "runs" / ("tiny_data" if options.tiny else "qwen0.5b_data")
    ).absolute()
    make_data(data, work)
    words = [str(RECIPE), *rolepool_words(work, data, tiny=options.tiny), *options.overrides]
    gpu = GpuMemory()
    results: dict[str, Measured] = {}
    try:
        fine = [run_part(part, words, options, work, data, gpu, results) for part in parts]
    finally:  # what was measured is shown when the rest is interrupted, too
        if results:
            print_summary(results, work)
            print_times(results)
    return 0 if all(fine) else 1


def run_part(
    part: str,
    words: list[str],
    options: argparse.Namespace,
    work: Work,
    data: Path,
    gpu: GpuMemory,
    results: dict[str, Measured],
) -> bool:
    """Whether it ended well. What it measured is in the results then."""
    run = options.runs.absolute() / part
    if part == "trl":
        ended = run_trl(options, work, data, run, gpu)
    else:
        steps = f"trainer.total_training_steps={options.steps}"
        program = (
            [str(HERE / "ppo_step_profile.py")]
            if part == "idle"
            else ["-m", "rolepool", "train", steps]
        )
        placement = PLACEMENTS["standard" if part == "idle" else part]
        command = [
            *program,
            "trainer.save_freq=-1",
            *words,
            *placement,
            f"trainer.default_local_dir={run}",
        ]
        ended = run_process(part, command, run, options.timeout_s, gpu)
    try:
        if part == "idle":
            report = run / "idle.txt"  # also there where only the second of its two profiles failed
            print(report.read_text(encoding="utf-8") if report.is_file() else "", flush=True)
        elif ended.fine:
            read = read_trl if part == "trl" else read_rolepool
            results[part] = read(run, ended.gpu_gib)
    except Exception:
        traceback.print_exc()
        return False
    return ended.fine


if __name__ == "__main__":
    sys.exit(main())
