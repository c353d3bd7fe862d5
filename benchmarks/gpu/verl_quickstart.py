"""PPO with the keys of verl's quickstart, on one GPU: the seconds of a step.

    python benchmarks/gpu/verl_quickstart.py [--parts keys,chosen] [--steps 5]
    python benchmarks/gpu/verl_quickstart.py --prompt-tokens 105 --new-tokens 239
    python benchmarks/gpu/verl_quickstart.py --tiny      a small model on the CPU, to try it out

The keys are those of "Quickstart: PPO training on GSM8K dataset" in verl's documentation
(https://verl.readthedocs.io/en/latest/start/quickstart.html), with responses of 512 tokens, and three
words more: the engine is rolepool's own (`rollout.fallback=native`), the reward has a KL penalty
(`algorithm.use_kl_in_reward=true`, because verl's published log has times of a reference), and end
tokens are ignored. Files and validation are left out: the model has the shape of Qwen2.5-0.5B and
random weights, and prompts are random letters.

All prompts and responses have the largest lengths that the keys allow, so a step is more work than
one on GSM8K. verl's published log is of a run whose responses had at most 256 tokens: prompts have
105 tokens and responses 239 on average, and the operations of its first step take 67.7 s together,
on a GPU that it does not name. The second command has as many tokens as that step.

    keys     with the micro-batches of the quickstart: 4 rows, and 8 for log-probs
    chosen   the plan chooses the micro-batches

Medians of the steps after the first two.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from step_parts import (
    ROOT,
    WARM_STEPS,
    GpuMemory,
    Measured,
    Work,
    data_of,
    make_data,
    print_steps,
    print_summary,
    print_times,
    read_rolepool,
    run_process,
    words_of,
    write_json,
)

QUICKSTART = (
    "data.train_batch_size=256",
    "data.max_prompt_length=512",
    "data.max_response_length=512",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    "critic.optim.lr=1e-5",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "trainer.logger=console",
    "trainer.val_before_train=False",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.total_epochs=15",
)
MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "critic.ppo_micro_batch_size_per_gpu=4",
)
OURS = (
    "actor_rollout_ref.rollout.fallback=native",
    "algorithm.use_kl_in_reward=true",
)
PARTS = {"keys": MICRO_BATCHES, "chosen": ()}
FULL = Work("qwen2.5-0.5b", 256, 512, 512)
TINY = Work("qwen2-tiny", 256, 16, 16)
GOAL_S = 5.0


def words(part: str, work: Work, data: Path, options: argparse.Namespace) -> list[str]:
    device = "cpu" if options.tiny else "cuda"
    return [
        *QUICKSTART,
        *PARTS[part],
        *OURS,
        *words_of(work, data),
        f"critic.model.path={data / 'model'}",
        f"trainer.device={device}",
        f"trainer.total_training_steps={options.steps}",
        *options.overrides,
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="default: 5")
    parser.add_argument("--prompt-tokens", type=int, help="default: 512")
    parser.add_argument("--new-tokens", type=int, help="default: 512")
    parser.add_argument("--data", type=Path, help="model and prompts; default: a folder of runs/")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "verl_quickstart", help="for run folders"
    )
    parser.add_argument("--timeout-s", type=float, default=180, help="for each part; default: 180")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.steps <= WARM_STEPS:
        parser.error(f"--steps must be over {WARM_STEPS}, because the first ones are not counted")
    return options


def main() -> int:
    options = parse_options()
    work = TINY if options.tiny else FULL
    if options.prompt_tokens is not None:
        work = replace(work, prompt_tokens=options.prompt_tokens)
    if options.new_tokens is not None:
        work = replace(work, new_tokens=options.new_tokens)
    data = (options.data or data_of(work)).absolute()
    gpu = GpuMemory()
    make_data(data, work, gpu.device)
    results: dict[str, Measured] = {}
    for part in options.parts:
        run = options.runs.absolute() / part
        command = ["-m", "rolepool.trainer.main_ppo", *words(part, work, data, options)]
        command.append(f"trainer.default_local_dir={run}")
        ended = run_process(part, command, run, options.timeout_s, gpu)
        if ended.fine:
            results[part] = read_rolepool(run, ended.gpu_gib, work)
            write_json(options.json, work, results)
    if results:
        print_summary(results, work.num_rows)
        print(f"goal: a step in less than {GOAL_S:g} s")
        print_steps(results)
        print_times(results)
    return 0 if len(results) == len(options.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
