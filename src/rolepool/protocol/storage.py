"""Batches as files: one safetensors file that also holds, as JSON, whatever is not a tensor. Never pickle.

Owns the file format. Tensors are stored under `batch['<key>']`, so that any safetensors reader finds them; ragged ones
as values and offsets, and dtypes that safetensors lacks as bytes. The entry `json` (UTF-8 bytes) describes the rest:
plain JSON values as they are, everything else as an object with one `$` key, arrays in it by the name of their entry.

Does not know DataProto: it takes and gives the parts of one.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from rolepool.errors import DataError
from rolepool.protocol.columns import Arrays
from rolepool.protocol.encoding import object_array, tensor_bytes, tensor_from_bytes
from rolepool.protocol.ragged import is_ragged, ragged_from_parts, ragged_parts

FORMAT = "rolepool.DataProto 1"

_NATIVE_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}

Parts = tuple[TensorDictBase | None, Arrays, dict[str, Any]]
_Entries = dict[str, torch.Tensor]


def save(filepath: str | os.PathLike[str], *parts: Any) -> None:
    """Write the parts of a batch to one file, through a temporary name, so that it is never seen half written."""
    entries: _Entries = {}
    names = ("batch", "non_tensor_batch", "meta_info")
    document = [_to_json(part, name, entries) for part, name in zip(parts, names, strict=True)]
    text = json.dumps({"format": FORMAT, "parts": document}).encode()
    entries["json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    path = Path(filepath)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        safetensors.torch.save_file(entries, temporary, metadata={"format": FORMAT})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(filepath: str | os.PathLike[str]) -> Parts:
    """The parts of the batch in a file."""
    path = Path(filepath)
    if not path.is_file():
        raise DataError(f"there is no batch to load at {path}")
    try:
        entries = safetensors.torch.load_file(path)
        document = json.loads(entries["json"].numpy().tobytes())
        found = document["format"]
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a file that save_to_disk wrote: {error}") from error
    if found != FORMAT:
        raise DataError(f"{path} has format {found}; this reads {FORMAT}")
    batch, arrays, meta_info = _from_json(document["parts"], entries)
    return batch, arrays, meta_info


def _to_json(value: Any, where: str, entries: _Entries) -> Any:
    """A value as JSON; tensors and arrays are put among the entries, under the name of the place they were found at."""

    def inner(item: Any, key: Any) -> Any:
        return _to_json(item, f"{where}[{key!r}]", entries)

    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, TensorDictBase):
        columns = {key: inner(tensor, key) for key, tensor in value.items()}
        return {"$batch": columns, "batch_size": list(value.batch_size)}
    if is_ragged(value):
        return {"$jagged": [inner(part, i) for i, part in enumerate(ragged_parts(value))]}
    if isinstance(value, torch.Tensor) and value.dtype in _NATIVE_DTYPES:
        # A copy: safetensors refuses two entries in one storage.
        entries[where] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"$tensor": where}
    if isinstance(value, torch.Tensor):
        entries[where] = torch.from_numpy(tensor_bytes(value).copy())
        return {"$bytes": where, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if kind is np.ndarray and value.dtype == np.dtype(object):
        return {"$objects": [inner(item, i) for i, item in enumerate(value.flat)], "shape": list(value.shape)}
    if kind is np.ndarray and not value.dtype.hasobject and not value.dtype.names:
        entries[where] = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8))
        return {"$array": where, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic) and not isinstance(value, np.void | np.object_):
        return {"$scalar": _to_json(np.asarray(value), where, entries)}
    if kind is list:
        return [inner(item, i) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [inner(item, i) for i, item in enumerate(value)]}
    if kind in (dict, OrderedDict, defaultdict):
        items = {key: inner(item, key) for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {"$dict": [[_to_json(key, f"a key of {where}", entries), item] for key, item in items.items()]}
    raise DataError(f"{where} is a {kind.__module__}.{kind.__qualname__}, which a JSON file cannot hold")


def _from_json(node: Any, entries: _Entries) -> Any:
    def inner(items: list[Any]) -> list[Any]:
        return [_from_json(item, entries) for item in items]

    match node:
        case list():
            return inner(node)
        case {"$batch": columns, "batch_size": batch_size}:
            return TensorDict(_from_json(columns, entries), batch_size)
        case {"$tensor": name}:
            return entries[name]
        case {"$bytes": name, "dtype": dtype, "shape": shape}:
            return tensor_from_bytes(entries[name].numpy(), getattr(torch, dtype), shape)
        case {"$jagged": parts}:
            return ragged_from_parts(*inner(parts))
        case {"$array": name, "dtype": dtype, "shape": shape}:
            return np.frombuffer(bytearray(entries[name].numpy().tobytes()), np.dtype(dtype)).reshape(shape)
        case {"$scalar": array}:
            return _from_json(array, entries)[()]
        case {"$objects": items, "shape": shape}:
            return object_array(inner(items)).reshape(shape)
        case {"$tuple": items}:
            return tuple(inner(items))
        case {"$dict": pairs}:
            return dict(map(inner, pairs))
        case dict():
            return {key: _from_json(item, entries) for key, item in node.items()}
    return node
