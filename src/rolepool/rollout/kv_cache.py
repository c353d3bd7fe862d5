"""The KV cache: one slot for each running sample, allocated once.

Owns the storage and its layout. Does not know which sample uses a slot, nor how attention reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rolepool.placement.estimate import cache_room
from rolepool.protocol.memory import free_bytes


@dataclass(frozen=True)
class CacheShape:
    """What a model stores for each token."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def slot_bytes(self, length: int) -> int:
        return 2 * self.num_layers * self.num_heads * self.head_dim * length * self.dtype.itemsize


def room_on_gpu(weights_bytes: int, utilization: float) -> int:
    """Bytes that a cache may take now on this process's GPU, if the rollout's weights take `weights_bytes`."""
    share = int(torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction())
    return cache_room(share, free_bytes("cuda"), weights_bytes, utilization)


class SlotCache:
    """`num_slots` slots of `length` tokens each."""

    def __init__(self, shape: CacheShape, num_slots: int, length: int) -> None:
        self.shape, self.num_slots, self.length = shape, num_slots, length
        size = (shape.num_layers, num_slots, shape.num_heads, length, shape.head_dim)
        # Zeros, because masked values are multiplied by zero, and uninitialized memory may contain NaN.
        self._keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros_like(self._keys)
        self._head_offsets_h = torch.arange(shape.num_heads, device=shape.device) * length
        self._lines = [
            (keys.view(-1, shape.head_dim), values.view(-1, shape.head_dim))
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    @property
    def place(self) -> list[int]:
        """What a kernel needs to find the cache: addresses of keys and values, number of slots, length of a slot."""
        return [self._keys.data_ptr(), self._values.data_ptr(), self.num_slots, self.length]

    def fits(self, shape: CacheShape, num_slots: int, length: int) -> bool:
        return self.shape == shape and self.num_slots >= num_slots and self.length >= length

    def places(self, slots_t: Tensor, positions_t: Tensor) -> Tensor:
        """Where `write` stores tokens; the same for all layers, so it is computed once."""
        first_t = slots_t * (self.shape.num_heads * self.length) + positions_t
        return (first_t[:, None] + self._head_offsets_h).view(-1)

    def write(self, layer: int, places: Tensor, keys_thd: Tensor, values_thd: Tensor) -> None:
        for lines, new in zip(self._lines[layer], (keys_thd, values_thd), strict=True):
            lines.index_copy_(0, places, new.reshape(-1, new.shape[-1]))

    def read(self, layer: int, slots: slice, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values (slots, heads, length, head_dim) of the first `length` tokens, as views."""
        return self._keys[layer, slots, :, :length], self._values[layer, slots, :, :length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot into another."""
        for storage in (self._keys, self._values):
            storage[:, target, :, :length] = storage[:, source, :, :length]
