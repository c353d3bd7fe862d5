"""How much the driver grows while a 256 MiB batch, made by workers, goes through a chain of calls
as futures.

    python benchmarks/driver_memory.py [--mib 256]

Prints the growth of the driver's unique set size. Goal: under 32 MiB. For comparison, the same
chain with get().
"""

from __future__ import annotations

import argparse
import gc
import os

import psutil
import torch

from rolepool import Cluster, DataProto, Dispatch, ResourcePoolManager, Role, Worker, register
from rolepool.placement.plan import place

MIB = 2**20


class Maker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def warm_up(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, seeds: DataProto, num_mib: int) -> DataProto:
        width = num_mib * MIB // 4 // (len(seeds) * self.world_size)
        return DataProto.from_dict({"x": torch.ones(len(seeds), width)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data: DataProto) -> float:
        return float(data.batch["x"].double().sum())


def unique_mib() -> float:
    gc.collect()
    return float(psutil.Process(os.getpid()).memory_full_info().uss / MIB)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pools = ResourcePoolManager(
        {"left": [2], "right": [2]}, {Role.Actor: "left", Role.Critic: "right"}
    )
    with Cluster(place(pools, [4], device="cpu")) as cluster:
        left = cluster.groups["left"].add_role("left", Maker)
        right = cluster.groups["right"].add_role("right", Maker)
        seeds = DataProto.from_dict({"seed": torch.arange(64)})
        right.total(left.make(seeds, 1))  # first use of everything
        before = unique_mib()
        made = left.make(seeds, options.mib)
        chain = left.double(right.double(made))
        totals = right.total(chain)
        growth = unique_mib() - before
        assert sum(totals) == options.mib * MIB / 4 * 4, totals
        print(
            f"futures kept through a chain of 4 calls: driver grew by {growth:.1f} MiB (goal: under 32)"
        )
        held = made.get(), chain.get()
        print(
            f"the same with two get():                 driver grew by {unique_mib() - before:.1f} MiB"
        )
        del held


if __name__ == "__main__":
    main()
