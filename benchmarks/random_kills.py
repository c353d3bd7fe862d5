"""Kill random workers at random moments of a running workload, and see that every kill becomes one
clean error.

    python benchmarks/random_kills.py [--kills 100] [--seed 1]
    python benchmarks/random_kills.py --device cuda --kills 20 --limit 300

Each round starts two pools of two processes on one Ray, keeps them busy with dependent calls and
collectives (of NCCL with `--device cuda`; several ranks may share one GPU, see `lanes.py`), kills
one process (SIGKILL) at a random moment, and waits for the WorkerError. Prints how many were clean
(a WorkerError that names the pid that was killed), the longest wait, and what was left behind.
Goal: all clean, none over 5 s, nothing left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from pathlib import Path

import lanes
import psutil
import ray
import torch
import torch.distributed as dist

from rolepool import Cluster, DataProto, Dispatch, ResourcePoolManager, Role, Worker, register
from rolepool.errors import WorkerError
from rolepool.placement.plan import place

LIMIT_S = 5.0


class Busy(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def step(self, data: DataProto) -> DataProto:
        total = data.batch["x"].sum().to(self.device)
        dist.all_reduce(total)
        time.sleep(0.01)
        return DataProto.from_dict({"x": data.batch["x"] + (total / total).cpu()})


def one_round(randomness: random.Random, device: str) -> tuple[bool, float, str, list[int]]:
    """Returns: clean, seconds from kill to error, what was raised, pids of the round's
    processes."""
    pools = ResourcePoolManager(
        {"left": [2], "right": [2]}, {Role.Actor: "left", Role.Critic: "right"}
    )
    with Cluster(place(pools, [4], device=device)) as cluster:
        left = cluster.groups["left"].add_role("left", Busy)
        right = cluster.groups["right"].add_role("right", Busy)
        pids = [process.pid for group in cluster.groups.values() for process in group.processes]
        victim = randomness.choice(pids)
        killed_at: list[float] = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

        timer = threading.Timer(randomness.uniform(0.0, 1.0), kill)
        timer.start()
        data = DataProto.from_dict({"x": torch.ones(64, randomness.choice([4, 4096]))})
        try:
            while True:
                right.step(left.step(data)).get(timeout_s=30)
                if killed_at and time.monotonic() - killed_at[0] > LIMIT_S:
                    return False, LIMIT_S, "no error", pids
        except WorkerError as error:
            took = time.monotonic() - killed_at[0] if killed_at else 0.0
            return error.pid == victim, took, str(error).splitlines()[0], pids
        finally:
            timer.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, default=36_000, help="seconds; then no new round")
    options = parser.parse_args()
    randomness = random.Random(options.seed)
    torch.set_num_threads(1)
    shared_before = {path.name for path in Path("/dev/shm").iterdir()}
    if options.device == "cuda":
        lanes.share_one_gpu()
    lanes.start_ray(options.device)
    deadline = time.monotonic() + options.limit
    outcomes, orphans = [], 0
    for number in range(options.kills):
        if time.monotonic() > deadline:
            print(f"stopped after {number} kills, because the time was over")
            break
        clean, took, message, pids = one_round(randomness, options.device)
        time.sleep(0.5)
        alive = [
            pid
            for pid in pids
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]
        orphans += len(alive)
        outcomes.append((clean, took))
        print(
            f"{number + 1:4} {'clean' if clean else 'NOT CLEAN'} {took:5.2f} s  {message[:150]}",
            flush=True,
        )
    ray.shutdown()
    time.sleep(1)
    left_behind = sorted({path.name for path in Path("/dev/shm").iterdir()} - shared_before)
    print(f"clean errors: {sum(clean for clean, _ in outcomes)} of {len(outcomes)}")
    print(f"longest wait: {max(took for _, took in outcomes):.2f} s (goal: at most {LIMIT_S:.0f})")
    print(
        f"processes left: {orphans}; files left in shared memory: {len(left_behind)} {left_behind}"
    )


if __name__ == "__main__":
    main()
