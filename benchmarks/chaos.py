"""Kill -9 of every kind of process in every phase of a run: all runs must go on and end with the
same metrics.

    python benchmarks/chaos.py                       all cases, one after another
    python benchmarks/chaos.py --cases rollout:update,reward:scoring

The run is the demo on CPU slots: the actor with the reference in two processes, the rollout, the
critic, and the process of the rule reward, each in a pool of its own. A case is `VICTIM:PHASE`. The
victim is killed just after the driver has queued the call that begins the phase. The victim `node`
is the raylet of the second of two nodes, while a third one is there to replace it. The victim
`driver` is the driver of `rolepool train`. Metrics are compared with those of a run without deaths,
bit for bit, except for times and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster as RayCluster

from rolepool import cli
from rolepool.cluster import RoleProxy, WorkerGroup
from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.metrics.spans import RULE_POOL
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer

VICTIMS = {
    "actor0": ("actor_pool", 0),
    "actor1": ("actor_pool", 1),
    "rollout": ("rollout_pool", 0),
    "critic": ("critic_pool", 0),
    "reward": (RULE_POOL, 0),
    "node": ("critic_pool", 0),
    "driver": ("critic_pool", 0),
}
TWO_NODES = """
trainer.nnodes=2 trainer.n_gpus_per_node=2
placement.pools.actor_pool=[1,1] placement.pools.rollout_pool=[1] placement.pools.critic_pool=[0,1]
"""
NODE_OPTIONS: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 * 2**20}
DRIVER_TIMEOUT_S = 300
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
    """A run's rows without what is measured, its restarts, and the seconds from the kill to the
    next row."""

    rows: list[dict[str, Any]]
    restarts: list[dict[str, Any]]
    seconds: float | None


class Clock(Observer):
    """Notes when rows are written. Those before a restart are forgotten."""

    def __init__(self) -> None:
        self.rows_s: list[float] = []

    def on_notice(self, line: str) -> None:
        if "training goes on" in line:
            self.rows_s.clear()

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        self.rows_s.append(time.monotonic())


DRIVER_MARK = Path(os.environ.get("CHAOS_MARK", os.devnull))
"""Exists if the driver was killed already."""


def lose_node(node_id: str) -> None:
    """Kill the raylet of a node. `start_nodes` replaces this function."""
    raise RuntimeError("there is only one node")


@contextmanager
def kill_at(victim: str, phase: str, step: int = STEP) -> Iterator[list[float]]:
    """Kill the victim once, after the driver has queued the phase's call for the `step`-th time.
    Yields a list, which then has the time."""
    pool, rank = VICTIMS[victim]
    killed_s: list[float] = []
    submit, add_role = RoleProxy._submit, WorkerGroup.add_role
    seen: dict[str, int] = {}

    def strike(groups: Any) -> None:
        if killed_s or pool not in groups:
            return
        killed_s.append(time.monotonic())
        if victim == "node":
            lose_node(groups[pool].processes[rank].node_id)
        elif victim == "driver":
            if not DRIVER_MARK.exists():
                DRIVER_MARK.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.kill(groups[pool].processes[rank].pid, signal.SIGKILL)

    def submit_and_kill(proxy: RoleProxy, name: str, spec: Any, args: Any, kwargs: Any) -> Any:
        future = submit(proxy, name, spec, args, kwargs)
        what = "validate" if kwargs.get("purpose") == "validate" else name
        seen[what] = seen.get(what, 0) + 1
        # Before the first step, weights are sent and a snapshot is taken; both are not the ones
        # that are meant.
        is_first = what in ("export_weights", "take_snapshot") and seen[what] <= 3
        if (
            what in PHASES[phase]
            and not is_first
            and (seen[what] >= step or what in ("validate", "save_checkpoint"))
        ):
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
    after = [row_s - killed_s[0] for row_s in clock.rows_s if killed_s and row_s > killed_s[0]]
    return outcome_of(folder, after[0] if after else None)


def outcome_of(folder: Path, seconds: float | None) -> Outcome:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {key: one[key] for key in one if not key.startswith(MEASURED)}
        for one in lines
        if "restart" not in one
    ]
    return Outcome(rows, [one["restart"] for one in lines if "restart" in one], seconds)


def run_driver(folder: Path, keys: list[str], case: str) -> Outcome:
    """Train with `rolepool train`, whose driver kills itself once in this phase."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark = folder.with_suffix(".mark")
    mark.unlink(missing_ok=True)
    words = [*keys, f"trainer.default_local_dir={folder}"]
    environment = {**os.environ, "CHAOS_PHASE": case.partition(":")[2], "CHAOS_MARK": str(mark)}
    with (folder.parent / "driver.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "train", *words],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        rows, seconds, deadline = folder / "metrics.jsonl", None, time.time() + DRIVER_TIMEOUT_S
        while process.poll() is None and time.time() < deadline:
            time.sleep(0.02)
            if seconds is None and mark.exists() and rows.exists():
                _, restarted, after = rows.read_text().rpartition('"restart"')
                if restarted and after.count("\n") > 1:
                    seconds = time.time() - mark.stat().st_mtime
        process.kill()
    if process.wait() != 0:
        raise RuntimeError((folder.parent / "driver.log").read_text()[-300:])
    return outcome_of(folder, seconds)


def start_nodes() -> RayCluster:
    """This process on a cluster with two nodes and a spare one."""
    global lose_node
    ray.shutdown()
    cluster = RayCluster(
        initialize_head=True, head_node_args={"include_dashboard": False, **NODE_OPTIONS}
    )
    cluster.add_node(**NODE_OPTIONS)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)

    def lose(node_id: str) -> None:
        cluster.add_node(**NODE_OPTIONS)  # replaces it
        (lost,) = (node for node in cluster.list_all_nodes() if node.node_id == node_id)
        lost.kill_raylet()

    lose_node = lose
    return cluster


def demo_keys(folder: Path) -> list[str]:
    demo = make_demo(folder)
    paths = [f"data.train_files={demo.train_file}", f"data.val_files={demo.val_file}"]
    return [*KEYS.split(), *paths, f"actor_rollout_ref.model.path={demo.model}"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [f"{victim}:{phase}" for victim in VICTIMS for phase in PHASES]
    parser.add_argument(
        "--cases",
        default=",".join(every),
        help="such as critic:update,reward:scoring; default: all",
    )
    cases = parser.parse_args().cases.split(",")
    on_nodes = [case for case in cases if case.startswith("node:")]
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        keys = demo_keys(Path(name) / "demo")
        print(f"{'case':<22} {'restarts':>8} {'seconds to the next row':>24}  result", flush=True)
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
        )
        failed += run_cases(Path(name), keys, [case for case in cases if case not in on_nodes])
        if on_nodes:
            cluster = start_nodes()
            failed += run_cases(Path(name), [*keys, *TWO_NODES.split()], on_nodes)
            ray.shutdown()
            cluster.shutdown()
    print(f"{len(cases) - failed} of {len(cases)} cases went on and ended with equal metrics")
    return 1 if failed else 0


def run_cases(folder: Path, keys: list[str], cases: list[str]) -> int:
    """Run cases and print a line for each. Returns how many failed."""
    failed = 0
    expected = run(folder / "undisturbed", keys) if cases else None
    for case in cases:
        try:
            runs = run_driver if case.startswith("driver:") else run
            outcome = runs(folder / "run", keys, case)
        except (
            Exception
        ) as error:  # a case that ends the run is a failure, and the others still run
            failed += 1
            print(f"{case:<22} {'-':>8} {'-':>24}  ended: {str(error)[-200:]!r}", flush=True)
            continue
        is_equal = expected is not None and outcome.rows == expected.rows
        failed += not is_equal or outcome.seconds is None
        result = "equal" if is_equal else "DIFFERENT"
        result = result if outcome.seconds is not None else "no kill"
        print(
            f"{case:<22} {len(outcome.restarts):>8} {outcome.seconds or 0:>24.1f}  {result}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    if "CHAOS_PHASE" in os.environ:  # as `rolepool`, whose driver is the victim
        with kill_at("driver", os.environ["CHAOS_PHASE"]):
            sys.exit(cli.main())
    sys.exit(main())
