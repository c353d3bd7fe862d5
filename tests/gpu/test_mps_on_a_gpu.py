"""Real CUDA MPS: two processes with half a GPU each are clients of one server, and nothing is left
after them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rolepool.cluster import Cluster
from rolepool.cluster.mps import CONTROL
from rolepool.placement import ResourcePoolManager
from rolepool.placement.plan import place
from rolepool.protocol import Dispatch, Worker, register

HERE = Path(__file__).parent
SIZE = 4096
NUM_PRODUCTS = 200
GONE_TIMEOUT_S = 40

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"needs {CONTROL} on the PATH"),
]


class Multiplier(Worker):
    """Keeps the GPU at work for a while."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def multiply(self) -> dict[str, Any]:
        matrix = torch.eye(SIZE, device=self.device)
        for _ in range(NUM_PRODUCTS):
            matrix = matrix @ matrix
        torch.cuda.synchronize()
        variables = {
            name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS_")
        }
        return {
            "pid": os.getpid(),
            "trace": matrix.trace().item(),
            "device": str(self.device),
            "variables": variables,
        }


def ask(variables: dict[str, str], command: str) -> list[int]:
    answer = subprocess.run(
        [CONTROL],
        input=f"{command}\n",
        text=True,
        capture_output=True,
        env={**os.environ, **variables},
        timeout=20,
        check=True,
    )
    return [int(word) for word in answer.stdout.split()]


def seconds_until(condition: Callable[[], bool]) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < GONE_TIMEOUT_S, f"not within {GONE_TIMEOUT_S} s"
        time.sleep(0.1)
    return time.monotonic() - begin


def test_two_halves_of_a_gpu_are_clients_of_one_server_that_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [str(HERE.parents[1] / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    pools = {name: {"per_node": [1], "share": 0.5} for name in ("left", "right")}
    plan = place(ResourcePoolManager(pools, {}), [1], device="cuda", mps=True)
    begin = time.monotonic()
    with Cluster(plan) as cluster:
        print(f"start with MPS: {time.monotonic() - begin:.1f} s")
        roles = [group.add_role("multiplier", Multiplier) for group in cluster.groups.values()]
        left, right = (call.get()[0] for call in [role.multiply() for role in roles])
        assert left["trace"] == right["trace"] == SIZE
        assert left["device"] == right["device"] == "cuda"
        assert left["variables"] == right["variables"] != {}
        (server,) = ask(left["variables"], "get_server_list")
        clients = ask(left["variables"], f"get_client_list {server}")
        print(f"server {server}, clients {clients}")
        assert {left["pid"], right["pid"]} <= set(clients)
    folder = Path(left["variables"]["CUDA_MPS_PIPE_DIRECTORY"]).parent
    took_s = seconds_until(lambda: not folder.exists() and not _runs(server))
    print(f"all gone {took_s:.1f} s after the run")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
