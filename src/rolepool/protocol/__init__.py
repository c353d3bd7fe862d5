"""What travels between processes, and what a worker is: batches, futures of them, and how methods are called.

Does not import ray.
"""

from __future__ import annotations

from rolepool.protocol.batching import (
    IS_PADDING_KEY,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    pad_rows,
    unfold_batch_dim,
    unpad_dataproto,
)
from rolepool.protocol.columns import RowIndexError, union_numpy_dict, union_tensor_dict
from rolepool.protocol.data import AUTO_PADDING_KEY, DataProto, DataProtoItem
from rolepool.protocol.dispatch import Dispatch, Execute, register
from rolepool.protocol.encoding import Encoded, encode
from rolepool.protocol.futures import CallFuture, DataProtoFuture
from rolepool.protocol.worker import Worker, WorkerContext

__all__ = [
    "AUTO_PADDING_KEY",
    "IS_PADDING_KEY",
    "CallFuture",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Encoded",
    "Execute",
    "RowIndexError",
    "Worker",
    "WorkerContext",
    "collate_fn",
    "encode",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "pad_rows",
    "register",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
