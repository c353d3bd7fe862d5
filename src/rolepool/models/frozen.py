"""A model without training: no gradients, no optimizer, and in host memory while idle if `offload` is set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rolepool.models.sharding import free_gathered, shard


class FrozenModel:
    def __init__(self, model: nn.Module, *, device: str, offload: bool) -> None:
        self.model = shard(model.requires_grad_(False), device, -1).eval()
        self.device = device
        self.offload = offload and device != "cpu"
        self._leave_device()

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """The model on its device inside the block, without gradients."""
        if self.offload:
            self.model.to(self.device)
        try:
            with torch.no_grad():
                yield self.model
        finally:
            free_gathered(self.model)
            self._leave_device()

    def _leave_device(self) -> None:
        if self.offload:
            self.model.to("cpu")
            torch.cuda.empty_cache()
