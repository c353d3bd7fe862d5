"""A 64 MiB batch of 8 keys to 4 workers and back, and a chain of three calls over two pools,
against bare Ray.

    python benchmarks/scatter_gather.py [--rounds 15] [--mib 64]

Scatter and gather: rolepool, against bare Ray actors that are each sent a cloned chunk, against
chunk views (which pickle their whole storage), and against clones with Ray's own zero-copy switch
on. Goals: at least 3x the clones, and not slower than the switch. Chain: one pool makes such a
batch, the other takes and returns it, the first reads it and answers with a number, as generating,
scoring and updating do. Futures handed from pool to pool, against getting and re-sending each
result. Goal: at least 2.2x.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from rolepool import Cluster, DataProto, Dispatch, ResourcePoolManager, Role, Worker, register
from rolepool.placement.plan import place

NUM_WORKERS, NUM_KEYS, NUM_ROWS = 4, 8, 1024
STORE_BYTES = 768 * 2**20
SWITCH = "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"


class Echo(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, seeds: DataProto, num_mib: int) -> DataProto:
        return DataProto.from_dict(make_batch(num_mib, len(seeds)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def read(self, data: DataProto) -> float:
        return sum(float(value.sum()) for value in data.batch.values())


class BareEcho:
    def __init__(self) -> None:
        torch.set_num_threads(1)

    def echo(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return data


def make_batch(num_mib: int, num_rows: int = NUM_ROWS) -> dict[str, torch.Tensor]:
    """Rows of a batch of NUM_ROWS rows that has `num_mib` in all."""
    width = num_mib * 2**20 // 4 // NUM_KEYS // NUM_ROWS
    return {
        f"key_{index}": torch.full((num_rows, width), float(index)) for index in range(NUM_KEYS)
    }


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = action()
    took = time.perf_counter() - start
    if isinstance(result, float):
        assert result > 0
    else:
        first = result.batch["key_0"] if isinstance(result, DataProto) else result["key_0"]
        assert first.shape[0] == NUM_ROWS
    return took


def with_bare_actors(
    actors: list[Any], batch: dict[str, torch.Tensor], clone: bool
) -> dict[str, torch.Tensor]:
    """Cut, send each worker its part, get the answers and put them together."""
    pieces = {key: value.chunk(len(actors)) for key, value in batch.items()}
    parts = [
        {key: chunks[index].clone() if clone else chunks[index] for key, chunks in pieces.items()}
        for index in range(len(actors))
    ]
    answers = ray.get([actor.echo.remote(part) for actor, part in zip(actors, parts, strict=True)])
    return {key: torch.cat([answer[key] for answer in answers]) for key in batch}


def start_ray() -> None:
    """With a small object store, so that all ways soon run on memory that has been written to
    before.

    In a large one every object would lie on new pages for a long time, and what is measured would
    be the kernel's first touch of them.
    """
    ray.init(
        address="local",
        num_cpus=3 * NUM_WORKERS + 1,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        logging_level="WARNING",
        log_to_driver=False,
    )


def time_bare_clones(rounds: int, num_mib: int) -> list[float]:
    """With a Ray of its own, as the switch is read when processes start."""
    start_ray()
    actors = [ray.remote(BareEcho).options(num_cpus=1).remote() for _ in range(NUM_WORKERS)]
    batch = make_batch(num_mib)
    times = [
        seconds(lambda: with_bare_actors(actors, batch, clone=True)) for _ in range(rounds + 2)
    ]
    ray.shutdown()
    return times[2:]


def with_switch(rounds: int, num_mib: int) -> list[float]:
    command = [
        sys.executable,
        __file__,
        "--rounds",
        str(rounds),
        "--mib",
        str(num_mib),
        "--bare-clones-only",
    ]
    environment = {**os.environ, SWITCH: "1", "OMP_WAIT_POLICY": "PASSIVE"}
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=True
    ).stdout
    return [float(number) for number in re.findall(r"took (\S+)", output)]


def alternating(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """All ways in turn, so that whatever else the machine does falls on all alike; the first rounds
    warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 3):
        for name, way in ways.items():
            took = seconds(way)
            if round_number >= 3:
                times[name].append(took)
    return times


def time_scatter_and_gather(rounds: int, num_mib: int) -> dict[str, list[float]]:
    pools = ResourcePoolManager({"pool": [NUM_WORKERS]}, {Role.Actor: "pool"})
    with Cluster(place(pools, [NUM_WORKERS], device="cpu")) as cluster:
        role = cluster.groups["pool"].add_role("echo", Echo)
        actors = [ray.remote(BareEcho).options(num_cpus=1).remote() for _ in range(NUM_WORKERS)]
        batch = make_batch(num_mib)
        proto = DataProto.from_dict(batch)
        times = alternating(
            {
                "rolepool": lambda: role.echo(proto).get(),
                "bare Ray, cloned chunks": lambda: with_bare_actors(actors, batch, clone=True),
            },
            rounds,
        )
        times.update(
            alternating(
                {"bare Ray, chunk views": lambda: with_bare_actors(actors, batch, clone=False)},
                rounds,
            )
        )
    return times


def time_chain(rounds: int, num_mib: int) -> dict[str, list[float]]:
    half = NUM_WORKERS // 2
    pools = ResourcePoolManager(
        {"left": [half], "right": [half]}, {Role.Actor: "left", Role.Critic: "right"}
    )
    with Cluster(place(pools, [NUM_WORKERS], device="cpu")) as cluster:
        left = cluster.groups["left"].add_role("left", Echo)
        right = cluster.groups["right"].add_role("right", Echo)
        seeds = DataProto.from_dict({"seed": torch.arange(NUM_ROWS)})
        return alternating(
            {
                "chain, futures": lambda: float(
                    sum(left.read(right.echo(left.make(seeds, num_mib))).get())
                ),
                "chain, get and re-send": lambda: float(
                    sum(left.read(right.echo(left.make(seeds, num_mib).get()).get()).get())
                ),
            },
            rounds,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--bare-clones-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare_clones_only:
        for took in time_bare_clones(options.rounds, options.mib):
            print(f"took {took}")
        return
    torch.set_num_threads(1)
    times = {"bare Ray, its zero-copy switch": with_switch(options.rounds, options.mib)}
    start_ray()
    times.update(time_scatter_and_gather(options.rounds, options.mib))
    times.update(time_chain(options.rounds, options.mib))
    middle = {name: statistics.median(values) for name, values in times.items()}
    for name, took in middle.items():
        print(f"{name:32} {took * 1e3:8.1f} ms")
    print(
        "scatter and gather, times as fast (goals: 3 against cloned chunks, 1 against the switch):"
    )
    for name in (
        "bare Ray, cloned chunks",
        "bare Ray, chunk views",
        "bare Ray, its zero-copy switch",
    ):
        print(f"  {middle[name] / middle['rolepool']:.2f} against {name}")
    print("chain of three calls, times as fast (goal: 2.2):")
    print(
        f"  {middle['chain, get and re-send'] / middle['chain, futures']:.2f} against getting and re-sending"
    )


if __name__ == "__main__":
    main()
