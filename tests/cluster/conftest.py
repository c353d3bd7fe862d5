"""What the tests with real processes share: the pools of several files, and where worker processes
find the role classes of the tests."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rolepool.cluster import Cluster

HERE = Path(__file__).parent
IMPORT_PATHS = [str(HERE.parents[1] / "src"), str(HERE)]

# Inherited by every Ray that a test starts, and by its worker processes.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*IMPORT_PATHS, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("RAY_ADDRESS", None)


shared = ExitStack()


@pytest.fixture(scope="session")
def shared_cluster() -> Cluster:
    """Pools for all files whose tests leave them alive, because starting the processes takes longer
    than the tests."""
    from cluster_helpers import start

    return shared.enter_context(start({"four": [4], "one": [1], "two": [2], "three": [3]}))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """The shared pools end with the last test of this folder."""
    if nextitem is None or nextitem.path.parent != HERE:
        shared.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the shared pools come after all others of this folder, which start a Ray of
    their own, and directly one after another: the pools end when a test of another folder follows,
    and then Ray would start again by itself if somebody called them."""
    sharing: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        is_sharing = item.path.parent == HERE and "shared_cluster" in fixtures
        (sharing if is_sharing else others).append(item)
    place = len(others)
    while place > 0 and others[place - 1].path.parent != HERE:
        place -= 1
    items[:] = [*others[:place], *sharing, *others[place:]]
