"""The digest that `rolepool.weights.digests` describes, with Python's integers and without tables."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 2**64 - 1
PLACES, ROWS = 1, 2
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
)


@functools.cache
def factor(seed: int, index: int) -> int:
    """An odd number of splitmix64."""
    bits = (index + (seed << 40)) * 0x9E3779B97F4A7C15 & MASK
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return (bits ^ (bits >> 31)) | 1


def by_hand(tensor: Tensor) -> int:
    shape = tensor.shape or (1,)
    num_rows = shape[0]
    row_bytes = math.prod(shape[1:]) * tensor.element_size()
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    content = bytes(flat.tolist())
    total = 0
    for row in range(num_rows):
        line = content[row * row_bytes : (row + 1) * row_bytes]
        padded = line + b"\0" * (-row_bytes % 4)
        for place, (word,) in enumerate(struct.iter_unpack("<i", padded)):
            total += word * factor(ROWS, row) * factor(PLACES, place)
    return total & MASK


def random_bits(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in which all bits are random, so that it may have NaN and any sign."""
    if dtype == torch.bool:
        return torch.rand(tuple(shape)) < 0.5
    content = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return content.view(dtype).view(tuple(shape))
