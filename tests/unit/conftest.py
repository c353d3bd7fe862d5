from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(params=["plain", "noise"])
def noise(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test as it is, and once more with noise on all logits that engines sample from."""
    from same_tokens import (
        NOISE,
        noise_on_logits,
    )  # imports torch, which most unit tests do not need

    with noise_on_logits(NOISE if request.param == "noise" else 0.0):
        yield


@pytest.fixture(autouse=True)
def no_ray_is_left() -> Iterator[None]:
    """Ray starts by itself if one of its functions is called, and then later tests, which start
    their own, fail."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
        pytest.fail("the test has started Ray, and has left it running")
