"""Tensors as plain buffers: written once into shared memory, read there by everyone, private when written to.

Owns the form in which tensors and numeric arrays travel between processes. `encode` pickles a value and leaves the
bytes of its tensors beside it as 1-d uint8 arrays, which pickle 5 (and so Ray) hands over out of band: no tensor is
pickled, and a row slice carries its own rows and never the storage behind them. `decode` puts them back.

**Reading is free of copies, writing is private.** Ray gives every process of a node the same memory, as read-only
arrays, and a torch view of it would be writable without a warning, for every process. So `decode` maps the same pages a
second time, copy-on-write (`MAP_PRIVATE`): reads come from the shared pages, and the first write to a page makes the
kernel copy that page for this process alone. The array
that keeps the object alive in Ray lives as long as a tensor on the mapping. If the memory cannot be mapped again (no
/proc, no permission, not a file), and for small messages, the bytes are copied.

What does not travel: the device (CUDA tensors arrive on the CPU), `requires_grad`, strides, and subclasses of
`torch.Tensor` other than Parameter and ragged columns, which are left to pickle.

Does not know Ray, batches, or what the tensors mean.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import pickle
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from rolepool.protocol.ragged import is_ragged, ragged_from_parts, ragged_parts

logger = logging.getLogger(__name__)

Buffer = npt.NDArray[np.uint8]

# Mapping costs a look at /proc: about 1 ms when nothing of this memory is held yet, and more in a process with CUDA.
# Below this a copy is cheaper.
MIN_MAPPED_BYTES = 2**20


# --- the picklable form -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoded:
    """A pickled value, with the bytes of its tensors and numeric arrays beside it."""

    pickled: bytes
    buffers: list[Buffer]

    @property
    def num_bytes(self) -> int:
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)

    def decode(self) -> Any:
        """The value; its tensors and arrays may be written to without anyone else seeing it."""
        return decode_all([self])[0]


def decode_all(values: Sequence[Encoded]) -> list[Any]:
    """Several values of one message, for which its shared memory is mapped only once."""
    buffers = iter(make_private([buffer for value in values for buffer in value.buffers]))
    return [
        pickle.loads(value.pickled, buffers=list(islice(buffers, len(value.buffers))))  # noqa: S301  # our own processes
        for value in values
    ]


def encode(value: Any) -> Encoded:
    """Take every tensor and numeric array out of `value`, however deep they are.

    Contiguous CPU tensors and arrays are not copied here: the buffers are views, so write them out before the
    originals change.
    """
    pickled, buffers = io.BytesIO(), list[Buffer]()

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.asarray(buffer.raw()))

    _Pickler(pickled, protocol=5, buffer_callback=keep).dump(value)
    return Encoded(pickled.getvalue(), buffers)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        raw: Any
        if type(value) is np.ndarray and not value.dtype.hasobject:
            raw = _array_bytes(value)
            return _array_from_bytes, (pickle.PickleBuffer(raw), value.dtype, value.shape)
        if is_ragged(value):
            return ragged_from_parts, ragged_parts(value)  # columns with one offsets tensor share it again
        if isinstance(value, TensorDictBase):
            return TensorDict, (dict(value.items()), value.batch_size)
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if is_plain and not (value.is_nested or value.is_quantized or value.is_meta):
            raw = tensor_bytes(value)
            return tensor_from_bytes, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))
        return super().reducer_override(value)


def tensor_bytes(tensor: torch.Tensor) -> Buffer:
    """The bytes of a strided tensor as a 1-d uint8 array: a view where the tensor is contiguous and on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1), which leaves a single element with whatever stride it had, and that cannot be viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def tensor_from_bytes(buffer: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that lives in a writable buffer, which it keeps alive."""
    if buffer.size == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(buffer).view(dtype).reshape(tuple(shape))


def _array_bytes(array: npt.NDArray[Any]) -> Buffer:
    flat = np.require(array, requirements=["C", "W"]).reshape(-1)  # what is pickled read-only would arrive so
    return flat.view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def _array_from_bytes(buffer: Buffer, dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    return buffer.view(dtype).reshape(shape) if buffer.size else np.empty(shape, dtype)


def object_array(items: Sequence[Any]) -> npt.NDArray[np.object_]:
    """A 1-d object array of these items; `np.array` would make lists of one length into a second dimension."""
    array = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        array[i] = item
    return array


# --- private views of shared memory -------------------------------------------------------------------------------


def make_private(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Buffers with the same bytes that may be written to without another process or a later read seeing it.

    Large read-only ones are shared memory, or may be: they are mapped again copy-on-write, all those of one message
    together; the others are copied.
    """
    private = {}
    by_memory: dict[_SharedMemory, dict[int, Buffer]] = {}
    for i, buffer in enumerate(buffers):
        may_be_shared = buffer.nbytes >= MIN_MAPPED_BYTES and not buffer.flags.writeable
        memory = _memory_at(_address(buffer), buffer.nbytes, by_memory) if may_be_shared else None
        if memory is None:
            private[i] = buffer.copy()
        else:
            by_memory.setdefault(memory, {})[i] = buffer
    for memory, shared in by_memory.items():
        private.update(zip(shared, _copy_on_write(memory, list(shared.values())), strict=True))
    return [private[i] for i in range(len(buffers))]


def _copy_on_write(memory: _SharedMemory, buffers: list[Buffer]) -> list[Buffer]:
    low = min(_address(buffer) for buffer in buffers) // mmap.PAGESIZE * mmap.PAGESIZE
    high = max(_address(buffer) + buffer.nbytes for buffer in buffers)
    try:
        descriptor = _open(memory)
        try:
            mapping = _PrivateMapping(
                descriptor,
                high - low,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=low - memory.start + memory.offset,
            )
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        logger.debug("copying %d bytes, as they cannot be mapped copy-on-write: %s", high - low, error)
        return [buffer.copy() for buffer in buffers]
    mapping.memory, mapping.owners = memory, buffers
    _living.add(mapping)
    whole = np.frombuffer(mapping, np.uint8)
    return [whole[_address(buffer) - low :][: buffer.nbytes] for buffer in buffers]


class _SharedMemory(NamedTuple):
    """A shared mapping of this process, and its file as (device, inode)."""

    start: int
    end: int
    offset: int
    file: tuple[int, int]


class _PrivateMapping(mmap.mmap):
    """A copy-on-write mapping of a part of shared memory, undone when the last array on it is gone."""

    memory: _SharedMemory
    owners: list[Buffer]  # pins the shared objects; without it the pages would be given to other ones


_living: weakref.WeakSet[_PrivateMapping] = weakref.WeakSet()
_known_paths: dict[tuple[int, int], str | None] = {}  # where a file can be opened, if anywhere

_SHARED_LINE = re.compile(rb"^(\w+)-(\w+) ...s (\w+) (\w+):(\w+) ([1-9]\d*)", re.MULTILINE)
"""Of /proc/self/maps, which has thousands of lines in a process that uses CUDA: a shared mapping of a file."""
_MAP_NORESERVE = 0x4000  # Linux; only the pages that get written will need memory


def _address(buffer: Buffer) -> int:
    return int(buffer.__array_interface__["data"][0])


def _memory_at(address: int, num_bytes: int, known: Iterable[_SharedMemory]) -> _SharedMemory | None:
    """The shared file mapping that holds these bytes, if there is one."""
    # Private mappings pin objects, so while one lives its addresses mean the same file.
    for memory in (*known, *(mapping.memory for mapping in list(_living))):
        if memory.start <= address and address + num_bytes <= memory.end:
            return memory
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return None
    for line in _SHARED_LINE.finditer(maps):
        start, end, offset, major, minor = (int(part, 16) for part in line.groups()[:5])
        if start <= address and address + num_bytes <= end:
            return _SharedMemory(start, end, offset, (os.makedev(major, minor), int(line[6])))
    return None


def _open(memory: _SharedMemory) -> int:
    """A read-only descriptor of the mapped file, which has no name any more."""
    if memory.file not in _known_paths:
        _known_paths[memory.file] = next((path for path in _places_of(memory) if _file_at(path) == memory.file), None)
    path = _known_paths[memory.file]
    if path is None or _file_at(path) != memory.file:
        raise OSError("its file cannot be opened a second time")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _places_of(memory: _SharedMemory) -> Iterator[str]:
    """Where the file may be opened: our own mapping of it (needs a capability), else the raylet, which made it."""
    yield f"/proc/self/map_files/{memory.start:x}-{memory.end:x}"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text() == "raylet\n":
                yield from map(str, (process / "fd").iterdir())
        except OSError:
            continue  # gone, or another user's
