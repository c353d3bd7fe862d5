"""What `rolepool plan` says about whole runs, against what the runs take on one GPU.

    python benchmarks/gpu/plan_memory_runs.py                         one rank, default keys, five models
    python benchmarks/gpu/plan_memory_runs.py --cases deepseek-llm-7b --folder /dev/shm/plan [--steps 10]
    python benchmarks/gpu/plan_memory_runs.py --several-ranks         2 and 4 ranks on the same GPU, two shapes
        [--shapes 0.5b 1.5b] [--cases fsdp-2 fsdp-4 hsdp-2x2 pools-2+2 tp-2] [--at-once 3] [--limit 290] [--json FILE]
    python benchmarks/gpu/plan_memory_runs.py --several-ranks --device cpu --shapes tiny     no GPU, no verdict
    python benchmarks/gpu/plan_memory_runs.py --several-ranks --check                        all up to the first process

Each case is `rolepool train` for two steps on a model of a public shape with random weights.
Prompts have the largest length, and no response ends early. Compared are what `plan` says for the
tensors of each process, without the 1 GiB that it adds for everything else, and the most that
torch had allocated in the process. The exit code is 1 if a figure is more than 15% off.

One rank: micro-batch sizes, checkpointing and cache are left to the program. The case
deepseek-llm-7b runs only if it is named: GRPO with a KL term, in which the optimizer's states are in
host memory except during the update, and the reference except while it computes. It takes about 52
+ 13 GiB of host memory, and 13 GiB for the model's files: in /dev/shm they need no disk.

Several ranks: NCCL 2.30 or later lets them share a GPU, and torch 2.11 has an older one, so the
newer library must be preloaded (LD_PRELOAD). Every case gets a Ray of its own that counts GPUs
which do not exist, because a plan begins at GPU 0. Cases run side by side as long as all their
plans fit in --memory GiB. What has ended is kept if another case fails or the --limit is reached.
Each line is a rank: its peak, that of every role, and what is reserved. `beyond` is what the GPU
has in use and torch has not reserved, per process: CUDA's contexts and NCCL's buffers. It is
only known if the case ran alone. With --check, each case starts its Ray and makes all checks of
`rolepool train`, and reserves the plan's GPUs, but trains nothing. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rolepool.config import Config, load_config
from rolepool.placement import Plan, build_plan
from rolepool.placement.estimate import (
    GIB,
    PROCESS_OVERHEAD_BYTES,
    MemoryEstimate,
    PoolMemory,
    estimate_memory,
    peak_by_role,
)
from rolepool.placement.hardware import detect_gpu_memory
from rolepool.report.run import ReadRun, read_run

ROOT = Path(__file__).parent.parent.parent
ALLOWED = 0.15
TIMEOUT_S = 300
STEPS = 2
POLL_S = 0.2
RESERVE_TIMEOUT_S = 30.0
NUM_ERROR_LINES = 15
SECONDS_TO_CLOSE = 60


# Cases


@dataclass(frozen=True)
class Case:
    shape: str
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    words: tuple[str, ...] = ()
    device: str = "cuda"
    num_gpus: int = 1
    steps: int = STEPS
    timeout_s: float = TIMEOUT_S


DYNAMIC = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
)
CASES = {
    "qwen3-0.6b": Case("qwen3-0.6b", 128, 256, 512),
    "llama-3.2-1b": Case(
        "llama-3.2-1b",
        16,
        512,
        1024,
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"),
    ),
    "qwen2.5-1.5b": Case("qwen2.5-1.5b", 64, 512, 8192),
    "qwen2.5-1.5b-dynamic": Case("qwen2.5-1.5b", 64, 512, 8192, DYNAMIC),
    # No formula was written from this one.
    "qwen3-1.7b": Case(
        "qwen3-1.7b",
        48,
        384,
        1600,
        ("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.use_kl_loss=true"),
    ),
}
OFFLOADED = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    "actor_rollout_ref.ref.fsdp_config.param_offload=true",
    # Two snapshots of 7 billion parameters are 154 GiB.
    "trainer.snapshot_freq=-1",
)
LARGE = {
    "deepseek-llm-7b": Case(
        "deepseek-llm-7b-chat", 8, 512, 512, OFFLOADED, steps=10, timeout_s=480
    ),
}
"""Cases that run only if they are named."""
TINY = {
    "tiny": Case("qwen2-tiny", 8, 16, 16, device="cpu"),
    "deepseek-llm-7b": Case("qwen2-tiny", 2, 16, 16, OFFLOADED, device="cpu", steps=10),
}


@dataclass(frozen=True)
class Layout:
    """How ranks share the work. Every rank has two micro-batches per update."""

    num_ranks: int
    num_parts: int
    """Ranks of a pool that is trained."""
    words: tuple[str, ...] = ()
    is_ppo: bool = True
    """With a critic and a reference; GRPO without both otherwise."""
    recomputes: bool = False
    short: bool = False
    """Few new tokens, because each one needs many slow exchanges."""


FSDP_SIZE = ("actor_rollout_ref.actor.fsdp_config.fsdp_size=2",)
LAYOUTS = {
    "fsdp-2": Layout(2, 2),
    "fsdp-4": Layout(4, 4, recomputes=True),
    "hsdp-2x2": Layout(4, 4, FSDP_SIZE, is_ppo=False),
    "pools-2+2": Layout(
        4, 2, ("placement.strategy=split", "placement.split.actor_gpus_per_node=2")
    ),
    "tp-2": Layout(
        2,
        2,
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2",),
        is_ppo=False,
        short=True,
    ),
}
SHAPES = {"0.5b": "qwen2.5-0.5b", "1.5b": "qwen2.5-1.5b", "tiny": "qwen2-tiny"}
SAMPLES = 8
RECOMPUTING_SHARES = {"0.5b": 0.07, "1.5b": 0.15, "tiny": 0.5}
"""Shares of the GPU in which kept activations do not fit, so that the plan chooses to recompute
them, with room to spare."""


def sharded_case(shape: str, name: str, device: str) -> Case:
    """Rows of 512 tokens, and two micro-batches of 4,096 tokens on every rank."""
    layout = LAYOUTS[name]
    is_tiny = shape == "tiny"
    length, pass_tokens = (32, 128) if is_tiny else (512, 4096)
    new_tokens = length // 4
    if layout.short:
        new_tokens = length // 16
    rows_of_pass = pass_tokens // length
    num_prompts = 2 * rows_of_pass * layout.num_parts // SAMPLES
    words = [
        *layout.words,
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"trainer.n_gpus_per_node={layout.num_ranks}",
        "trainer.snapshot_freq=-1",
        *by_tokens("actor_rollout_ref.actor", "ppo_max_token_len_per_gpu", pass_tokens),
    ]
    if layout.is_ppo:
        words += [
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
            f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={pass_tokens}",
            *by_tokens("critic", "ppo_max_token_len_per_gpu", pass_tokens),
        ]
    else:
        words.append("algorithm.adv_estimator=grpo")
    if layout.recomputes:
        share = RECOMPUTING_SHARES[shape]
        roles = ("actor", "rollout", "ref", "critic")
        words += [
            "placement.strategy=custom",
            f"placement.pools.all={{per_node: [{layout.num_ranks}], share: {share}}}",
            *(f"placement.roles.{role}=all" for role in roles),
        ]
    return Case(
        SHAPES[shape],
        num_prompts,
        length - new_tokens,
        new_tokens,
        tuple(words),
        device,
        layout.num_ranks,
    )


def by_tokens(section: str, key: str, num_tokens: int) -> list[str]:
    return [f"{section}.use_dynamic_bsz=true", f"{section}.{key}={num_tokens}"]


def words_of(case: Case, data: Path, run: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={data / 'model'}",
        f"critic.model.path={data / 'model'}",
        f"data.train_files={data / 'train.jsonl'}",
        f"data.train_batch_size={case.num_prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={case.num_prompts}",
        f"critic.ppo_mini_batch_size={case.num_prompts}",
        f"data.max_prompt_length={case.prompt_tokens}",
        f"data.max_response_length={case.new_tokens}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "trainer.n_gpus_per_node=1",
        f"trainer.device={case.device}",
        f"trainer.total_training_steps={case.steps}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={run}",
        *case.words,
    ]


# Processes


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}


def call(*words: str, timeout_s: float = TIMEOUT_S) -> None:
    """Run Python with these words. What has not ended in time is interrupted, so that a training
    ends its processes."""
    command = [sys.executable, *words]
    process = subprocess.Popen(command, env=environment(), stdout=sys.stderr)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(SECONDS_TO_CLOSE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


def make_data(case: Case, data: Path, num_prompts: int, timeout_s: float = TIMEOUT_S) -> None:
    """A model with random weights and prompts, unless they exist."""
    if (data / "train.jsonl").exists():
        return
    call(
        str(ROOT / "scripts/make_shape_model.py"),
        str(ROOT / "recipes/shapes" / case.shape),
        str(data),
        "--num-prompts",
        str(num_prompts),
        "--prompt-tokens",
        str(case.prompt_tokens),
        "--device",
        "cpu" if detect_gpu_memory() is None else "cuda",
        timeout_s=timeout_s,
    )


def train_in_own_ray(file: Path) -> int:
    """Train in a Ray that counts as many GPUs as the case needs. It starts in this process, and
    ends with it. With "only_checks" in the file, stop before the first process starts."""
    from rolepool import cli
    from rolepool.cluster.connection import local_ray

    told = json.loads(file.read_text(encoding="utf-8"))
    with local_ray(told["num_cpus"], told["num_gpus"], object_store_bytes=2 * GIB):
        if told["only_checks"]:
            check_in_ray(told["words"])
            return 0
        return cli.main(["train", *told["words"]])


def check_in_ray(words: Sequence[str]) -> None:
    """What training does in the Ray of this process before it starts processes: checks, and
    reserving a bundle for each slot."""
    import ray
    from ray.util.placement_group import placement_group

    from rolepool.trainer.start_checks import check_start

    loaded = load_config([], list(words))
    for warning in check_start(loaded):
        print(f"warning: {warning}")
    kind = "CPU" if loaded.config.trainer.device == "cpu" else "GPU"
    slots = {slot for pool in build_plan(loaded.config).pools.values() for slot in pool.slots}
    ray.get(placement_group([{kind: 1}] * len(slots)).ready(), timeout=RESERVE_TIMEOUT_S)
    print(f"Ray has reserved {len(slots)} {kind}s")


def rank_environment() -> dict[str, str]:
    """Several processes on one GPU, each of which sees it as its first."""
    variables = environment()
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    for name, value in {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
    }.items():
        variables.setdefault(name, value)
    return variables


# Figures


def tensors_of(pool: PoolMemory) -> int:
    """What the plan says torch allocates in a process of the pool."""
    return pool.peak - PROCESS_OVERHEAD_BYTES


def peaks(run: ReadRun) -> dict[str, float]:
    """The most that torch had allocated in each operation, in GiB."""
    found: dict[str, float] = {}
    for _, operation, span in run.spans:
        found[operation] = max(found.get(operation, 0.0), round(span.peak_memory_bytes / GIB, 2))
    return found


def most_in_use(run: ReadRun) -> float:
    """The most that the GPU had in use, by all processes, in GiB."""
    used = (gpu["memory_bytes"] for sample in run.monitor for gpu in sample["gpus"])
    return round(max(used, default=0) / GIB, 2)


@dataclass
class Rank:
    """A process: GiB of its tensors, planned and measured."""

    pool: str
    rank: int
    planned_gib: float
    measured_gib: float
    percent: float
    """How much more (+) or less (-) was planned, in percent of what was measured."""
    is_close: bool
    reserved_gib: float
    roles: dict[str, tuple[float, float]]
    """Planned and measured peak while each role computed."""
    operations: dict[str, float]


def ranks_of(run: ReadRun, estimate: MemoryEstimate) -> list[Rank]:
    measured: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    by_role: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    reserved: dict[tuple[str, int], int] = defaultdict(int)
    for _, operation, span in run.spans:
        if span.pool not in estimate.pools:
            continue
        place = (span.pool, span.rank)
        peak = span.peak_memory_bytes
        measured[place][operation] = max(measured[place][operation], peak)
        by_role[place][span.role] = max(by_role[place][span.role], peak)
        reserved[place] = max(reserved[place], span.reserved_memory_bytes)
    ranks = []
    for place, of_operations in sorted(measured.items()):
        pool, rank = place
        planned = tensors_of(estimate.pools[pool])
        most = max(of_operations.values())
        planned_of = peak_by_role(estimate.pools[pool].roles)
        roles = {
            str(role): (
                in_gib(peak - PROCESS_OVERHEAD_BYTES),
                in_gib(by_role[place][str(role)]),
            )
            for role, peak in planned_of.items()
        }
        operations = {name: in_gib(peak) for name, peak in of_operations.items()}
        ranks.append(
            Rank(
                pool,
                rank,
                planned_gib=in_gib(planned),
                measured_gib=in_gib(most),
                percent=round(100 * (planned - most) / max(most, 1), 1),
                is_close=abs(planned - most) <= ALLOWED * most,
                reserved_gib=in_gib(reserved[place]),
                roles=roles,
                operations=operations,
            )
        )
    return ranks


def in_gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 2)


# One rank


def measure(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Train the case, and compare."""
    data, run_folder = folder / f"{case.shape}_{case.prompt_tokens}", folder / f"run_{name}"
    start_s = time.monotonic()
    make_data(case, data, case.num_prompts * case.steps)
    made_s = time.monotonic() - start_s
    words = words_of(case, data, run_folder)
    config = load_config([], words).config
    estimate = estimate_memory(config, build_plan(config), detect_gpu_memory())
    (pool,) = estimate.pools.values()
    call("-m", "rolepool", "train", *words, timeout_s=case.timeout_s)
    run = read_run(run_folder)
    taken = max(row["perf/max_memory_allocated_gb"] for row in run.metrics.values())
    planned = tensors_of(pool) / GIB
    sizes = {operation: size.tokens for operation, size in estimate.micro_batches.items()}
    result = {
        "case": name,
        "planned_gib": round(planned, 2),
        "least_gib": in_gib(pool.least - PROCESS_OVERHEAD_BYTES),
        "planned_peak_role": pool.peak_role,
        "planned_by_role": {role: in_gib(memory.working) for role, memory in pool.roles.items()},
        "measured_gib": round(taken, 2),
        "gpu_in_use_gib": most_in_use(run),
        "ratio": round(planned / taken, 3) if taken else None,
        "is_close": case.device == "cpu" or abs(planned - taken) <= ALLOWED * taken,
        "measured_by_operation": peaks(run),
        "micro_batch_tokens": sizes,
        "steps_s": [row["timing_s/step"] for row in run.metrics.values() if "timing_s/step" in row],
        "seconds_of_making_the_model": round(made_s),
        "seconds": round(time.monotonic() - start_s),
    }
    print(json.dumps(result), flush=True)
    return result


def run_cases(
    cases: Mapping[str, Case], folder: Path = Path("runs/plan_memory"), file: Path | None = None
) -> bool:
    """Whether the plan is close enough in every case."""
    results: list[dict[str, Any]] = []
    for name, case in cases.items():
        try:
            results.append(measure(name, case, folder))
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name}: {error}", flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    is_good = len(results) == len(cases) and all(result["is_close"] for result in results)
    print("every figure is within 15%" if is_good else "NOT every figure is within 15%")
    return is_good


# Several ranks


@dataclass
class Result:
    """What became of a case."""

    case: str
    seconds: float = 0.0
    error: str = ""
    ranks: list[Rank] = field(default_factory=list)
    micro_batches: dict[str, str] = field(default_factory=dict)
    gpu_in_use_gib: float = 0.0
    beyond_gib: float | None = None
    """Per process, of what the GPU has in use; None if another case ran at the same time."""

    def is_good(self, options: argparse.Namespace) -> bool:
        if self.error or options.check:
            return not self.error
        is_close = all(rank.is_close for rank in self.ranks)
        return bool(self.ranks) and (is_close or options.device == "cpu")


@dataclass
class Prepared:
    """A case that is ready to start."""

    name: str
    case: Case
    config: Config
    plan: Plan
    estimate: MemoryEstimate
    words: list[str]
    run_folder: Path
    only_checks: bool

    def beside(self, ending: str) -> Path:
        """A file beside the run folder. Names of shapes have points, so `with_suffix` would cut
        them, and give two cases the same file."""
        return self.run_folder.with_name(self.run_folder.name + ending)

    @property
    def planned_gib(self) -> float:
        """The planned memory of all processes, added up."""
        return sum(
            memory.peak / GIB * self.plan.pools[name].world_size
            for name, memory in self.estimate.pools.items()
        )


@dataclass
class Running:
    prepared: Prepared
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float
    was_alone: bool


def prepare(names: Sequence[tuple[str, str]], options: argparse.Namespace) -> list[Prepared]:
    """Read the configs, and make the models. The largest case is the first."""
    cases = {f"{shape}-{name}": sharded_case(shape, name, options.device) for shape, name in names}
    folders = {
        name: options.folder / f"{case.shape}_{case.prompt_tokens}" for name, case in cases.items()
    }
    most_prompts = STEPS * max(case.num_prompts for case in cases.values())
    unique = {folders[name]: case for name, case in cases.items()}
    with ThreadPoolExecutor(len(unique)) as threads:
        made = [
            threads.submit(make_data, case, data, most_prompts, options.limit)
            for data, case in unique.items()
        ]
        for one in made:
            one.result()
    prepared = []
    gpu_memory = detect_gpu_memory() if options.device == "cuda" else None
    for name, case in cases.items():
        run_folder = options.folder / f"run_{name}_{os.getpid()}"
        words = words_of(case, folders[name], run_folder)
        config = load_config([], words).config
        plan = build_plan(config)
        estimate = estimate_memory(config, plan, gpu_memory)
        prepared.append(
            Prepared(name, case, config, plan, estimate, words, run_folder, options.check)
        )
    return sorted(prepared, key=lambda one: -one.planned_gib)


def start(prepared: Prepared, was_alone: bool) -> Running:
    prepared.run_folder.mkdir(parents=True)
    told, log = prepared.beside(".json"), prepared.beside(".log")
    case = prepared.case
    content = {
        "words": prepared.words,
        "num_cpus": case.num_gpus + 4,
        "num_gpus": 0 if case.device == "cpu" else case.num_gpus,
        "only_checks": prepared.only_checks,
    }
    told.write_text(json.dumps(content), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).resolve()), "--train-from", str(told)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=rank_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(prepared, process, log, time.monotonic(), was_alone)


def finish(running: Running, problem: str = "") -> Result:
    """What the run measured, or why it did not."""
    prepared = running.prepared
    result = Result(prepared.name, round(time.monotonic() - running.start_s, 1))
    code = running.process.poll()
    if problem or code != 0:
        text = running.log.read_text(encoding="utf-8", errors="replace")
        last = "\n".join(text.splitlines()[-NUM_ERROR_LINES:])
        result.error = f"{problem or f'exit code {code}'}; the end of {running.log}:\n{last}"
    for operation, size in prepared.estimate.micro_batches.items():
        how = {None: "", True: ", recomputed", False: ", activations kept"}[size.recomputes]
        result.micro_batches[operation] = f"{size.tokens} tokens{how}"
    with suppress(Exception):  # without figures; the error says why
        run = read_run(prepared.run_folder)
        result.ranks = ranks_of(run, prepared.estimate)
        result.gpu_in_use_gib = most_in_use(run)
        if running.was_alone and result.ranks and result.gpu_in_use_gib:
            reserved = sum(rank.reserved_gib for rank in result.ranks)
            beyond = (result.gpu_in_use_gib - reserved) / len(result.ranks)
            result.beyond_gib = round(beyond, 2)
    return result


def stop(all_running: Sequence[Running]) -> None:
    """End cases and what they started: first with a signal that lets each end its Ray."""
    for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        for running in all_running:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, number)
        deadline = time.monotonic() + wait_s
        for running in all_running:
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, deadline - time.monotonic()))


def measure_several(options: argparse.Namespace) -> list[Result]:
    """Run cases side by side, as many as fit in memory, until the limit."""
    deadline = time.monotonic() + options.limit
    names = [(shape, name) for shape in options.shapes for name in options.cases or LAYOUTS]
    waiting = prepare(names, options)
    has_gpu = options.device == "cuda"
    running: list[Running] = []
    results: list[Result] = []

    def keep(result: Result) -> None:
        results.append(result)
        show(result, has_gpu)
        if options.json:
            text = json.dumps([asdict(one) for one in results], indent=1)
            options.json.write_text(text, encoding="utf-8")

    try:
        while waiting or running:
            used = sum(one.prepared.planned_gib for one in running)
            for prepared in list(waiting):
                fits = not has_gpu or used + prepared.planned_gib <= options.memory
                if len(running) < options.at_once and (fits or not running):
                    waiting.remove(prepared)
                    for other in running:
                        other.was_alone = False
                    running.append(start(prepared, was_alone=not running))
                    used += prepared.planned_gib
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                keep(finish(one))
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
    finally:
        stop(running)
        for one in running:
            keep(finish(one, f"not ended within --limit {options.limit:g} s"))
    for prepared in waiting:
        keep(Result(prepared.name, error=f"not started within --limit {options.limit:g} s"))
    return results


def show(result: Result, has_gpu: bool) -> None:
    print(f"\n{result.case}: {result.seconds:.0f} s, {result.micro_batches}")
    if result.gpu_in_use_gib:
        beyond = "not alone" if result.beyond_gib is None else f"{result.beyond_gib} per process"
        print(f"  GPU in use at most {result.gpu_in_use_gib} GiB, beyond reserved: {beyond}")
    for rank in result.ranks:
        comparison = "(the process: a CPU has no allocator to ask)"
        if has_gpu:
            verdict = "within 15%" if rank.is_close else "MORE THAN 15%"
            comparison = f"{rank.percent:+6.1f}%  {verdict}  reserved {rank.reserved_gib:.2f}"
        print(
            f"  {rank.pool}/{rank.rank}: planned {rank.planned_gib:6.2f}  measured "
            f"{rank.measured_gib:6.2f}  {comparison}"
        )
        roles = (
            f"{role} {planned:.2f}/{measured:.2f}"
            for role, (planned, measured) in rank.roles.items()
        )
        print(f"    planned/measured: {', '.join(roles)}")
        if rank.rank == 0:
            print(f"    operations: {rank.operations}")
    if result.error:
        print(f"  FAILED: {result.error}")
    sys.stdout.flush()


def chosen_cases(options: argparse.Namespace) -> dict[str, Case]:
    """The cases of one rank that are asked for."""
    cases = CASES | LARGE
    names = options.cases or list(CASES)
    if options.tiny:
        cases = TINY
        names = [name for name in options.cases or TINY if name in TINY]
    steps: dict[str, Any] = {}
    if options.steps is not None:
        steps["steps"] = options.steps
    return {name: replace(cases[name], **steps) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *LARGE, *LAYOUTS])
    parser.add_argument("--folder", type=Path, default=Path("runs/plan_memory"))
    parser.add_argument("--steps", type=int, help="one rank: of each case; default: 2, or 10")
    parser.add_argument("--tiny", action="store_true", help="one rank: a small model on the CPU")
    parser.add_argument("--several-ranks", action="store_true", help="2 and 4 ranks on one GPU")
    parser.add_argument("--shapes", nargs="*", default=["0.5b", "1.5b"], choices=list(SHAPES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--at-once", type=int, default=1, help="cases side by side, at most")
    parser.add_argument(
        "--memory",
        type=float,
        default=125,
        help="GiB that the plans of running cases may add up to",
    )
    parser.add_argument("--limit", type=float, default=290, help="seconds for all cases")
    parser.add_argument(
        "--check", action="store_true", help="several ranks: all up to the first process"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--train-from", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train_from:
        return train_in_own_ray(options.train_from)
    options.folder = options.folder.resolve()
    known: Mapping[str, object] = LAYOUTS if options.several_ranks else CASES | LARGE
    if wrong := [name for name in options.cases or [] if name not in known]:
        parser.error(f"--cases {' '.join(wrong)}: here they are {', '.join(known)}")
    if not options.several_ranks:
        return 0 if run_cases(chosen_cases(options), options.folder, options.json) else 1
    start_s = time.monotonic()
    results = measure_several(options)
    good = [result.is_good(options) for result in results]
    what = "within 15% on every rank"
    if options.check:
        what = "could start"
    elif options.device == "cpu":
        what = "ran"
    print(f"\n{sum(good)} of {len(good)} cases {what}, in {time.monotonic() - start_s:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
