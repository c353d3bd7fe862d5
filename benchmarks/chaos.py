"""Kill -9 of every kind of process in every phase of a run: all runs must go on and end with the same metrics.

    python benchmarks/chaos.py                       all cases, one after another
    python benchmarks/chaos.py --cases rollout:update,reward:scoring

The run is the demo on CPU slots: the actor with the reference in two processes, the rollout, the critic, and the
process of the rule reward, each in a pool of its own. A case is `VICTIM:PHASE`. The victim is killed just after the
driver has queued the call that begins the phase. Metrics are compared with those of a run without deaths, bit for bit,
except for times and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rolepool.cluster import RoleProxy, WorkerGroup
from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.metrics.spans import RULE_POOL
from rolepool.trainer.loop import Trainer
from rolepool.trainer.observer import Observer

VICTIMS = {
    "actor0": ("actor_pool", 0),
    "actor1": ("actor_pool", 1),
    "rollout": ("rollout_pool", 0),
    "critic": ("critic_pool", 0),
    "reward": (RULE_POOL, 0),
}
PHASES: dict[str, tuple[str, ...]] = {
    "start": ("__init__",),
    "validation": ("validate",),
    "generation": ("generate_sequences",),
    "scoring": ("compute_scores",),
    "update": ("update_actor", "update_critic"),
    "sync": ("export_weights", "take_weights_here"),
    "checkpoint": ("save_checkpoint",),
    "snapshot": ("take_snapshot",),
}
"""The methods whose call begins each phase."""
STEP = 2
"""The step in which a victim is killed; validation and checkpoint follow it."""
MEASURED = ("timing_", "perf/", "pool/", "overlap/")
KEYS = """
data.train_batch_size=16 data.val_max_samples=8 data.max_prompt_length=8 data.max_response_length=4
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.optim.lr=1e-3 critic.optim.lr=1e-3
actor_rollout_ref.rollout.n=2 algorithm.use_kl_in_reward=true trainer.device=cpu trainer.logger=[]
trainer.total_training_steps=4 trainer.test_freq=2 trainer.save_freq=2 trainer.val_before_train=false
placement.strategy=custom placement.pools.actor_pool=[2] placement.pools.rollout_pool=[1]
placement.pools.critic_pool=[1] placement.roles.actor=actor_pool placement.roles.ref=actor_pool
placement.roles.rollout=rollout_pool placement.roles.critic=critic_pool trainer.n_gpus_per_node=4
"""


@dataclass
class Outcome:
    """A run's rows without what is measured, its restarts, and the seconds from the kill to the next row."""

    rows: list[dict[str, Any]]
    restarts: list[dict[str, Any]]
    seconds: float | None


class Clock(Observer):
    """Notes when rows are written."""

    def __init__(self) -> None:
        self.rows_s: list[float] = []

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        self.rows_s.append(time.monotonic())


@contextmanager
def kill_at(victim: str, phase: str) -> Iterator[list[float]]:
    """Kill the victim once, after the driver has queued the phase's call. Yields a list, which then has the time."""
    pool, rank = VICTIMS[victim]
    killed_s: list[float] = []
    submit, add_role = RoleProxy._submit, WorkerGroup.add_role
    seen: dict[str, int] = {}

    def strike(groups: Any) -> None:
        if not killed_s and pool in groups:
            os.kill(groups[pool].processes[rank].pid, signal.SIGKILL)
            killed_s.append(time.monotonic())

    def submit_and_kill(proxy: RoleProxy, name: str, spec: Any, args: Any, kwargs: Any) -> Any:
        future = submit(proxy, name, spec, args, kwargs)
        what = "validate" if kwargs.get("purpose") == "validate" else name
        seen[what] = seen.get(what, 0) + 1
        # Before the first step, weights are sent and a snapshot is taken; both are not the ones that are meant.
        is_first = what in ("export_weights", "take_snapshot") and seen[what] <= 3
        if what in PHASES[phase] and not is_first and (seen[what] >= STEP or what in ("validate", "save_checkpoint")):
            strike(proxy.group._all_groups)
        return future

    def add_role_and_kill(group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
        made = add_role(group, *args, **kwargs)
        if phase == "start":
            strike(group._all_groups)
        return made

    RoleProxy._submit, WorkerGroup.add_role = submit_and_kill, add_role_and_kill  # type: ignore[method-assign]
    try:
        yield killed_s
    finally:
        RoleProxy._submit, WorkerGroup.add_role = submit, add_role  # type: ignore[method-assign]


def run(folder: Path, keys: list[str], case: str | None = None) -> Outcome:
    """Train, with the deaths of a case if one is given."""
    shutil.rmtree(folder, ignore_errors=True)
    trainer = Trainer(load_config([], [*keys, f"trainer.default_local_dir={folder}"]))
    trainer.observer = clock = Clock()
    killed_s: list[float] = []
    if case is None:
        trainer.run()
    else:
        with kill_at(*case.split(":")) as killed_s:
            trainer.run()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: one[key] for key in one if not key.startswith(MEASURED)} for one in lines if "restart" not in one]
    restarts = [one["restart"] for one in lines if "restart" in one]
    after = [row_s - killed_s[0] for row_s in clock.rows_s if killed_s and row_s > killed_s[0]]
    return Outcome(rows, restarts, after[0] if after else None)


def demo_keys(folder: Path) -> list[str]:
    demo = make_demo(folder)
    paths = [f"data.train_files={demo.train_file}", f"data.val_files={demo.val_file}"]
    return [*KEYS.split(), *paths, f"actor_rollout_ref.model.path={demo.model}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{victim}:{phase}" for victim in VICTIMS for phase in PHASES]
    parser.add_argument("--cases", default=",".join(every), help="such as critic:update,reward:scoring; default: all")
    cases = parser.parse_args().cases.split(",")
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        keys = demo_keys(Path(name) / "demo")
        expected = run(Path(name) / "undisturbed", keys)
        print(f"{'case':<22} {'restarts':>8} {'seconds to the next row':>24}  result", flush=True)
        for case in cases:
            try:
                outcome = run(Path(name) / "run", keys, case)
            except Exception as error:  # a case that ends the run is a failure, and the others still run
                failed += 1
                print(f"{case:<22} {'-':>8} {'-':>24}  ended: {str(error)[:150]!r}", flush=True)
                continue
            is_equal = outcome.rows == expected.rows
            failed += not is_equal or outcome.seconds is None
            result = "equal" if is_equal else "DIFFERENT"
            result = result if outcome.seconds is not None else "no kill"
            print(f"{case:<22} {len(outcome.restarts):>8} {outcome.seconds or 0:>24.1f}  {result}", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} cases went on and ended with equal metrics")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
