"""A process dies on one of two nodes, and training goes on: the rows are those of a run in which
nothing died."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from test_recovery import chaos

from rolepool.files import left_behind
from rolepool.placement.estimate import SHARED_MEMORY
from rolepool.report.run import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SECOND_NODE = """
trainer.nnodes=2 trainer.n_gpus_per_node=4 placement.pools.actor_pool=[0,2] placement.pools.rollout_pool=[0,1]
placement.pools.critic_pool=[0,1]
"""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """This process on a cluster of two nodes."""
    cluster = chaos.start_nodes()
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def keys(two_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*chaos.demo_keys(tmp_path_factory.mktemp("demo") / "data"), *chaos.TWO_NODES.split()]


@pytest.fixture(scope="module")
def expected(keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run without deaths."""
    return chaos.run(tmp_path_factory.mktemp("undisturbed") / "run", keys)


def snapshots_left() -> set[Path]:
    """The folders of snapshots that no living process holds."""
    return set(left_behind(SHARED_MEMORY.glob("rolepool-*")))


@pytest.mark.parametrize(
    "case", ["actor1:update", "critic:generation", "actor0:sync", "actor1:snapshot"]
)
def test_training_goes_on_as_if_nothing_had_died(
    case: str, keys: list[str], expected: Any, tmp_path: Path
) -> None:
    for folder in snapshots_left():  # so that only those of this run count
        shutil.rmtree(folder, ignore_errors=True)
    outcome = chaos.run(tmp_path / "run", keys, case)
    assert outcome.seconds is not None, "the victim was not killed"
    (restart,) = outcome.restarts
    assert restart["pools"] == [chaos.VICTIMS[case.partition(":")[0]][0]]
    assert outcome.rows == expected.rows
    assert not snapshots_left()


def test_the_only_node_of_the_plan_may_be_another_than_the_drivers(
    keys: list[str], expected: Any, tmp_path: Path
) -> None:
    outcome = chaos.run(
        tmp_path / "run", [*keys, *SECOND_NODE.split(), "trainer.save_freq=-1"], "critic:update"
    )
    (restart,) = outcome.restarts
    assert restart["repeated_from_step"] == 2
    losses = [
        [row for row in rows if "actor/pg_loss" in row] for rows in (outcome.rows, expected.rows)
    ]
    assert losses[0] == losses[1]


def test_another_node_takes_the_place_of_a_lost_one(
    keys: list[str], expected: Any, tmp_path: Path
) -> None:
    outcome = chaos.run(tmp_path / "run", keys, "node:update")
    assert outcome.restarts
    assert outcome.rows == expected.rows


def test_pools_are_planned_again_on_the_nodes_that_are_left(
    keys: list[str], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        chaos.VICTIMS, "node", ("critic_pool", 1)
    )  # rank 0 is on the node of the driver
    shrinking = [
        "placement.on_node_loss=shrink",
        "trainer.n_gpus_per_node=1",
        "placement.strategy=split",
    ]
    removed = [key for key in keys if not key.startswith(("placement.", "trainer.n"))]
    more = ["trainer.nnodes=2", "placement.split.share=0.5", *shrinking]
    outcome = chaos.run(tmp_path / "run", [*removed, *more], "node:update")
    assert outcome.restarts
    assert [row["step"] for row in outcome.rows] == [row["step"] for row in expected.rows]
    plans = read_run(tmp_path / "run").plans
    assert [len(planned.plan.pools["critic_pool"].slots) for planned in plans] == [2, 1]
    for mine, theirs in zip(outcome.rows, expected.rows, strict=True):
        if "critic/vf_loss" in theirs:
            assert mine["critic/vf_loss"] == pytest.approx(theirs["critic/vf_loss"], rel=1e-3)
