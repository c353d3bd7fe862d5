"""What travels between processes, and what a worker is: batches, futures of them, and how methods
are called.

Does not import ray.
"""

from .batching import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from .columns import RowIndexError, pad_ragged, ragged, union_numpy_dict, union_tensor_dict, unpad
from .data import DataProto, DataProtoItem
from .encoding import Encoded, encode
from .futures import CallFuture, DataProtoFuture
from .worker import (
    Dispatch,
    Execute,
    Worker,
    WorkerContext,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

DataProtoConfig = DataProto
"""verl's name for the class that has `auto_padding`."""

__all__ = [
    "CallFuture",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Encoded",
]
__all__ += [
    "Execute",
    "RowIndexError",
    "Worker",
    "WorkerContext",
    "collate_fn",
    "encode",
    "fold_batch_dim",
]
__all__ += [
    "make_nd_compute_dataproto_dispatch_fn",
    "pad_dataproto_to_divisor",
    "pad_ragged",
    "ragged",
    "register",
]
__all__ += ["unfold_batch_dim", "union_numpy_dict", "union_tensor_dict", "unpad", "unpad_dataproto"]
