"""Llama's norms in the precision of the model, with noise of more than its rounding.

transformers computes them in float32, in a float64 model too. Then the last bit of a float64
number, which depends on the CPU, decides now and then to which float32 number it is rounded, and a
difference of 1e-16 becomes one of 1e-8. With these norms a test in float64 can compare to 1e-9 on
every CPU, and the noise shows that it does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def use_exact_norms() -> None:
    """In this process from now on."""
    LlamaRMSNorm.forward = exact_norm()


def exact_norm() -> Callable[[LlamaRMSNorm, Tensor], Tensor]:
    """A `forward` whose noise differs between calls and between ranks, and is the same in every run
    of a test."""
    generators: list[torch.Generator] = []

    def forward(self: LlamaRMSNorm, hidden_states: Tensor) -> Tensor:
        if not generators:  # only now, because a process starts before it has a rank
            seed = 1000 * dist.get_world_size() + dist.get_rank() if dist.is_initialized() else 0
            generators.append(torch.Generator().manual_seed(seed))
        normed = F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
        noise = 2 * torch.rand(normed.shape, generator=generators[0], dtype=normed.dtype) - 1
        return normed * (1 + 10 * torch.finfo(normed.dtype).eps * noise)

    return forward
