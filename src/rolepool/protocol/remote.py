"""Results that stay where they were made: a small header for the driver, objects of keys for whoever reads them.

Owns the form of a reply, which rows of a batch a rank gets, and putting rows together. How objects are stored and
fetched is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolepool.errors import DataError, WorkerError
from rolepool.metrics import Span
from rolepool.protocol.columns import merge_meta_info
from rolepool.protocol.data import DataProto
from rolepool.protocol.encoding import Encoded, encode

RowNumbers = npt.NDArray[np.int64]
INLINE_BYTES = 64 * 1024
"""The smallest keys of a batch travel in its header, up to this size together; the others are an object each."""


@dataclass(frozen=True)
class Share:
    """Part `index` of `parts` of a batch of `total` rows: contiguous `rows`, and `padding` after them.

    Parts are of one size, padding included. Driver and workers both compute it, so nobody has to be told.
    """

    total: int
    parts: int
    index: int

    @property
    def size(self) -> int:
        return -(-self.total // self.parts)

    @property
    def rows(self) -> range:
        return range(self.total)[self.index * self.size :][: self.size]

    @property
    def num_real(self) -> int:
        return len(self.rows)

    @property
    def padding(self) -> int:
        return self.size - self.num_real

    @property
    def fetched(self) -> RowNumbers:
        """The rows to have at hand: the real ones, or the first of the batch where all are padding."""
        return np.array(self.rows or range(self.total)[:1], dtype=np.int64)


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
class RemoteBatch:
    """One rank's resulting batch without its data. A column is encoded, or a reference to where it is so."""

    num_rows: int
    batch_size: tuple[int, ...] | None
    columns: dict[str, Any]
    meta_info: Encoded
    producer: Producer


@dataclass(frozen=True, slots=True)
class Reply:
    """What a rank answers to a call: its span, and a value or the header of a batch."""

    span: Span
    producer: Producer
    value: Any = None
    batch: RemoteBatch | None = None


Fetch = Callable[[Sequence[tuple[Any, Producer]]], list[Any]]
"""The values of columns, all fetched side by side."""


def leave_here(batch: DataProto, producer: Producer, store: Callable[[list[Encoded]], Iterable[Any]]) -> RemoteBatch:
    """The header of a batch whose keys are stored where it was made. `store` takes all objects at once."""
    columns: dict[str, Any] = {key: encode(column) for key, column in batch.columns().items()}
    by_size = sorted(columns, key=lambda key: columns[key].num_bytes)
    ends = np.cumsum([columns[key].num_bytes for key in by_size])
    large = [key for key, end in zip(by_size, ends, strict=True) if end > INLINE_BYTES]
    if large:
        columns.update(zip(large, store([columns[key] for key in large]), strict=True))
    batch_size = None if batch.batch is None else tuple(batch.batch.batch_size)
    return RemoteBatch(len(batch), batch_size, columns, encode(batch.meta_info), producer)


def batches_of(replies: Iterable[Reply]) -> list[RemoteBatch]:
    """The headers of replies that must be batches."""
    batches = []
    for reply in replies:
        if reply.batch is None:
            raise DataError(f"{reply.producer} returned {type(reply.value).__name__}, and a batch is needed")
        batches.append(reply.batch)
    return batches


def value_of(reply: Reply, fetch: Fetch) -> Any:
    """A single rank's result with its data."""
    return reply.value if reply.batch is None else gather_rows([reply.batch], None, None, fetch)


def gather_rows(
    batches: Sequence[RemoteBatch], rows: RowNumbers | None, keys: Collection[str] | None, fetch: Fetch
) -> DataProto:
    """Rows (None: all) of a batch that lies in stretches, one per rank. Fetches only what holds them."""
    ends = np.cumsum([batch.num_rows for batch in batches])
    rows = np.arange(ends[-1]) if rows is None else rows
    if len(rows) and not 0 <= rows.min() <= rows.max() < ends[-1]:
        raise DataError(f"rows {rows.min()} to {rows.max()} were asked for, and the batch has {ends[-1]}")
    owner = np.searchsorted(ends, rows, side="right")
    owners = np.unique(owner) if len(rows) else [0]
    stretches = [batches[i] for i in owners]
    first = stretches[0]
    for batch in stretches:
        if batch.columns.keys() != first.columns.keys():
            raise DataError(
                f"{first.producer} returned the keys {sorted(first.columns)}, {batch.producer} {sorted(batch.columns)}"
            )
    names = [key for key in first.columns if keys is None or key in keys]
    values = iter(fetch([(batch.columns[name], batch.producer) for batch in stretches for name in names]))
    parts = []
    for i, batch in zip(owners, stretches, strict=True):
        part = DataProto.from_columns({name: next(values) for name in names}, batch.batch_size, {})
        inside = rows[owner == i] - (ends[i] - batch.num_rows)
        parts.append(pick_rows(part, inside) if len(part) == batch.num_rows else part)
    joined = parts[0] if len(parts) == 1 else DataProto.concat(parts)
    joined.meta_info = merge_meta_info([batch.meta_info.decode() for batch in batches])
    is_in_order = (np.diff(owner) >= 0).all()
    return joined if is_in_order else joined[np.argsort(np.argsort(owner, kind="stable"))]


def pick_rows(batch: DataProto, rows: RowNumbers) -> DataProto:
    """The rows with these numbers, without a copy where they are next to each other."""
    is_stretch = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    picked: DataProto = batch[rows[0] : rows[-1] + 1] if is_stretch else batch[rows]
    return picked
