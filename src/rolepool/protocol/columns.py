"""Operations on the columns of a batch: dicts of tensors or arrays that have one entry per row.

Owns how rows are taken and joined, for dense tensors, ragged columns and numpy arrays, and when two values count as
the same. Columns that share one offsets tensor share the new one as well: torch knows by that object that their rows
have the same lengths, and lets such columns be added or compared.

Does not know DataProto.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from rolepool.errors import DataError
from rolepool.protocol.encoding import tensor_bytes
from rolepool.protocol.ragged import is_ragged, offsets_of, places_of, ragged_from_parts, ragged_parts

Arrays = dict[str, npt.NDArray[Any]]
Column = torch.Tensor | npt.NDArray[Any]
Columns = dict[str, Column]
RowIndex = builtins.slice | torch.Tensor  # a slice with step 1, or a 1-d int64 tensor of row numbers


class RowIndexError(DataError, IndexError):
    """A row number beyond the batch. It is an IndexError too, so that iteration by position ends."""


# --- taking and joining rows --------------------------------------------------------------------------------------


def rows_of(index: Any, num_rows: int) -> RowIndex:
    """The rows, out of `num_rows`, that a slice, a list, array or tensor of row numbers, or a bool mask selects."""
    everything = np.arange(num_rows)
    if isinstance(index, builtins.slice):
        start, stop, step = index.indices(num_rows)
        return builtins.slice(start, max(start, stop)) if step == 1 else torch.from_numpy(everything[index].copy())
    try:
        rows = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    except (TypeError, ValueError) as error:
        raise DataError(f"rows are selected by numbers or a bool mask, not by {index!r}") from error
    if rows.shape == (0,) and rows.dtype != bool:
        rows = rows.astype(np.int64)  # an empty list counts as one of floats
    if rows.ndim != 1 or rows.dtype.kind not in "biu":
        raise DataError(f"rows are selected by a 1-d index of integers or a bool mask, not by {index!r}")
    try:
        return torch.from_numpy(everything[rows])
    except IndexError as error:
        raise RowIndexError(f"the batch has {num_rows} rows: {error}") from None


def take_rows(columns: Mapping[str, Column], rows: RowIndex) -> Columns:
    """These rows of every column: views for a slice, copies for row numbers."""
    taken: Columns = {}
    places: dict[int, Any] = {}  # by the id of the offsets, so that columns that share them share the new ones
    for key, column in columns.items():
        if is_ragged(column):
            values, offsets = ragged_parts(column)
            if id(offsets) not in places:
                places[id(offsets)] = (*places_of(offsets, rows), offsets)  # kept alive, as its id is the key
            inside, new_offsets, _ = places[id(offsets)]
            taken[key] = ragged_from_parts(values[inside], new_offsets)
        elif isinstance(rows, builtins.slice):
            taken[key] = column[rows]
        else:
            taken[key] = column[rows.to(column.device)] if isinstance(column, torch.Tensor) else column[rows.numpy()]
    return taken


def join_rows(parts: Sequence[Mapping[str, Column]]) -> Columns:
    """The rows of all parts, one after another, copied. The parts have the same keys."""
    joined: Columns = {}
    shared: dict[tuple[int, ...], Any] = {}  # new offsets by the ids of the old ones
    for key in parts[0]:
        column: list[Any] = [part[key] for part in parts]
        try:
            if isinstance(column[0], np.ndarray):
                joined[key] = np.concatenate(column)
            elif is_ragged(column[0]):
                values, old_offsets = zip(*map(ragged_parts, column), strict=True)
                ids = tuple(map(id, old_offsets))
                if ids not in shared:
                    shared[ids] = offsets_of(torch.cat([offsets.diff() for offsets in old_offsets])), old_offsets
                joined[key] = ragged_from_parts(torch.cat(values), shared[ids][0])
            else:
                joined[key] = torch.cat(column)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"{key!r} cannot be concatenated: {', '.join(map(describe, column))}") from error
    return joined


# --- equality and union -------------------------------------------------------------------------------------------


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = "ragged " if value.is_nested else ""
        return f"{kind}{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every element; NaN equals NaN."""
    if a.dtype != b.dtype or is_ragged(a) != is_ragged(b):
        return False
    if is_ragged(a):
        return same_value(ragged_parts(a), ragged_parts(b))
    if a.shape != b.shape:
        return False
    same_bytes = np.array_equal(tensor_bytes(a), tensor_bytes(b))
    if same_bytes or not (a.is_floating_point() or a.is_complex()):
        return same_bytes
    b = b.to(a.device)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same_value(a: Any, b: Any) -> bool:
    """Equal, also for tensors, arrays and containers of them; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype.hasobject:
            return all(map(same_value, a.flat, b.flat))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_value, a, b))
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (TypeError, ValueError, RuntimeError):  # a tensor or array against something else
        return False


def only_in_second(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What a union adds to the first; keys in both must hold equal values."""
    for key in first.keys() & second.keys():
        if not same_value(first[key], second[key]):
            content = f"{describe(first[key])}, {describe(second[key])}"
            raise DataError(f"{key!r} is in both batches with different content: {content}")
    return {key: value for key, value in second.items() if key not in first}


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Add the second's tensors to the first, which is changed and returned; keys in both must hold equal tensors."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = [f"{list(one.batch_size)} (keys {sorted(one.keys())})" for one in (tensor_dict1, tensor_dict2)]
        raise DataError(f"a union needs equal batch sizes, not {' and '.join(sizes)}")
    return tensor_dict1.update(only_in_second(dict(tensor_dict1.items()), dict(tensor_dict2.items())))


def union_numpy_dict(tensor_dict1: Arrays, tensor_dict2: Arrays) -> Arrays:
    """Add the second's arrays to the first, which is changed and returned; keys in both must hold equal arrays."""
    tensor_dict1.update(only_in_second(tensor_dict1, tensor_dict2))
    return tensor_dict1


def merge_meta_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The meta_info of batches that are joined: equal entries once, the `metrics` dicts as one dict of lists."""
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        merged |= only_in_second(merged, {key: value for key, value in part.items() if key != "metrics"})
        own = part.get("metrics") or []
        for row in own if isinstance(own, list) else [own]:
            for key, value in row.items():
                metrics.setdefault(key, []).append(value)
    return {**merged, "metrics": metrics} if metrics else merged


# --- sizes --------------------------------------------------------------------------------------------------------


def new_batch(columns: Mapping[str, torch.Tensor], batch_size: Sequence[int], device: Any = None) -> TensorDict:
    return TensorDict(dict(columns), batch_size=list(batch_size), device=device)


def wrong_tensors(tensors: Mapping[str, Any]) -> Iterator[str]:
    """The reasons why some of these cannot be in a batch."""
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            yield f"batch[{key!r}] is a {type(value).__name__}, not a tensor (see from_tensordict)"
        elif not is_ragged(value) and value.is_nested:
            yield f"batch[{key!r}] is a nested tensor without rows; make it with layout=torch.jagged, untransposed"


def common_size(tensors: Mapping[str, torch.Tensor], num_batch_dims: int) -> tuple[int, ...]:
    """The first `num_batch_dims` dimensions, which all tensors must share."""
    if problems := list(wrong_tensors(tensors)):
        raise DataError(problems)
    sizes = {key: tuple(tensor.shape[:num_batch_dims]) for key, tensor in tensors.items()}
    if len(set(sizes.values())) > 1 or min(map(len, sizes.values())) < num_batch_dims:
        raise DataError(f"the tensors of a batch need {num_batch_dims} batch dimensions of equal sizes, not {sizes}")
    return next(iter(sizes.values()))
