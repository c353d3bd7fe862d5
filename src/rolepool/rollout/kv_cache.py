"""Keys and values of running samples: a slot for each, allocated once.

Owns the storage and its layout. Does not know whose keys they are, nor how they are attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rolepool.placement.memory import cache_room


@dataclass(frozen=True)
class CacheShape:
    """What a model needs to store for a token."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def slot_bytes(self, length: int) -> int:
        return 2 * self.num_layers * self.num_heads * self.head_dim * length * self.dtype.itemsize


def room_on_gpu(weights_bytes: int, utilization: float) -> int:
    """Bytes that a cache may take now on this process's GPU, where the rollout's weights take `weights_bytes`."""
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    share = int(total * torch.cuda.get_per_process_memory_fraction())
    unused = torch.cuda.memory_reserved() - allocated  # which torch holds, and gives to whoever asks in this process
    return cache_room(share, min(free + unused, share - allocated), weights_bytes, utilization)


class SlotCache:
    """`num_slots` slots of `length` tokens each."""

    def __init__(self, shape: CacheShape, num_slots: int, length: int) -> None:
        self.shape, self.num_slots, self.length = shape, num_slots, length
        size = (shape.num_layers, num_slots, shape.num_heads, length, shape.head_dim)
        # Zeros, as what is masked out is still multiplied by zero, and memory just taken may hold NaN.
        self._keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros_like(self._keys)
        self._num_heads = shape.num_heads
        self._head_offsets_h = torch.arange(shape.num_heads, device=shape.device) * length
        self._lines = [
            (keys.view(-1, shape.head_dim), values.view(-1, shape.head_dim))
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    @property
    def place(self) -> list[int]:
        """Where a kernel finds it: addresses of keys and values, slots, and their length."""
        return [self._keys.data_ptr(), self._values.data_ptr(), self.num_slots, self.length]

    def fits(self, shape: CacheShape, num_slots: int, length: int) -> bool:
        return self.shape == shape and self.num_slots >= num_slots and self.length >= length

    def places(self, slots_t: Tensor, positions_t: Tensor) -> Tensor:
        """Where `write` puts tokens: the same for all layers of a pass, so computed once."""
        first_t = slots_t * (self._num_heads * self.length) + positions_t
        return (first_t[:, None] + self._head_offsets_h).view(-1)

    def write(self, layer: int, places: Tensor, keys_thd: Tensor, values_thd: Tensor) -> None:
        for lines, new in zip(self._lines[layer], (keys_thd, values_thd), strict=True):
            lines.index_copy_(0, places, new.reshape(-1, new.shape[-1]))

    def read(self, layer: int, slots: slice, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values (slots, heads, length, head_dim) of the first `length` tokens; views, nothing is copied."""
        return self._keys[layer, slots, :, :length], self._values[layer, slots, :, :length]

    def copy(self, source: int, target: int, length: int) -> None:
        """A slot's first `length` tokens over another slot."""
        for storage in (self._keys, self._values):
            storage[:, target, :, :length] = storage[:, source, :, :length]
