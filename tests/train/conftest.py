from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from rolepool.data.demo import Demo, make_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return make_demo(tmp_path_factory.mktemp("demo") / "data")


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """One Ray for all runs of a module, as starting it takes longer than they do."""
    ray.init(address="local", num_cpus=6, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
