"""A GRPO step on one GPU: rolepool, without and with `bypass_mode`, and TRL's GRPOTrainer.

    python benchmarks/gpu/grpo_step.py --trl-site FOLDER [--parts standard,bypass,trl] [--steps 6]
    python benchmarks/gpu/grpo_step.py --tiny      a small model on the CPU, to try the script out

The same work for all: policy, reference and a cheap function as reward; 32 prompts of 128 tokens, 8
responses of 256 tokens to each (none ends early) at temperature 1, a KL term against the reference
in the loss, one optimizer step for all 256 responses. Model and prompts are made by
scripts/make_shape_model.py: the shape of Qwen2.5-0.5B, random weights, saved in bf16. rolepool
trains fp32 weights with bf16 arithmetic; TRL trains bf16 weights, which is the cheaper of the two.

    standard   one pool, with the sizes of recipes/qwen0.5b_h200.yaml
    bypass     the same with the engine's log-probs as the old ones, so the actor does not compute
               them. TRL does not compute them either if there is one update for what it generated
    defaults   all sizes of micro-batches are chosen by the plan
    trl        GRPOTrainer with plain `generate`

Medians of the steps after the first two, which compile; of TRL's after the first. GPU memory is the
most that NVML saw of the whole GPU, less what was in use when the script began; torch's is the most
that it had allocated. `prefilled` is the number of prompt tokens that a step of rolepool computed in
prefills, relative to those of all responses: 0.125 if the prompt of 8 responses is computed once.
For `bypass` the losses of the first step are printed beside those of `standard`: both have sampled
the same responses, if the GPU rounds in the same way in both runs.

TRL's part needs trl 1.16.0. `--trl-site` names a folder in which it is (`pip install --no-deps
--target FOLDER trl==1.16.0 accelerate`); only TRL's part sees it. If it runs out of memory, it is
tried again with half the rows in a pass.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ppo_step import BYPASS, CHOSEN_SIZES, RECIPE
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

FULL = Work("qwen2.5-0.5b", 32, 128, 256, num_samples=8)
TINY = Work("qwen2-tiny", 4, 16, 16, num_samples=4)
PARTS: Mapping[str, tuple[str, ...]] = {
    "standard": (),
    "bypass": (BYPASS,),
    "defaults": CHOSEN_SIZES,
    "trl": (),
}
DEFAULT_PARTS = ("standard", "bypass", "trl")
TRL_WARM_STEPS = 1
GOAL = "goal: 6 times TRL's samples/s"
LOSSES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/ppo_kl")


@dataclass
class Bench:
    """What all parts have in common."""

    options: argparse.Namespace
    work: Work
    data: Path
    gpu: GpuMemory


def rolepool_words(bench: Bench) -> list[str]:
    work = bench.work
    words = [
        *words_of(work, bench.data),
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work.num_prompts}",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        f"custom_reward_function.path={HERE / 'step_reward.py'}",
        "custom_reward_function.name=score_by_letters",
    ]
    if bench.options.tiny:
        words += [
            "trainer.device=cpu",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={work.num_rows}",
        ]
    return words


def run_rolepool(bench: Bench, part: str, run: Path) -> Ended:
    command = [
        "-m",
        "rolepool",
        "train",
        str(RECIPE),
        *rolepool_words(bench),
        *PARTS[part],
        *bench.options.overrides,
        f"trainer.total_training_steps={bench.options.steps}",
        f"trainer.default_local_dir={run}",
    ]
    return run_process(part, command, run, bench.options.timeout_s, bench.gpu)


def run_trl(bench: Bench, run: Path) -> Ended:
    """With half the rows in a pass, and again, while memory does not suffice."""
    options, work = bench.options, bench.work
    rows = min(options.trl_rows, work.num_rows)
    while True:
        command = [
            str(HERE / "grpo_step_trl.py"),
            str(bench.data),
            str(run / "trl.json"),
            f"--steps={options.trl_steps}",
            f"--num-prompts={work.num_prompts}",
            f"--num-samples={work.num_samples}",
            f"--new-tokens={work.new_tokens}",
            f"--rows={rows}",
        ]
        if options.tiny:
            command.append("--cpu")
        ended = run_process("trl", command, run, options.timeout_s, bench.gpu, options.trl_site)
        if ended.fine or rows < 2 or not ran_out_of_memory(run):
            return ended
        rows //= 2
        print(f"trl: again with {rows} rows a pass", flush=True)


def measure(bench: Bench, part: str) -> Measured | None:
    """None if the part failed."""
    run = bench.options.runs.absolute() / part
    try:
        if part == "trl":
            ended = run_trl(bench, run)
            if not ended.fine:
                return None
            return read_trl(run / "trl.json", ended.gpu_gib, TRL_WARM_STEPS)
        ended = run_rolepool(bench, part, run)
        if not ended.fine:
            return None
        return read_rolepool(run, ended.gpu_gib, bench.work)
    except Exception:
        traceback.print_exc()
        return None


def print_more(results: Mapping[str, Measured]) -> None:
    """What prefills computed, and the losses of the first step."""
    for part, measured in results.items():
        if measured.prefilled is not None:
            print(f"{part}: prefilled {measured.prefilled:.3f} of the tokens of all prompts")
    print(f"{'first step':12}" + "".join(f"{name:>18}" for name in LOSSES))
    for part, measured in results.items():
        if measured.first:
            values = [measured.first.get(name) for name in LOSSES]
            cells = ["-" if value is None else f"{value:.3e}" for value in values]
            print(f"{part:12}" + "".join(f"{cell:>18}" for cell in cells))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(DEFAULT_PARTS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=6, help="of rolepool's parts; default: 6")
    parser.add_argument("--trl-steps", type=int, default=3, help="default: 3")
    parser.add_argument(
        "--trl-rows", type=int, default=32, help="of a training pass of TRL's; default: 32"
    )
    parser.add_argument("--trl-site", type=Path, help="a folder with trl 1.16.0")
    parser.add_argument("--data", type=Path, help="model and prompts; default: a folder of runs/")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "grpo_step", help="where run folders go"
    )
    parser.add_argument("--timeout-s", type=float, default=180, help="for each part; default: 180")
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
        parser.error(f"--steps must be over {WARM_STEPS} and --trl-steps over {TRL_WARM_STEPS}")
    return options


def main() -> int:
    options = parse_options()
    work = TINY if options.tiny else FULL
    gpu = GpuMemory()
    bench = Bench(options, work, (options.data or data_of(work)).absolute(), gpu)
    make_data(bench.data, work, gpu.device)
    results: dict[str, Measured] = {}
    try:
        for part in options.parts:
            measured = measure(bench, part)
            if measured is not None:
                results[part] = measured
    finally:  # what was measured is shown when the rest is interrupted, too
        write_json(options.json, work, results)
        if results:
            print_summary(results, work.num_rows)
            print(GOAL)
            print_steps(results)
            print_times(results)
            print_more(results)
    return 0 if len(results) == len(options.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
