from __future__ import annotations

from pathlib import Path

import pytest
import ray

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def one_ray() -> None:
    """One Ray for all runs of this process, as starting it takes longer than they do."""
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=6,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
        )


@pytest.fixture
def no_ray() -> None:
    """For a run that joins or starts a Ray of its own."""
    ray.shutdown()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """That Ray ends with the last test of this folder."""
    if nextitem is None or nextitem.path.parent != HERE:
        ray.shutdown()
