"""A number that changes with every bit of a tensor.

The bytes of a tensor are read as 32-bit integers. Each of them is multiplied by an odd 64-bit number
that depends on its position, and the products are added modulo 2**64. So

- two different values at one position never give the same digest, because an odd factor has an
  inverse modulo 2**64;
- changes at several positions, such as two values that change places, give the same digest with a
  probability of about 2**-32;
- the order of the additions has no effect, so that a CPU and a GPU compute the same number.

It finds damage and stale weights. It does not protect from somebody who wants to deceive it.

Imports only torch and the standard library, because the process of vLLM, whose Python environment
does not have rolepool, loads this file by its path.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

ROW_WORDS = 4096
"""The number of words that are added up first. The factor of a position is that of its row times
that of its place in the row."""
CHUNK_ROWS = {"cpu": 64, "cuda": 1024}
"""The number of rows that are multiplied at a time, by the type of the device. The products take
twice the memory of the rows: 2 MiB, so that they stay in the cache of a CPU, and 32 MiB on a GPU."""
_WORD_BYTES = 4
_WHOLE = 2**64
_PLACES, _ROWS = 1, 2
"""The seeds of the factors of places and of rows."""


class Digest(NamedTuple):
    """What is compared of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    number: int


class Digests:
    """The digests of named tensors. Each of them stays on the device of its tensor until all of
    them are read, so that the host does not wait for a GPU after each tensor."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._numbers: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor, device: torch.device | None = None) -> None:
        """Compute the digest of a tensor, on its device, or on another one, to which it is copied in
        chunks."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._kinds[name] = (dtype, tuple(tensor.shape))
        self._numbers[name] = weighted_sum(tensor, tensor.device if device is None else device)

    def read(self) -> dict[str, Digest]:
        """All digests by name. Waits for the devices once."""
        names_on: dict[torch.device, list[str]] = {}
        for name, number in self._numbers.items():
            names_on.setdefault(number.device, []).append(name)
        numbers: dict[str, int] = {}
        for names in names_on.values():
            here = torch.stack([self._numbers[name] for name in names])
            numbers.update(zip(names, here.tolist(), strict=True))
        digests: dict[str, Digest] = {}
        for name, (dtype, shape) in self._kinds.items():
            # Python shows a negative number with a sign, which looks odd in a hexadecimal number.
            digests[name] = Digest(dtype, shape, numbers[name] % _WHOLE)
        return digests


def digests_of(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Digest]:
    """The digests of these tensors by name."""
    digests = Digests()
    for name, tensor in named_tensors:
        digests.add(name, tensor)
    return digests.read()


@torch.no_grad()
def weighted_sum(tensor: Tensor, device: torch.device) -> Tensor:
    """The digest of the bytes of a tensor, as a 64-bit integer on a device."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    words, tail = _words_of(tensor.detach())
    num_rows, num_left = divmod(words.numel(), ROW_WORDS)
    factors_c = _factors(_PLACES, ROW_WORDS, device)
    factors_r = _factors(_ROWS, num_rows + 2, device)

    chunk_rows = CHUNK_ROWS.get(device.type, CHUNK_ROWS["cuda"])
    for first in range(0, num_rows, chunk_rows):
        last = min(first + chunk_rows, num_rows)
        chunk_rc = words[first * ROW_WORDS : last * ROW_WORDS].view(-1, ROW_WORDS)
        sums_r = (chunk_rc.to(device) * factors_c).sum(dim=1)
        total += (sums_r * factors_r[first:last]).sum()

    # The last row, which is shorter than the others, and a word with the last one to three bytes.
    if num_left:
        left_c = words[num_rows * ROW_WORDS :].to(device)
        total += (left_c * factors_c[:num_left]).sum() * factors_r[num_rows]
    if tail is not None:
        total += tail.to(device) * factors_r[num_rows + 1]
    return total


def _words_of(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """The bytes of a tensor as 32-bit words, and the bytes after the last whole word as one more."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()  # words must begin at a multiple of their size
    num_words = flat.numel() // _WORD_BYTES
    words = flat[: num_words * _WORD_BYTES].view(torch.int32)
    left = flat[num_words * _WORD_BYTES :]
    if not len(left):
        return words, None
    padded = flat.new_zeros(_WORD_BYTES)
    padded[: len(left)] = left
    return words, padded.view(torch.int32)[0]


# Factors


@functools.cache
def _table(seed: int, device: torch.device, size: int) -> Tensor:
    return _odd_numbers(seed, size).to(device)


def _factors(seed: int, size: int, device: torch.device) -> Tensor:
    """At least so many factors. Sizes are powers of two, so that few tables are kept."""
    return _table(seed, device, max(ROW_WORDS, 1 << (size - 1).bit_length()))


def _odd_numbers(seed: int, size: int) -> Tensor:
    """Odd 64-bit numbers that look random. A table is the beginning of every longer one.

    This is splitmix64, written out because torch's own generators may change with its version, and
    the process of vLLM has another one.
    """
    bits = torch.arange(size, dtype=torch.int64) + (seed << 40)
    bits = bits * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return (bits ^ _shifted(bits, 31)) | 1


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Bits shifted to the right. torch would fill the places that become free with the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one with the same bits."""
    return number - _WHOLE if number >= _WHOLE // 2 else number
