"""What `rolepool plan` says about a run with default keys, against what the run takes on one GPU.

    python benchmarks/gpu/plan_memory_runs.py [--cases qwen3-0.6b llama-3.2-1b] [--folder runs/plan_memory]
    python benchmarks/gpu/plan_memory_runs.py --tiny      a small model on the CPU, to try the script out; no verdict

Each case is `rolepool train` for two steps, all roles in one pool, on a model of a public shape
with random weights. Micro-batch sizes, checkpointing and cache are left to the program. Prompts
have the largest length, and no response ends early. Compared are the figure that `plan` prints for
the pool and `perf/max_memory_allocated_gb` of the run, the most that torch had allocated. Also
printed: the most that the GPU had in use (NVML, once a second), which includes memory that torch's
allocator holds unused. The exit code is 1 if a figure is more than 15% off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rolepool.config import load_config
from rolepool.placement import build_plan
from rolepool.placement.estimate import GIB, estimate_memory
from rolepool.placement.plan import detect_gpu_memory
from rolepool.report.run import Run, read_run

ROOT = Path(__file__).parent.parent.parent
ALLOWED = 0.15
TIMEOUT_S = 300
STEPS = 2


@dataclass(frozen=True)
class Case:
    shape: str
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    words: tuple[str, ...] = ()
    device: str = "cuda"


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
TINY = {"tiny": Case("qwen2-tiny", 8, 16, 16, device="cpu")}


def words_of(case: Case, data: Path, run: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={data / 'model'}",
        f"data.train_files={data / 'train.jsonl'}",
        f"data.train_batch_size={case.num_prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={case.num_prompts}",
        f"data.max_prompt_length={case.prompt_tokens}",
        f"data.max_response_length={case.new_tokens}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "trainer.n_gpus_per_node=1",
        f"trainer.device={case.device}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={run}",
        *case.words,
    ]


def call(*words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(
        [sys.executable, *words], env=environment, timeout=TIMEOUT_S, check=True, stdout=sys.stderr
    )


def measure(name: str, case: Case, folder: Path) -> bool:
    """Whether the plan is close enough."""
    data, run_folder = folder / f"{case.shape}_{case.prompt_tokens}", folder / f"run_{name}"
    start_s = time.monotonic()
    if not (data / "train.jsonl").exists():
        sizes = [
            "--num-prompts",
            str(case.num_prompts * STEPS),
            "--prompt-tokens",
            str(case.prompt_tokens),
        ]
        call(
            str(ROOT / "scripts/make_shape_model.py"),
            str(ROOT / "recipes/shapes" / case.shape),
            str(data),
            *sizes,
        )
    words = words_of(case, data, run_folder)
    config = load_config([], words).config
    estimate = estimate_memory(config, build_plan(config), detect_gpu_memory())
    (pool,) = estimate.pools.values()
    call("-m", "rolepool", "train", *words)
    run = read_run(run_folder)
    taken = max(row["perf/max_memory_allocated_gb"] for row in run.metrics.values())
    in_use = (
        max((gpu["memory_bytes"] for sample in run.monitor for gpu in sample["gpus"]), default=0)
        / GIB
    )
    planned = pool.peak / GIB
    sizes = {operation: size.tokens for operation, size in estimate.micro_batches.items()}
    print(
        json.dumps(
            {
                "case": name,
                "planned_gib": round(planned, 2),
                "least_gib": round(pool.least / GIB, 2),
                "planned_peak_role": pool.peak_role,
                "planned_by_role": {
                    role: round(memory.working / GIB, 2) for role, memory in pool.roles.items()
                },
                "measured_gib": round(taken, 2),
                "gpu_in_use_gib": round(in_use, 2),
                "ratio": round(planned / taken, 3) if taken else None,
                "measured_by_operation": peaks(run),
                "micro_batch_tokens": sizes,
                "seconds": round(time.monotonic() - start_s),
            }
        ),
        flush=True,
    )
    return case.device == "cpu" or abs(planned - taken) <= ALLOWED * taken


def peaks(run: Run) -> dict[str, float]:
    """The most that torch had allocated in each operation, in GiB."""
    found: dict[str, float] = {}
    for _, operation, span in run.spans:
        found[operation] = max(found.get(operation, 0.0), round(span.peak_memory_bytes / GIB, 2))
    return found


def run_cases(
    names: Iterable[str] = CASES, *, tiny: bool = False, folder: Path = Path("runs/plan_memory")
) -> bool:
    """Whether the plan is close enough in every case."""
    good = True
    for name, case in TINY.items() if tiny else ((name, CASES[name]) for name in names):
        try:
            good = measure(name, case, folder) and good
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name}: {error}", flush=True)
            good = False
    print("every figure is within 15%" if good else "NOT every figure is within 15%")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--folder", type=Path, default=Path("runs/plan_memory"))
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    options = parser.parse_args()
    return 0 if run_cases(options.cases, tiny=options.tiny, folder=options.folder) else 1


if __name__ == "__main__":
    sys.exit(main())
