"""How the memory of Ray's GCS process grows with the number of calls: Ray's defaults, and the
settings of a Ray that rolepool starts.

    python benchmarks/gcs_memory.py [--calls 40000]

Makes tiny calls on two actors, in a new Ray for each row, and prints the resident memory of the GCS
process at the start, in the middle and at the end.
"""

import argparse
import logging
import time

import psutil
import ray

from rolepool.cluster.connection import SYSTEM_CONFIG

CALLS_AT_ONCE = 500
REPORT_S = 3.0
"""Workers report their events once per second."""


@ray.remote
class Tiny:
    def call(self) -> None:
        """Does nothing."""


def gcs_mb() -> float:
    """Resident memory of the GCS process of this process's Ray, after the last events have
    arrived."""
    time.sleep(REPORT_S)
    gcs = ray._private.worker._global_node.all_processes["gcs_server"][0].process
    return psutil.Process(gcs.pid).memory_info().rss / 1e6


def measure(num_calls: int, settings: dict[str, int]) -> list[float]:
    """Memory after no calls, half of the calls, and all calls."""
    options = {"num_cpus": 2, "include_dashboard": False, "logging_level": logging.ERROR}
    ray.init(address="local", _system_config=settings, **options)
    try:
        actors = [Tiny.remote() for _ in range(2)]
        ray.get([actor.call.remote() for actor in actors])
        found = [gcs_mb()]
        for _ in range(2):
            for _ in range(num_calls // 2 // CALLS_AT_ONCE):
                ray.get([actors[number % 2].call.remote() for number in range(CALLS_AT_ONCE)])
            found.append(gcs_mb())
        return found
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=40_000, help="number of calls for each row")
    num_calls = parser.parse_args().calls
    print(f"{'GCS memory (MB)':<24}{'start':>8}{num_calls // 2:>8}{num_calls:>8} calls")
    for name, settings in {"Ray's defaults": {}, "rolepool's settings": SYSTEM_CONFIG}.items():
        print(
            f"{name:<24}" + "".join(f"{number:8.1f}" for number in measure(num_calls, settings)),
            flush=True,
        )


if __name__ == "__main__":
    main()
