"""A process dies on one of two nodes, and training goes on: the rows are those of a run in which nothing died."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from test_recovery import chaos

from rolepool.cluster.keepers import SHARED_MEMORY, _lock, remove_left_behind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BOTH_NODES = """
trainer.nnodes=2 trainer.n_gpus_per_node=2
placement.pools.actor_pool=[1,1] placement.pools.rollout_pool=[1] placement.pools.critic_pool=[0,1]
"""
SECOND_NODE = """
trainer.nnodes=2 trainer.n_gpus_per_node=4 placement.pools.actor_pool=[0,2] placement.pools.rollout_pool=[0,1]
placement.pools.critic_pool=[0,1]
"""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """This process on a cluster of two nodes."""
    options = {"num_cpus": 4, "object_store_memory": 100 * 2**20}
    cluster = RayCluster(initialize_head=True, head_node_args={"include_dashboard": False, **options})
    cluster.add_node(**options)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def keys(two_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*chaos.demo_keys(tmp_path_factory.mktemp("demo") / "data"), *BOTH_NODES.split()]


@pytest.fixture(scope="module")
def expected(keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run without deaths."""
    return chaos.run(tmp_path_factory.mktemp("undisturbed") / "run", keys)


def snapshots_left() -> set[Path]:
    """The folders of snapshots that no living process holds."""
    left = set()
    for folder in SHARED_MEMORY.glob("rolepool-*"):
        with suppress(OSError):
            os.close(_lock(folder))
            left.add(folder)
    return left


@pytest.mark.parametrize("case", ["actor1:update", "critic:generation", "actor0:sync", "actor1:snapshot"])
def test_training_goes_on_as_if_nothing_had_died(case: str, keys: list[str], expected: Any, tmp_path: Path) -> None:
    remove_left_behind(SHARED_MEMORY)  # those of other runs, which were killed
    outcome = chaos.run(tmp_path / "run", keys, case)
    assert outcome.seconds is not None, "the victim was not killed"
    (restart,) = outcome.restarts
    assert restart["pools"] == [chaos.VICTIMS[case.partition(":")[0]][0]]
    assert outcome.rows == expected.rows
    assert not snapshots_left()


def test_the_only_node_of_the_plan_may_be_another_than_the_drivers(
    keys: list[str], expected: Any, tmp_path: Path
) -> None:
    outcome = chaos.run(tmp_path / "run", [*keys, *SECOND_NODE.split(), "trainer.save_freq=-1"], "critic:update")
    (restart,) = outcome.restarts
    assert restart["repeated_from_step"] == 2
    losses = [[row for row in rows if "actor/loss" in row] for rows in (outcome.rows, expected.rows)]
    assert losses[0] == losses[1]
