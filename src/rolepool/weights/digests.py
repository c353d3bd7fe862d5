"""A number that changes with every bit of a tensor, and that adds up over the parts of a tensor.

A tensor is read as a matrix: its rows are the first dimension, and its columns are all others. The
bytes of each row are read as signed 32-bit words (little-endian), and a row that ends within a word is
filled up with zeros. Each word is multiplied by an odd 64-bit factor of its row and by one of its
place in the row, and the products are added modulo 2**64. So

- the digest of a part, with the factors of its place in the whole, is the part's share of the sum,
  and the digests of disjoint parts that cover a tensor add up to that of the tensor. If two parts
  share a word, each reads it with zeros in place of the other's bytes, and both words add up to the
  whole one;
- the order of the additions has no effect, so that a CPU and a GPU compute the same number.

How probable it is that other contents have the same digest, if the factors are random odd numbers:

- Two different values at one position: impossible, because odd factors have inverses modulo 2**64.
- Changes of which at least one is the only one in its row or in its column: at most 2**-32. Two
  changes are always such changes, also within one row or one column.
- Any other changes, such as two rows that changed places: at most about 2**-27. A factor is that of a
  row times that of a column, so the changes +d, -d, -d, +d at the corners of a rectangle give
  d (row - row') (column - column'). Differences of odd numbers are even, and may have more factors 2.

These are the worst cases: all changes are multiples of 2**31, such as signs that flip. If all of them
are multiples of 2**16 (the upper of two 16-bit numbers in each word), the bounds are 2**-47 and
2**-41, and if one of them is odd, 2**-63 and 2**-57.

It finds damage, stale weights and rows in the wrong place. It does not protect from somebody who
wants to deceive it.

Imports only torch and the standard library, because the process of vLLM, whose Python environment
does not have rolepool, loads this file by its path. On a GPU it also loads `digest_kernels`, which
lies beside it, if there is Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rolepool.weights.digest_kernels import Layout, Matrix

Interval = tuple[int, int]
"""A first number, and the one after the last."""
CHUNK_WORDS = {"cpu": 2**18, "cuda": 2**22}
"""The number of words that are multiplied at a time, by the type of the device. The products take
twice the memory of the words: 2 MiB on a CPU, and 32 MiB on a GPU."""
MAX_TABLE = 2**20
"""The most factors that are kept, 8 MiB. Those of later rows and places are computed each time."""
_MIN_TABLE = 4096
_MAX_NARROW_WORDS = 2
"""Rows with so few words are added up column by column, because each row would cost a loop."""
_SMALL_WORDS = 2**13
"""So few words need no scratch memory: the process has memory for them without asking the system."""
_MAX_WAITING_BYTES = 2**27
"""Parts on a GPU wait until there are so many bytes of them, and are then read by one launch."""
_WORD_BYTES = 4
_UNITS = {1: torch.int8, 2: torch.int16}
"""Types of the parts of words, by the bytes of an element. Longer elements are one or more words."""
_WHOLE = 2**64
_PLACES, _ROWS = 1, 2
"""The seeds of the factors of places and of rows."""


class Digest(NamedTuple):
    """What is compared of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    number: int


class _Part(NamedTuple):
    """A part of a weight, on a GPU."""

    number: int
    """The number of its weight."""
    tensor: Tensor
    """Keeps its memory."""
    matrix: Matrix


class Digests:
    """The digests of named tensors. Each of them stays on the device of its tensor until all of
    them are read, so that the host does not wait for a GPU after each tensor.

    A GPU reads many parts at once, because launching a kernel for each would take longer than
    reading it. So a part may be read later than it is added: until then it is kept, and must not be
    changed. Parts that are overwritten earlier are added with `at_once=True`.

    `uses_triton` is for comparisons. Without Triton, a GPU computes with torch's operations."""

    def __init__(self, uses_triton: bool = True) -> None:
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._numbers: dict[str, int] = {}
        """A number for each name; another one if the name is added again."""
        self._num_numbers = 0
        self._sums: list[tuple[list[int], Tensor]] = []
        """The numbers of weights, and a sum for each of them."""
        self._waiting: dict[torch.device, list[_Part]] = {}
        self._waiting_bytes = 0
        self._uses_triton = uses_triton

    def add(
        self,
        name: str,
        tensor: Tensor,
        device: torch.device | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Add the digest of a tensor. It is computed on its device, or on another one, to which it
        is copied in chunks."""
        shape = tuple(tensor.shape)
        num_rows, num_columns = _matrix_shape(shape)
        self._kinds.pop(name, None)
        self._numbers.pop(name, None)
        region = ((0, num_rows), (0, num_columns))
        self.add_part(name, tensor, region, shape, device, at_once=at_once)

    def add_part(
        self,
        name: str,
        part: Tensor,
        region: tuple[Interval, Interval],
        whole_shape: Sequence[int],
        device: torch.device | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Add the digest of a part to that of its tensor. `region` has the rows and columns of the
        tensor's matrix that the part has (`regions.Region`). Parts must not overlap."""
        dtype = str(part.dtype).removeprefix("torch.")
        kind = (dtype, tuple(whole_shape))
        _check_kind(name, self._kinds.get(name, kind), kind)
        _check_region(name, part, region, kind[1])
        self._kinds[name] = kind
        if name not in self._numbers:
            self._numbers[name] = self._num_numbers
            self._num_numbers += 1
        number = self._numbers[name]
        if device is None:
            device = part.device
        if self._can_wait(part, region, device):
            self._wait(number, part, region)
            if at_once:
                self._add_up_waiting()
        else:
            total = weighted_sum(part, region, device, self._uses_triton)
            self._sums.append(([number], total.view(1)))

    def _can_wait(
        self, part: Tensor, region: tuple[Interval, Interval], device: torch.device
    ) -> bool:
        """Whether the part is read together with others: on a GPU, where it lies, with factors that
        are in the tables."""
        if device.type != "cuda" or part.device != device or not part.numel():
            return False
        (_, last_row), (_, last_column) = region
        units_per_element = max(1, part.element_size() // _WORD_BYTES)
        has_factors = last_row <= MAX_TABLE and last_column * units_per_element <= MAX_TABLE
        return has_factors and self._uses_triton and _kernels() is not None

    def _wait(self, number: int, part: Tensor, region: tuple[Interval, Interval]) -> None:
        """Put a part into the list of what waits. It is called for every weight of every transfer,
        so it makes no views of a tensor that is in one piece."""
        (first_row, last_row), (first_column, last_column) = region
        num_rows = last_row - first_row
        num_columns = last_column - first_column
        row_stride = num_columns
        if not part.is_contiguous():
            part = _rows_of(part, num_rows, num_columns)
            row_stride = part.stride(0)
        address = part.data_ptr()
        layout = _layout_of(
            num_rows,
            num_columns,
            row_stride,
            first_row,
            first_column,
            part.element_size(),
            address % _WORD_BYTES == 0,
        )
        kernels = _kernels()
        assert kernels is not None
        waiting = self._waiting.setdefault(part.device, [])
        waiting.append(_Part(number, part, kernels.Matrix(address, layout)))
        self._waiting_bytes += part.nbytes
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            self._add_up_waiting()

    def _add_up_waiting(self) -> None:
        """Launch what waits, and let go of the tensors."""
        for device, parts in self._waiting.items():
            numbers = [part.number for part in parts]
            matrices = [part.matrix for part in parts]
            self._sums.append((numbers, _sums_of_matrices(matrices, device)))
        self._waiting.clear()
        self._waiting_bytes = 0

    def read(self) -> dict[str, Digest]:
        """All digests by name. Waits for the devices once."""
        self._add_up_waiting()
        sums_on: dict[torch.device, list[Tensor]] = {}
        numbers_on: dict[torch.device, list[int]] = {}
        for numbers, sums in self._sums:
            sums_on.setdefault(sums.device, []).append(sums)
            numbers_on.setdefault(sums.device, []).extend(numbers)
        totals = [0] * self._num_numbers
        for device, vectors in sums_on.items():
            here = torch.cat(vectors).tolist()
            for number, total in zip(numbers_on[device], here, strict=True):
                totals[number] += total
        digests: dict[str, Digest] = {}
        for name, (dtype, shape) in self._kinds.items():
            total = totals[self._numbers[name]]
            # Python shows a negative number with a sign, which looks odd in a hexadecimal number.
            digests[name] = Digest(dtype, shape, total % _WHOLE)
        return digests


def digests_of(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Digest]:
    """The digests of these tensors by name."""
    digests = Digests()
    for name, tensor in named_tensors:
        digests.add(name, tensor)
    return digests.read()


def sum_of(receipts: Iterable[Mapping[str, Digest]]) -> dict[str, Digest]:
    """The digests of whole tensors from those of their parts, which several ranks have. A rank may
    lack a name."""
    sums: dict[str, Digest] = {}
    for digests in receipts:
        for name, digest in digests.items():
            so_far = sums.get(name)
            if so_far is None:
                sums[name] = digest
                continue
            _check_kind(name, so_far[:2], digest[:2])
            number = (so_far.number + digest.number) % _WHOLE
            sums[name] = digest._replace(number=number)
    return sums


def _check_kind(
    name: str, expected: tuple[str, tuple[int, ...]], kind: tuple[str, tuple[int, ...]]
) -> None:
    if kind != expected:
        dtype, shape = kind
        other_dtype, other_shape = expected
        raise ValueError(
            f"{name}: one part is of {dtype} {list(shape)}, and another one of "
            f"{other_dtype} {list(other_shape)}; all parts of a weight must have one dtype and "
            "name the shape of the same whole"
        )


def _check_region(
    name: str, part: Tensor, region: tuple[Interval, Interval], whole_shape: tuple[int, ...]
) -> None:
    """Raise ValueError if the part does not have the size of its region, or if the region is not in
    the whole."""
    num_elements = 1
    for (first, last), size in zip(region, _matrix_shape(whole_shape), strict=True):
        if not 0 <= first <= last <= size:
            raise ValueError(
                f"{name}: rows and columns {tuple(region)} are not a part of {list(whole_shape)}"
            )
        num_elements *= last - first
    if part.numel() != num_elements:
        raise ValueError(
            f"{name}: a part of shape {list(part.shape)} cannot be rows and columns "
            f"{tuple(region)} of {list(whole_shape)}, which have {num_elements} elements"
        )


# Weighted sums


@torch.no_grad()
def weighted_sum(
    part: Tensor,
    region: tuple[Interval, Interval],
    device: torch.device,
    uses_triton: bool = True,
) -> Tensor:
    """The digest of a part of a tensor, as a 64-bit integer on a device."""
    if not part.numel():
        return torch.zeros((), dtype=torch.int64, device=device)
    (first_row, last_row), (first_column, last_column) = region
    units = _units_of(part, last_row - first_row, last_column - first_column)
    units_per_element = max(1, part.element_size() // _WORD_BYTES)
    first_unit = first_column * units_per_element

    kernels = _kernels() if uses_triton and device.type == "cuda" else None
    reads_in_place = kernels is not None and units.device == device
    sums: list[Tensor] = []
    for row, unit, block in _blocks(units, device, reads_in_place):
        here = block.to(device)
        if kernels is None:
            sums.append(_sum_of_block(here, first_row + row, first_unit + unit))
        else:
            sums.append(_sum_with_kernel(kernels, here, first_row + row, first_unit + unit))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _blocks(
    units: Tensor, device: torch.device, reads_in_place: bool
) -> Iterator[tuple[int, int, Tensor]]:
    """Divide a matrix into blocks whose copies and factors take little memory: the first row and
    the first unit of each, and the block."""
    num_rows, num_columns = units.shape
    if reads_in_place:
        rows_at_a_time = MAX_TABLE
        columns_at_a_time = MAX_TABLE
    else:
        chunk_words = CHUNK_WORDS.get(device.type, CHUNK_WORDS["cuda"])
        columns_at_a_time = min(num_columns, chunk_words)
        words_per_row = math.ceil(columns_at_a_time * units.element_size() / _WORD_BYTES)
        rows_at_a_time = chunk_words // words_per_row
    if num_rows <= rows_at_a_time and num_columns <= columns_at_a_time:
        yield 0, 0, units  # most weights of small models: slices would take longer than the sum
        return
    for column in range(0, num_columns, columns_at_a_time):
        for row in range(0, num_rows, rows_at_a_time):
            rows = slice(row, row + rows_at_a_time)
            columns = slice(column, column + columns_at_a_time)
            yield row, column, units[rows, columns]


def _sum_with_kernel(kernels: ModuleType, units: Tensor, first_row: int, first_unit: int) -> Tensor:
    """The weighted sum of a block, whose factors may be after those of the tables."""
    address = units.data_ptr()
    layout = _layout_of(
        *units.shape,
        units.stride(0),
        first_row,
        first_unit,
        units.element_size(),
        address % _WORD_BYTES == 0,
    )
    row_factors = _factors(_ROWS, first_row, len(units), units.device)
    word_factors = _factors(_PLACES, layout.first_word, layout.num_words, units.device)
    # Counted from the first factors of the block.
    at_its_factors = layout._replace(first_row=0, first_word=0)
    matrix = kernels.Matrix(address, at_its_factors)
    sums: Tensor = kernels.weighted_sums([matrix], row_factors, word_factors)
    return sums[0]


def _sums_of_matrices(matrices: Sequence[Matrix], device: torch.device) -> Tensor:
    """The weighted sums of matrices on a GPU, whose factors are in the tables."""
    kernels = _kernels()
    assert kernels is not None
    layouts = [matrix.layout for matrix in matrices]
    num_rows = max(layout.first_row + layout.num_rows for layout in layouts)
    num_words = max(layout.first_word + layout.num_words for layout in layouts)
    row_factors = _factors(_ROWS, 0, num_rows, device)
    word_factors = _factors(_PLACES, 0, num_words, device)
    sums: Tensor = kernels.weighted_sums(matrices, row_factors, word_factors)
    return sums


@functools.lru_cache(maxsize=4096)
def _layout_of(
    num_rows: int,
    num_columns: int,
    row_stride: int,
    first_row: int,
    first_column: int,
    element_bytes: int,
    is_aligned: bool,
) -> Layout:
    """How the kernel reads a matrix of elements: as whole words, if all its rows begin and end with
    words, and otherwise as parts of words. `is_aligned` says whether its memory begins with a
    word."""
    units_per_element = max(1, element_bytes // _WORD_BYTES)
    num_units = num_columns * units_per_element
    stride = row_stride * units_per_element
    first_unit = first_column * units_per_element
    units_per_word = max(1, _WORD_BYTES // element_bytes)
    begins_with_words = is_aligned and first_unit % units_per_word == 0
    has_whole_words = num_units % units_per_word == 0
    if begins_with_words and has_whole_words and stride % units_per_word == 0:
        num_units //= units_per_word
        stride //= units_per_word
        first_unit //= units_per_word
        units_per_word = 1
    first_word, front = divmod(first_unit, units_per_word)
    kernels = _kernels()
    assert kernels is not None
    layout: Layout = kernels.Layout(
        num_rows=num_rows,
        num_columns=num_units,
        row_stride=stride,
        first_row=first_row,
        first_word=first_word,
        front=front,
        units_per_word=units_per_word,
    )
    return layout


def _sum_of_block(units: Tensor, first_row: int, first_unit: int) -> Tensor:
    """The weighted sum of a block, with torch's operations."""
    words = _words_of(units, first_unit)
    num_rows, num_words = words.shape
    first_word = first_unit * units.element_size() // _WORD_BYTES
    row_factors = _factors(_ROWS, first_row, num_rows, units.device)
    word_factors = _factors(_PLACES, first_word, num_words, units.device)
    if num_words <= _MAX_NARROW_WORDS:
        words = words.T
        row_factors, word_factors = word_factors, row_factors
    if words.device.type != "cpu":
        return ((words * word_factors).sum(dim=1) * row_factors).sum()
    # A product of a matrix and a vector reads the words once, but has no mixed types. Only a CPU
    # has one of 64-bit integers.
    if words.numel() <= _SMALL_WORDS:
        return torch.dot(torch.mv(words.to(torch.int64), word_factors), row_factors)
    words_64 = _scratch("words", torch.int64, words.numel()).view(words.shape)
    words_64.copy_(words)
    sums = _scratch("sums", torch.int64, len(words))
    torch.mv(words_64, word_factors, out=sums)
    return torch.dot(sums, row_factors)


# Words


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The numbers of rows and columns of a tensor that is read as a matrix."""
    if not shape:
        return 1, 1
    return shape[0], math.prod(shape[1:])


def _units_of(tensor: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A tensor as a matrix of 8, 16 or 32-bit integers."""
    matrix = _rows_of(tensor, num_rows, num_columns)
    return matrix.view(_UNITS.get(tensor.element_size(), torch.int32))


def _rows_of(tensor: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A tensor as a matrix. It is not copied if the elements of its rows are neighbours in
    memory."""
    matrix = tensor.detach().reshape(num_rows, num_columns)
    if num_columns == 1:
        # Its stride along the row has no meaning, and may be one that views do not accept.
        return matrix[:, 0].unsqueeze(1)
    if matrix.stride(1) != 1:
        return matrix.contiguous()
    return matrix


def _begins_and_ends_with_words(units: Tensor, first_unit: int) -> bool:
    """Whether the rows of a part can be read as whole words where they lie."""
    units_per_word = _WORD_BYTES // units.element_size()
    if first_unit % units_per_word or units.shape[1] % units_per_word:
        return False
    if units.stride(0) % units_per_word or units.storage_offset() % units_per_word:
        return False
    return units.data_ptr() % _WORD_BYTES == 0


def _words_of(units: Tensor, first_unit: int) -> Tensor:
    """The rows as words. Rows that begin or end within a word are copied, and filled up with
    zeros."""
    if units.dtype == torch.int32:
        return units
    if _begins_and_ends_with_words(units, first_unit):
        return units.view(torch.int32)
    units_per_word = _WORD_BYTES // units.element_size()
    front = first_unit % units_per_word
    num_rows, num_columns = units.shape
    if num_columns == 1:
        return _words_with_one_unit(units, front)
    num_words = math.ceil((front + num_columns) / units_per_word)
    shape = (num_rows, num_words * units_per_word)
    if units.device.type == "cpu":
        padded = _scratch("padded", units.dtype, math.prod(shape)).view(shape)
        padded.zero_()
    else:
        padded = units.new_zeros(shape)
    padded[:, front : front + num_columns].copy_(units)
    return padded.view(torch.int32)


def _words_with_one_unit(units: Tensor, place: int) -> Tensor:
    """Words that are zero except for one unit, as those of a vector: faster than filling up rows."""
    bits = 8 * units.element_size()
    words = units.to(torch.int32) & ((1 << bits) - 1)
    return words << (place * bits) if place else words  # the sign of the highest unit is shifted


class _Buffers(threading.local):
    """Memory of a thread that is used for one chunk after another. New memory for each chunk would
    cost more than the arithmetic, because the system clears its pages."""

    def __init__(self) -> None:
        self.by_use: dict[tuple[str, torch.dtype], Tensor] = {}


_buffers = _Buffers()


def _scratch(use: str, dtype: torch.dtype, size: int) -> Tensor:
    """Memory on the CPU that keeps its contents until the next call for the same use."""
    buffer = _buffers.by_use.get((use, dtype))
    if buffer is None or len(buffer) < size:
        # A tensor that was made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=dtype, device="cpu")
        _buffers.by_use[use, dtype] = buffer
    return buffer[:size]


@functools.cache
def _kernels() -> ModuleType | None:
    """The module `digest_kernels`, or None without Triton or the C compiler that Triton needs. It is
    loaded by its path in every process, because that of vLLM cannot import it by its name."""
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("cc", "gcc", "clang")))
    if importlib.util.find_spec("triton") is None or not has_compiler:
        return None
    file = Path(__file__).with_name("digest_kernels.py")
    spec = importlib.util.spec_from_file_location("rolepool_digest_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Factors


@functools.cache
def _table(seed: int, size: int, device: torch.device) -> Tensor:
    # Computed on the CPU, because the copy is complete when it returns: a table may be read from
    # another stream than that of its first use.
    return _odd_numbers(seed, 0, size, torch.device("cpu")).to(device)


def _factors(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """Some factors in their order. Sizes of tables are powers of two, so that few are kept."""
    last = first + count
    if last > MAX_TABLE:
        return _odd_numbers(seed, first, count, device)
    size = max(_MIN_TABLE, 1 << (last - 1).bit_length())
    return _table(seed, size, device)[first:last]


def _odd_numbers(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers that look random: those after the first so many of the sequence of a seed.

    This is splitmix64, written out because torch's own generators may change with its version, and
    the process of vLLM has another one.
    """
    places = torch.arange(first, first + count, dtype=torch.int64, device=device)
    bits = (places + (seed << 40)) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return (bits ^ _shifted(bits, 31)) | 1


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Bits shifted to the right. torch would fill the places that become free with the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one with the same bits."""
    return number - _WHOLE if number >= _WHOLE // 2 else number
