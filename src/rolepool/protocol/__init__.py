"""What travels between processes, and what a worker is: batches, futures of them, and how methods are called.

Does not import ray.
"""

from __future__ import annotations

from rolepool.protocol.batching import IS_PADDING_KEY as IS_PADDING_KEY
from rolepool.protocol.batching import collate_fn as collate_fn
from rolepool.protocol.batching import fold_batch_dim as fold_batch_dim
from rolepool.protocol.batching import pad_dataproto_to_divisor as pad_dataproto_to_divisor
from rolepool.protocol.batching import pad_rows as pad_rows
from rolepool.protocol.batching import unfold_batch_dim as unfold_batch_dim
from rolepool.protocol.batching import unpad_dataproto as unpad_dataproto
from rolepool.protocol.columns import RowIndexError as RowIndexError
from rolepool.protocol.columns import union_numpy_dict as union_numpy_dict
from rolepool.protocol.columns import union_tensor_dict as union_tensor_dict
from rolepool.protocol.data import AUTO_PADDING_KEY as AUTO_PADDING_KEY
from rolepool.protocol.data import DataProto as DataProto
from rolepool.protocol.data import DataProtoItem as DataProtoItem
from rolepool.protocol.encoding import Encoded as Encoded
from rolepool.protocol.encoding import encode as encode
from rolepool.protocol.futures import CallFuture as CallFuture
from rolepool.protocol.futures import DataProtoFuture as DataProtoFuture
from rolepool.protocol.ragged import pad_ragged as pad_ragged
from rolepool.protocol.ragged import ragged as ragged
from rolepool.protocol.ragged import unpad as unpad
from rolepool.protocol.worker import Dispatch as Dispatch
from rolepool.protocol.worker import Execute as Execute
from rolepool.protocol.worker import Worker as Worker
from rolepool.protocol.worker import WorkerContext as WorkerContext
from rolepool.protocol.worker import register as register
