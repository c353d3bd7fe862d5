"""A PPO step on one GPU: rolepool in one pool and in two that share the GPU, without and with CUDA
MPS, and TRL.

    python benchmarks/gpu/ppo_step.py --parts standard,bypass,defaults,trl --trl-site FOLDER
    python benchmarks/gpu/ppo_step.py --parts standard,split,mps      two pools
    python benchmarks/gpu/ppo_step.py --parts idle                    what the GPU waits for
    python benchmarks/gpu/ppo_step.py --parts no_snapshots,standard   what snapshots cost
    python benchmarks/gpu/ppo_step.py --parts standard,deterministic  what trainer.deterministic costs
    python benchmarks/gpu/ppo_step.py --shape qwen2.5-3b --num-prompts 64 --steps 4 \\
        --parts defaults,mps_defaults trainer.snapshot_freq=-1        two pools, a larger model
    python benchmarks/gpu/ppo_step.py --tiny      a small model on the CPU, to try the script out

The same work for all: policy, value model, reference and a rule for a reward; 256 prompts of 128
tokens, 256 new tokens each (none ends early) at temperature 1, one epoch of four mini-batches.
Model and prompts are made by scripts/make_shape_model.py: the shape of Qwen2.5-0.5B, random
weights, saved in bf16. rolepool trains fp32 weights with bf16 arithmetic; TRL trains bf16 weights,
which is what loading gives it and the cheaper of the two. TRL's reward model is a comparison of one
token, so that it is not charged for a network.

The parts of rolepool:

    standard        one pool, with the sizes of recipes/qwen0.5b_h200.yaml: a mini-batch is one
                    micro-batch
    bypass          the same with the engine's log-probs as the old ones, so the actor does not
                    compute them
    defaults        one pool, and all sizes of micro-batches are chosen by the plan
    no_snapshots    `standard` without snapshots in shared memory
    deterministic   `standard` with trainer.deterministic=true
    split, mps      two pools without and with CUDA MPS, and micro-batches of 16 rows, so that the
                    activations of both take less than those of one
    split_defaults  two pools, and the plan chooses what fits beside the other pool
    mps_defaults    the same with CUDA MPS
    idle            a run of `standard` of its own, under the profiler

Medians of the steps after the first two, which compile; of TRL's after the first. A step is from
the start of a generation to that of the next. GPU memory is the most that NVML saw of the whole
GPU, 20 times a second, less what was in use when the script began; torch's is the most that it had
allocated, in all processes together. Of a step of rolepool's, `controller` is the share in which no
worker process runs an operation, and `fetch` the share in which they fetch what one was given, both
from spans.jsonl; `kernels` is the share in which NVML sees a kernel run.

TRL's part needs trl 1.12.0, the last release with a PPOTrainer. `--trl-site` names a folder in which
it is (`pip install --no-deps --target FOLDER trl==1.12.0 accelerate`); only TRL's part sees it.

Each part is a process of its own, and a failed one does not stop the others. On an H200: standard
and idle 85 to 110 s, most of it compiling, split and mps 70 to 95 s, a step of TRL's 22 to 60 s;
with passes of 64 rows TRL runs out of 140 GB.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from step_parts import (
    HERE,
    ROOT,
    WARM_STEPS,
    Ended,
    GpuMemory,
    Measured,
    Work,
    data_of,
    make_data,
    print_steps,
    print_summary,
    print_times,
    ran_out_of_memory,
    read_rolepool,
    read_trl,
    run_process,
    words_of,
    write_json,
)

RECIPE = ROOT / "recipes" / "qwen0.5b_h200.yaml"
SPLIT_ROWS = 16
SHARED_GPU = ("placement.strategy=split", "placement.split.share=0.5")
SPLIT = (
    *SHARED_GPU,
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={SPLIT_ROWS}",
    f"critic.ppo_micro_batch_size_per_gpu={SPLIT_ROWS}",
)
STANDARD = ("placement.strategy=standard",)
CHOSEN_SIZES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=null",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null",
    "critic.ppo_micro_batch_size_per_gpu=null",
    "critic.forward_micro_batch_size_per_gpu=null",
    # The default, with which the plan recomputes activations only if they do not fit.
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "critic.model.enable_gradient_checkpointing=true",
)
"""The plan chooses the micro-batches, whatever the recipe says."""
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
MPS = "placement.mps=true"
PLACEMENTS = {
    "standard": STANDARD,
    "bypass": (*STANDARD, BYPASS),
    "defaults": (*STANDARD, *CHOSEN_SIZES),
    "no_snapshots": (*STANDARD, "trainer.snapshot_freq=-1"),
    "deterministic": (*STANDARD, "trainer.deterministic=true"),
    "split": SPLIT,
    "mps": (*SPLIT, MPS),
    "split_defaults": (*SHARED_GPU, *CHOSEN_SIZES),
    "mps_defaults": (*SHARED_GPU, *CHOSEN_SIZES, MPS),
}
PARTS = (*PLACEMENTS, "trl", "idle")
DEFAULT_PARTS = ("standard", "split", "mps", "trl", "idle")
GOALS = (
    "goals: 14 times TRL's samples/s with 0.3 of its memory; `defaults` at 97% of the speed of "
    "`standard`; two pools with MPS not slower than one; in one pool a controller under 3%"
)
MINI_BATCHES = 4
TRL_WARM_STEPS = 1
FULL = Work("qwen2.5-0.5b", 256, 128, 256)
TINY = Work("qwen2-tiny", MINI_BATCHES * SPLIT_ROWS, 16, 16)


def rows_per_mini_batch(work: Work) -> int:
    return work.num_prompts // MINI_BATCHES


def rolepool_words(work: Work, data: Path, *, tiny: bool) -> list[str]:
    words = [
        *words_of(work, data),
        f"actor_rollout_ref.actor.ppo_mini_batch_size={rows_per_mini_batch(work)}",
        "actor_rollout_ref.actor.ppo_epochs=1",
    ]
    if tiny:
        rows = rows_per_mini_batch(work)
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
    rows = min(options.trl_rows, rows_per_mini_batch(work))
    rollout_rows = min(options.trl_rollout_rows, work.num_prompts)
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
        if options.tiny:
            command.append("--cpu")
        ended = run_process("trl", command, run, options.timeout_s, gpu, options.trl_site)
        if ended.fine or rows < 2 or not ran_out_of_memory(run):
            return ended
        rows, rollout_rows = rows // 2, rollout_rows // 2
        print(f"trl: again with {rows} rows a pass, {rollout_rows} in rollouts", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(DEFAULT_PARTS), help="default: %(default)s")
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
    parser.add_argument("--trl-site", type=Path, help="a folder with trl 1.12.0")
    parser.add_argument("--shape", help="a folder of recipes/shapes; default: qwen2.5-0.5b")
    parser.add_argument("--num-prompts", type=int, help=f"default: {FULL.num_prompts}")
    parser.add_argument("--prompt-tokens", type=int, help=f"default: {FULL.prompt_tokens}")
    parser.add_argument("--new-tokens", type=int, help=f"default: {FULL.new_tokens}")
    parser.add_argument("--data", type=Path, help="model and prompts; default: a folder of runs/")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "ppo_step", help="where run folders go"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=240, help="for each part; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for all of rolepool's parts"
    )
    options = parser.parse_intermixed_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.steps <= WARM_STEPS or options.trl_steps <= TRL_WARM_STEPS:
        parser.error(
            f"--steps must be over {WARM_STEPS} and --trl-steps over {TRL_WARM_STEPS}, which are not counted"
        )
    num_prompts = options.num_prompts
    if num_prompts is not None and (num_prompts < 1 or num_prompts % MINI_BATCHES):
        parser.error(f"--num-prompts {num_prompts}: give a positive multiple of {MINI_BATCHES}")
    return options


def work_of(options: argparse.Namespace) -> Work:
    work = TINY if options.tiny else FULL
    for name in ("shape", "num_prompts", "prompt_tokens", "new_tokens"):
        value = getattr(options, name)
        if value is not None:
            work = replace(work, **{name: value})
    return work


def main() -> int:
    options = parse_options()
    work = work_of(options)
    data = (options.data or data_of(work)).absolute()
    gpu = GpuMemory()
    make_data(data, work, gpu.device)
    words = [str(RECIPE), *rolepool_words(work, data, tiny=options.tiny)]
    results: dict[str, Measured] = {}
    try:
        fine = [run_part(part, words, options, work, data, gpu, results) for part in options.parts]
    finally:  # what was measured is shown when the rest is interrupted, too
        write_json(options.json, work, results)
        if results:
            print_summary(results, work.num_rows)
            print(GOALS)
            print_steps(results)
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
            *words,
            *placement,
            *options.overrides,
            f"trainer.default_local_dir={run}",
        ]
        ended = run_process(part, command, run, options.timeout_s, gpu)
    try:
        if part == "idle":
            report = run / "idle.txt"  # also there where only the second of its two profiles failed
            print(report.read_text(encoding="utf-8") if report.is_file() else "", flush=True)
        elif ended.fine and part == "trl":
            results[part] = read_trl(run / "trl.json", ended.gpu_gib, TRL_WARM_STEPS)
        elif ended.fine:
            results[part] = read_rolepool(run, ended.gpu_gib, work)
    except Exception:
        traceback.print_exc()
        return False
    return ended.fine


if __name__ == "__main__":
    sys.exit(main())
