"""Batches as files: one safetensors file that also holds, as JSON, whatever is not a tensor. Never pickle.

Owns the file format. Tensors are stored under `batch/<key>`, so that any safetensors reader finds them; jagged ones
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
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch

from rolepool.errors import DataError
from rolepool.protocol.encoding import jagged_from_parts, jagged_parts, object_array, tensor_bytes, tensor_from_bytes

FORMAT = "rolepool.DataProto"
VERSION = 1

_NATIVE_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}

Parts = tuple[dict[str, torch.Tensor] | None, tuple[int, ...], dict[str, npt.NDArray[Any]], dict[str, Any]]


def save(
    filepath: str | os.PathLike[str],
    tensors: dict[str, torch.Tensor] | None,
    batch_size: tuple[int, ...],
    non_tensor_batch: dict[str, npt.NDArray[Any]],
    meta_info: dict[str, Any],
) -> None:
    """Write the parts of a batch to one file, through a temporary name, so that it is never seen half written."""
    writer = _Writer()
    batch = None if tensors is None else {key: writer.tensor(t, f"batch/{key}") for key, t in tensors.items()}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "batch": batch,
        "batch_size": list(batch_size),
        "non_tensor_batch": {key: writer.value(v, f"non_tensor_batch[{key!r}]") for key, v in non_tensor_batch.items()},
        "meta_info": writer.value(meta_info, "meta_info"),
    }
    text = json.dumps(document).encode()
    writer.entries["json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    path = Path(filepath)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        safetensors.torch.save_file(writer.entries, temporary, metadata={"format": FORMAT})
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
        known = document["format"] == FORMAT
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a file that save_to_disk wrote: {error}") from error
    if not known or document["version"] > VERSION:
        raise DataError(f"{path} has format {document['format']} {document['version']}; this reads {FORMAT} {VERSION}")
    reader = _Reader(entries)
    batch = document["batch"]
    tensors = None if batch is None else {key: reader.value(node) for key, node in batch.items()}
    arrays = {key: reader.value(node) for key, node in document["non_tensor_batch"].items()}
    return tensors, tuple(document["batch_size"]), arrays, reader.value(document["meta_info"])


class _Writer:
    """Turns values into JSON, putting tensors and arrays aside under a name."""

    def __init__(self) -> None:
        self.entries: dict[str, torch.Tensor] = {}
        self.storages: set[int] = set()

    def tensor(self, tensor: torch.Tensor, name: str) -> dict[str, Any]:
        if tensor.is_nested:
            values, offsets, dim = jagged_parts(tensor)
            number = f"jagged/{len(self.entries)}"
            nodes = [self.tensor(values, f"{number}/values"), self.tensor(offsets, f"{number}/offsets")]
            return {"$jagged": [*nodes, dim]}
        node: dict[str, Any] = {"$tensor": name}
        if tensor.dtype in _NATIVE_DTYPES:
            entry = tensor.detach().cpu().contiguous()
        else:
            entry = torch.from_numpy(tensor_bytes(tensor))
            node |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if entry.untyped_storage().data_ptr() in self.storages:
            entry = entry.clone()  # safetensors refuses two entries in one storage
        self.storages.add(entry.untyped_storage().data_ptr())
        self.entries[name] = entry
        return node

    def array(self, array: npt.NDArray[Any], where: str) -> dict[str, Any]:
        if array.dtype == np.dtype(object):
            items = [self.value(item, f"{where}[{i}]") for i, item in enumerate(array.flat)]
            return {"$objects": items, "shape": list(array.shape)}
        if array.dtype.hasobject or array.dtype.names:
            raise DataError(f"{where} has dtype {array.dtype}, which cannot be saved")
        raw = np.frombuffer(bytearray(np.ascontiguousarray(array).tobytes()), np.uint8)
        name = f"array/{len(self.entries)}"
        self.entries[name] = torch.from_numpy(raw) if raw.size else torch.empty(0, dtype=torch.uint8)
        return {"$array": name, "dtype": array.dtype.str, "shape": list(array.shape)}

    def value(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, np.generic) and not isinstance(value, np.void | np.object_):
            return {"$scalar": self.array(np.asarray(value), where)}
        if kind is np.ndarray:
            return self.array(value, where)
        if isinstance(value, torch.Tensor) and (value.layout == torch.strided or value.layout == torch.jagged):
            return self.tensor(value, f"tensor/{len(self.entries)}")
        if kind is list:
            return [self.value(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.value(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        if kind in (dict, OrderedDict, defaultdict):
            items = {key: self.value(item, f"{where}[{key!r}]") for key, item in value.items()}
            if all(type(key) is str and not key.startswith("$") for key in items):
                return items
            return {"$dict": [[self.value(key, f"a key of {where}"), item] for key, item in items.items()]}
        raise DataError(f"{where} is a {kind.__module__}.{kind.__qualname__}, which a JSON file cannot hold")


class _Reader:
    def __init__(self, entries: dict[str, torch.Tensor]) -> None:
        self.entries = entries

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind = next((key for key in node if key.startswith("$")), None)
        return {key: self.value(item) for key, item in node.items()} if kind is None else self.special(kind, node)

    def special(self, kind: str, node: dict[str, Any]) -> Any:
        content = node[kind]
        if kind == "$tensor":
            entry = self.entries[content]
            if "dtype" not in node:
                return entry
            return tensor_from_bytes(entry.numpy(), getattr(torch, node["dtype"]), node["shape"])
        if kind == "$jagged":
            values, offsets, dim = content
            return jagged_from_parts(self.value(values), self.value(offsets), dim)
        if kind == "$array":
            return self.entries[content].numpy().view(np.dtype(node["dtype"])).reshape(node["shape"])
        if kind == "$scalar":
            return self.value(content)[()]
        if kind == "$objects":
            return object_array([self.value(item) for item in content]).reshape(node["shape"])
        if kind == "$tuple":
            return tuple(self.value(content))
        if kind == "$dict":
            return {self.value(key): self.value(item) for key, item in content}
        raise DataError(f"the file holds a {kind} entry, which this version cannot read")
