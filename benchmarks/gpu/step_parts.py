"""What the benchmarks of whole training steps share: the work of a step, parts that run in
processes of their own, and what is read from their run folders.

It knows neither PPO nor GRPO, and not how other programs are started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from rolepool.metrics.spans import DRIVER, RULE_POOL, Span, preparation_times, step_bounds
from rolepool.report.run import ReadRun, read_run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WARM_STEPS = 2
"""rolepool's first steps, which compile and capture, and are not counted."""
SAMPLES_PER_S = 20
SECONDS_TO_FINISH = 10
SECONDS_TO_CLOSE = 30
SECONDS_TO_SETTLE = 20
LINES_OF_A_FAILURE = 25
STEPS_OF_PROMPTS = 8
"""How many steps have prompts of their own. Later ones use them again."""
GIB = 2**30


@dataclass(frozen=True)
class Work:
    """What every part does in a step."""

    shape: str
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    num_samples: int = 1
    """Responses to each prompt."""

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.num_samples


@dataclass(frozen=True)
class Shares:
    """Shares of the time of a step of rolepool."""

    controller: float
    """No worker process, helpers included, runs an operation."""
    fetch: float
    """Worker processes fetch what an operation was given, added up."""
    kernels: float
    """A kernel runs on the GPU, by NVML's utilization, once a second: coarse, but without a
    profiler."""


@dataclass(frozen=True)
class Measured:
    """What was measured of one part: the seconds of each operation and of the `step`, and memory, if
    it was seen."""

    seconds: dict[str, float]
    torch_gib: float
    gpu_gib: float | None
    shares: Shares | None = None
    steps_s: tuple[float, ...] = ()
    """All steps, the first ones included, without the time in which they compile and capture."""
    prefilled: float | None = None
    """Tokens that prefills of a step computed, relative to those of all prompts and samples."""
    first: dict[str, float] = field(default_factory=dict)
    """The metrics of the first step."""


@dataclass
class Ended:
    """How a process ended, and the most GPU memory while it ran."""

    fine: bool = False
    gpu_gib: float | None = None
    began_s: float = 0.0
    """When it was started, in seconds since the epoch."""
    seconds: float = 0.0


@dataclass
class GpuMemory:
    """The memory of the whole GPU, as NVML sees it; None on a machine without one."""

    before_bytes: int | None = None
    _handle: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError:
            return
        self.before_bytes = self._used()

    @property
    def device(self) -> str:
        """The device on which models are made."""
        if self.before_bytes is None:
            return "cpu"
        return "cuda"

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


def make_data(folder: Path, work: Work, device: str) -> None:
    """A model with random weights and prompts, unless they exist."""
    if (folder / "train.jsonl").exists():  # written last
        return
    script = [
        str(ROOT / "scripts" / "make_shape_model.py"),
        str(ROOT / "recipes" / "shapes" / work.shape),
        str(folder),
    ]
    options = [
        f"--num-prompts={STEPS_OF_PROMPTS * work.num_prompts}",
        f"--prompt-tokens={work.prompt_tokens}",
        f"--device={device}",
    ]
    subprocess.run([sys.executable, *script, *options], check=True)


def data_of(work: Work) -> Path:
    """The folder of the model and prompts of this work, if the user names none. Prompts of another
    length have a folder of their own."""
    return ROOT / "runs" / f"data_{work.shape}_{work.num_prompts}x{work.prompt_tokens}"


def words_of(work: Work, data: Path) -> list[str]:
    """The keys that say what the work is."""
    return [
        f"data.train_files={data / 'train.jsonl'}",
        f"data.train_batch_size={work.num_prompts}",
        f"data.max_prompt_length={work.prompt_tokens}",
        f"data.max_response_length={work.new_tokens}",
        f"actor_rollout_ref.model.path={data / 'model'}",
        f"actor_rollout_ref.rollout.n={work.num_samples}",
        "actor_rollout_ref.rollout.temperature=1.0",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "trainer.save_freq=-1",
    ]


def log_of(run: Path) -> Path:
    """What a part printed. It is beside the run folder, because nothing starts early in a run
    folder that holds something."""
    return run.with_name(f"{run.name}.txt")


def environment(site: Path | None = None) -> dict[str, str]:
    """The environment of a part. `site` is a folder with packages that come before all others."""
    variables = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if site is not None:
        paths = [str(site.absolute()), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return variables


def run_process(
    name: str,
    command: Sequence[str],
    run: Path,
    timeout_s: float,
    gpu: GpuMemory,
    site: Path | None = None,
) -> Ended:
    """A part in a process of its own. Says why, where it fails."""
    ended = Ended()
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    log = log_of(run)
    with log.open("w", encoding="utf-8") as output, gpu.watch(ended):
        # Only what the part itself takes counts, and not the wait for memory of the part before.
        start_s = time.monotonic()
        ended.began_s = time.time()
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(site),
            cwd=ROOT,
        )
        try:
            how = f"ended with {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            how = f"was stopped after {timeout_s:.0f} s"
            interrupt(process)
        except BaseException:
            # Who ends this benchmark wants its training to end, too.
            interrupt(process)
            raise
        ended.seconds = time.monotonic() - start_s
    ended.fine = process.returncode == 0
    if ended.fine:
        print(f"{name}: {ended.seconds:.0f} s in all", flush=True)
        return ended
    print(f"{name} {how}; the end of {log}:")
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[
        -LINES_OF_A_FAILURE:
    ]:
        print(f"    {line}")
    sys.stdout.flush()
    return ended


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a part. After the first signal a training finishes its step and closes its processes, and
    after the second one it closes them at once."""
    for wait_s in (SECONDS_TO_FINISH, SECONDS_TO_CLOSE):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()


def ran_out_of_memory(run: Path) -> bool:
    return "OutOfMemoryError" in log_of(run).read_text(encoding="utf-8", errors="replace")


# What comes out


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: statistics.median(row[key] for row in rows if key in row) for key in keys}


def read_rolepool(folder: Path, gpu_gib: float | None, work: Work | None = None) -> Measured:
    run = read_run(folder)
    rows = [
        row for step, row in run.metrics.items() if step > WARM_STEPS and "timing_s/step" in row
    ]
    peaks: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.endswith("/peak_memory_gb") and RULE_POOL not in key:
                peaks[key] = max(peaks.get(key, 0.0), value)
    seconds = [seconds_of(row) for row in rows]
    prefilled = None
    if work is not None:
        prefilled = read_prefilled(run, work)
    return Measured(
        medians(seconds),
        sum(peaks.values()),
        gpu_gib,
        read_shares(run, rows),
        tuple(read_steps(run)),
        prefilled,
        dict(run.metrics.get(1, {})),
    )


def seconds_of(row: Mapping[str, float]) -> dict[str, float]:
    """The timings of a step by operation."""
    return {
        key.removeprefix("timing_s/"): value
        for key, value in row.items()
        if key.startswith("timing_s/")
    }


def preparations(run: ReadRun) -> dict[int, dict[str, float]]:
    """The seconds in which each step compiled and captured."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for step, _, span in run.spans:
        spans[step].append(span)
    return {step: preparation_times(of_step) for step, of_step in spans.items()}


def read_steps(run: ReadRun) -> Iterator[float]:
    """The seconds of each step, without its preparations."""
    prepared = preparations(run)
    for step, row in sorted(run.metrics.items()):
        if "timing_s/step" in row:
            yield row["timing_s/step"] - sum(prepared.get(step, {}).values())


def read_prefilled(run: ReadRun, work: Work) -> float | None:
    """Tokens that the prefills of a step computed, relative to those of all prompts and samples."""
    tokens: dict[int, int] = defaultdict(int)
    for step, operation, span in run.spans:
        if operation == "gen":
            tokens[step] += sum(part.num_tokens for part in span.parts if part.name == "prefill")
    if not tokens:
        return None
    return statistics.median(tokens.values()) / (work.num_rows * work.prompt_tokens)


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


def read_trl(file: Path, gpu_gib: float | None, warm_steps: int) -> Measured:
    """What TRL's side wrote."""
    content = json.loads(file.read_text(encoding="utf-8"))
    print(f"trl: {content['setting']}")
    steps_s = tuple(step["step"] for step in content["steps"])
    return Measured(
        medians(content["steps"][warm_steps:]),
        content["torch_gib"],
        gpu_gib,
        steps_s=steps_s,
    )


def ratio_text(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value and other else "-"


def print_summary(results: dict[str, Measured], num_rows: int) -> None:
    trl = results.get("trl", Measured({"step": 0.0}, 0.0, None))
    memory = ("GPU GiB", "of TRL's", "torch GiB", "of TRL's")
    columns = ("step s", "samples/s", "x TRL's", *memory, "controller", "fetch", "kernels")
    print(f"\n{'':15}" + "".join(f"{column:>11}" for column in columns))
    for name, one in results.items():
        step_s = one.seconds["step"]
        shares = ("-",) * 3
        if one.shares is not None:
            shares = tuple(f"{share:.1%}" for share in astuple(one.shares))
        cells = (
            f"{step_s:.3f}",
            f"{num_rows / step_s:.1f}",
            ratio_text(trl.seconds["step"], step_s),
            "-" if one.gpu_gib is None else f"{one.gpu_gib:.1f}",
            ratio_text(one.gpu_gib, trl.gpu_gib),
            f"{one.torch_gib:.1f}",
            ratio_text(one.torch_gib, trl.torch_gib),
            *shares,
        )
        print(f"{name:15}" + "".join(f"{cell:>11}" for cell in cells))


def print_steps(results: Mapping[str, Measured]) -> None:
    """All steps, the first ones included."""
    for name, one in results.items():
        steps = "  ".join(f"{seconds:.3f}" for seconds in one.steps_s)
        print(f"{name}: steps without compiling and capturing: {steps}")


def print_times(results: dict[str, Measured]) -> None:
    """Where each spends its time. Operations of pools side by side overlap, and then add up to more
    than the step."""
    ours = {name: one for name, one in results.items() if name != "trl"}
    others = {name: one for name, one in results.items() if name == "trl"}
    for sides in (ours, others):
        if not sides:
            continue
        print(f"\n{'seconds':20}" + "".join(f"{name:>16}" for name in sides))
        for key in dict.fromkeys(key for one in sides.values() for key in one.seconds):
            values = [one.seconds.get(key) for one in sides.values()]
            cells = ["-" if value is None else f"{value:.4f}" for value in values]
            print(f"{key:20}" + "".join(f"{cell:>16}" for cell in cells))


def write_json(file: Path | None, work: Work, results: Mapping[str, Measured]) -> None:
    """All results, for a program that reads them."""
    if file is None:
        return
    parts = {name: asdict(one) for name, one in results.items()}
    content: dict[str, Any] = {"work": asdict(work), "parts": parts}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
