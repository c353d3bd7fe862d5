"""Makes the trainings of one process, one after another: `python training_process.py ORDER.json`.

`trainings.py` writes the order and reads the results. A training that fails does not stop the
others.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch

from commands import load_benchmark
from rolepool.cluster import Cluster
from rolepool.config import Config, load_config
from rolepool.data.demo import Demo
from rolepool.protocol import DataProto, DataProtoFuture
from rolepool.trainer.loop import Trainer
from rolepool.trainer.step import Roles

POLL_S = 0.1
GPUS_TIMEOUT_S = 60.0
NUM_CPUS = 8
"""Ray starts as many idle processes, and the largest plan has four."""
NUM_STARTS = 3
OBJECT_STORE_BYTES = 200 * 2**20
NEVER = "data.val_files=null trainer.save_freq=-1 trainer.test_freq=-1 trainer.logger=[]"


@dataclass
class WatchedRollout:
    """Samples, and writes what it sampled. If the training replays another one, it passes on what
    that one sampled."""

    rollout: Any
    folder: Path
    replayed: Path | None
    limit_s: float
    num_steps: int = 0
    _sampled: list[tuple[DataProtoFuture, DataProtoFuture]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)

    def generate_sequences(self, prompts: DataProto, **options: Any) -> DataProtoFuture:
        own: DataProtoFuture = self.rollout.generate_sequences(prompts, **options)
        self.num_steps += 1
        used = own if self.replayed is None else own.union(self._await_rollouts(self.num_steps))
        self._sampled.append((own, used))
        if self.replayed is None:  # others may wait for it
            self._write("used", self.num_steps, own)
        return used

    def write_all(self) -> None:
        for number, (own, used) in enumerate(self._sampled, start=1):
            self._write("own", number, own)
            self._write("used", number, used)

    def _write(self, kind: str, number: int, rollouts: DataProtoFuture) -> None:
        path = self.folder / kind / f"{number}.pt"
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(rollouts.get().select(deepcopy=True), part)
        part.rename(path)

    def _await_rollouts(self, number: int) -> DataProto:
        """What the other training has sampled in this step."""
        assert self.replayed is not None
        path = self.replayed / "used" / f"{number}.pt"
        result = self.replayed / "result.json"
        deadline_s = time.monotonic() + self.limit_s
        while not path.exists():
            if result.exists():
                raise RuntimeError(f"{self.replayed.name!r}, which it replays, has failed")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{path} was not there within {self.limit_s:.0f} s")
            time.sleep(POLL_S)
        rollouts: DataProto = torch.load(path, weights_only=False)
        return rollouts


class WatchedTrainer(Trainer):
    """A training that keeps its responses, or trains on those of another one."""

    watched: WatchedRollout

    def build_roles(self, cluster: Cluster, config: Config, reads_weights: bool) -> Roles:
        roles = super().build_roles(cluster, config, reads_weights)
        self.watched.rollout = roles.rollout
        roles.rollout = self.watched  # type: ignore[assignment]
        return roles

    def train(self) -> None:
        super().train()
        self.watched.write_all()


def keys_of(training: dict[str, Any], folder: Path, order: dict[str, Any]) -> list[str]:
    demo = Demo(Path(order["demo"]))
    words = [*NEVER.split(), *training["keys"].split()]
    words += [
        f"actor_rollout_ref.model.path={demo.model}",
        f"data.train_files={demo.train_file}",
        f"trainer.device={order['device']}",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    if "reward_model.enable=true" in words:
        words.append(f"reward_model.model.path={demo.reward_model}")
    if not training["compiles"]:
        words.append("actor_rollout_ref.rollout.enforce_eager=true")
    return words


def dtype_of(order: dict[str, Any]) -> torch.dtype:
    """On a CPU float64, in which no two tokens are so close that rounding decides. A GPU computes
    in 16 bits, whatever the dtype of the weights is."""
    return torch.float64 if order["device"] == "cpu" else torch.float32


def train(name: str, training: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
    """Returns what is known beside the run's folder."""
    folder = Path(order["folder"]) / name
    words = keys_of(training, folder, order)
    if training["kills"]:
        outcome = load_benchmark("chaos").run(
            folder / "run", without_folder(words), training["kills"]
        )
        return {"gap_s": outcome.seconds, "restarts": outcome.restarts}
    if training["moves"]:
        moves = load_benchmark("moves")
        words = without_folder(words)
        moves.run(
            folder / "run", words, training["moves"], every=3, waits=True, dtype=torch.float32
        )
        return {}
    files = [training["recipe"]] if training["recipe"] else []
    loaded = load_config(files, words)
    if name not in order["replayed"] and training["replays"] is None:
        Trainer(loaded, torch.float32).run()
        return {}
    trainer = WatchedTrainer(loaded, dtype_of(order))
    replayed = training["replays"]
    trainer.watched = WatchedRollout(
        rollout=None,
        folder=folder,
        replayed=Path(order["folder"]) / replayed if replayed else None,
        limit_s=order["limit_s"],
    )
    trainer.run()
    return {}


def without_folder(words: list[str]) -> list[str]:
    """The benchmarks add the run folder themselves."""
    return [word for word in words if not word.startswith("trainer.default_local_dir=")]


def start_ray(num_gpus: int) -> None:
    """Several Rays that start at the same time may choose the same port, so it is tried again."""
    for attempt in range(1, NUM_STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=NUM_CPUS,
                num_gpus=num_gpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level="ERROR",
            )
            return
        except Exception:
            if attempt == NUM_STARTS:
                raise
            traceback.print_exc()
            ray.shutdown()


def await_free_gpus(num_gpus: int) -> None:
    """Ray must give the next plan the GPUs with the lowest numbers, also just after a training."""
    deadline_s = time.monotonic() + GPUS_TIMEOUT_S
    while ray.available_resources().get("GPU", 0) < num_gpus:
        if time.monotonic() > deadline_s:
            free = ray.available_resources().get("GPU", 0)
            raise TimeoutError(f"{free:g} of {num_gpus} GPUs are free after {GPUS_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    order = json.loads(Path(sys.argv[1]).read_text())
    start_ray(order["num_gpus"])
    for name, training in order["trainings"].items():
        folder = Path(order["folder"]) / name
        folder.mkdir()
        print(f"=== {name}", flush=True)
        start_s = time.monotonic()
        try:
            await_free_gpus(order["num_gpus"])
            result = {"error": None, **train(name, training, order)}
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        result["training_s"] = time.monotonic() - start_s
        print(f"=== {name}: {result['error'] or 'done'}, {result['training_s']:.1f} s", flush=True)
        part = folder / "result.part"
        part.write_text(json.dumps(result))
        part.rename(folder / "result.json")
    ray.shutdown()


if __name__ == "__main__":
    main()
