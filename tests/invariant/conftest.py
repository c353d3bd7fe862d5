from __future__ import annotations

import pytest
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from exact_norms import exact_norm


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the test's own process."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact_norm())
