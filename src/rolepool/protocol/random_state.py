"""The states of the random generators that a role may use: torch, CUDA, Python and numpy."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

RandomState = Mapping[str, Any]
"""The states of all generators. Each has the type that its generator returns."""


def random_state() -> RandomState:
    """The state of every generator that a role may use. The GPU's is None if this process does not
    use a GPU."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def set_random_state(state: RandomState) -> None:
    """Restore a state, also one that was stored as JSON with lists. A GPU's is ignored if there is
    no GPU."""
    torch.set_rng_state(torch.as_tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.as_tensor(state["cuda"], dtype=torch.uint8))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
