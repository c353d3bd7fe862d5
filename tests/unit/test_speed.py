"""What must answer at once does: the plan of a large cluster, and help.

Times are processor seconds: what the clock shows when the machine has nothing else to do.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
from collections.abc import Callable

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]

BATCHES = ("data.train_batch_size=8192", "actor_rollout_ref.actor.ppo_mini_batch_size=8192")
MODEL = "actor_rollout_ref.model.path=recipes/shapes/deepseek-llm-7b-chat"


def seconds(python: Python, *arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = python(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--json",),
        ("placement.strategy=split", MODEL, "--gpu-memory", "80"),
        (MODEL, "--gpu-memory", "2"),
    ],
    ids=["standard", "json", "split with memory", "with advice"],
)
def test_the_plan_of_1024_nodes_takes_under_a_second(
    python: Python, arguments: tuple[str, ...]
) -> None:
    command = (
        "-m",
        "rolepool",
        "plan",
        "trainer.nnodes=1024",
        "trainer.n_gpus_per_node=8",
        *BATCHES,
        *arguments,
    )
    assert min(seconds(python, *command) for _ in range(3)) < 1


def test_help_takes_at_most_three_times_as_long_as_importing_pydantic(python: Python) -> None:
    rounds = [
        (seconds(python, "-m", "rolepool", "--help"), seconds(python, "-c", "import pydantic"))
        for _ in range(5)
    ]
    helps, imports = zip(*rounds, strict=True)
    assert statistics.median(helps) < 3 * statistics.median(imports)
