"""What `algorithm.max_staleness` saves if responses have a long tail of lengths.

    python benchmarks/staleness.py                         two CPU slots; needs two free cores
    python benchmarks/staleness.py --ranks 4               eight CPU slots; needs eight free cores
    python benchmarks/staleness.py --device cuda           two ranks that share the first GPU
    python benchmarks/staleness.py --device cuda --mps     the same as shares of the GPU, with CUDA MPS
    python benchmarks/staleness.py --tiny                  tries the script out
    python benchmarks/staleness.py key=value ...           further keys for all runs

90% of the responses have the same short length, and 10% are eight times longer
(`fixed_lengths.py`). The rollout has a pool of its own, and actor and critic have the other one. The
sizes are such that generation and training take about the same time on the machine for which they
were chosen; the output says whether they do. The sides k = 0, 1 and 2 are runs of their own, one at
a time, and take turns for some rounds, each time in another order.

Prints the median step of each side, how many times faster than k = 0 it is (by rounds, and the
median of the rounds), the busy share of both pools, and the distance from the ideal: the longer of
generation and learning at k = 0, as if nothing else took time and both sides did not slow each
other down. Then what `rolepool predict` says for k = 1 and 2, from the runs with k = 0 alone.

The goal of 1.6 is for k = 1 with partial rollouts, which do not exist yet, so the exit code does
not depend on it. It is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lanes
import ray
from lanes import Job, Outcome, run_jobs

from rolepool.config import load_config
from rolepool.config.fitting import num_cores
from rolepool.placement import build_plan
from rolepool.placement.hardware import detect_gpu_memory
from rolepool.planner.predict import Predictor
from rolepool.planner.profile import Profile
from rolepool.report.recordings import read_recordings
from rolepool.report.run import read_run
from rolepool.trainer.loop import Trainer
from rolepool.trainer.paper import schedule_of

ROOT = Path(__file__).parent.parent
EXTENSION = Path(__file__).with_name("fixed_lengths.py")
STALENESSES = (0, 1, 2)
GOAL = 1.6
NUM_WARM_STEPS = 4
"""Not counted: the pools fill their queues, and measure what they need."""
NUM_LAST_STEPS = 2
"""Not counted either, because nothing is generated ahead at the end of a run."""
JOB_LIMIT_S = 600.0
KEYS = f"""
data.val_files=null actor_rollout_ref.rollout.ignore_eos=true trainer.save_freq=-1 trainer.logger=[]
trainer.val_before_train=false trainer.test_freq=-1 trainer.total_epochs=1000
placement.strategy=custom placement.roles={{actor:train,ref:train,critic:train,rollout:generate}}
trainer.extensions=[{EXTENSION}]
"""


@dataclass(frozen=True)
class Size:
    """A model and a batch with which generation and training take about the same time."""

    shape: Mapping[str, object]
    num_rows: int
    num_mini_batches: int
    prompt_tokens: int
    longest_response: int


def _shape(hidden_size: int, num_layers: int, vocab_size: int) -> dict[str, object]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 64,
        "intermediate_size": 3 * hidden_size,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
    }


CPU_SIZE = Size(
    _shape(64, 4, 512), num_rows=10, num_mini_batches=2, prompt_tokens=16, longest_response=640
)
CUDA_SIZE = Size(
    _shape(896, 16, 8192), num_rows=256, num_mini_batches=4, prompt_tokens=64, longest_response=512
)
TINY_SIZE = Size(
    _shape(64, 1, 512), num_rows=20, num_mini_batches=2, prompt_tokens=8, longest_response=16
)


# One run


def train(argument: tuple[str, list[str], str]) -> dict[str, float]:
    """In a lane: one run. Returns the medians of its steps."""
    folder, words, device = argument
    if device == "cuda" and not ray.is_initialized():
        lanes.start_ray(device)
    if ray.is_initialized():
        lanes.await_free_gpus()
    Trainer(load_config([], [*words, f"trainer.default_local_dir={folder}"])).run()
    return medians_of(Path(folder))


def medians_of(folder: Path) -> dict[str, float]:
    """Seconds of a step and of both pools' work in it, and what else is printed."""
    metrics = read_run(folder).metrics
    last = max(metrics) - NUM_LAST_STEPS
    rows = [row for step, row in metrics.items() if NUM_WARM_STEPS < step <= last]
    values: dict[str, list[float]] = {}
    for row in rows:
        step_s = row["timing_s/step"]
        generate_busy = row["pool/generate/busy_fraction"]
        train_busy = row["pool/train/busy_fraction"]
        of_row = {
            "step_s": step_s,
            "gen_s": row["timing_s/gen"],
            "generate_busy": generate_busy,
            "train_busy": train_busy,
            "generate_busy_s": generate_busy * step_s,
            "train_busy_s": train_busy * step_s,
            "mean_response_tokens": row["response_length/mean"],
            "longest_response_tokens": row["response_length/max"],
            "staleness": row["training/staleness/mean"],
        }
        for name, value in of_row.items():
            values.setdefault(name, []).append(value)
    return {name: median(of_steps) for name, of_steps in values.items()}


# All of them


def write_models(folder: Path, size: Size) -> list[str]:
    """Write a model with random weights, and prompts. Returns the words that name them."""
    shape = folder / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(size.shape))
    script = str(ROOT / "scripts" / "make_shape_model.py")
    numbers = ["--num-prompts", "2048", "--prompt-tokens", str(size.prompt_tokens)]
    command = [sys.executable, script, str(shape), str(folder / "data"), *numbers]
    subprocess.run(command, check=True, capture_output=True, timeout=JOB_LIMIT_S)
    return [
        f"actor_rollout_ref.model.path={folder / 'data' / 'model'}",
        f"data.train_files={folder / 'data' / 'train.jsonl'}",
    ]


def words_of(options: argparse.Namespace, size: Size) -> list[str]:
    """The keys of all sides, without the model and `algorithm.max_staleness`."""
    num_gpus = 2 * options.ranks
    pools = f"{{train:[{options.ranks}],generate:[{options.ranks}]}}"
    mps = []
    if options.mps:
        num_gpus = 1
        half = "{per_node:[1],share:0.5}"
        pools = f"{{train:{half},generate:{half}}}"
        mps = ["placement.mps=true"]
    if options.device == "cpu":
        mps = [f"ray_kwargs.ray_init.num_cpus={num_gpus}"]
    return [
        *KEYS.split(),
        f"trainer.device={options.device}",
        f"trainer.n_gpus_per_node={num_gpus}",
        f"placement.pools={pools}",
        *mps,
        f"data.train_batch_size={size.num_rows * options.ranks}",
        f"data.max_prompt_length={size.prompt_tokens}",
        f"data.max_response_length={size.longest_response}",
        "actor_rollout_ref.actor.ppo_mini_batch_size="
        f"{size.num_rows * options.ranks // size.num_mini_batches}",
        f"trainer.total_training_steps={options.steps + NUM_WARM_STEPS + NUM_LAST_STEPS}",
        *options.words,
    ]


def measure(
    options: argparse.Namespace, words: Sequence[str], folder: Path
) -> list[dict[int, dict[str, float]]]:
    """The medians of each side, by round. A round without all sides is left out."""
    jobs: list[Job] = []
    for number in range(options.rounds):
        turned = STALENESSES[number % len(STALENESSES) :] + STALENESSES[: number % len(STALENESSES)]
        for k in turned:
            run = [*words, f"algorithm.max_staleness={k}"]
            name = f"round{number + 1}_k{k}"
            jobs.append(Job(name, (str(folder / name), run, options.device)))
    rounds: list[dict[int, dict[str, float]]] = [{} for _ in range(options.rounds)]

    def note(outcome: Outcome) -> None:
        number, _, k = outcome.name.removeprefix("round").partition("_k")
        if outcome.problem is not None:
            print(f"{outcome.name}: {outcome.problem}\n{outcome.log[-2000:]}", flush=True)
            return
        rounds[int(number) - 1][int(k)] = outcome.result
        shown = f"step {outcome.result['step_s']:.3f} s, {outcome.seconds:.0f} s for the run"
        print(f"round {number}, k={k}: {shown}", flush=True)

    run_jobs(
        jobs,
        train,
        num_lanes=1,
        folder=folder,
        limit_s=options.limit,
        job_limit_s=JOB_LIMIT_S,
        on_outcome=note,
    )
    return [sides for sides in rounds if len(sides) == len(STALENESSES)]


def predictions(
    words: Sequence[str], folders: Sequence[Path], device: str
) -> dict[int, dict[str, float]]:
    """The step of each k > 0, from the runs with k = 0."""
    profile = Profile(read_recordings(folders, None))
    cores = num_cores() if device == "cpu" else None
    predictor = Predictor(
        profile, schedule_of, gpu_memory_bytes=detect_gpu_memory(), num_cores=cores
    )
    predicted: dict[int, dict[str, float]] = {}
    for k in STALENESSES[1:]:
        config = load_config([], [*words, f"algorithm.max_staleness={k}"]).config
        prediction = predictor.predict(f"k={k}", config, build_plan(config))
        predicted[k] = {
            "step_s": prediction.step_s,
            "low_s": prediction.low_s,
            "high_s": prediction.high_s,
        }
    return predicted


def report_on(rounds: Sequence[Mapping[int, Mapping[str, float]]]) -> dict[str, Any]:
    """Print the table of all sides, and return its numbers."""
    sides: dict[int, dict[str, Any]] = {}
    for k in STALENESSES:
        names = rounds[0][k]
        sides[k] = {name: median(sides_of[k][name] for sides_of in rounds) for name in names}
        ratios = [sides_of[0]["step_s"] / sides_of[k]["step_s"] for sides_of in rounds]
        sides[k]["speed_ups"] = ratios
        sides[k]["speed_up"] = median(ratios)
    base = sides[0]
    ideal_s = max(base["generate_busy_s"], base["train_busy_s"])
    tokens = (
        f"{base['mean_response_tokens']:.1f}, the longest {base['longest_response_tokens']:.0f}"
    )
    print(f"\n{len(rounds)} rounds; tokens of a response: mean {tokens}")
    balance = base["generate_busy_s"] / base["train_busy_s"]
    print(
        f"at k=0 the rollout's pool works {base['generate_busy_s']:.3f} s per step and the other one "
        f"{base['train_busy_s']:.3f} s, ratio {balance:.2f}; ideal step {ideal_s:.3f} s, which is "
        f"{base['step_s'] / ideal_s:.2f} times faster"
    )
    print("  k   step s  faster  (by rounds)            generate  train   over the ideal")
    for k, side in sides.items():
        side["over_ideal"] = side["step_s"] / ideal_s
        by_rounds = " ".join(f"{ratio:.2f}" for ratio in side["speed_ups"])
        busy = f"{side['generate_busy']:>7.0%}  {side['train_busy']:>6.0%}"
        print(
            f"  {k}  {side['step_s']:>7.3f}  {side['speed_up']:>6.2f}  ({by_rounds:<20})  {busy}"
            f"   {side['over_ideal']:>6.2f}"
        )
    reached = "reached" if sides[1]["speed_up"] >= GOAL else "not reached"
    print(
        f"k=1 without partial rollouts: {sides[1]['speed_up']:.2f} times faster; {GOAL}, the goal "
        f"with partial rollouts, is {reached}"
    )
    return {"ideal_s": ideal_s, "balance": balance, "sides": sides, "goal": GOAL}


def show_predictions(
    report: Mapping[str, Any], predicted: Mapping[int, Mapping[str, float]]
) -> None:
    for k, numbers in predicted.items():
        measured_s = report["sides"][k]["step_s"]
        error = numbers["step_s"] / measured_s - 1
        interval = f"{numbers['low_s']:.3f} to {numbers['high_s']:.3f}"
        print(
            f"predicted from k=0: k={k} {numbers['step_s']:.3f} s ({interval}), measured "
            f"{measured_s:.3f} s, error {error:+.0%}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="key=value for all runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each of the two pools")
    parser.add_argument("--mps", action="store_true", help="pools are shares of one GPU, with MPS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="measured steps of a run")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all runs together")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="where all numbers are written")
    options = parser.parse_intermixed_args()
    if options.mps and (options.device == "cpu" or options.ranks > 1):
        parser.error("--mps: needs --device cuda, and one rank for each pool")
    if options.device == "cuda" and 2 * options.ranks > lanes.NUM_GPUS:
        parser.error(f"--ranks {options.ranks}: the Ray of a lane counts {lanes.NUM_GPUS} GPUs")
    return options


def main() -> int:
    options = parse()
    size = CPU_SIZE
    if options.device == "cuda":
        size = CUDA_SIZE
        if not options.mps:
            lanes.share_one_gpu()
    if options.tiny:
        size = TINY_SIZE
        options.rounds, options.steps = 1, 4
    with tempfile.TemporaryDirectory(prefix="staleness_") as name:
        folder = Path(name)
        words = [*words_of(options, size), *write_models(folder, size)]
        before = os.getloadavg()[0]
        if options.device == "cpu" and before > num_cores() / 4:
            print(
                f"other programs use this machine (load {before:.1f} on {num_cores()} cores), so "
                "times of different runs cannot be compared",
                flush=True,
            )
        rounds = measure(options, words, folder)
        if not rounds:
            print("no round has all sides")
            return 1
        report = report_on(rounds)
        synchronous = [folder / f"round{number + 1}_k0" for number in range(options.rounds)]
        finished = [run for run in synchronous if run.exists()]
        predicted = predictions(words, finished, options.device)
        show_predictions(report, predicted)
    if options.json is not None:
        report |= {
            "rounds": rounds,
            "predicted": predicted,
            "size": asdict(size),
            "words": words,
            "load_before": before,
            "num_cores": num_cores(),
        }
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(len(rounds) < options.rounds)


if __name__ == "__main__":
    sys.exit(main())
