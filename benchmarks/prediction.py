"""How well the planner predicts: profile runs, predictions of other placements and workloads, then
the real runs.

    python benchmarks/prediction.py                 CPU slots, up to 12 processes; meant for 16 cores
    python benchmarks/prediction.py --gpu           one GPU: one pool, and two pools that share it, also with CUDA MPS
    python benchmarks/prediction.py --two-cores     CPU slots, one or two processes; for 2 cores
    python benchmarks/prediction.py --tiny          a few cases at a tiny shape, to try the script out
    python benchmarks/prediction.py --only 2,5      some of the cases, by number
    python benchmarks/prediction.py --runs FOLDER   keeps the runs there, and does not repeat those that it has

The cases are listed in this file, and all of them are predicted before the first of them runs. Two
profile runs are recorded on CPU slots: the first one moves between placements. On a GPU there are
two for the small shape, one pool and two pools that share the GPU without MPS, and one for the
large shape. Prints predicted and measured step time (the median of the steps after the first two)
and the error of each case, the median and the worst error (goals: 10% and 20%), and how much slower
the placement that the planner prefers for the same work is than the best measured one (goal: 5%).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from moves import Mover
from transformers import AutoConfig, AutoModelForSequenceClassification

from rolepool.config import load_config
from rolepool.config.fitting import num_cores
from rolepool.placement import build_plan
from rolepool.placement.hardware import detect_gpu_memory
from rolepool.planner.predict import Predictor
from rolepool.planner.profile import Profile
from rolepool.report.predicted import read_recordings
from rolepool.report.run import read_run
from rolepool.trainer.loop import Trainer
from rolepool.trainer.paper import schedule_of

ROOT = Path(__file__).parent.parent
CPU_SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
CPU_WORK = """
data.train_batch_size=48 data.max_prompt_length=16 data.max_response_length=32 data.val_files=null
actor_rollout_ref.actor.ppo_mini_batch_size=24 actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.ignore_eos=true
actor_rollout_ref.actor.use_kl_loss=true reward_model.enable=true trainer.device=cpu trainer.save_freq=-1
trainer.logger=[] trainer.val_before_train=false trainer.total_epochs=100
"""
GPU_WORK = """
data.train_batch_size=256 data.max_prompt_length=128 data.max_response_length=256 data.val_files=null
actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.ignore_eos=true
actor_rollout_ref.actor.use_kl_loss=true trainer.device=cuda trainer.n_gpus_per_node=1 trainer.save_freq=-1
trainer.logger=[] trainer.val_before_train=false trainer.total_epochs=100
"""
SHARED = "placement.strategy=split placement.split.share=0.5"
STANDARD = "placement.strategy=standard trainer.n_gpus_per_node={}"
SPLIT = "placement.strategy=split placement.split.actor_gpus_per_node={} trainer.n_gpus_per_node={}"
POOLS = "placement.strategy=custom trainer.n_gpus_per_node={} placement.pools={} placement.roles={}"
OWN_ROLLOUT = "{actor:a,ref:a,rollout:r,critic:c,reward_model:c}"
OWN_CRITIC = "{actor:a,ref:a,rollout:a,reward_model:a,critic:c}"


@dataclass(frozen=True)
class Case:
    """A run: what it changes, and the placements that it moves to."""

    words: str
    moves: tuple[str, ...] = ()
    shape: str = ""


LONG, SHORT = "data.max_response_length=64", "data.max_response_length=16"
LARGE = "data.train_batch_size=96 actor_rollout_ref.actor.ppo_mini_batch_size=48"
CPU_PROFILES = (
    Case(
        STANDARD.format(1),
        (STANDARD.format(12), POOLS.format(8, "{a:[4],r:[2],c:[2]}", OWN_ROLLOUT)),
    ),
    Case(f"{STANDARD.format(4)} {LARGE} {SHORT}"),
)
CPU_CASES = (
    Case(STANDARD.format(2)),
    Case(STANDARD.format(4)),
    Case(STANDARD.format(6)),
    Case(STANDARD.format(8)),
    Case(SPLIT.format(1, 2)),
    Case(SPLIT.format(2, 4)),
    Case(SPLIT.format(3, 4)),
    Case(SPLIT.format(4, 8)),
    Case(SPLIT.format(6, 8)),
    Case(SPLIT.format(2, 8)),
    Case(SPLIT.format(8, 12)),
    Case(SPLIT.format(6, 12)),
    Case(POOLS.format(8, "{a:[6],c:[2]}", OWN_CRITIC)),
    Case(POOLS.format(12, "{a:[4],r:[4],c:[4]}", OWN_ROLLOUT)),
    Case(POOLS.format(8, "{a:[3],r:[3],c:[2]}", OWN_ROLLOUT)),
    Case(f"{STANDARD.format(4)} {LARGE}"),
    Case(f"{SPLIT.format(4, 8)} {LARGE}"),
    Case(f"{STANDARD.format(8)} {LONG}"),
    Case(f"{SPLIT.format(6, 8)} {LONG}"),
    Case(f"{STANDARD.format(2)} actor_rollout_ref.rollout.n=4"),
    Case(f"{SPLIT.format(6, 12)} actor_rollout_ref.actor.ppo_epochs=2"),
)
SMALL = "data.train_batch_size=128"
NO_SNAPSHOTS = "placement.strategy=standard trainer.snapshot_freq=-1"
GPU_PROFILES = (
    Case("placement.strategy=standard", shape="qwen2.5-0.5b"),
    Case(f"{SHARED} {SMALL}", shape="qwen2.5-0.5b"),
    Case(f"{NO_SNAPSHOTS} {SMALL}", shape="qwen2.5-1.5b"),
)
GPU_CASES = (
    Case(NO_SNAPSHOTS, shape="qwen2.5-0.5b"),
    Case(f"placement.strategy=standard {SMALL}", shape="qwen2.5-0.5b"),
    Case(SHARED, shape="qwen2.5-0.5b"),
    Case(f"{SHARED} placement.mps=true", shape="qwen2.5-0.5b"),
    Case(f"{NO_SNAPSHOTS} data.train_batch_size=64", shape="qwen2.5-1.5b"),
    Case(NO_SNAPSHOTS, shape="qwen2.5-1.5b"),
)
TWO_PROFILES = (
    Case(STANDARD.format(2), (STANDARD.format(1),)),
    Case(f"{SPLIT.format(1, 2)} {LARGE} {SHORT}"),
)
TWO_CASES = (
    Case(SPLIT.format(1, 2)),
    Case(f"{STANDARD.format(1)} {SHORT}"),
    Case(f"{STANDARD.format(2)} {LARGE}"),
    Case(f"{STANDARD.format(2)} {LONG}"),
    Case(f"{SPLIT.format(1, 2)} {LONG}"),
    Case(f"{SPLIT.format(1, 2)} {LARGE}"),
    Case(f"{STANDARD.format(2)} actor_rollout_ref.rollout.n=4"),
    Case(f"{SPLIT.format(1, 2)} actor_rollout_ref.actor.ppo_epochs=2"),
)
TINY_CASES = (
    Case(STANDARD.format(1)),
    Case(SPLIT.format(1, 2)),
    Case(f"{STANDARD.format(1)} {SHORT}"),
)


def make_models(folder: Path, shape: str) -> list[str]:
    """Make model, reward model and prompts, unless they are there. Returns the words that name
    them."""
    data = folder / f"data{shape}"
    words = [
        f"actor_rollout_ref.model.path={data / 'model'}",
        f"data.train_files={data / 'train.jsonl'}",
    ]
    if not shape:
        words.append(f"reward_model.model.path={data / 'reward'}")
    if data.exists():
        return words
    source = ROOT / "recipes" / "shapes" / shape if shape else folder / "shape"
    if not shape:
        source.mkdir(parents=True, exist_ok=True)
        (source / "config.json").write_text(json.dumps(CPU_SHAPE))
    size = ["--num-prompts", "2048", "--prompt-tokens", "128" if shape else "16"]
    script = [
        sys.executable,
        str(ROOT / "scripts" / "make_shape_model.py"),
        str(source),
        str(data),
        *size,
    ]
    subprocess.run(script, check=True, capture_output=True)
    if not shape:
        config = AutoConfig.from_pretrained(data / "model", num_labels=1)
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(
            data / "reward"
        )
        (data / "reward" / "tokenizer.json").write_bytes(
            (data / "model" / "tokenizer.json").read_bytes()
        )
        (data / "reward" / "tokenizer_config.json").write_bytes(
            (data / "model" / "tokenizer_config.json").read_bytes()
        )
    return words


def keys_of(case: Case, models: dict[str, list[str]], *, on_gpu: bool) -> list[str]:
    return [*(GPU_WORK if on_gpu else CPU_WORK).split(), *models[case.shape], *case.words.split()]


def train(case: Case, keys: list[str], folder: Path, num_steps: int) -> float:
    """Train so many steps with each placement, unless the folder has such a run. Returns the
    seconds that it took."""
    if folder.exists() and len(read_run(folder).metrics) >= num_steps * (1 + len(case.moves)):
        return 0.0
    shutil.rmtree(folder, ignore_errors=True)  # a run that was cut off
    start_s = time.monotonic()
    total = [] if case.moves else [f"trainer.total_training_steps={num_steps}"]
    trainer = Trainer(load_config([], [*keys, *total, f"trainer.default_local_dir={folder}"]))
    if case.moves:
        observer = Mover(case.moves, num_steps, waits=True)
        trainer.observer, observer.trainer = observer, trainer
    trainer.run()
    return time.monotonic() - start_s


def measured_step_s(folder: Path) -> float:
    return read_recordings([folder], None)[0].step_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--two-cores", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", help="numbers of cases, such as 2,5; default: all")
    parser.add_argument(
        "--runs", type=Path, help="where run folders go; default: a temporary folder"
    )
    options = parser.parse_args()
    profiles, cases = (GPU_PROFILES, GPU_CASES) if options.gpu else (CPU_PROFILES, CPU_CASES)
    if options.two_cores:
        profiles, cases = TWO_PROFILES, TWO_CASES
    if options.tiny:
        profiles, cases = (Case(STANDARD.format(2)),), TINY_CASES
    all_cases = cases
    if options.only:
        cases = tuple(cases[int(number) - 1] for number in options.only.split(","))
    home = options.runs or Path(tempfile.mkdtemp(prefix="prediction_"))
    home.mkdir(parents=True, exist_ok=True)
    gpus = {"num_gpus": 1} if options.gpu else {}
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        **gpus,
    )
    models = {
        shape: make_models(home, shape) for shape in dict.fromkeys(case.shape for case in cases)
    }
    folders: dict[str, list[Path]] = {}
    for number, case in enumerate(profiles):
        if case.shape not in models:
            continue
        folder = home / f"profile{number + 1}"
        took_s = train(case, keys_of(case, models, on_gpu=options.gpu), folder, options.steps)
        folders.setdefault(case.shape, []).append(folder)
        print(
            f"profile {number + 1}: {case.words} {' -> '.join(case.moves)} ({took_s:.0f} s)",
            flush=True,
        )
    predicted = {}
    for shape, of_shape in folders.items():
        cores = None if options.gpu else num_cores()
        profile = Profile(read_recordings(of_shape, None))
        predictor = Predictor(
            profile, schedule_of, gpu_memory_bytes=detect_gpu_memory(), num_cores=cores
        )
        for case in (case for case in cases if case.shape == shape):
            config = load_config([], keys_of(case, models, on_gpu=options.gpu)).config
            predicted[case] = predictor.predict(case.words, config, build_plan(config))
    (home / "predicted.json").write_text(
        json.dumps({one.words: made.step_s for one, made in predicted.items()})
    )
    print(
        f"{'case':>4} {'predicted':>9} {'from':>7} {'to':>7} {'measured':>8} {'error':>6}",
        flush=True,
    )
    measured = {}
    for case in cases:
        number = all_cases.index(case) + 1
        folder = home / f"case{number}"
        took_s = train(case, keys_of(case, models, on_gpu=options.gpu), folder, options.steps)
        measured[case], made = measured_step_s(folder), predicted[case]
        times = f"{made.step_s:>9.3f} {made.low_s:>7.3f} {made.high_s:>7.3f} {measured[case]:>8.3f}"
        error = made.step_s / measured[case] - 1
        print(
            f"{number:>4} {times} {error:>+6.1%}  {case.shape} {case.words} ({took_s:.0f} s)",
            flush=True,
        )
    errors = [abs(predicted[case].step_s / measured[case] - 1) for case in cases]
    inside = sum(
        predicted[case].low_s <= measured[case] <= predicted[case].high_s for case in cases
    )
    print(
        f"{len(cases)} cases: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    )
    print(f"inside the predicted interval: {inside}")
    print_choice(cases, {case: one.step_s for case, one in predicted.items()}, measured)
    return 0


def print_choice(
    cases: tuple[Case, ...], predicted: dict[Case, float], measured: dict[Case, float]
) -> None:
    """For the most frequent work among the cases: the preferred placement compared with the best
    measured one."""
    placements = ("placement.", "trainer.n_gpus_per_node")
    works: dict[str, list[Case]] = {}
    for case in cases:
        work = " ".join(
            [case.shape, *(word for word in case.words.split() if not word.startswith(placements))]
        )
        works.setdefault(work, []).append(case)
    same = max(works.values(), key=len)
    chosen, best = (
        min(same, key=lambda case: predicted[case]),
        min(same, key=lambda case: measured[case]),
    )
    ratio = measured[chosen] / measured[best]
    print(
        f"of {len(same)} placements of the same work, the chosen one takes {ratio:.3f} times the best one's step"
    )
    print(f"  chosen: {chosen.words}\n  best: {best.words}")


if __name__ == "__main__":
    sys.exit(main())
