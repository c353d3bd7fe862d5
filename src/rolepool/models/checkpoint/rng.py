"""The random states of a process, as JSON: torch (CPU and its GPU), Python, numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict


class RngStates(BaseModel):
    """Where the generators of a process stand. Torch's are bytes in hexadecimal; numpy's is that of `np.random`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    torch_cpu: str
    torch_cuda: str | None
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]

    @classmethod
    def now(cls) -> RngStates:
        numpy: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]
        name, keys, position, has_gauss, gauss = numpy
        return cls(
            torch_cpu=_to_hex(torch.get_rng_state()),
            torch_cuda=_to_hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
            python=random.getstate(),
            numpy=(name, tuple(keys.tolist()), position, has_gauss, gauss),
        )

    def restore(self) -> None:
        """Go on from here. A state of a GPU is left out where there is none."""
        torch.set_rng_state(_from_hex(self.torch_cpu))
        if self.torch_cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_from_hex(self.torch_cuda))
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
