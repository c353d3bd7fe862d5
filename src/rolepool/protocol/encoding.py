"""Tensors outside of a process: as plain buffers in shared memory, and as files.

Owns the form in which tensors and numeric arrays travel between processes. `encode` pickles a value and puts the bytes
of its tensors beside the pickle as 1-d uint8 arrays, which pickle 5 (and so Ray) transfers out of band: no tensor is
pickled, and a slice of rows carries its own rows only, not the storage that it is a view of. `decode` is the inverse.

**Reading does not copy, and writing is private.** Ray gives every process of a node the same memory, as read-only
arrays. A torch view of it could be written to without a warning, and every process would see the change. So `decode`
maps the same pages a second time, copy-on-write (`MAP_PRIVATE`): reads come from the shared pages, and the first write
to a page makes the kernel copy that page for this process alone. The array that keeps the object alive in Ray lives as
long as a tensor on the mapping. If the memory cannot be mapped again (no /proc, no permission, not a file), and if a
message is small, the bytes are copied.

What does not travel: the device (CUDA tensors arrive on the CPU), `requires_grad`, and strides. Subclasses of
`torch.Tensor` other than Parameter and ragged columns are pickled as usual.

Does not know Ray, or what the tensors mean.
"""

import ctypes
import functools
import io
import json
import logging
import mmap
import os
import pickle
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from rolepool.errors import DataError
from rolepool.files import atomic_path
from rolepool.protocol.ragged import is_ragged, ragged_from_parts, ragged_parts

logger = logging.getLogger(__name__)

Buffer = npt.NDArray[np.uint8]

# The first mapping of a memory reads /proc, which takes about 1 ms, and more in a process with CUDA. A copy of fewer
# bytes than this is faster.
MIN_MAPPED_BYTES = 2**20
FILE_FORMAT = "rolepool.DataProto 2"


# --- the picklable form -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoded:
    """A pickled value, with the bytes of its tensors and numeric arrays beside it."""

    pickled: bytes
    buffers: list[Buffer]
    is_column: bool = False
    """Whether the value is itself a tensor or a numeric array, and does not just contain some."""

    @property
    def num_bytes(self) -> int:
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)

    def decode(self) -> Any:
        """The value. Nobody else sees what is written to its tensors and arrays."""
        return decode_all([self])[0]


def decode_all(values: Sequence[Encoded], *, to_copy: bool = False) -> list[Any]:
    """Decode several values of one message, and map its shared memory only once.

    With `to_copy`, columns are views of the message itself: the caller must not write to them, and must copy them
    while it holds the message.
    """
    views = [to_copy and value.is_column for value in values]
    own = [buffer for value, is_view in zip(values, views, strict=True) if not is_view for buffer in value.buffers]
    private = iter(make_private(own))
    decoded = []
    for value, is_view in zip(values, views, strict=True):
        buffers = map(_view, value.buffers) if is_view else islice(private, len(value.buffers))
        decoded.append(pickle.loads(value.pickled, buffers=buffers))  # noqa: S301  # from our own processes
    return decoded


def _view(buffer: Buffer) -> Buffer:
    """The same memory as a writable array, because torch warns about others."""
    if not buffer.nbytes:
        return buffer.copy()
    return np.ctypeslib.as_array((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ctypes.data))


def encode(value: Any) -> Encoded:
    """Pickle a value. The bytes of every tensor and numeric array in it, at any depth, become buffers.

    The buffers of contiguous CPU tensors and arrays are views, not copies: send them before the originals change.
    Lists, dicts and arrays may contain themselves.
    """
    pickled, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Pickler(pickled, protocol=5, buffer_callback=buffers.append).dump(value)
    except pickle.PicklingError as error:
        if isinstance(error.__cause__, RecursionError):
            raise DataError("cannot be sent: a DataProto contains itself, or the value is nested too deeply") from None
        raise
    is_column = isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
    return Encoded(pickled.getvalue(), [np.asarray(buffer.raw()) for buffer in buffers], is_column)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and not value.dtype.hasobject:
            # "W" because a buffer that is pickled read-only would arrive read-only.
            raw: Any = np.require(value, requirements=["C", "W"]).reshape(-1).view(np.uint8)
            return _from_bytes, (pickle.PickleBuffer(raw), value.dtype, value.shape)
        if is_ragged(value):
            return ragged_from_parts, ragged_parts(value)  # columns with one offsets tensor share it again
        if isinstance(value, TensorDictBase):
            return TensorDict, (dict(value.items()), value.batch_size)
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if is_plain and not (value.is_nested or value.is_quantized or value.is_meta):
            raw = tensor_bytes(value)
            return _from_bytes, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))
        return super().reducer_override(value)


def tensor_bytes(tensor: torch.Tensor) -> Buffer:
    """The bytes of a strided tensor as a 1-d uint8 array. It is a view if the tensor is contiguous and on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1), which leaves a single element with whatever stride it had, and that cannot be viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def _from_bytes(buffer: Buffer, dtype: torch.dtype | np.dtype[Any], shape: Sequence[int]) -> Any:
    """The tensor or array that lives in a writable buffer, which it keeps alive."""
    if isinstance(dtype, torch.dtype):
        return torch.from_numpy(buffer).view(dtype).reshape(shape) if buffer.size else torch.empty(shape, dtype=dtype)
    return buffer.view(dtype).reshape(shape)


# --- private views of shared memory -------------------------------------------------------------------------------


class _SharedMemory(NamedTuple):
    """A shared mapping of this process, and its file as (device, inode)."""

    start: int
    end: int
    offset: int
    file: tuple[int, int]


class _PrivateMapping(mmap.mmap):
    """A copy-on-write mapping of a part of shared memory. It is unmapped when the last array on it is gone."""

    memory: _SharedMemory
    owners: list[Buffer]  # pins the shared object; without it the pages would be given to other objects


_living: weakref.WeakSet[_PrivateMapping] = weakref.WeakSet()

# A shared mapping of a file, as a line of /proc/self/maps, which has thousands of lines in a process that uses CUDA.
_SHARED_LINE = re.compile(rb"^(\w+)-(\w+) ...s (\w+) (\w+):(\w+) ([1-9]\d*)", re.MULTILINE)
_MAP_NORESERVE = 0x4000  # Linux; only the pages that get written will need memory


def make_private(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Buffers with the same bytes that may be written to without another process or a later read seeing it.

    Large read-only buffers may be shared memory. Those of one message are parts of one object: they are mapped again
    together, copy-on-write. The others are copied.
    """
    shared = [buffer for buffer in buffers if buffer.nbytes >= MIN_MAPPED_BYTES and not buffer.flags.writeable]
    mapped = dict(zip(map(id, shared), _copy_on_write(shared), strict=True)) if shared else {}
    return [mapped[id(buffer)] if id(buffer) in mapped else buffer.copy() for buffer in buffers]


def _copy_on_write(buffers: list[Buffer]) -> list[Buffer]:
    """The buffers, mapped again together. If that is not possible, they are copied."""
    addresses = [buffer.ctypes.data for buffer in buffers]
    low = min(addresses) // mmap.PAGESIZE * mmap.PAGESIZE
    high = max(address + buffer.nbytes for address, buffer in zip(addresses, buffers, strict=True))
    try:
        memory = _memory_at(low, high)
        path, offset = _path_of(memory), low - memory.start + memory.offset
        if _file_at(path) != memory.file:
            raise OSError("their file cannot be opened a second time")
        with Path(path).open("rb") as file:
            mapping = _PrivateMapping(file.fileno(), high - low, mmap.MAP_PRIVATE | _MAP_NORESERVE, offset=offset)
    except (OSError, ValueError) as error:
        logger.debug("copying %d buffers, because they cannot be mapped copy-on-write: %s", len(buffers), error)
        return [buffer.copy() for buffer in buffers]
    mapping.memory, mapping.owners = memory, buffers
    _living.add(mapping)
    whole = np.frombuffer(mapping, np.uint8)
    return [whole[address - low :][: buffer.nbytes] for address, buffer in zip(addresses, buffers, strict=True)]


def _memory_at(low: int, high: int) -> _SharedMemory:
    """The shared file mapping that contains these addresses. Raises OSError if there is none."""
    # A private mapping pins its object, so the addresses of the object's memory mean the same file while it lives.
    for mapping in list(_living):
        if mapping.memory.start <= low and high <= mapping.memory.end:
            return mapping.memory
    for line in _SHARED_LINE.finditer(Path("/proc/self/maps").read_bytes()):
        start, end, offset, major, minor = (int(part, 16) for part in line.groups()[:5])
        if start <= low and high <= end:
            return _SharedMemory(start, end, offset, (os.makedev(major, minor), int(line[6])))
    raise OSError("they are not in a shared file")


@functools.cache  # searching all processes takes milliseconds
def _path_of(memory: _SharedMemory) -> str:
    """Where the mapped file, which has no name any more, can be opened. It is "" if that is not possible."""
    return next((path for path in _places_of(memory) if _file_at(path) == memory.file), "")


def _file_at(path: str) -> tuple[int, int] | None:
    """The device and inode of the file at a path, if there is one."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _places_of(memory: _SharedMemory) -> Iterator[str]:
    """Where the file may be opened: this process's mapping of it (needs a capability), or the raylet, which made it."""
    yield f"/proc/self/map_files/{memory.start:x}-{memory.end:x}"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text() == "raylet\n":
                yield from map(str, (process / "fd").iterdir())
        except OSError:
            continue  # it has ended, or it is another user's


# --- files --------------------------------------------------------------------------------------------------------


def save_parts(filepath: str | os.PathLike[str], batch: Any, arrays: dict[str, Any], meta_info: dict[str, Any]) -> None:
    """Write the parts of a batch to one safetensors file, completely or not at all.

    Tensors and numeric arrays are stored under `batch/KEY` and `arrays/KEY`, so that any safetensors reader finds them.
    A ragged column is stored as `batch/KEY/values` and `batch/KEY/offsets`. The file's metadata has everything else as
    JSON. Pickle is never used.
    """
    columns = {} if batch is None else dict(batch.items())
    content: dict[str, Any] = {
        "batch_size": None if batch is None else list(batch.batch_size),
        "keys": [list(columns), list(arrays)],
        "objects": {},
        "meta_info": _as_json(meta_info, "meta_info"),
    }
    tensors: dict[str, torch.Tensor] = {}
    for key, column in {**columns, **arrays}.items():
        if is_ragged(column):
            tensors[f"batch/{key}/values"], tensors[f"batch/{key}/offsets"] = ragged_parts(column)
        elif isinstance(column, torch.Tensor):
            tensors[f"batch/{key}"] = column
        elif column.dtype.kind in "biuf":
            tensors[f"arrays/{key}"] = torch.from_numpy(column)
        else:
            content["objects"][key] = _as_json(column.tolist(), f"non_tensor_batch[{key!r}]")
    # Copies, because safetensors refuses two tensors in one storage.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    path = Path(filepath)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        try:
            safetensors.torch.save_file(copies, temporary, {"format": FILE_FORMAT, "content": json.dumps(content)})
        except (KeyError, ValueError) as error:
            raise DataError(f"{path}: a safetensors file cannot hold these tensors ({error})") from None


def load_parts(filepath: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The batch, arrays and meta_info that `save_parts` wrote."""
    path = Path(filepath)
    if not path.is_file():
        raise DataError(f"there is no batch to load at {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dict
            content = json.loads(file.metadata()["content"])
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a file that save_to_disk wrote: {error}") from error
    columns, objects, batch_size = {}, content["objects"], content["batch_size"]
    for key in content["keys"][0]:
        if f"batch/{key}" in tensors:
            columns[key] = tensors[f"batch/{key}"]
        else:
            columns[key] = ragged_from_parts(tensors[f"batch/{key}/values"], tensors[f"batch/{key}/offsets"])
    arrays = {
        key: np.fromiter(objects[key], object) if key in objects else tensors[f"arrays/{key}"].numpy()
        for key in content["keys"][1]
    }
    return None if batch_size is None else TensorDict(columns, batch_size), arrays, content["meta_info"]


def _as_json(value: Any, name: str, around: tuple[int, ...] = ()) -> Any:
    """The value as JSON can hold it. Numbers of numpy become Python's, and tuples and arrays become lists.

    `around` has the ids of the containers that the value is in.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if id(value) in around:
        raise DataError(f"{name} is inside of itself, which a JSON file cannot hold")
    inside = (*around, id(value))
    if isinstance(value, dict):
        return {str(key): _as_json(item, f"{name}[{key!r}]", inside) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_as_json(item, f"{name}[{number}]", inside) for number, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    raise DataError(f"{name} is a {kind.__module__}.{kind.__qualname__}, which a JSON file cannot hold")
