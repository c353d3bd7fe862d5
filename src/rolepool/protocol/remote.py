"""Results that stay where they were made: a small header for the driver, objects of keys for whoever reads them.

Owns the form of a reply and putting rows of it together. How objects are stored and fetched is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolepool.errors import DataError, WorkerError
from rolepool.metrics import Span
from rolepool.protocol.columns import merge_meta_info, new_batch
from rolepool.protocol.data import DataProto
from rolepool.protocol.encoding import Encoded, encode
from rolepool.protocol.rows import pieces

Rows = range | npt.NDArray[np.int64]
INLINE_BYTES = 64 * 1024
"""A batch up to this size travels in its header."""
ALONE_BYTES = 64 * 1024
"""A key over this size is an object of its own, so that who does not read it does not fetch it; tiny ones share."""


class Producer(NamedTuple):
    """The process and method that something came from, as errors name it."""

    pool: str
    role: str
    rank: int
    node: str
    pid: int
    method: str

    def __str__(self) -> str:
        return f"{self.pool} rank {self.rank} ({self.role}.{self.method}, node {self.node}, pid {self.pid})"

    def error(self, problems: str | Iterable[str]) -> WorkerError:
        """An error that is about this process and method."""
        return WorkerError(problems, **self._asdict())


@dataclass(frozen=True, slots=True)
class Column:
    """One key of one rank's result: the object it is in, or the value itself where the whole batch is small.

    An object holds a dict of keys to values.
    """

    name: str
    num_bytes: int
    is_tensor: bool
    ref: Any = None
    inline: Encoded | None = None


@dataclass(frozen=True, slots=True)
class RemoteBatch:
    """One rank's resulting batch without its data."""

    num_rows: int
    batch_size: tuple[int, ...] | None
    columns: dict[str, Column]
    meta_info: Encoded
    producer: Producer


@dataclass(frozen=True, slots=True)
class Reply:
    """What a rank answers to a call: its span, and a value or the header of a batch."""

    span: Span
    producer: Producer
    value: Any = None
    batch: RemoteBatch | None = None


Fetch = Callable[[Sequence[tuple[Column, Producer]]], list[Any]]
"""The values of columns, all fetched side by side."""


def leave_here(batch: DataProto, producer: Producer, store: Callable[[list[Encoded]], Iterable[Any]]) -> RemoteBatch:
    """The header of a batch whose keys are stored where it was made. `store` takes all objects at once."""
    tensors = {} if batch.batch is None else dict(batch.batch.items())
    values = {**tensors, **batch.non_tensor_batch}
    encoded = {key: encode(value) for key, value in values.items()}
    sizes = {key: sum(buffer.nbytes for buffer in value.buffers) for key, value in encoded.items()}
    refs: dict[str, Any] = {}
    if sum(sizes.values()) > INLINE_BYTES:
        objects = objects_of(sizes)
        stored = store([encode({key: values[key] for key in keys}) for keys in objects])
        for keys, ref in zip(objects, stored, strict=True):
            refs.update(dict.fromkeys(keys, ref))
    columns = {
        key: Column(key, sizes[key], key in tensors, refs.get(key), None if refs else encoded[key]) for key in values
    }
    return RemoteBatch(
        num_rows=len(batch),
        batch_size=None if batch.batch is None else tuple(batch.batch.batch_size),
        columns=columns,
        meta_info=encode(batch.meta_info),
        producer=producer,
    )


def objects_of(sizes: Mapping[str, int]) -> list[list[str]]:
    """Which keys are stored together: each alone, but for tiny ones."""
    tiny = [key for key, size in sizes.items() if size <= ALONE_BYTES]
    return [*([key] for key, size in sizes.items() if size > ALONE_BYTES), *([tiny] if tiny else [])]


def gather_rows(batches: Sequence[RemoteBatch], rows: Rows, keys: Iterable[str] | None, fetch: Fetch) -> DataProto:
    """Rows of a batch that lies in stretches, one per rank, counted over all of them. Fetches what holds them only."""
    lengths = [batch.num_rows for batch in batches]
    located = _locate(rows, lengths)
    stretches = [batches[stretch] for stretch, _ in located] or [batches[0]]
    wanted = None if keys is None else set(keys)
    names = [key for key in stretches[0].columns if wanted is None or key in wanted]
    for batch in stretches:
        if set(batch.columns) != set(stretches[0].columns):
            raise DataError(
                f"{stretches[0].producer} returned the keys {sorted(stretches[0].columns)}, "
                f"{batch.producer} {sorted(batch.columns)}"
            )
    values = iter(fetch([(batch.columns[name], batch.producer) for batch in stretches for name in names]))
    parts = [_batch_of(batch, {name: next(values) for name in names}) for batch in stretches]
    if located:
        parts = [
            part if _is_whole(inside, len(part)) else part[inside]
            for part, (_, inside) in zip(parts, located, strict=True)
        ]
    else:
        parts = [part[:0] for part in parts]
    joined = parts[0] if len(parts) == 1 else DataProto.concat(parts)
    joined.meta_info = merge_meta_info([batch.meta_info.decode() for batch in batches])
    return joined if isinstance(rows, range) else joined[_undo_grouping(rows, lengths)]


def _locate(rows: Rows, lengths: list[int]) -> list[tuple[int, slice | npt.NDArray[np.int64]]]:
    """For each stretch that holds any of the rows, which of its own rows those are."""
    if isinstance(rows, range):
        return [(stretch, slice(first, last)) for stretch, first, last in pieces(rows, lengths)]
    if len(rows) and not 0 <= rows.min() <= rows.max() < sum(lengths):
        raise DataError(f"rows {rows.min()} to {rows.max()} were asked for, and the batch has {sum(lengths)}")
    ends = np.cumsum(lengths)
    owner = np.searchsorted(ends, rows, side="right")
    starts = ends - np.asarray(lengths)
    return [(int(stretch), rows[owner == stretch] - starts[stretch]) for stretch in np.unique(owner)]


def _undo_grouping(rows: npt.NDArray[np.int64], lengths: list[int]) -> npt.NDArray[np.int64]:
    """Rows were gathered stretch by stretch; this index brings them into the order that was asked for."""
    owner = np.searchsorted(np.cumsum(lengths), rows, side="right")
    grouped = np.argsort(owner, kind="stable")
    order = np.empty_like(grouped)
    order[grouped] = np.arange(len(rows))
    return order


def _is_whole(inside: slice | npt.NDArray[np.int64], length: int) -> bool:
    return isinstance(inside, slice) and (inside.start, inside.stop) == (0, length)


def _batch_of(header: RemoteBatch, values: Mapping[str, Any]) -> DataProto:
    tensors = {key: value for key, value in values.items() if header.columns[key].is_tensor}
    arrays = {key: value for key, value in values.items() if not header.columns[key].is_tensor}
    batch = None if header.batch_size is None else new_batch(tensors, header.batch_size)
    return DataProto(batch, arrays, {})
