"""Results of calls: what a rank replies, the batch that consists of the replies, and the future of
this batch.

The reply of a rank describes its batch by a small header. Large columns are stored separately, and
a process that reads them fetches them. So this module can join, select and reorder rows and keys of
a result without moving its data. How to wait for a call and how to fetch stored columns is known to
`rolepool.cluster`, which passes in a `Pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rolepool.errors import DataError
from rolepool.metrics import Span
from rolepool.protocol.columns import Array, Columns, MetaInfo, merge_meta_info
from rolepool.protocol.data import DataProto, batch_to_tensordict
from rolepool.protocol.encoding import Encoded, Value, encode

Reference = Any
"""A reference to an object of Ray, which this package does not import."""
RowNumbers = npt.NDArray[np.int64]
Keys = frozenset[str] | None
"""Which keys to use; None means all."""
INLINE_BYTES = 64 * 1024
"""The smallest columns of a batch are sent in its header, up to this size together; the others are
stored."""


# What a rank replies


class BatchHeader(NamedTuple):
    """The batch that one rank returned, without its large columns."""

    num_rows: int
    batch_size: tuple[int, ...] | None
    small: dict[str, Encoded]
    large: tuple[str, ...]
    """The names of the stored columns."""
    meta_info: Encoded


class Reply(NamedTuple):
    """What a rank replies to a call: its span, and a value or the header of a batch."""

    span: Span
    value: Encoded | None = None
    header: BatchHeader | None = None
    stored: Reference = None
    """The large columns, a dict of Encoded; None if there are none. It is added by the process that reads
    the reply."""

    @property
    def maker(self) -> str:
        """The process and method that replied, for messages."""
        span = self.span
        return f"{span.pool} rank {span.rank} ({span.role}.{span.method}, node {span.node})"

    @property
    def batch(self) -> BatchHeader:
        """The header of a reply that must be a batch."""
        if self.header is None:
            if self.value is None:
                kind = "None"
            else:
                kind = f"a {type(self.value.decode()).__name__}"
            raise DataError(f"{self.maker} returned {kind}; it must return a DataProto")
        return self.header


def encode_result(
    result: object,
) -> tuple[Encoded | None, BatchHeader | None, dict[str, Encoded] | None]:
    """The value and the header of the reply for a result, and the large columns, which must be
    stored."""
    if result is None:
        return None, None, None
    if not isinstance(result, DataProto):
        return encode(result), None, None
    columns = {key: encode(column) for key, column in result.columns().items()}
    small: dict[str, Encoded] = {}
    large: dict[str, Encoded] = {}
    num_bytes = 0
    for key in sorted(columns, key=lambda key: columns[key].num_bytes):
        num_bytes += columns[key].num_bytes
        if num_bytes > INLINE_BYTES:
            large[key] = columns[key]
    # In the order of the batch, not by size, because readers keep this order.
    for key, column in columns.items():
        if key not in large:
            small[key] = column
    header = BatchHeader(
        num_rows=len(result),
        batch_size=None if result.batch is None else tuple(result.batch.batch_size),
        small=small,
        large=tuple(large),
        meta_info=encode(result.meta_info),
    )
    return None, header, large or None


Fetch = Callable[[Sequence[Reply]], list[dict[str, Encoded]]]
"""The stored columns of these replies."""


def values_of(replies: Iterable[Reply], fetch: Fetch) -> list[Value]:
    """Each rank's result, with its data."""
    values: list[Value] = []
    for reply in replies:
        if reply.header is not None:
            values.append(gather_rows([reply], None, None, fetch))
        elif reply.value is not None:
            values.append(reply.value.decode())
        else:
            values.append(None)
    return values


def count_rows(replies: Iterable[Reply]) -> int:
    """The number of rows of the batch that consists of the replies."""
    return sum(reply.batch.num_rows for reply in replies)


def gather_rows(
    replies: Sequence[Reply],
    rows: RowNumbers | None,
    keys: Keys,
    fetch: Fetch,
) -> DataProto:
    """These rows (None: all) of the batch that consists of the replies. Only replies with such rows
    are fetched."""
    headers = [reply.batch for reply in replies]
    ends = np.cumsum([header.num_rows for header in headers])
    num_rows = ends[-1]
    if rows is None:
        rows = np.arange(num_rows)
    if len(rows):
        lowest = rows.min()
        highest = rows.max()
        if lowest < 0 or highest >= num_rows:
            raise DataError(
                f"rows {lowest} to {highest} were requested, but the batch has {num_rows} rows"
            )
    part_of_row = np.searchsorted(ends, rows, side="right")
    numbers: list[int] = np.unique(part_of_row).tolist()
    if not numbers:
        # Without rows, the first part tells the columns.
        numbers = [0]
    used_replies = [replies[number] for number in numbers]
    names = _common_names(used_replies, keys)
    columns_of_parts = _columns_of(used_replies, names, fetch)
    parts: list[DataProto] = []
    for number, encoded in zip(numbers, columns_of_parts, strict=True):
        header = headers[number]
        columns = {name: encoded[name].decode() for name in names}
        part = DataProto.from_columns(columns, header.batch_size, {})
        # A batch of arrays only has no rows if none of its columns is wanted.
        if len(part) == header.num_rows:
            first_row = ends[number] - header.num_rows
            rows_of_part = rows[part_of_row == number]
            part = pick_rows(part, rows_of_part - first_row)
        parts.append(part)
    joined = parts[0] if len(parts) == 1 else DataProto.concat(parts)
    joined.meta_info = merge_meta_info([header.meta_info.decode() for header in headers])
    is_in_order = (np.diff(part_of_row) >= 0).all()
    if not is_in_order:
        # The rows lie part by part, and go to where they were asked for.
        places = np.argsort(part_of_row, kind="stable")
        joined = joined[np.argsort(places)]
    return joined


def _columns_of(
    replies: Sequence[Reply],
    names: Sequence[str],
    fetch: Fetch,
) -> Iterator[dict[str, Encoded]]:
    """The columns of each reply. Stored ones are fetched only if one of these names is among
    them."""
    wanted = set(names)
    needs_stored = [not wanted.isdisjoint(reply.batch.large) for reply in replies]
    replies_to_fetch = list(compress(replies, needs_stored))
    fetched = iter(fetch(replies_to_fetch))
    for reply, has_stored in zip(replies, needs_stored, strict=True):
        if has_stored:
            yield reply.batch.small | next(fetched)
        else:
            yield reply.batch.small


def _common_names(replies: Sequence[Reply], keys: Keys) -> list[str]:
    """The wanted columns of these replies. Raises DataError if the replies differ in their keys."""
    all_names: list[list[str]] = []
    for reply in replies:
        header = reply.batch
        all_names.append([*header.small, *header.large])
    distinct = set(map(frozenset, all_names))
    if len(distinct) > 1:
        shown: list[str] = []
        for reply, names in zip(replies, all_names, strict=True):
            shown.append(f"{reply.maker}: {sorted(names)}")
        of_ranks = "; ".join(shown)
        raise DataError(f"the ranks returned batches with different keys: {of_ranks}")
    common_names = all_names[0]
    if keys is None:
        return common_names
    return [name for name in common_names if name in keys]


def pick_rows(batch: DataProto, rows: RowNumbers) -> DataProto:
    """The rows with these numbers: the batch itself if they are all of its rows. They are not
    copied if they are consecutive."""
    is_range = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    if not is_range:
        return batch.select_idxs(rows)
    if len(rows) == len(batch):
        return batch
    first = int(rows[0])
    last = int(rows[-1])
    return batch.slice(first, last + 1)


# Futures


class Pending(Protocol):
    """A call that was made on the ranks of a group. `rolepool.cluster` makes it."""

    number: int

    @property
    def what(self) -> str:
        """The call in words, for errors."""

    @property
    def objects(self) -> Sequence[tuple[Reference, Reference | None]]:
        """References to the replies with a result, to pass them to another call without reading
        them."""

    def replies(self, timeout_s: float | None) -> list[Reply]:
        """Wait for the ranks that return a result. The replies are in rank order. Raises
        WorkerError."""

    def spans(self, timeout_s: float | None) -> list[Span]:
        """Wait for all ranks and return their spans."""

    def has_ended(self, within_s: float) -> bool:
        """Whether every rank has replied or failed."""

    def fetch(self, replies: Sequence[Reply]) -> list[dict[str, Encoded]]:
        """The stored columns of replies."""


class CallFuture:
    """The result of a call (or of several, one after another). `get()` waits for it.

    If it is passed to another call, the wait happens in that call's workers.
    """

    def __init__(self, calls: Sequence[Pending], collect: Callable[[list[Value]], Value]) -> None:
        self.calls = tuple(calls)
        self.sources: Iterable[Pending] = self.calls
        """The calls whose results it contains."""
        self.collect = collect

    def get(self, timeout_s: float | None = None) -> Value:
        """Wait for every rank and return the result. Raises WorkerError if a rank failed or
        died."""
        replies = replies_of(self.calls, timeout_s)
        return self.collect(values_of(replies, self.calls[0].fetch))

    def spans(self, timeout_s: float | None = None) -> list[Span]:
        """Wait for every rank, and return the spans of the call: what each rank did, with its start
        and end."""
        spans: list[Span] = []
        for call in self.calls:
            spans += call.spans(timeout_s)
        return spans

    def done(self) -> bool:
        """Whether every rank has replied or failed."""
        return all(call.has_ended(within_s=0) for call in self.calls)

    def __repr__(self) -> str:
        calls = " and ".join(call.what for call in self.calls)
        return f"<{type(self).__name__} of {calls}>"


class Stripe(NamedTuple):
    """Some keys of a batch, for all of its rows. They come from the results of calls or from a
    batch of the driver.

    `order` has the numbers of the rows, in their order. None means all rows.
    """

    source: tuple[Pending, ...] | DataProto
    keys: Keys = None
    order: RowNumbers | None = None

    def num_rows(self) -> int:
        """The number of rows. If only the result tells it, this waits for the headers of the
        result."""
        if self.order is not None:
            return len(self.order)
        if isinstance(self.source, DataProto):
            return len(self.source)
        return count_rows(replies_of(self.source, None))

    def load(self, keys: Keys, timeout_s: float | None) -> DataProto:
        wanted = intersection(self.keys, keys)
        if isinstance(self.source, DataProto):
            return rows_with_keys(self.source, self.order, wanted)
        replies = replies_of(self.source, timeout_s)
        first_call = self.source[0]
        return gather_rows(replies, self.order, wanted, first_call.fetch)


class DataProtoFuture(CallFuture):
    """The future of a batch. If it is passed to another call, its data goes from worker to worker,
    not via the driver.

    `select`, `union`, `reorder`, `chunk` and `concat` return new futures and move no data. Unlike
    on DataProto, none of them changes the future it is called on.
    """

    def __init__(
        self,
        calls: Sequence[Pending],
        stripes: Iterable[Stripe] | None = None,
    ) -> None:
        super().__init__(calls, collect_batches)
        self.is_plain = stripes is None
        """Whether it is a future as a call returned it."""
        if stripes is None:
            stripes = [Stripe(self.calls)]
        self.stripes = tuple(stripes)
        sources: list[Pending] = []
        for stripe in self.stripes:
            if isinstance(stripe.source, tuple):
                sources += stripe.source
        self.sources = sources

    def get(
        self,
        timeout_s: float | None = None,
        keys: Iterable[str] | None = None,
    ) -> Any:
        """Wait for the batch, fetch it (only these keys, if they are given) and return it.

        If the method returned TensorDicts, the result is one TensorDict; if it returned lists, the
        joined list. If it returned other values, the result is a list of them.
        """
        if self.is_plain:
            replies = replies_of(self.calls, timeout_s)
            if any(reply.header is None for reply in replies):
                return super().get(timeout_s)
        wanted = None if keys is None else frozenset(keys)
        parts = [stripe.load(wanted, timeout_s) for stripe in self.stripes]
        batch = join_stripes(parts)
        return batch_to_tensordict(batch)

    def __len__(self) -> int:
        """Number of rows. Waits for the result's header, not for its data."""
        return self.stripes[0].num_rows()

    def select(self, keys: Iterable[str]) -> DataProtoFuture:
        """These keys only."""
        wanted = frozenset(keys)
        stripes: list[Stripe] = []
        for stripe in self.stripes:
            common = intersection(stripe.keys, wanted)
            stripes.append(stripe._replace(keys=common))
        return DataProtoFuture(self.calls, stripes)

    def union(self, other: DataProto | DataProtoFuture) -> DataProtoFuture:
        """With the keys of another batch of as many rows. If both have a key, the other batch's
        column is used."""
        return DataProtoFuture(self.calls, (*self.stripes, *stripes_of(other)))

    def reorder(self, indices: Sequence[int] | Array) -> DataProtoFuture:
        """The rows with these numbers, in this order."""
        rows = np.asarray(indices, dtype=np.int64)
        stripes: list[Stripe] = []
        for stripe in self.stripes:
            order = rows if stripe.order is None else stripe.order[rows]
            stripes.append(stripe._replace(order=order))
        return DataProtoFuture(self.calls, stripes)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """`chunks` parts of equal size. Waits for the result's header to know the number of
        rows."""
        total = len(self)
        if chunks < 1 or total % chunks:
            raise DataError(f"{total} rows cannot be split into {chunks} equal parts")
        rows_of_parts = np.arange(total).reshape(chunks, -1)
        return [self.reorder(rows) for rows in rows_of_parts]

    @staticmethod
    def concat(futures: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """The rows of all futures, one after another. Each must be a future as a call returned
        it."""
        if not futures or not all(future.is_plain for future in futures):
            raise DataError(
                "only futures as calls returned them can be concatenated; get() the others first"
            )
        calls: list[Pending] = []
        for future in futures:
            calls += future.calls
        return DataProtoFuture(calls)


def stripes_of(batch: DataProto | DataProtoFuture) -> tuple[Stripe, ...]:
    if isinstance(batch, DataProtoFuture):
        return batch.stripes
    return (Stripe(batch),)


def replies_of(calls: Iterable[Pending], timeout_s: float | None) -> list[Reply]:
    replies: list[Reply] = []
    for call in calls:
        replies += call.replies(timeout_s)
    return replies


collect_first = itemgetter(0)
"""The result of the only rank."""


def collect_batches(results: list[Value]) -> Value:
    """The results of ranks that each had a part of a batch: batches and lists are joined, others
    stay in a list."""
    if all(isinstance(result, DataProto) for result in results):
        return DataProto.concat(results)
    if all(isinstance(result, list) for result in results):
        return list(chain.from_iterable(results))
    if all(result is None for result in results):
        return None
    return results


def join_stripes(parts: Sequence[DataProto]) -> DataProto:
    """One batch with all the keys. If two parts have a key, the later one's column is used."""
    # A part without keys has no rows to compare.
    distinct_sizes = {len(part) for part in parts if part.columns()}
    if len(distinct_sizes) > 1:
        sizes = ", ".join(f"{sorted(part.columns())}: {len(part)}" for part in parts)
        raise DataError(f"batches of different numbers of rows cannot be one batch: {sizes}")
    columns: Columns = {}
    meta_info: MetaInfo = {}
    for part in parts:
        columns.update(part.columns())
        meta_info.update(part.meta_info)

    def how_much_it_knows(part: DataProto) -> tuple[bool, int]:
        """A part with tensors knows their device, and one with columns the number of rows."""
        return part.batch is not None, len(part.columns())

    widest = max(parts, key=how_much_it_knows)
    return widest.like(columns, len(widest), meta_info)


def intersection(first: Keys, second: Keys) -> Keys:
    if first is None:
        return second
    if second is None:
        return first
    return first & second


def rows_with_keys(batch: DataProto, rows: RowNumbers | None, keys: Keys) -> DataProto:
    """These rows (None means all) of the batch, without columns that are not among the keys."""
    columns: Columns = {}
    for key, column in batch.columns().items():
        if keys is None or key in keys:
            columns[key] = column
    chosen = batch.like(columns, len(batch))
    # A batch of arrays only has no rows if none of them is among the keys.
    has_no_rows = len(chosen) < len(batch)
    if rows is None or has_no_rows:
        return chosen
    return pick_rows(chosen, rows)
