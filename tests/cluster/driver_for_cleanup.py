"""A driver that `test_cleanup` runs in a process of its own: starts its pools, says so, and ends as
it is told."""

from __future__ import annotations

import logging
import sys
import time

import torch
from cluster_helpers import pids_of, start
from roles_for_tests import Fragile, Place

from rolepool.protocol import DataProto


def main(ending: str, pools: list[str]) -> None:
    logging.basicConfig(level=logging.INFO)
    with start({pool: [1] for pool in pools}) as cluster:
        for group in cluster.groups.values():
            group.add_role("place", Place).speak(f"hello from {group.name}")
        worker = cluster.groups[pools[0]].add_role("fragile", Fragile)
        result = worker.make(DataProto.from_dict({"x": torch.arange(50)}))
        received = result.get()
        running = worker.work(600)
        time.sleep(1.5)  # for what the workers wrote to arrive
        sys.stdout.write(f"READY {' '.join(map(str, pids_of(cluster)))}\n")
        sys.stdout.flush()
        if ending == "raise":
            raise RuntimeError(f"the driver fails with {len(received)} rows")
        if ending != "leave":
            running.get()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
