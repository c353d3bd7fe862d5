"""Functions on whole batches: padding to a size that the ranks divide, folding rows, collating items."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rolepool.errors import DataError
from rolepool.protocol.columns import new_batch
from rolepool.protocol.data import DataProto, DataProtoItem
from rolepool.protocol.encoding import object_array
from rolepool.protocol.ragged import is_ragged, ragged

IS_PADDING_KEY = "is_padding"


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, repeated from the front, until `size_divisor` divides them; returns also how many.

    The padding rows are full copies, masks included: right for forward passes whose result is cut by `unpad_dataproto`,
    wrong for updates and metrics (see `pad_rows`). A batch that fits is returned as it is.
    """
    if size_divisor < 1:
        raise DataError(f"size_divisor is {size_divisor}; it must be at least 1")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Without the last `pad_size` rows; the `is_padding` column of `pad_rows` goes with the last padding row."""
    if not 0 <= pad_size <= len(data):
        raise DataError(f"{pad_size} rows of padding cannot be removed from {len(data)} rows")
    if pad_size == 0:
        return data
    real = data.slice(0, len(data) - pad_size)
    mark = real.columns().get(IS_PADDING_KEY)
    if mark is not None and not mark.any():
        del real.batch[IS_PADDING_KEY]
    return real


def pad_rows(data: DataProto, num_rows: int) -> DataProto:
    """Append `num_rows` rows that count for nothing, so that updates and metrics are those of the real rows.

    A padding row is a copy of the first row, so that a forward pass over it is finite and of an ordinary length, but
    every column whose name ends in `mask`, `weight` or `weights` (`response_mask`, `loss_mask`, `loss_weights`) is
    zero in it: a loss or metric that is a masked sum over a mask's sum does not see it. `attention_mask` (and names
    that end so) is the exception, as a row that attends to nothing gives NaN; code that derives a loss mask from it
    must use `is_padding` as well. That is a bool column, added here, True in padding rows: the only mark for code
    that counts rows. Remove the rows of a result with `unpad_dataproto`.

    With `num_rows` 0 the batch is returned as it is, without the column.
    """
    if num_rows < 0:
        raise DataError(f"{num_rows} rows cannot be appended")
    if num_rows == 0:
        return data
    if len(data) == 0:
        raise DataError("a batch without rows has no row to pad with")
    num_real = len(data)
    padded = data.select_idxs(torch.cat([torch.arange(num_real), torch.zeros(num_rows, dtype=torch.int64)]))
    for key, column in padded.columns().items():
        if not key.endswith(("mask", "weight", "weights")) or key.endswith("attention_mask"):
            continue
        if isinstance(column, torch.Tensor):
            for row in column.unbind()[num_real:]:
                row.zero_()
        elif column.dtype.kind in "biufc":
            column[num_real:] = 0
    if padded.batch is None:
        padded.batch = new_batch({}, [len(padded)])
    device = next((tensor.device for tensor in padded.batch.values()), None)
    is_padding = torch.arange(len(padded), device=device) >= num_real
    if IS_PADDING_KEY in padded.columns():
        is_padding |= padded.batch[IS_PADDING_KEY]
    padded.batch.set(IS_PADDING_KEY, is_padding)
    return padded


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[rows, ...] as [new_batch_size, rows // new_batch_size, ...]: groups of neighbouring rows become rows."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise DataError(f"{len(data)} rows cannot be folded into {new_batch_size}")
    return _reshape(data, 1, [new_batch_size, len(data) // new_batch_size])


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The first `batch_dims` dimensions as one dimension of rows: the inverse of `fold_batch_dim`."""
    shapes = {key: tuple(column.shape) for key, column in data.columns().items()}
    folded = {shape[:batch_dims] for shape in shapes.values()} or {(len(data),)}
    if batch_dims < 1 or len(folded) > 1 or (shapes and min(map(len, folded)) < batch_dims):
        raise DataError(f"these columns do not have the same first {batch_dims} dimensions: {shapes}")
    return _reshape(data, batch_dims, [int(np.prod(folded.pop()))])


def _reshape(data: DataProto, num_dims: int, new_dims: list[int]) -> DataProto:
    """With the first dimensions of every column replaced by others of as many elements."""
    columns = data.columns()
    if found := [key for key, column in columns.items() if is_ragged(column)]:
        raise DataError(f"ragged columns cannot be folded: {found}")
    reshaped = {key: column.reshape(*new_dims, *column.shape[num_dims:]) for key, column in columns.items()}
    batch_size, device = (None, None) if data.batch is None else (new_dims[:1], data.batch.device)
    return DataProto.from_columns(reshaped, batch_size, dict(data.meta_info), device)


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """The batch whose rows these items are; without meta_info, which belongs to the batch they came from."""
    if not items:
        raise DataError("nothing to collate: the list of items is empty")
    return DataProto.concat([_batch_of_one(item) for item in items])


def _batch_of_one(item: DataProtoItem) -> DataProto:
    arrays = {key: object_array([value]) for key, value in item.non_tensor_batch.items()}
    if item.batch is None:
        return DataProto(None, arrays)
    columns = {
        key: ragged(row, torch.tensor([len(row)])) if key in item.ragged_keys else row.unsqueeze(0)
        for key, row in item.batch.items()
    }
    return DataProto(new_batch(columns, [1, *item.batch.batch_size], item.batch.device), arrays)
