"""What travels between processes, and what a worker is: batches, futures of them, and how methods are called.

Does not import ray.
"""

from .batching import collate_fn, fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto
from .columns import RowIndexError, union_numpy_dict, union_tensor_dict
from .data import DataProto, DataProtoItem
from .encoding import Encoded, encode
from .futures import CallFuture, DataProtoFuture
from .ragged import pad_ragged, ragged, unpad
from .worker import Dispatch, Execute, Worker, WorkerContext, register

__all__ = ["CallFuture", "DataProto", "DataProtoFuture", "DataProtoItem", "Dispatch", "Encoded", "Execute"]
__all__ += ["RowIndexError", "Worker", "WorkerContext", "collate_fn", "encode", "fold_batch_dim"]
__all__ += ["pad_dataproto_to_divisor", "pad_ragged", "ragged", "register", "unfold_batch_dim", "union_numpy_dict"]
__all__ += ["union_tensor_dict", "unpad", "unpad_dataproto"]
