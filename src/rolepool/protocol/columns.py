"""Operations on the columns of a batch: dicts of tensors or arrays that have one entry per row.

Owns how rows of dense tensors, ragged columns and numpy arrays are selected and joined, and when two values are equal.
Ragged columns that share one offsets tensor share the new one as well: by that object torch knows that their rows have
the same lengths, and allows such columns to be added or compared.

Does not know DataProto.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict.base import TensorDictBase

from rolepool.errors import DataError
from rolepool.protocol.encoding import tensor_bytes
from rolepool.protocol.ragged import is_ragged, offsets_of, places_of, ragged_from_parts, ragged_parts

Arrays = dict[str, npt.NDArray[Any]]
Columns = dict[str, Any]  # tensors and arrays
RowIndex = slice | torch.Tensor  # a slice with step 1, or a 1-d int64 tensor of row numbers


class RowIndexError(DataError, IndexError):
    """A row number that the batch does not have. It is also an IndexError, as Python expects of sequences."""


# --- rows ---------------------------------------------------------------------------------------------------------


def rows_of(index: Any, num_rows: int) -> RowIndex:
    """The rows, out of `num_rows`, that a slice, a list, array or tensor of row numbers, or a bool mask selects."""
    everything = np.arange(num_rows)
    if isinstance(index, slice):
        start, stop, step = index.indices(num_rows)
        return slice(start, max(start, stop)) if step == 1 else torch.from_numpy(everything[index].copy())
    try:
        rows = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
        if rows.ndim == 1 and (rows.size == 0 or rows.dtype.kind in "biu"):
            # numpy makes an empty list an array of floats.
            return torch.from_numpy(everything[rows if rows.size or rows.dtype == bool else []])
    except IndexError as error:
        raise RowIndexError(f"the batch has {num_rows} rows: {error}") from None
    except (TypeError, ValueError):
        pass  # nested lists of different lengths
    raise DataError(f"rows are selected by a 1-d index of integers or a bool mask, not by {index!r}")


def take_rows(columns: Columns, rows: RowIndex) -> Columns:
    """These rows of every column. They are views if the rows are a slice, and copies if they are row numbers."""
    taken: Columns = {}
    places: dict[int, Any] = {}  # by the id of the offsets, because columns that share them must share the new ones
    for key, column in columns.items():
        if is_ragged(column):
            values, offsets = ragged_parts(column)
            if id(offsets) not in places:
                places[id(offsets)] = (*places_of(offsets, rows), offsets)  # kept alive, because its id is the key
            inside, new_offsets, _ = places[id(offsets)]
            taken[key] = ragged_from_parts(values[inside], new_offsets)
        elif isinstance(rows, slice):
            taken[key] = column[rows]
        else:
            taken[key] = column[rows.to(column.device)] if isinstance(column, torch.Tensor) else column[rows.numpy()]
    return taken


def join_rows(parts: Sequence[Columns]) -> Columns:
    """A copy of the rows of all parts, one after another. The parts have the same keys."""
    joined: Columns = {}
    shared: dict[tuple[int, ...], Any] = {}  # new offsets by the ids of the old ones
    for key in parts[0]:
        column = [part[key] for part in parts]
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


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal: tensors and arrays in dtype, shape and every element. NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.layout, a.dtype) != (b.layout, b.dtype):
            return False
        if is_ragged(a):
            return same_value(ragged_parts(a), ragged_parts(b))
        if a.shape != b.shape or np.array_equal(tensor_bytes(a), tensor_bytes(b)):
            return a.shape == b.shape
        a, b = a.cpu(), b.cpu()  # 0.0 equals -0.0
        return (a.is_floating_point() or a.is_complex()) and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype.hasobject:
            return all(map(same_value, a.flat, b.flat))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return all(map(same_value, a, b))
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (TypeError, ValueError, RuntimeError):  # a tensor or array and something else
        return False


def additions(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What a union adds to the first: the entries of the second whose keys are new. Others must be equal in both."""
    for key in first.keys() & second.keys():
        if not same_value(first[key], second[key]):
            content = f"{describe(first[key])}, {describe(second[key])}"
            raise DataError(f"{key!r} is in both batches with different content: {content}")
    return {key: value for key, value in second.items() if key not in first}


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Add the second's tensors to the first, which is changed and returned. A key in both must have equal tensors."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = [f"{list(one.batch_size)} (keys {sorted(one.keys())})" for one in (tensor_dict1, tensor_dict2)]
        raise DataError(f"a union needs equal batch sizes, not {' and '.join(sizes)}")
    return tensor_dict1.update(additions(dict(tensor_dict1.items()), dict(tensor_dict2.items())))


def union_numpy_dict(tensor_dict1: Arrays, tensor_dict2: Arrays) -> Arrays:
    """Add the second's arrays to the first, which is changed and returned. A key in both must have equal arrays."""
    tensor_dict1.update(additions(tensor_dict1, tensor_dict2))
    return tensor_dict1


def merge_meta_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The meta_info of joined batches. Entries must be equal, except `metrics`: these become one dict of lists."""
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        merged |= additions(merged, {key: value for key, value in part.items() if key != "metrics"})
        own = part.get("metrics") or []
        for row in own if isinstance(own, list) else [own]:
            for key, value in row.items():
                metrics.setdefault(key, []).append(value)
    return {**merged, "metrics": metrics} if metrics else merged
