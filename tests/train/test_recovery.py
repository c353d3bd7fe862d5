"""A process dies, and training goes on: the rows of metrics are those of a run in which nothing
died."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from commands import load_benchmark
from rolepool.errors import WorkerError

chaos = load_benchmark("chaos")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made: list[str] = chaos.demo_keys(tmp_path_factory.mktemp("demo") / "data")
    return made


@pytest.fixture(scope="module")
def expected(keys: list[str], one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run without deaths."""
    return chaos.run(tmp_path_factory.mktemp("undisturbed") / "run", keys)


CASES = [
    "actor0:update",
    "actor0:update+wait",
    "reward:scoring",
    "critic:generation",
    "rollout:sync",
    "actor1:sync+wait",
    "rollout:sync+wait",
    "actor1-rollout:sync+wait",
    "actor1:checkpoint",
    "rollout:validation",
    "actor0:start",
    "critic:snapshot",
    "actor1:snapshot",
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(200)
def test_training_goes_on_as_if_nothing_had_died(
    case: str, keys: list[str], expected: Any, tmp_path: Path
) -> None:
    outcome = chaos.run(tmp_path / "run", keys, case)
    assert outcome.seconds is not None, "the victim was not killed"
    assert outcome.rows == expected.rows
    if not case.endswith(":start"):
        (restart,) = outcome.restarts
        victims = case.partition(":")[0].split("-")
        assert sorted(restart["pools"]) == sorted(chaos.VICTIMS[victim][0] for victim in victims)
        assert "died" in restart["what"]
    assert not list(Path("/dev/shm").glob(f"rolepool-{os.getpid()}-*"))


DEATHS = {"reward:scoring": 1, "actor0:update": 1, "critic:generation": 5, "rollout:validation": 1}
DEATHS |= {"actor1:checkpoint": 1, "rollout:sync": 5}
"""Victims, phases, and how often the phase's call was made before."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases", [list(DEATHS)[:2], pytest.param(list(DEATHS), marks=pytest.mark.slow)], ids=len
)
def test_training_goes_on_after_several_deaths_some_of_them_in_one_step(
    cases: list[str], keys: list[str], expected: Any, tmp_path: Path
) -> None:
    with ExitStack() as kills:
        killed_s = {
            case: kills.enter_context(chaos.kill_at(*case.split(":"), DEATHS[case]))
            for case in cases
        }
        outcome = chaos.run(tmp_path / "run", [*keys, "trainer.max_restarts=6"])
    assert all(killed_s.values()), "a victim was not killed"
    assert outcome.rows == expected.rows
    pools = [pool for restart in outcome.restarts for pool in restart["pools"]]
    assert sorted(pools) == sorted(chaos.VICTIMS[case.partition(":")[0]][0] for case in cases)
    assert all("died" in restart["what"] for restart in outcome.restarts)
    if len(cases) == 2:
        # The first death comes before the first update, so no role is rewound. The second one comes
        # when both roles are updated.
        assert outcome.num_loads == {"actor": 1, "critic": 1}
    assert not list(Path("/dev/shm").glob(f"rolepool-{os.getpid()}-*"))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_healthy_role_is_not_rewound_twice_if_another_one_dies_while_it_is_replaced(
    keys: list[str], expected: Any, tmp_path: Path
) -> None:
    update, load = chaos.kill_at("critic", "update", 2), chaos.kill_at("critic", "load", 1)
    with update as killed_s, load as killed_again_s:
        outcome = chaos.run(tmp_path / "run", [*keys, "trainer.save_freq=-1"])
    assert killed_s and killed_again_s, "a victim was not killed"
    assert outcome.num_loads == {"actor": 1, "critic": 1}, "by the processes that lived on"
    assert len(outcome.restarts) == 2
    assert [row for row in outcome.rows if len(row) > 2] == [
        row for row in expected.rows if len(row) > 2
    ]


@pytest.mark.slow
def test_without_snapshots_training_goes_on_from_the_checkpoint(
    keys: list[str], expected: Any, tmp_path: Path
) -> None:
    more = ["trainer.snapshot_freq=-1", "trainer.save_freq=1"]
    outcome = chaos.run(tmp_path / "run", [*keys, *more], "critic:update")
    rows = [row for row in outcome.rows if "timing_s/save_checkpoint" not in row]
    assert [row for row in rows if len(row) > 2] == [row for row in expected.rows if len(row) > 2]


@pytest.mark.timeout(200)
def test_snapshots_that_have_no_room_or_are_removed_come_back_and_then_a_process_may_die(
    keys: list[str],
    expected: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pattern = f"rolepool-{os.getpid()}-*"
    disk_usage, num_asked = shutil.disk_usage, count(1)

    def without_room_at_first(path: Path) -> Any:
        usage = disk_usage(path)
        # The first snapshots are those before the first step and after it.
        return usage if next(num_asked) > 2 else usage._replace(free=1000)

    def remove_snapshots(step: int) -> None:
        if step == 1:
            for folder in Path("/dev/shm").glob(pattern):
                shutil.rmtree(folder)

    # Shared memory belongs to the machine, and others use it, too.
    monkeypatch.setattr(shutil, "disk_usage", without_room_at_first)
    with chaos.kill_at("critic", "update", 4) as killed_s:
        more_keys = [*keys, "trainer.save_freq=-1"]
        outcome = chaos.run(tmp_path / "run", more_keys, after_row=remove_snapshots)
    assert killed_s, "the victim was not killed"
    warnings = [
        record.getMessage() for record in caplog.records if "snapshots" in record.getMessage()
    ]
    assert len(warnings) == 2
    assert "no snapshots are taken until there is room" in warnings[0]
    assert "has 1000 B free" in warnings[0]
    assert "are lost; new ones are taken" in warnings[1]
    (restart,) = outcome.restarts
    assert (restart["pools"], restart["repeated_from_step"]) == (["critic_pool"], 4)
    assert [row for row in outcome.rows if len(row) > 2] == [
        row for row in expected.rows if len(row) > 2
    ]
    assert not list(Path("/dev/shm").glob(pattern))


@pytest.mark.slow
def test_the_run_ends_with_the_error_if_nothing_may_be_restarted(
    keys: list[str], expected: Any, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match=r"critic_pool rank 0 .* died during"):
        chaos.run(tmp_path / "run", [*keys, "trainer.max_restarts=0"], "critic:update")
