"""Functions on whole batches: padding to a size that the ranks divide, folding rows, collating
items."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from rolepool.errors import DataError
from rolepool.protocol.columns import Arrays, Columns, describe, is_ragged, ragged
from rolepool.protocol.data import DataProto, DataProtoItem

IS_PADDING_KEY = "is_padding"


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, repeated from the front, until `size_divisor` divides their number. Returns also
    how many.

    The padding rows are full copies, also of the masks. That is right for forward passes whose
    result is shortened by `unpad_dataproto`, and wrong for updates and metrics (see `pad_rows`). A
    batch that fits is returned unchanged.
    """
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    rows = torch.arange(len(data) + pad_size) % len(data)
    return data.select_idxs(rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise DataError(f"{pad_size} rows of padding cannot be removed from {len(data)} rows")
    return data.slice(0, len(data) - pad_size)


def pad_rows(data: DataProto, num_rows: int) -> DataProto:
    """Append `num_rows` rows that count for nothing, so that updates and metrics are those of the
    real rows.

    A padding row is a copy of the first row, so that a forward pass over it is finite and has an
    ordinary length. But every column whose name ends in `mask`, `weight` or `weights`
    (`response_mask`, `loss_mask`, `loss_weights`) is zero in it, so a loss or metric that is a
    masked sum divided by the sum of the mask ignores it. `attention_mask` (and names that end with
    it) is the exception, because a row that attends to nothing gives NaN; code that derives a loss
    mask from it must use `is_padding` as well. `is_padding` is a bool column that is added here and
    is True in padding rows; code that counts rows must use it. Remove the rows of a result with
    `unpad_dataproto`.

    With `num_rows` 0 the batch is returned unchanged, without the column.
    """
    if num_rows == 0:
        return data
    num_real = len(data)
    padded = data.select()
    if padded.batch is None:
        padded.batch = TensorDict({}, [num_real])
    no_padding = torch.zeros(num_real, dtype=torch.bool)
    padded.batch.setdefault(IS_PADDING_KEY, no_padding)
    padded.padding(num_rows, "first")
    padded.batch[IS_PADDING_KEY][num_real:] = True
    for key, column in padded.columns().items():
        counts_tokens = key.endswith(("mask", "weight", "weights"))
        if not counts_tokens or key.endswith("attention_mask"):
            continue
        if isinstance(column, torch.Tensor):
            # One row after another, because a ragged column cannot be indexed with a slice.
            for row in column.unbind()[num_real:]:
                row.zero_()
        elif column.dtype.kind in "biufc":
            column[num_real:] = 0
    return padded


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[rows, ...] as [new_batch_size, rows // new_batch_size, ...]: groups of neighbouring rows
    become rows."""
    num_rows = len(data)
    if new_batch_size < 1 or num_rows % new_batch_size:
        raise DataError(f"{num_rows} rows cannot be folded into {new_batch_size}")
    group_size = num_rows // new_batch_size
    return _reshape(data, 1, [new_batch_size, group_size])


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The first `batch_dims` dimensions as one dimension of rows: the inverse of
    `fold_batch_dim`."""
    columns = list(data.columns().values())
    # A batch without columns has no rows.
    shape = columns[0].shape if columns else (len(data),)
    num_rows = math.prod(shape[:batch_dims])
    return _reshape(data, batch_dims, [num_rows])


def _reshape(data: DataProto, num_dims: int, new_dims: list[int]) -> DataProto:
    """Replace the first `num_dims` dimensions of every column."""
    columns = data.columns()
    old_dims: set[tuple[int, ...]] = set()
    are_dense = True
    for column in columns.values():
        old_dims.add(tuple(column.shape[:num_dims]))
        if is_ragged(column):
            are_dense = False
    have_all_dims = all(len(dims) == num_dims for dims in old_dims)
    have_same_dims = num_dims >= 1 and len(old_dims) <= 1 and have_all_dims
    if not (have_same_dims and are_dense):
        shown = {key: describe(column) for key, column in columns.items()}
        raise DataError(
            f"only dense columns with the same first {num_dims} dimensions can be folded, not {shown}"
        )
    reshaped: Columns = {}
    for key, column in columns.items():
        other_dims = column.shape[num_dims:]
        reshaped[key] = column.reshape(*new_dims, *other_dims)
    batch_size = None
    device = None
    if data.batch is not None:
        batch_size = new_dims[:1]
        device = data.batch.device
    return DataProto.from_columns(reshaped, batch_size, dict(data.meta_info), device)


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """The batch that has these items as rows; without meta_info, which belongs to the batch they
    came from."""
    return DataProto.concat([_batch_of_one(item) for item in items])


def _batch_of_one(item: DataProtoItem) -> DataProto:
    arrays: Arrays = {}
    for key, value in item.non_tensor_batch.items():
        arrays[key] = np.fromiter([value], object)
    if item.batch is None:
        return DataProto(None, arrays)
    columns: Columns = dict(arrays)
    for key, row in item.batch.items():
        if key in item.ragged_keys:
            lengths = torch.tensor([len(row)])
            columns[key] = ragged(row, lengths)
        else:
            columns[key] = row.unsqueeze(0)
    return DataProto.from_columns(
        columns,
        batch_size=[1, *item.batch.batch_size],
        meta_info={},
        device=item.batch.device,
    )
