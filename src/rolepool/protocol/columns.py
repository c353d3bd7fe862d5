"""Operations on the columns of a batch: dicts of tensors or arrays that have one entry per row.

Owns how rows are taken and joined, for dense tensors, jagged nested tensors (which torch itself can neither slice,
index nor concatenate along rows) and numpy arrays, and when two values count as the same. Columns that share one
offsets tensor share the new one as well: torch knows by that object that their rows have the same lengths.

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
from rolepool.protocol.encoding import jagged_from_parts, jagged_parts, tensor_bytes

Arrays = dict[str, npt.NDArray[Any]]
Column = torch.Tensor | npt.NDArray[Any]
Columns = dict[str, Column]
Rows = builtins.slice | torch.Tensor  # a slice with step 1, or a 1-d int64 tensor of row numbers
_NewOffsets = dict[tuple[int, ...], tuple[Any, torch.Tensor]]  # by the ids of the old ones, which are kept alive


class RowIndexError(DataError, IndexError):
    """A row number beyond the batch. An IndexError too, so that iteration by position ends where it should."""


# --- taking and joining rows --------------------------------------------------------------------------------------


def rows_of(index: Any, num_rows: int) -> Rows:
    """The rows that a slice, a list, array or tensor of row numbers, or a bool mask selects of `num_rows`."""
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
        raise DataError(f"rows are selected by a 1-d index of whole numbers or a bool mask, not by {index!r}")
    try:
        return torch.from_numpy(everything[rows])
    except IndexError as error:
        raise RowIndexError(f"of a batch of {num_rows} rows: {error}") from None


def take_rows(columns: Mapping[str, Column], rows: Rows) -> Columns:
    """These rows of every column: views for a slice (but of jagged tensors copies), copies for row numbers."""
    new_offsets: _NewOffsets = {}
    return {key: _take(column, rows, new_offsets) for key, column in columns.items()}


def _take(column: Column, rows: Rows, new_offsets: _NewOffsets) -> Column:
    if isinstance(column, torch.Tensor) and column.is_nested:
        return _take_jagged(column, torch.arange(len(column))[rows], new_offsets)
    if isinstance(rows, builtins.slice):
        return column[rows]
    return column[rows.to(column.device)] if isinstance(column, torch.Tensor) else column[rows.numpy()]


def _take_jagged(tensor: torch.Tensor, rows: torch.Tensor, new_offsets: _NewOffsets) -> torch.Tensor:
    values, offsets, dim = jagged_parts(tensor)
    rows = rows.to(offsets.device)
    lengths = offsets.diff()[rows]
    fresh = _offsets_of(lengths)
    shift = torch.repeat_interleave(offsets[:-1][rows] - fresh[:-1], lengths)
    taken = values.index_select(dim - 1, shift + torch.arange(int(fresh[-1]), device=offsets.device))
    return jagged_from_parts(taken, new_offsets.setdefault((id(offsets),), (offsets, fresh))[1], dim)


def join_rows(parts: Sequence[Mapping[str, Column]]) -> Columns:
    """The rows of all parts, one after another, copied. The parts have the same keys."""
    new_offsets: _NewOffsets = {}
    joined: Columns = {}
    for key in parts[0]:
        column: list[Any] = [part[key] for part in parts]
        try:
            if isinstance(column[0], np.ndarray):
                joined[key] = np.concatenate(column)
            elif column[0].is_nested:
                joined[key] = _join_jagged(column, new_offsets)
            else:
                joined[key] = torch.cat(column)
        except (RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"{key!r} cannot be concatenated: {', '.join(map(describe, column))}") from error
    return joined


def _join_jagged(column: list[torch.Tensor], new_offsets: _NewOffsets) -> torch.Tensor:
    if not all(tensor.is_nested for tensor in column):
        raise ValueError("dense and jagged tensors")
    values, offsets, dims = zip(*map(jagged_parts, column), strict=True)
    if len(set(dims)) > 1:
        raise ValueError("jagged in different dimensions")
    fresh = _offsets_of(torch.cat([one.diff() for one in offsets]))
    shared = new_offsets.setdefault(tuple(map(id, offsets)), (offsets, fresh))[1]
    return jagged_from_parts(torch.cat(values, dim=dims[0] - 1), shared, dims[0])


def _offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


# --- equality and union -------------------------------------------------------------------------------------------


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = "jagged " if value.is_nested else ""
        return f"{kind}{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every element, where NaN equals NaN."""
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        return same_value(jagged_parts(a), jagged_parts(b))
    if a.shape != b.shape:
        return False
    same_bytes = np.array_equal(tensor_bytes(a), tensor_bytes(b))
    if same_bytes or not (a.is_floating_point() or a.is_complex()):
        return same_bytes
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
    """What of these cannot be in a batch."""
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            yield f"batch[{key!r}] is a {type(value).__name__}, not a tensor (see from_tensordict)"
        elif value.is_nested and value.layout != torch.jagged:
            yield f"batch[{key!r}] is a strided nested tensor, which has no rows; make it with layout=torch.jagged"


def common_size(tensors: Mapping[str, torch.Tensor], num_batch_dims: int) -> tuple[int, ...]:
    """The first `num_batch_dims` dimensions, which all tensors must share."""
    if problems := list(wrong_tensors(tensors)):
        raise DataError(problems)
    sizes = {key: tuple(tensor.shape[:num_batch_dims]) for key, tensor in tensors.items()}
    if len(set(sizes.values())) > 1 or min(map(len, sizes.values())) < num_batch_dims:
        raise DataError(f"the tensors of a batch need {num_batch_dims} batch dimensions of equal sizes, not {sizes}")
    return next(iter(sizes.values()))
