"""Tensors outside of a process: as plain buffers in shared memory, and as files.

Owns the form in which tensors and numeric arrays travel between processes. `encode` pickles a value
and puts the bytes of its tensors beside the pickle as 1-d uint8 arrays, which pickle 5 (and so Ray)
transfers out of band: no tensor is pickled, and a slice of rows carries its own rows only, not the
storage that it is a view of. `decode` is the inverse.

**Reading does not copy, and writing is private.** Ray gives every process of a node the same memory, as read-only
arrays. A torch view of it could be written to without a warning, and every process would see the change. So `decode`
maps the same pages a second time, copy-on-write (`MAP_PRIVATE`): reads come from the shared pages, and the first write
to a page makes the kernel copy that page for this process alone. The array that keeps the object alive in Ray lives as
long as a tensor on the mapping. If the memory cannot be mapped again (no /proc, no permission, not a file), and if a
message is small, the bytes are copied.

What does not travel: the device (CUDA tensors arrive on the CPU), `requires_grad`, and strides.
Subclasses of `torch.Tensor` other than Parameter and ragged columns are pickled as usual.

Does not know Ray, or what the tensors mean.
"""

import functools
import io
import json
import mmap
import os
import pickle
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from rolepool.errors import DataError, logger
from rolepool.files import atomic_path
from rolepool.protocol.columns import (
    Arrays,
    Column,
    MetaInfo,
    is_ragged,
    ragged_from_parts,
    ragged_parts,
)

Buffer = npt.NDArray[np.uint8]
Value = Any
"""What travels. Whoever sends it and whoever reads it know its type."""

MIN_MAPPED_BYTES = 2**20
"""A copy of fewer bytes than this is faster. The first mapping of a memory reads /proc, which takes
about 1 ms, and more in a process with CUDA."""


# The picklable form


@dataclass(frozen=True, slots=True)
class Encoded:
    """A pickled value, with the bytes of its tensors and numeric arrays beside it."""

    pickled: bytes
    buffers: list[Buffer]

    @property
    def num_bytes(self) -> int:
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)

    def decode(self) -> Value:
        """The value. Nobody else sees what is written to its tensors and arrays."""
        return pickle.loads(self.pickled, buffers=map(make_private, self.buffers))  # noqa: S301  # from our own processes


def encode(value: object) -> Encoded:
    """Pickle a value. The bytes of every tensor and numeric array in it, at any depth, become
    buffers.

    The buffers of contiguous CPU tensors and arrays are views, not copies: send them before the
    originals change. Lists, dicts and arrays may contain themselves.
    """
    pickled = io.BytesIO()
    buffers = list[pickle.PickleBuffer]()
    _Pickler(pickled, protocol=5, buffer_callback=buffers.append).dump(value)
    return Encoded(pickled.getvalue(), [np.asarray(buffer.raw()) for buffer in buffers])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: object) -> object:
        """The function and the arguments that make the value again."""
        if type(value) is np.ndarray and not value.dtype.hasobject:
            # "W" because a buffer that is pickled read-only would arrive read-only.
            writable = np.require(value, requirements=["C", "W"])
            raw = writable.reshape(-1).view(np.uint8)
            buffer = pickle.PickleBuffer(raw.data)
            return _from_bytes, (buffer, value.dtype, value.shape)
        if is_ragged(value):
            # Columns with one offsets tensor share it again.
            return ragged_from_parts, ragged_parts(value)
        if isinstance(value, TensorDictBase):
            entries = dict(value.items())
            return TensorDict, (entries, value.batch_size)
        if isinstance(value, torch.Tensor) and _is_plain(value):
            raw = tensor_bytes(value)
            buffer = pickle.PickleBuffer(raw.data)
            shape = tuple(value.shape)
            return _from_bytes, (buffer, value.dtype, shape)
        return super().reducer_override(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its shape and the numbers in its memory, and nothing else."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.layout != torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def tensor_bytes(tensor: torch.Tensor) -> Buffer:
    """The bytes of a strided tensor as a 1-d uint8 array. It is a view if the tensor is contiguous
    and on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1), which leaves a single element with whatever stride it had, and that cannot be
    # viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def _from_bytes(
    buffer: Buffer,
    dtype: torch.dtype | np.dtype[np.generic],
    shape: Sequence[int],
) -> Column:
    """The tensor or array that lives in a writable buffer, which it keeps alive."""
    if not isinstance(dtype, torch.dtype):
        return buffer.view(dtype).reshape(shape)
    if not buffer.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(buffer).view(dtype).reshape(shape)


# Private views of shared memory


class SharedMemory(NamedTuple):
    """A shared mapping of this process, and its file as (device, inode)."""

    start: int
    end: int
    offset: int
    file: tuple[int, int]


FindPlaces = Callable[[SharedMemory], Iterator[str]]
"""Finds the paths at which the mapped file may be opened."""


class _PrivateMapping(mmap.mmap):
    """A copy-on-write mapping of a part of shared memory. It is unmapped when the last array on it
    is gone."""

    memory: SharedMemory
    owner: Buffer  # pins the shared object; without it the pages would be given to other objects


_living: weakref.WeakSet[_PrivateMapping] = weakref.WeakSet()

# A shared mapping of a file, as a line of /proc/self/maps, which has thousands of lines in a
# process that uses CUDA.
_SHARED_LINE = re.compile(rb"^(\w+)-(\w+) ...s (\w+) (\w+):(\w+) ([1-9]\d*)", re.MULTILINE)
_MAP_NORESERVE = 0x4000  # Linux; only the pages that get written will need memory


def make_private(buffer: Buffer, find_places: FindPlaces | None = None) -> Buffer:
    """The same bytes, which may be written to without another process or a later read seeing it.

    A large read-only buffer may be shared memory. It is mapped again, copy-on-write, if its file is
    in one of the places that are found (`places_of`). All others are copied.
    """
    start = buffer.ctypes.data
    end = buffer.ctypes.data + buffer.nbytes
    if buffer.nbytes < MIN_MAPPED_BYTES or buffer.flags.writeable:
        return buffer.copy()
    first_page = start // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        memory = _memory_at(first_page, end)
        path = _path_of(memory, find_places or places_of)
        offset = first_page - memory.start + memory.offset
        if _file_at(path) != memory.file:
            raise OSError("its file cannot be opened a second time")
        with Path(path).open("rb") as file:
            mapping = _PrivateMapping(
                file.fileno(),
                end - first_page,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                offset=offset,
            )
    except (OSError, ValueError) as error:
        logger.debug(
            "copying %d bytes, because they cannot be mapped copy-on-write: %s",
            buffer.nbytes,
            error,
        )
        return buffer.copy()
    mapping.memory = memory
    mapping.owner = buffer
    _living.add(mapping)
    return np.frombuffer(mapping, np.uint8)[start - first_page :]


def _memory_at(low: int, high: int) -> SharedMemory:
    """The shared file mapping that contains these addresses. Raises OSError if there is none."""
    # A private mapping pins its object, so the addresses of the object's memory mean the same file
    # while it lives.
    for mapping in list(_living):
        if mapping.memory.start <= low and high <= mapping.memory.end:
            return mapping.memory
    all_maps = Path("/proc/self/maps").read_bytes()
    for line in _SHARED_LINE.finditer(all_maps):
        start = int(line[1], 16)
        end = int(line[2], 16)
        if start <= low and high <= end:
            major = int(line[4], 16)
            minor = int(line[5], 16)
            inode = int(line[6])
            return SharedMemory(
                start,
                end,
                offset=int(line[3], 16),
                file=(os.makedev(major, minor), inode),
            )
    raise OSError("they are not in a shared file")


@functools.cache  # searching all processes takes milliseconds
def _path_of(memory: SharedMemory, find_places: FindPlaces) -> str:
    """Where the mapped file, which has no name any more, can be opened. It is "" if that is not
    possible."""
    for path in find_places(memory):
        if _file_at(path) == memory.file:
            return path
    return ""


def _file_at(path: str) -> tuple[int, int] | None:
    """The device and inode of the file at a path, if there is one."""
    with suppress(OSError):
        status = Path(path).stat()
        return status.st_dev, status.st_ino
    return None


def places_of(memory: SharedMemory) -> Iterator[str]:
    """Where the file may be opened: this process's mapping of it (needs a capability), or the
    raylet, which made it."""
    yield f"/proc/self/map_files/{memory.start:x}-{memory.end:x}"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or it is another user's
            if (process / "comm").read_text() == "raylet\n":
                yield from map(str, (process / "fd").iterdir())


# Files


def save_parts(
    filepath: str | os.PathLike[str],
    batch: TensorDictBase | None,
    arrays: Arrays,
    meta_info: MetaInfo,
) -> None:
    """Write the parts of a batch to one safetensors file, completely or not at all.

    Tensors and numeric arrays are stored under `batch/KEY` and `arrays/KEY`, so that any
    safetensors reader finds them. A ragged column is stored as `batch/KEY/values` and
    `batch/KEY/offsets`. The file's metadata has everything else as JSON, under `arrays/KEY` and
    `meta_info/KEY`. Pickle is never used.
    """
    columns = {} if batch is None else dict(batch.items())
    batch_size = None if batch is None else list(batch.batch_size)
    texts: dict[str, str] = {}
    for key, value in meta_info.items():
        texts[f"meta_info/{key}"] = _as_json(f"meta_info[{key!r}]", value)
    keys = [list(columns), list(arrays)]
    texts["keys"] = json.dumps(keys)
    texts["batch_size"] = json.dumps(batch_size)
    tensors: dict[str, torch.Tensor] = {}
    for key, column in {**columns, **arrays}.items():
        if is_ragged(column):
            values, offsets = ragged_parts(column)
            tensors[f"batch/{key}/values"] = values
            tensors[f"batch/{key}/offsets"] = offsets
        elif isinstance(column, torch.Tensor):
            tensors[f"batch/{key}"] = column
        elif column.dtype.kind in "biuf":
            tensors[f"arrays/{key}"] = torch.from_numpy(column)
        else:
            texts[f"arrays/{key}"] = _as_json(f"non_tensor_batch[{key!r}]", column)
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        # A copy, because safetensors refuses two tensors in one storage.
        copies[name] = tensor.detach().cpu().clone().contiguous()
    path = Path(filepath)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        safetensors.torch.save_file(copies, temporary, texts)


def load_parts(
    filepath: str | os.PathLike[str],
) -> tuple[TensorDict | None, Arrays, MetaInfo]:
    """The batch, arrays and meta_info that `save_parts` wrote."""
    try:
        with safetensors.safe_open(filepath, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dict
            texts = {name: json.loads(text) for name, text in file.metadata().items()}
        names, array_names = texts["keys"]
    except (OSError, safetensors.SafetensorError, AttributeError, KeyError, ValueError) as error:
        raise DataError(f"{filepath} is not a file that save_to_disk wrote: {error}") from error

    def stored(name: str) -> Column:
        if name in texts:
            return np.fromiter(texts[name], object)
        if name in tensors:
            dense: Column = tensors[name]
            return dense
        values = tensors[f"{name}/values"]
        offsets = tensors[f"{name}/offsets"]
        return ragged_from_parts(values, offsets)

    batch = None
    if texts["batch_size"] is not None:
        columns = {key: stored(f"batch/{key}") for key in names}
        batch = TensorDict(columns, texts["batch_size"])
    arrays: Arrays = {}
    for key in array_names:
        arrays[key] = np.asarray(stored(f"arrays/{key}"))
    meta_info: MetaInfo = {}
    for name, value in texts.items():
        if name.startswith("meta_info/"):
            meta_info[name.removeprefix("meta_info/")] = value
    return batch, arrays, meta_info


def _as_json(name: str, value: object) -> str:
    """The value as JSON. Numbers and arrays of numpy become those of Python."""

    def plain(inside: object) -> object:
        if isinstance(inside, np.generic | np.ndarray):
            return inside.tolist()
        kind = type(inside)
        raise TypeError(f"it contains a {kind.__module__}.{kind.__qualname__}")

    try:
        return json.dumps(value, default=plain)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} cannot be written as JSON: {error}") from None
