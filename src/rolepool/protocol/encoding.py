"""Tensors as plain buffers: written once into shared memory, read there by everyone, private when written to.

Owns the form in which tensors and numeric arrays travel between processes. `encode` takes them out of a value
and leaves their bytes as 1-d uint8 arrays, which pickle 5 (and so Ray) hands over out of band: no tensor is
pickled, and a row slice carries its own rows and never the storage behind them. `decode` puts them back.

**Reading is free of copies, writing is private.** Ray gives every process of a node the same memory, as read-only
arrays, and a torch view of it would be writable without a word, for everybody. So `decode` maps the same pages a
second time, copy-on-write (`MAP_PRIVATE`): reads come from the shared pages, and the first write to a page makes the
kernel copy that page for this process alone. The sender's array, which pins the object in Ray, lives as long as a
tensor on the mapping does. Where the memory cannot be mapped again (no /proc, no permission, not a file), and for
small messages, the bytes are copied.

What does not travel: the device (CUDA tensors arrive on the CPU), `requires_grad`, strides, and subclasses of
`torch.Tensor` other than Parameter and jagged nested tensors, which are left to pickle.

Does not know Ray, batches, or what the tensors mean.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rolepool.errors import DataError

logger = logging.getLogger(__name__)

Buffer = npt.NDArray[np.uint8]

# Mapping costs a look at /proc (about 1 ms when nothing of this memory is held yet); below this a copy is cheaper.
MIN_MAPPED_BYTES = 64 * 1024


# --- the picklable form -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value with its tensors and numeric arrays taken out: `tree` refers to `buffers` by position."""

    tree: Any
    buffers: list[Buffer]

    def decode(self) -> Any:
        return decode(self)


class _TensorRef(NamedTuple):
    buffer: int
    dtype: str
    shape: tuple[int, ...]


class _JaggedRef(NamedTuple):
    values: _TensorRef
    offsets: _TensorRef
    dim: int


class _ArrayRef(NamedTuple):
    buffer: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _Container(NamedTuple):
    """A dict, list, tuple or object array that holds a reference somewhere below; others stay as they are."""

    kind: str
    keys: Any
    items: list[Any]


def encode(value: Any) -> Encoded:
    """Take every tensor and numeric array out of `value`, however deep in dicts, lists, tuples and object arrays.

    Contiguous CPU tensors and arrays are not copied here: the buffers are views, so write them out before the
    originals change. Objects that occur several times are encoded once.
    """
    return _Encoder().run(value)


def decode(encoded: Encoded) -> Any:
    """The value that was encoded; its tensors and arrays may be written to without anyone else seeing it."""
    return _Decoder(make_private(encoded.buffers)).restore(encoded.tree)


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


def object_array(items: Sequence[Any]) -> npt.NDArray[np.object_]:
    """A 1-d object array of these items; `np.array` would make lists of one length into a second dimension."""
    array = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        array[i] = item
    return array


class _Encoder:
    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.done: dict[int, Any] = {}
        self.alive: list[Any] = []  # an id is only good while its object lives
        self.open: set[int] = set()

    def run(self, value: Any) -> Encoded:
        return Encoded(self.replace(value), self.buffers)

    def replace(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor | np.ndarray | dict | list | tuple):
            return value
        key = id(value)
        if key in self.done:
            return self.done[key]
        if key in self.open:
            raise DataError(f"a {type(value).__name__} contains itself, which cannot be sent to another process")
        self.open.add(key)
        replaced = self.replace_new(value)
        self.open.remove(key)
        self.done[key] = replaced
        self.alive.append(value)
        return replaced

    def replace_new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if type(value) is np.ndarray:
            return self.objects(value) if value.dtype.hasobject else self.array(value)
        if type(value) is dict:
            return self.container(value, "dict", list(value), list(value.values()))
        if type(value) is list:
            return self.container(value, "list", None, value)
        if type(value) is tuple:
            return self.container(value, "tuple", None, list(value))
        return value

    def container(self, value: Any, kind: str, keys: Any, items: list[Any]) -> Any:
        replaced = [self.replace(item) for item in items]
        changed = any(new is not old for new, old in zip(replaced, items, strict=True))
        return _Container(kind, keys, replaced) if changed else value

    def objects(self, array: npt.NDArray[Any]) -> Any:
        if array.dtype != np.dtype(object):
            return array
        return self.container(array, "objects", array.shape, list(array.flat))

    def array(self, array: npt.NDArray[Any]) -> _ArrayRef:
        flat = np.ascontiguousarray(array).reshape(-1)
        self.buffers.append(flat.view(np.uint8) if array.nbytes else np.empty(0, np.uint8))
        return _ArrayRef(len(self.buffers) - 1, array.dtype, array.shape)

    def tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_nested and tensor.layout == torch.jagged:
            # Through `replace`: columns with one offsets tensor share it again on the other side, by which torch
            # knows that their rows have the same lengths.
            values, offsets, dim = jagged_parts(tensor)
            return _JaggedRef(self.replace(values), self.replace(offsets), dim)
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return tensor
        self.buffers.append(tensor_bytes(tensor))
        return _TensorRef(len(self.buffers) - 1, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class _Decoder:
    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.done: dict[int, Any] = {}

    def restore(self, node: Any) -> Any:
        if not isinstance(node, _TensorRef | _JaggedRef | _ArrayRef | _Container):
            return node
        if id(node) not in self.done:
            self.done[id(node)] = self.restore_new(node)
        return self.done[id(node)]

    def restore_new(self, node: _TensorRef | _JaggedRef | _ArrayRef | _Container) -> Any:
        if isinstance(node, _TensorRef):
            return tensor_from_bytes(self.buffers[node.buffer], getattr(torch, node.dtype), node.shape)
        if isinstance(node, _JaggedRef):
            return jagged_from_parts(self.restore(node.values), self.restore(node.offsets), node.dim)
        if isinstance(node, _ArrayRef):
            buffer = self.buffers[node.buffer]
            return buffer.view(node.dtype).reshape(node.shape) if buffer.size else np.empty(node.shape, node.dtype)
        items = [self.restore(item) for item in node.items]
        if node.kind == "dict":
            return dict(zip(node.keys, items, strict=True))
        if node.kind == "objects":
            return object_array(items).reshape(node.keys)
        return tuple(items) if node.kind == "tuple" else items


class Jagged(NamedTuple):
    """A jagged tensor without holes: row i is `values` from `offsets[i]` to `offsets[i + 1]`.

    `dim` is the dimension of the jagged tensor whose length varies (1, unless it was transposed); in `values`, which
    has no dimension of rows, it is `dim - 1`.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    dim: int


def jagged_parts(tensor: torch.Tensor) -> Jagged:
    jagged: Any = tensor  # torch types it as a plain Tensor, and has no public name for the ragged dimension
    if jagged.lengths() is not None:
        jagged = jagged.contiguous()
    return Jagged(jagged.values(), jagged.offsets(), int(jagged._ragged_idx))


def jagged_from_parts(values: torch.Tensor, offsets: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)


# --- private views of shared memory -------------------------------------------------------------------------------


def make_private(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Buffers with the same bytes that may be written to without another process or a later read seeing it.

    A writable buffer is private already and returned as it is. Read-only ones are shared memory, or may be: large
    ones are mapped again copy-on-write, all those of one message together; the others are copied.
    """
    private = list(buffers)
    by_memory: dict[int, tuple[_SharedMemory, list[int]]] = {}
    for i, buffer in enumerate(buffers):
        if buffer.flags.writeable:
            continue
        memory = _memory_at(_address(buffer), buffer.nbytes) if buffer.nbytes >= MIN_MAPPED_BYTES else None
        if memory is None:
            private[i] = buffer.copy()
        else:
            by_memory.setdefault(memory.start, (memory, []))[1].append(i)
    for memory, positions in by_memory.values():
        views = _copy_on_write(memory, [buffers[i] for i in positions])
        for i, view in zip(positions, views, strict=True):
            private[i] = view
    return private


def _copy_on_write(memory: _SharedMemory, buffers: list[Buffer]) -> list[Buffer]:
    low = min(_address(buffer) for buffer in buffers) // mmap.PAGESIZE * mmap.PAGESIZE
    high = max(_address(buffer) + buffer.nbytes for buffer in buffers)
    try:
        mapping = _PrivateMapping(memory, low, high - low, buffers)
    except OSError as error:
        logger.debug("copying %d bytes, as they cannot be mapped copy-on-write: %s", high - low, error)
        return [buffer.copy() for buffer in buffers]
    whole: Buffer = np.asarray(mapping)
    return [whole[_address(buffer) - low :][: buffer.nbytes] for buffer in buffers]


class _PrivateMapping:
    """A copy-on-write mapping of a part of shared memory, undone when the last array on it is gone.

    Not `mmap.mmap`, which holds a file descriptor for every mapping.
    """

    def __init__(self, memory: _SharedMemory, low: int, num_bytes: int, owners: list[Buffer]) -> None:
        self._address = 0
        self._num_bytes = num_bytes
        self._memory = memory
        self._owners = owners  # pins the shared object; without it the pages would be given to another one
        self._munmap = _libc().munmap
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
        offset = low - memory.start + memory.offset
        address = _libc().mmap(None, num_bytes, protection, flags, memory.descriptor, offset)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._address = address
        data = (address, False)  # False: not read-only
        self.__array_interface__ = {"data": data, "shape": (num_bytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self._address:
            self._munmap(self._address, self._num_bytes)


class _SharedMemory:
    """A shared file mapping of this process and a read-only descriptor of its file.

    Lives exactly as long as private mappings of it do: they pin objects in it, so while one lives the addresses
    still mean the same file; and once none does, the descriptor must not keep a finished Ray's memory allocated.
    """

    def __init__(self, start: int, end: int, offset: int, descriptor: int) -> None:
        self.start, self.end, self.offset, self.descriptor = start, end, offset, descriptor
        self._close = os.close

    def __del__(self) -> None:
        self._close(self.descriptor)


_memories: weakref.WeakValueDictionary[int, _SharedMemory] = weakref.WeakValueDictionary()
_known_paths: dict[tuple[int, int], str] = {}  # where a file (device, inode) was opened last time
_unreachable: set[tuple[int, int]] = set()

_MAP_NORESERVE = 0x4000  # Linux; only the pages that get written will need memory
_MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _address(buffer: Buffer) -> int:
    return int(buffer.__array_interface__["data"][0])


def _memory_at(address: int, num_bytes: int) -> _SharedMemory | None:
    """The shared file mapping that holds these bytes, or None if there is none or its file cannot be opened."""
    for memory in list(_memories.values()):
        if memory.start <= address and address + num_bytes <= memory.end:
            return memory
    found = _mapping_at(address)
    if found is None or address + num_bytes > found.end or not found.shared:
        return None
    descriptor = _open_file(found)
    if descriptor is None:
        return None
    memory = _SharedMemory(found.start, found.end, found.offset, descriptor)
    _memories[found.start] = memory
    return memory


class _Mapping(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    end: int
    shared: bool
    offset: int
    device: int
    inode: int


def _mapping_at(address: int) -> _Mapping | None:
    try:
        lines = Path("/proc/self/maps").read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        span, mode, offset, device, inode, *_ = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split(b"-"))
        if start <= address < end:
            major, minor = (int(part, 16) for part in device.split(b":"))
            shared = mode.endswith(b"s") and inode != b"0"
            return _Mapping(start, end, shared, int(offset, 16), os.makedev(major, minor), int(inode))
    return None


def _open_file(mapping: _Mapping) -> int | None:
    """A read-only descriptor of the mapped file, which has no name any more."""
    wanted = (mapping.device, mapping.inode)
    if wanted in _unreachable:
        return None
    known = [_known_paths[wanted]] if wanted in _known_paths else []
    for path in itertools.chain(known, _places_of(mapping)):
        descriptor = _open_if(path, wanted)
        if descriptor is not None:
            _known_paths[wanted] = path
            return descriptor
    _unreachable.add(wanted)
    logger.debug("shared memory %s is copied when read: its file cannot be opened a second time", wanted)
    return None


def _open_if(path: str, wanted: tuple[int, int]) -> int | None:
    try:
        found = Path(path).stat()  # before opening: to open a pipe or a device could block
        if (found.st_dev, found.st_ino) != wanted:
            return None
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _places_of(mapping: _Mapping) -> Iterator[str]:
    """Where the file may be opened: our own mapping of it (needs a capability), else the raylet, which made it.

    A worker's parent is its raylet; a driver looks for processes of that name. Other users' cannot be opened.
    """
    yield f"/proc/self/map_files/{mapping.start:x}-{mapping.end:x}"
    for pid in (str(os.getppid()), *_raylets()):
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        yield from map(str, descriptors)


def _raylets() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text() == "raylet\n":
                yield entry.name
        except OSError:
            continue
