"""The recipe for one GPU of 141 GB, in one pool and in two that share the GPU: seconds by operation, side by side.

    python benchmarks/gpu/train_recipe.py [--steps 10] [--data runs/qwen0.5b_data] [--timeout-s 1200]
    python benchmarks/gpu/train_recipe.py --tiny      a small model on the CPU, to try the script out

Makes the model (random weights) and prompts with scripts/make_shape_model.py where they are not there yet. Each
placement is a `rolepool train` of its own, and a failed one does not stop the other. Prints the means of
metrics.jsonl without the first step, which warms up, and standard over split: above 1 split is faster, or takes less.
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
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes" / "qwen0.5b_h200.yaml"
PLACEMENTS = {
    "standard": ["placement.strategy=standard"],
    "split": ["placement.strategy=split", "placement.split.share=0.5"],
}
TINY = [
    "trainer.device=cpu",
    "data.train_batch_size=16",
    "data.max_prompt_length=16",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "critic.ppo_micro_batch_size_per_gpu=8",
]
SECONDS_TO_CLOSE = 60
LINES_OF_A_FAILURE = 15

Means = dict[str, float]


def make_data(folder: Path, *, tiny: bool) -> None:
    if (folder / "train.jsonl").exists():  # written last
        return
    shape, prompts = ("qwen2-tiny", ("256", "16")) if tiny else ("qwen2.5-0.5b", ("2048", "128"))
    script = [sys.executable, str(ROOT / "scripts" / "make_shape_model.py"), str(ROOT / "recipes" / "shapes" / shape)]
    subprocess.run([*script, str(folder), "--num-prompts", prompts[0], "--prompt-tokens", prompts[1]], check=True)


def train(name: str, words: list[str], run: Path, timeout_s: float) -> bool:
    """One training in a process of its own. Says why, where it fails."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    log = run / "output.txt"
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "rolepool", "train", str(RECIPE), *words, f"trainer.default_local_dir={run}"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        try:
            ended = f"ended with {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            ended = f"was stopped after {timeout_s:.0f} s"
            process.send_signal(signal.SIGINT)  # it closes its worker processes
            try:
                process.wait(SECONDS_TO_CLOSE)
            except subprocess.TimeoutExpired:
                process.kill()
    if process.returncode == 0:
        return True
    print(f"{name} {ended}; the end of {log}:", flush=True)
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_OF_A_FAILURE:]:
        print(f"    {line}")
    return False


def read_means(run: Path) -> Means:
    """Means of what is timed, and the largest of what memory was taken, over all steps but the first."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 1 and "timing_s/step" in row]
    means: Means = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        if key.startswith("timing_s/"):
            means[key] = statistics.mean(values)
        elif "memory" in key:
            means[f"{key} (most)"] = max(values)
    return means


def print_table(means: dict[str, Means]) -> None:
    keys = list(dict.fromkeys(key for of_run in means.values() for key in of_run))
    width = max(map(len, keys))
    print(f"{'':{width}} " + " ".join(f"{name:>12}" for name in means) + f" {'ratio':>8}")
    for key in keys:
        values = [of_run.get(key) for of_run in means.values()]
        shown = " ".join(f"{'-' if value is None else f'{value:.4f}':>12}" for value in values)
        standard, split = (means.get(name, {}).get(key) for name in PLACEMENTS)
        ratio = f"{standard / split:.2f}" if standard and split else "-"
        print(f"{key:{width}} {shown} {ratio:>8}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--data", type=Path, help="default: runs/qwen0.5b_data, or runs/tiny_data")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "train_recipe", help="where run folders go")
    parser.add_argument("--timeout-s", type=float, default=1200, help="for each placement")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for both placements")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first is not counted")
    data = (options.data or ROOT / "runs" / ("tiny_data" if options.tiny else "qwen0.5b_data")).absolute()
    make_data(data, tiny=options.tiny)
    words = [
        f"data.train_files={data / 'train.jsonl'}",
        f"actor_rollout_ref.model.path={data / 'model'}",
        f"trainer.total_training_steps={options.steps}",
        *(TINY if options.tiny else []),
        *options.overrides,
    ]
    runs = {name: options.runs.absolute() / name for name in PLACEMENTS}
    fine = [name for name, run in runs.items() if train(name, [*words, *PLACEMENTS[name]], run, options.timeout_s)]
    if fine:
        print(f"means of {options.steps - 1} steps; ratio: standard over split")
        print_table({name: read_means(runs[name]) for name in fine})
    return 0 if len(fine) == len(PLACEMENTS) else 1


if __name__ == "__main__":
    sys.exit(main())
