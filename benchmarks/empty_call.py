"""An empty call on 4 workers against the same fan-out written with bare Ray actors, in one run.

    python benchmarks/empty_call.py [--rounds 40] [--calls 25]

Prints the median time of a call for both and their ratio. Goal: at most 1.3.
"""

from __future__ import annotations

import argparse
import statistics
import time

import ray

from rolepool import Cluster, Dispatch, ResourcePoolManager, Role, Worker, register
from rolepool.placement.plan import place

NUM_WORKERS = 4


class Idle(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None


class BareIdle:
    def nothing(self) -> None:
        return None


def per_call_s(call: object, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()  # type: ignore[operator]
    return (time.perf_counter() - start) / num_calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=25)
    options = parser.parse_args()
    plan = place(
        ResourcePoolManager({"pool": [NUM_WORKERS]}, {Role.Critic: "pool"}),
        [NUM_WORKERS],
        device="cpu",
    )
    with Cluster(plan, num_cpus=2 * NUM_WORKERS + 1) as cluster:
        role = cluster.groups["pool"].add_role("critic", Idle)
        actors = [ray.remote(BareIdle).options(num_cpus=1).remote() for _ in range(NUM_WORKERS)]

        def bare() -> None:
            ray.get([actor.nothing.remote() for actor in actors])

        ours, theirs = [], []
        for round_number in range(options.rounds + 3):
            pair = per_call_s(role.nothing, options.calls), per_call_s(bare, options.calls)
            if round_number >= 3:  # the first rounds warm up both
                ours.append(pair[0])
                theirs.append(pair[1])
        ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
        print(f"rolepool  {statistics.median(ours) * 1e3:7.3f} ms a call")
        print(f"bare Ray  {statistics.median(theirs) * 1e3:7.3f} ms a call")
        print(f"ratio     {ratio:7.2f} (median of {options.rounds} rounds; goal: at most 1.3)")


if __name__ == "__main__":
    main()
