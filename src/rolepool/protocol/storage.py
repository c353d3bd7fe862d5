"""Batches as files: one safetensors file, whose metadata holds as JSON what is not a tensor. It never uses pickle.

Tensors and numeric arrays are stored under `batch/KEY` and `arrays/KEY`, so that any safetensors reader finds them.
A ragged column is stored as `batch/KEY/values` and `batch/KEY/offsets`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from tensordict import TensorDict

from rolepool.errors import DataError
from rolepool.files import atomic_path
from rolepool.protocol.encoding import object_array
from rolepool.protocol.ragged import is_ragged, ragged_from_parts, ragged_parts

FORMAT = "rolepool.DataProto 2"


def save(filepath: str | os.PathLike[str], batch: Any, arrays: dict[str, Any], meta_info: dict[str, Any]) -> None:
    """Write the parts of a batch to one file, completely or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {}
    for key, column in {} if batch is None else batch.items():
        if is_ragged(column):
            tensors[f"batch/{key}/values"], tensors[f"batch/{key}/offsets"] = ragged_parts(column)
        else:
            tensors[f"batch/{key}"] = column
    for key, array in arrays.items():
        if array.dtype.kind in "biuf":
            tensors[f"arrays/{key}"] = torch.from_numpy(array)
        else:
            objects[key] = _checked(array.tolist(), f"non_tensor_batch[{key!r}]")
    content = {
        "batch_size": None if batch is None else list(batch.batch_size),
        "keys": [[] if batch is None else list(batch.keys()), list(arrays)],
        "objects": objects,
        "meta_info": _checked(meta_info, "meta_info"),
    }
    # Copies: safetensors refuses two tensors in one storage.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    path = Path(filepath)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        try:
            safetensors.torch.save_file(copies, temporary, {"format": FORMAT, "content": json.dumps(content)})
        except (KeyError, ValueError) as error:
            raise DataError(f"{path}: a safetensors file cannot hold these tensors ({error})") from None


def load(filepath: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The parts of the batch in a file."""
    path = Path(filepath)
    if not path.is_file():
        raise DataError(f"there is no batch to load at {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dict
            metadata = file.metadata()
        content = json.loads(metadata["content"])
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a file that save_to_disk wrote: {error}") from error
    tensor_keys, array_keys = content["keys"]
    columns = {
        key: tensors[f"batch/{key}"]
        if f"batch/{key}" in tensors
        else ragged_from_parts(tensors[f"batch/{key}/values"], tensors[f"batch/{key}/offsets"])
        for key in tensor_keys
    }
    arrays = {
        key: object_array(content["objects"][key]) if key in content["objects"] else tensors[f"arrays/{key}"].numpy()
        for key in array_keys
    }
    batch_size = content["batch_size"]
    return None if batch_size is None else TensorDict(columns, batch_size), arrays, content["meta_info"]


def _checked(value: Any, where: str) -> Any:
    """The value as JSON can hold it. numpy's numbers become Python's, and tuples become lists."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {str(key): _checked(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_checked(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    raise DataError(f"{where} is a {kind.__module__}.{kind.__qualname__}, which a JSON file cannot hold")
