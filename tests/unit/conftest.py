from __future__ import annotations

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
