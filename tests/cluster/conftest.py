"""What the tests with real processes share: the pools of several files, and where worker processes find the role
classes of the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


@pytest.fixture(scope="package")
def shared_cluster() -> Iterator[Cluster]:
    """Pools for all files whose tests leave them alive, because starting the processes takes longer than the tests."""
    from cluster_helpers import start

    with start({"four": [4], "one": [1], "two": [2], "three": [3]}) as cluster:
        yield cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the shared pools come last in this folder, because the others start a Ray of their own."""
    places = [place for place, item in enumerate(items) if item.path.parent == HERE]
    tests = sorted((items[place] for place in places), key=lambda item: "shared_cluster" in item.fixturenames)  # type: ignore[attr-defined]
    for place, item in zip(places, tests, strict=True):
        items[place] = item
