"""Is training deterministic, what is not, and what does `trainer.deterministic=true` cost?

    python benchmarks/gpu/determinism.py --shape tiny --self-check              on the CPU, to try the script out
    python benchmarks/gpu/determinism.py --device cuda --shape 0.5b --limit 300 --json determinism.json
    python benchmarks/gpu/determinism.py --device cuda --shape tiny --ranks 2

Two sides, `off` and `on`, have the key's two values. Each is a process with a Ray of its own and
does this:

1. It trains twice, with new processes each time, and compares all metrics except times and memory,
   and all weights and optimizer states, bit for bit.
2. It computes each part of a step several times from the same inputs and the same weights, and
   compares what comes out: responses, log-probs, values, losses, gradients, weights after updates.
   Gradients that differ are counted by the kind of weight, which tells the kernel: if only those
   below an attention differ, it is the backward pass of the attention.
3. The sides take turns with whole rounds of a step's operations. The ratio of the medians is what
   the key costs. Nothing else runs meanwhile.
4. The side `off` repeats the operations with torch's warnings about operations that are not
   deterministic.

With --self-check, the side `off` gets noise of its own, which must be found.

The table and the file have what is known when the time is over. On a machine with one GPU all ranks
share it, which needs NCCL 2.30 or later (`lanes.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

import lanes
from lanes import Job, Lane

from rolepool.cluster import Cluster
from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.columns import NUM_PROMPT_TOKENS, flat_values, is_ragged, lengths_of
from rolepool.trainer.advantages import RepeatedPrompts
from rolepool.trainer.build import build_roles
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer

ROOT = Path(__file__).parents[2]
MEASURED = ("timing_", "perf/", "pool/", "overlap/")
SIDES = {"off": "trainer.deterministic=false", "on": "trainer.deterministic=true"}
NUM_TRIES = 3
NUM_WARM_ROUNDS = 2
KEYS = f"""
trainer.extensions=[{Path(__file__).with_name("probes.py")}] trainer.logger=[] trainer.test_freq=-1
trainer.save_freq=-1 trainer.val_before_train=false trainer.total_epochs=100 trainer.resume_mode=disable
algorithm.use_kl_in_reward=true placement.strategy=standard data.val_files=null
"""
SHAPES = {
    "tiny": """
data.train_batch_size=16 data.max_prompt_length=8 data.max_response_length=4
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=2
actor_rollout_ref.actor.optim.lr=1e-3 critic.optim.lr=1e-3
""",
    "0.5b": """
data.train_batch_size=64 data.max_prompt_length=128 data.max_response_length=128
actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=2
actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5
""",
}


# In a lane


class Side:
    """One value of the key: its config, and the roles that are asked in parts 2 to 4."""

    def __init__(self, words: Sequence[str], folder: Path, device: str) -> None:
        self._words, self._folder = list(words), folder
        lanes.start_ray(device)

    def train(self, number: int) -> dict[str, Any]:
        """A run from the start. Returns its rows and the fingerprints of its last state."""
        folder = self._folder / f"run-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        loaded = load_config([], [*self._words, f"trainer.default_local_dir={folder}"])
        trainer = Trainer(loaded)
        hashes = Hashes(trainer)
        trainer.observer = hashes
        trainer.run()
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [
            {key: value for key, value in json.loads(line).items() if not key.startswith(MEASURED)}
            for line in lines
        ]
        return {"rows": rows, "state": hashes.state}

    def open(self) -> None:
        """Build the roles, and make the batch that updates read."""
        loaded = load_config([], [*self._words, f"trainer.default_local_dir={self._folder}/open"])
        trainer = Trainer(loaded)
        config = loaded.config
        self.cluster = Cluster(
            trainer.parts.plan,
            run_seed=config.trainer.seed,
            deterministic=config.trainer.deterministic,
        )
        self.roles = build_roles(self.cluster, config, num_steps=100)
        for call in self.roles.sync_weights(0):
            call.get()
        prompts = RepeatedPrompts(trainer.parts.loader, config.actor_rollout_ref.rollout.n)
        self.prompts = prompts.next_batch()
        self.rollouts: DataProto = self.roles.rollout.generate_sequences(self.prompts).get()
        old = self.roles.actor.compute_log_prob(self.rollouts).get()
        generator = torch.Generator().manual_seed(1)
        lengths = lengths_of(self.rollouts.batch["input_ids"])
        num_response = lengths - self.rollouts.batch[NUM_PROMPT_TOKENS]
        columns = {"old_log_probs": old.batch["old_log_probs"]}
        for name in ("advantages", "values", "returns"):
            numbers = torch.randn(int(num_response.sum()), generator=generator)
            columns[name] = ragged(numbers, num_response)
        self.batch = self.rollouts.select().union(DataProto.from_dict(columns))

    @property
    def operations(self) -> dict[str, Callable[[], Any]]:
        """The calls of a step, by operation."""
        roles = self.roles
        assert roles.critic is not None
        assert roles.ref is not None
        critic, ref = roles.critic, roles.ref
        return {
            "generate_sequences": lambda: roles.rollout.generate_sequences(self.prompts),
            "compute_log_prob": lambda: roles.actor.compute_log_prob(self.rollouts),
            "compute_ref_log_prob": lambda: ref.compute_ref_log_prob(self.rollouts),
            "compute_values": lambda: critic.compute_values(self.rollouts),
            "update_critic": lambda: critic.update_critic(self.batch),
            "update_actor": lambda: roles.actor.update_actor(self.batch),
        }

    def compare(self) -> dict[str, Any]:
        """Each part of a step several times from the same state."""
        found: dict[str, Any] = {}
        for name, call in self.operations.items():
            if name.startswith("update_"):
                continue
            tries = [bits_of(call().get()) for _ in range(NUM_TRIES)]
            found[name] = {
                "equal": all(one == tries[0] for one in tries),
                "columns": sorted(key for key in tries[0] if len({str(t[key]) for t in tries}) > 1),
            }
        for role in ("actor", "critic"):
            proxy: Any = self.roles.by_name[role]
            of_ranks = proxy.probe_gradients(self.batch, num_tries=NUM_TRIES).get()
            losses = [one["losses"] for one in of_ranks]
            found[f"{role}: loss"] = {"equal": all(len(set(one)) == 1 for one in losses)}
            found[f"{role}: gradients"] = compare_tries([one["gradients"] for one in of_ranks])
            states = proxy.probe_update(self.batch, num_tries=NUM_TRIES).get()
            found[f"{role}: state after updates"] = compare_tries(states)
        return found

    def round(self) -> dict[str, float]:
        """The seconds of each operation of a step, on its slowest rank."""
        seconds = {}
        for name, call in self.operations.items():
            spans = call().spans()
            seconds[name] = max(span.end_s - span.start_s for span in spans)
        return seconds

    def warnings(self) -> dict[str, list[str]]:
        """What torch warns of in each operation."""
        places = {
            "rollout": ("generate_sequences", self.prompts),
            "ref": ("compute_ref_log_prob", self.rollouts),
            "critic": ("update_critic", self.batch),
            "actor": ("update_actor", self.batch),
        }
        found: dict[str, list[str]] = {}
        for role, (method, data) in places.items():
            proxy: Any = self.roles.by_name[role]
            texts = proxy.probe_warnings(data, method=method).get()
            found[method] = sorted({text for of_rank in texts for text in of_rank})
        return found


class Hashes(Observer):
    """Asks for the fingerprints of the last state when the last row is written."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.state: dict[str, Any] = {}

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        if step == self._trainer.num_steps and not self.state:
            for name, role in self._trainer.deployment.roles.trained.items():
                proxy: Any = role
                self.state[name] = proxy.hash_state().get()


def bits_of(batch: DataProto) -> dict[str, Any]:
    """All tensors of a batch as plain data, so that they can be compared bit for bit."""
    found: dict[str, Any] = {}
    for key, tensor in batch.batch.items():
        values = flat_values(tensor) if is_ragged(tensor) else tensor
        found[key] = values.contiguous().numpy().tobytes()
    return found


def compare_tries(of_ranks: Sequence[Sequence[dict[str, int]]]) -> dict[str, Any]:
    """How many tensors differ between tries on any rank, by the kind of weight."""
    differing: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    names: list[str] = []
    for tries in of_ranks:
        for name, first in tries[0].items():
            kind = re.sub(r"\.\d+\.", ".*.", name)
            totals[kind] += 1
            if any(one[name] != first for one in tries[1:]):
                differing[kind] += 1
                names.append(name)
    return {
        "equal": not names,
        "num_tensors": totals.total(),
        "num_different": len(names),
        "by_kind": {kind: f"{count} of {totals[kind]}" for kind, count in differing.items()},
        "last": names[-3:],
    }


_side: Side | None = None


def work(argument: tuple[str, Any]) -> Any:
    """What a lane does. The lane's state is its side."""
    global _side
    name, value = argument
    if name == "begin":
        _side = Side(*value)
        return None
    assert _side is not None
    if name == "train":
        return _side.train(value)
    return getattr(_side, name)()


# The controller


class Lanes:
    """The processes of both sides, which answer one question at a time."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        self._lanes = {
            name: Lane(number, work, folder / f"side-{name}.log")
            for number, name in enumerate(SIDES)
        }

    def ask(self, questions: dict[str, tuple[str, Any]]) -> dict[str, Any]:
        """Ask sides at the same time, and wait for all answers. Raises RuntimeError if one fails or
        the time is over."""
        for side, question in questions.items():
            self._lanes[side].begin(Job(question[0], question))
        answers = {}
        for side, (name, _) in questions.items():
            lane = self._lanes[side]
            if not lane.connection.poll(max(0.0, self._deadline - time.monotonic())):
                raise RuntimeError(f"{side}: {name} was still running when the time was over")
            try:
                answers[side], problem = lane.connection.recv()
            except EOFError:
                problem = f"its process died: exit code {lane.process.exitcode}"
            if problem is not None:
                log = lane.end_of_log
                raise RuntimeError(f"{side}: {name}: {problem}; end of its log:\n{log}")
        return answers

    def ask_both(self, name: str, value: Any = None) -> dict[str, Any]:
        return self.ask(dict.fromkeys(SIDES, (name, value)))

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.kill()


def compare_runs(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How many metrics and tensors of two runs differ, and the first metric."""
    values = differing = 0
    first = None
    largest = 0.0
    for row, second in zip(one["rows"], other["rows"], strict=True):
        for key in row:
            values += 1
            here, there = row[key], second.get(key)
            if here == there or (here != here and there != there):
                continue
            differing += 1
            first = first or f"step {row['step']} {key}: {here} and {there}"
            if isinstance(here, float) and isinstance(there, float):
                largest = max(largest, abs(here - there) / max(abs(here), 1e-12))
    states = {}
    for role, of_ranks in one["state"].items():
        pairs = list(zip(of_ranks, other["state"][role], strict=True))
        states[role] = compare_tries([[a, b] for a, b in pairs])
    return {
        "equal": not differing and all(state["equal"] for state in states.values()),
        "num_values": values,
        "num_different": differing,
        "first": first,
        "largest_relative": largest,
        "state": states,
    }


def investigate(report: dict[str, Any], options: argparse.Namespace, sides: Lanes) -> None:
    """All parts. What is known is in the report, also if a later part fails."""

    def save() -> None:
        report["seconds"] = time.monotonic() - report["start_s"]
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1))

    runs: dict[str, list[Any]] = {side: [] for side in SIDES}
    for number in range(2):
        for side, answer in sides.ask_both("train", number).items():
            runs[side].append(answer)
    report["training"] = {side: compare_runs(*pair) for side, pair in runs.items()}
    show_training(report["training"])
    save()

    sides.ask_both("open")
    report["parts"] = sides.ask_both("compare")
    show_parts(report["parts"])
    save()

    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    report["rounds"] = rounds
    for number in range(NUM_WARM_ROUNDS + options.rounds):
        order = list(SIDES) if number % 2 else list(SIDES)[::-1]
        for side in order:
            rounds[side].append(sides.ask({side: ("round", None)})[side])
        if number >= NUM_WARM_ROUNDS:
            report["cost"] = costs(rounds)
            save()
    show_costs(report["cost"])

    report["warnings"] = sides.ask({"off": ("warnings", None)})["off"]
    show_warnings(report["warnings"])
    save()


def costs(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians and ratios of all operations, and of their sum."""
    found: dict[str, dict[str, float]] = {}
    warm = {side: of_side[NUM_WARM_ROUNDS:] for side, of_side in rounds.items()}
    num_rounds = min(len(of_side) for of_side in warm.values())
    names = [*warm["off"][0], "all"]
    for name in names:
        seconds = {
            side: median(
                sum(row.values()) if name == "all" else row[name] for row in of_side[:num_rounds]
            )
            for side, of_side in warm.items()
        }
        found[name] = {**seconds, "ratio": seconds["on"] / seconds["off"]}
    return found


def show_training(training: dict[str, Any]) -> None:
    print("the same training twice:", flush=True)
    for side, outcome in training.items():
        tensors = ", ".join(
            f"{role}: {state['num_different']} of {state['num_tensors']} tensors differ"
            for role, state in outcome["state"].items()
        )
        words = "equal" if outcome["equal"] else "DIFFERENT"
        print(
            f"  {SIDES[side]:<28} {words}: {outcome['num_different']} of {outcome['num_values']} metrics "
            f"differ (by at most {outcome['largest_relative']:.1e}); {tensors}",
            flush=True,
        )
        if outcome["first"]:
            print(f"    first: {outcome['first']}")


def show_parts(parts: dict[str, Any]) -> None:
    print(f"each part {NUM_TRIES} times from the same state:")
    print(f"  {'':<28} {'off':>12} {'on':>12}")
    for name in parts["off"]:
        cells = ["equal" if parts[side][name]["equal"] else "DIFFERENT" for side in SIDES]
        print(f"  {name:<28} {cells[0]:>12} {cells[1]:>12}")
    for side in SIDES:
        for name, outcome in parts[side].items():
            if outcome["equal"]:
                continue
            if "columns" in outcome:
                print(f"  {side}, {name}: {', '.join(outcome['columns'])}")
            if "gradients" in name:
                kinds = ", ".join(f"{kind} {count}" for kind, count in outcome["by_kind"].items())
                print(f"  {side}, {name}: {kinds}")
    sys.stdout.flush()


def show_costs(cost: dict[str, dict[str, float]]) -> None:
    print("what the key costs (medians, the sides took turns):")
    print(f"  {'':<28} {'off ms':>10} {'on ms':>10} {'ratio':>7}")
    for name, row in cost.items():
        print(
            f"  {name:<28} {1000 * row['off']:>10.1f} {1000 * row['on']:>10.1f} {row['ratio']:>7.2f}"
        )
    sys.stdout.flush()


def show_warnings(found: dict[str, list[str]]) -> None:
    print("torch's warnings about operations that are not deterministic:")
    for name, texts in found.items():
        print(f"  {name}: {'none' if not texts else ''}")
        for text in texts:
            print(f"    {text[:200]}")


def words_for(options: argparse.Namespace, folder: Path) -> list[str]:
    """The config without the key."""
    if options.shape == "tiny":
        demo = make_demo(folder / "demo")
        model, file = demo.model, demo.train_file
    else:
        script = ROOT / "scripts" / "make_shape_model.py"
        shape = ROOT / "recipes" / "shapes" / "qwen2.5-0.5b"
        command = [sys.executable, str(script), str(shape), str(folder / "shape")]
        subprocess.run([*command, "--num-prompts", "512"], check=True, timeout=300)
        model, file = folder / "shape" / "model", folder / "shape" / "train.jsonl"
    return [
        *KEYS.split(),
        *SHAPES[options.shape].split(),
        f"trainer.device={options.device}",
        f"trainer.n_gpus_per_node={options.ranks}",
        f"trainer.total_training_steps={options.steps}",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={file}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--steps", type=int, default=3, help="steps of each training")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each side")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for everything")
    parser.add_argument("--no-compile", action="store_true", help="layers are not compiled")
    parser.add_argument("--self-check", action="store_true", help="noise on the side off")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda":
        lanes.share_one_gpu()
    if options.no_compile:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if options.self_check:
        os.environ["DETERMINISM_NOISE"] = "1"
    report: dict[str, Any] = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "start_s": time.monotonic(),
        "problem": None,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = words_for(options, folder)
        sides = Lanes(folder, options.limit - (time.monotonic() - report["start_s"]))
        try:
            sides.ask(
                {
                    side: ("begin", ([*words, key], folder / side, options.device))
                    for side, key in SIDES.items()
                }
            )
            investigate(report, options, sides)
        except RuntimeError as error:
            report["problem"] = str(error)
            print(f"not finished: {error}", flush=True)
        finally:
            sides.close()
    report["seconds"] = time.monotonic() - report["start_s"]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    print(f"{report['seconds']:.0f} s")
    is_good = report["problem"] is None and report["training"]["on"]["equal"]
    if is_good and options.self_check:
        is_good = not report["training"]["off"]["equal"]
        is_good = is_good and not report["parts"]["off"]["actor: gradients"]["equal"]
        print(f"self-check: the noise was {'' if is_good else 'NOT '}found")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
