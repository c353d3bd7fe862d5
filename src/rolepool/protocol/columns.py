"""Operations on the columns of a batch: dicts of tensors or arrays that have one entry per row.

Owns how rows are taken and joined, for dense tensors, jagged nested tensors (which torch itself can neither slice,
index nor concatenate along rows) and numpy arrays, and when two values count as the same. Columns that share one
offsets tensor share the new one as well: torch knows by that object that their rows have the same lengths.

Does not know DataProto.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from rolepool.errors import DataError
from rolepool.protocol.encoding import jagged_from_parts, jagged_parts, tensor_bytes

Tensors = dict[str, torch.Tensor]
Arrays = dict[str, npt.NDArray[Any]]
Rows = builtins.slice | torch.Tensor  # a slice with step 1, or a 1-d int64 tensor of row numbers


class RowIndexError(DataError, IndexError):
    """A row number beyond the batch. An IndexError too, so that iteration by position ends where it should."""


# --- which rows ---------------------------------------------------------------------------------------------------


def row_number(index: int, num_rows: int) -> int:
    """A row number counted from the front."""
    if not -num_rows <= index < num_rows:
        raise RowIndexError(f"row {index} of a batch of {num_rows} rows")
    return index % num_rows


def rows_of(index: Any, num_rows: int) -> Rows:
    """The rows that a slice, a list, array or tensor of row numbers, or a bool mask selects of `num_rows`."""
    if isinstance(index, builtins.slice):
        start, stop, step = index.indices(num_rows)
        if step == 1:
            return builtins.slice(start, max(start, stop))
        return torch.arange(num_rows)[torch.from_numpy(np.arange(start, stop, step))]
    if isinstance(index, torch.Tensor):
        rows = index.detach().cpu()
    else:
        try:
            rows = torch.as_tensor(np.asarray(index))
        except (TypeError, ValueError) as error:
            raise DataError(f"rows are selected by numbers or a bool mask, not by {index!r}") from error
    if rows.dim() != 1:
        raise DataError(f"rows are selected by a 1-d index, not by one of shape {tuple(rows.shape)}")
    if rows.dtype == torch.bool:
        if len(rows) != num_rows:
            raise DataError(f"a bool mask of {len(rows)} entries on a batch of {num_rows} rows")
        return rows.nonzero().squeeze(1)
    if len(rows) == 0:
        return torch.zeros(0, dtype=torch.int64)
    if rows.is_floating_point() or rows.is_complex():
        raise DataError(f"rows are selected by whole numbers or a bool mask, not by {rows.dtype}")
    rows = rows.to(torch.int64)
    low, high = int(rows.min()), int(rows.max())
    if low < -num_rows or high >= num_rows:
        raise RowIndexError(f"row {low if low < -num_rows else high} of a batch of {num_rows} rows")
    return torch.where(rows < 0, rows + num_rows, rows)


def num_selected(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, builtins.slice) else len(rows)


# --- taking rows --------------------------------------------------------------------------------------------------


def take_tensors(columns: Mapping[str, torch.Tensor], rows: Rows) -> Tensors:
    """These rows of every column: views for a slice, copies for row numbers."""
    shared = _SharedOffsets()
    taken = {}
    for key, tensor in columns.items():
        if tensor.is_nested:
            taken[key] = _take_jagged(tensor, rows, shared)
        else:
            taken[key] = tensor[rows if isinstance(rows, builtins.slice) else rows.to(tensor.device)]
    return taken


def take_arrays(columns: Mapping[str, npt.NDArray[Any]], rows: Rows) -> Arrays:
    """These rows of every array: views for a slice, copies for row numbers."""
    index = rows if isinstance(rows, builtins.slice) else rows.numpy()
    return {key: array[index] for key, array in columns.items()}


def take_row(tensor: torch.Tensor, row: int) -> torch.Tensor:
    """One row, without the batch dimension; of a jagged tensor a dense one of that row's length."""
    if not tensor.is_nested:
        return tensor[row]
    values, offsets, dim = jagged_parts(tensor)
    start, stop = (int(edge) for edge in offsets[row : row + 2])
    return values.narrow(dim - 1, start, stop - start)


class _SharedOffsets:
    """New offsets by old ones, so that columns which shared theirs share the new ones."""

    def __init__(self) -> None:
        self.new: dict[tuple[int, ...], torch.Tensor] = {}
        self.alive: list[Any] = []  # an id is only good while its object lives

    def get(self, old: Sequence[torch.Tensor], fresh: torch.Tensor) -> torch.Tensor:
        self.alive.append(old)
        return self.new.setdefault(tuple(map(id, old)), fresh)


def _take_jagged(tensor: torch.Tensor, rows: Rows, shared: _SharedOffsets) -> torch.Tensor:
    values, offsets, dim = jagged_parts(tensor)
    if isinstance(rows, builtins.slice):
        edges = offsets[rows.start : rows.stop + 1]
        start, stop = int(edges[0]), int(edges[-1])
        taken = values.narrow(dim - 1, start, stop - start)
        fresh = edges - start
    else:
        rows = rows.to(offsets.device)
        lengths = offsets.diff()[rows]
        fresh = torch.cat([offsets.new_zeros(1), lengths.cumsum(0).to(offsets.dtype)])
        shift = torch.repeat_interleave(offsets[:-1][rows] - fresh[:-1], lengths)
        positions = shift + torch.arange(int(fresh[-1]), device=offsets.device)
        taken = values[(builtins.slice(None),) * (dim - 1) + (positions,)]
    return jagged_from_parts(taken, shared.get([offsets], fresh), dim)


# --- joining rows -------------------------------------------------------------------------------------------------


def cat_tensors(parts: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
    """The rows of all parts, one after another, copied. The parts have the same keys."""
    shared = _SharedOffsets()
    joined = {}
    for key in parts[0]:
        column = [part[key] for part in parts]
        try:
            if any(tensor.is_nested for tensor in column):
                joined[key] = _cat_jagged(column, shared)
            else:
                joined[key] = torch.cat(column)
        except (RuntimeError, ValueError) as error:
            kinds = ", ".join(describe(tensor) for tensor in column)
            raise DataError(f"{key!r} cannot be concatenated: {kinds}") from error
    return joined


def _cat_jagged(column: list[torch.Tensor], shared: _SharedOffsets) -> torch.Tensor:
    if not all(tensor.is_nested for tensor in column):
        raise ValueError("dense and jagged tensors")
    parts = [jagged_parts(tensor) for tensor in column]
    dim = parts[0].dim
    if any(part.dim != dim for part in parts):
        raise ValueError("jagged in different dimensions")
    lengths = torch.cat([part.offsets.diff() for part in parts])
    fresh = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])
    values = torch.cat([part.values for part in parts], dim=dim - 1)
    return jagged_from_parts(values, shared.get([part.offsets for part in parts], fresh), dim)


def jagged_from_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A jagged tensor of these rows, which may differ in one dimension."""
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def cat_arrays(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> Arrays:
    """The rows of all parts, one after another, copied. The parts have the same keys."""
    joined = {}
    for key in parts[0]:
        column = [part[key] for part in parts]
        try:
            joined[key] = np.concatenate(column)
        except ValueError as error:
            shapes = ", ".join(str(array.shape) for array in column)
            raise DataError(f"{key!r} cannot be concatenated: arrays of shapes {shapes}") from error
    return joined


# --- equality and union -------------------------------------------------------------------------------------------


def describe(tensor: torch.Tensor) -> str:
    kind = "jagged " if tensor.is_nested else ""
    return f"{kind}{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every element, where NaN equals NaN."""
    if a is b:
        return True
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        x, y = jagged_parts(a), jagged_parts(b)
        return x.dim == y.dim and same_tensor(x.offsets, y.offsets) and same_tensor(x.values, y.values)
    if a.shape != b.shape:
        return False
    if np.array_equal(tensor_bytes(a), tensor_bytes(b)):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    b = b.to(a.device)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same_value(a: Any, b: Any) -> bool:
    """Equal, also for tensors, arrays and containers of them, where NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype.hasobject:
            return all(same_value(x, y) for x, y in zip(a.flat, b.flat, strict=True))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):  # a tensor or array against something else
        return False


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Add the second's tensors to the first, which is changed and returned; keys in both must hold equal tensors."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{list(tensor_dict1.batch_size)} (keys {sorted(tensor_dict1.keys())}) and"
        sizes += f" {list(tensor_dict2.batch_size)} (keys {sorted(tensor_dict2.keys())})"
        raise DataError(f"a union needs equal batch sizes, not {sizes}")
    new: dict[str, Any] = dict(tensor_dict2.items())
    for key in [key for key in new if key in tensor_dict1.keys()]:  # noqa: SIM118  # a TensorDict iterates rows
        mine: Any = tensor_dict1.get(key)
        theirs = new.pop(key)
        if not same_tensor(mine, theirs):
            raise DataError(f"{key!r} is in both batches with different content: {describe(mine)}, {describe(theirs)}")
    for key, tensor in new.items():
        tensor_dict1.set(key, tensor)
    return tensor_dict1


def union_numpy_dict(tensor_dict1: Arrays, tensor_dict2: Arrays) -> Arrays:
    """Add the second's arrays to the first, which is changed and returned; keys in both must hold equal arrays."""
    for key, theirs in tensor_dict2.items():
        if key in tensor_dict1 and not same_value(tensor_dict1[key], theirs):
            mine = tensor_dict1[key]
            kinds = f"{mine.dtype}{list(mine.shape)}, {theirs.dtype}{list(theirs.shape)}"
            raise DataError(f"{key!r} is in both batches with different content: {kinds}")
    tensor_dict1.update({key: array for key, array in tensor_dict2.items() if key not in tensor_dict1})
    return tensor_dict1


def merge_meta_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The meta_info of batches that are joined: equal entries once, the `metrics` dicts as one dict of lists."""
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        merged = union_meta_info(merged, {key: value for key, value in part.items() if key != "metrics"})
        own = part.get("metrics") or []
        for row in own if isinstance(own, list) else [own]:
            for key, value in row.items():
                metrics.setdefault(key, []).append(value)
    return {**merged, "metrics": metrics} if metrics else merged


def union_meta_info(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The entries of both; keys in both must hold equal values."""
    for key in first.keys() & second.keys():
        if not same_value(first[key], second[key]):
            raise DataError(f"meta_info {key!r} is {first[key]!r} in one batch and {second[key]!r} in the other")
    return {**first, **second}


def new_batch(columns: Mapping[str, torch.Tensor], batch_size: Sequence[int], device: Any = None) -> TensorDict:
    return TensorDict(dict(columns), batch_size=list(batch_size), device=device)


def common_size(tensors: Mapping[str, torch.Tensor], num_batch_dims: int) -> tuple[int, ...]:
    """The first `num_batch_dims` dimensions, which all tensors must share."""
    if wrong := {key: type(value).__name__ for key, value in tensors.items() if not isinstance(value, torch.Tensor)}:
        raise DataError(f"tensors holds values that are none: {wrong}")
    if strided := [key for key, tensor in tensors.items() if tensor.is_nested and tensor.layout != torch.jagged]:
        raise DataError(f"these are strided nested tensors, which have no rows; use layout=torch.jagged: {strided}")
    sizes = {key: tuple(tensor.shape[:num_batch_dims]) for key, tensor in tensors.items()}
    if short := {key: size for key, size in sizes.items() if len(size) < num_batch_dims}:
        raise DataError(f"these tensors have fewer than {num_batch_dims} batch dimensions: {short}")
    if len(set(sizes.values())) > 1:
        raise DataError(f"the tensors of a batch need equal batch sizes, not {sizes}")
    return next(iter(sizes.values()))


def num_bytes(tensor: torch.Tensor) -> int:
    return int((tensor.values() if tensor.is_nested else tensor).nbytes)
