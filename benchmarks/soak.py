"""A long run with random kills: memory must stay flat, and nothing may be left behind.

    python benchmarks/soak.py [--steps 2000] [--kills 20]

The run is the tiny demo of benchmarks/chaos.py on CPU slots. At random steps (the seed is fixed)
one of its worker processes gets a SIGKILL. Prints the memory of the driver, of the workers of each
pool, of Ray's GCS server and of the object store in the first and in the last fifth of the run,
their ratio, the restarts, and what is left in /dev/shm and in the folder of Ray's files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil
import ray
from chaos import demo_keys
from ray._private.internal_api import node_stats

from rolepool.cluster.connection import _private_root
from rolepool.config import load_config
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer

SAMPLED_EVERY = 20
LIMIT = 1.1
"""How much more memory the last fifth of the run may use than the first."""


class Soak(Observer):
    """Kills processes, and samples memory."""

    def __init__(self, num_steps: int, num_kills: int) -> None:
        draw = random.Random(0)
        self._kills = set(draw.sample(range(10, num_steps - 10), num_kills))
        self._draw = draw
        self.trainer: Trainer | None = None
        self.samples: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        assert self.trainer is not None
        if "timing_s/step" not in metrics:
            return
        groups = self.trainer.deployment.cluster.groups
        if step in self._kills:
            self._kills.remove(step)
            pool = self._draw.choice(sorted(groups))
            victim = self._draw.choice(groups[pool].processes)
            print(f"step {step}: kill {victim}", flush=True)
            os.kill(victim.pid, signal.SIGKILL)
        elif step % SAMPLED_EVERY == 0:
            self._sample(step)

    def _sample(self, step: int) -> None:
        assert self.trainer is not None
        used = {"driver": psutil.Process().memory_info().rss}
        for name, group in self.trainer.deployment.cluster.groups.items():
            for process in group.processes:
                used[name] = max(used.get(name, 0), psutil.Process(process.pid).memory_info().rss)
        for process in psutil.Process().children(recursive=True):
            if process.name() == "gcs_server":
                used["GCS server"] = process.memory_info().rss
        (node,) = ray.nodes()
        stats = node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
        )
        used["object store"] = stats.store_stats.object_store_bytes_used
        for name, num_bytes in used.items():
            self.samples[name].append((step, num_bytes / 2**20))


def left_behind() -> set[Path]:
    return {*Path("/dev/shm").glob("*rolepool*"), *_private_root().iterdir()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    before = left_behind()
    soak = Soak(options.steps, options.kills)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        keys = [*demo_keys(Path(folder) / "demo"), f"trainer.total_training_steps={options.steps}"]
        keys += [
            "trainer.test_freq=-1",
            "trainer.save_freq=500",
            f"trainer.default_local_dir={run}",
        ]
        keys += [
            "data.train_batch_size=8",
            "trainer.max_actor_ckpt_to_keep=1",
            "trainer.max_critic_ckpt_to_keep=1",
        ]
        trainer = Trainer(load_config([], keys))
        trainer.observer, soak.trainer = soak, trainer
        start_s = time.monotonic()
        trainer.run()
        seconds = time.monotonic() - start_s
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    restarts = [row["restart"] for row in rows if "restart" in row]
    steps = [row["step"] for row in rows if "timing_s/step" in row]
    is_whole = steps == list(range(1, options.steps + 1))
    print(
        f"{options.steps} steps in {seconds:.0f} s, {len(restarts)} restarts, every step once: {is_whole}"
    )
    flat = True
    print(f"{'memory, MiB (median)':<22} {'first fifth':>11} {'last fifth':>11} {'ratio':>6}")
    for name, samples in soak.samples.items():
        early = median(size for step, size in samples if step <= options.steps / 5)
        late = median(size for step, size in samples if step > options.steps * 4 / 5)
        print(f"{name:<22} {early:>11.1f} {late:>11.1f} {late / max(early, 1):>6.2f}")
        flat &= late <= max(LIMIT * early, early + 8)
    left = left_behind() - before
    print(f"left behind: {', '.join(map(str, left)) or 'nothing'}")
    return 0 if flat and not left and is_whole and len(restarts) == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
