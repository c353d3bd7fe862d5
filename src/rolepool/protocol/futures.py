"""Futures: the result of a call before it is there, and before its data is fetched.

Owns what can be done with a result without touching its data: handing it on, choosing keys, adding keys, changing the
order of rows. Waiting and fetching are a `Pending`'s, which `rolepool.cluster` hands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rolepool.errors import DataError
from rolepool.metrics import Span
from rolepool.protocol.data import DataProto
from rolepool.protocol.remote import Producer, Reply, RowNumbers, batches_of, gather_rows, pick_rows, value_of

Keys = frozenset[str] | None
"""Which keys to take; None: all."""


class Pending(Protocol):
    """A call under way on the ranks of a group."""

    number: int

    @property
    def what(self) -> str:
        """The call in words, for errors."""

    @property
    def refs(self) -> Sequence[Any]:
        """Handles of the replies of the ranks that answer, for handing them to another call unseen."""

    def replies(self, timeout_s: float | None) -> list[Reply]:
        """Wait for the ranks that answer, in rank order. Raises WorkerError."""

    def spans(self, timeout_s: float | None) -> list[Span]:
        """Wait for all ranks; what each did."""

    def has_ended(self, within_s: float) -> bool:
        """Whether every rank has answered or failed."""

    def fetch(self, columns: Sequence[tuple[Any, Producer]]) -> list[Any]:
        """The values of columns of its replies."""


class CallFuture:
    """The result of a call (or of several, one after another). `get()` waits for it.

    Given to another call, it is waited for there.
    """

    def __init__(self, calls: Sequence[Pending], collect: Callable[[list[Any]], Any]) -> None:
        self.calls = tuple(calls)
        self.collect = collect

    @property
    def sources(self) -> Iterable[Pending]:
        """The calls whose results are in it."""
        return self.calls

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for every rank and return the result. Raises WorkerError when a rank failed or died."""
        return self.collect([value_of(reply, call.fetch) for call in self.calls for reply in call.replies(timeout_s)])

    def spans(self, timeout_s: float | None = None) -> list[Span]:
        """Wait, and say what every rank did from when to when."""
        return [span for call in self.calls for span in call.spans(timeout_s)]

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        return all(call.has_ended(within_s=0) for call in self.calls)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {' and '.join(call.what for call in self.calls)}>"


@dataclass(frozen=True, eq=False)
class Stripe:
    """Some keys of a batch, for all of its rows: in the results of calls, one after another, or here.

    `order` picks and orders the rows.
    """

    source: tuple[Pending, ...] | DataProto
    keys: Keys = None
    order: RowNumbers | None = None

    def num_rows(self) -> int:
        """Waits for the headers of a result where nothing else tells."""
        if self.order is not None:
            return len(self.order)
        if isinstance(self.source, DataProto):
            return len(self.source)
        return sum(batch.num_rows for batch in batches_of(_replies(self.source, None)))

    def load(self, keys: Keys, timeout_s: float | None) -> DataProto:
        wanted = intersection(self.keys, keys)
        if isinstance(self.source, DataProto):
            return rows_with_keys(self.source, self.order, wanted)
        batches = batches_of(_replies(self.source, timeout_s))
        return gather_rows(batches, self.order, wanted, self.source[0].fetch)


class DataProtoFuture(CallFuture):
    """A batch before it is there. Given to another call, its data goes from worker to worker and not through here.

    `select`, `union`, `reorder`, `chunk` and `concat` return new futures and move nothing. Unlike on DataProto, none
    of them changes the future it is called on.
    """

    def __init__(self, calls: Sequence[Pending], stripes: Iterable[Stripe] | None = None) -> None:
        super().__init__(calls, collect_batches)
        self._is_plain = stripes is None
        self.stripes = (Stripe(self.calls),) if stripes is None else tuple(stripes)

    @property
    def sources(self) -> Iterable[Pending]:
        return [call for stripe in self.stripes if isinstance(stripe.source, tuple) for call in stripe.source]

    def get(self, timeout_s: float | None = None, keys: Iterable[str] | None = None) -> Any:
        """Wait, fetch (these keys only) and return the batch.

        A method that returned lists gives them joined, one that returned anything else a list of its results.
        """
        if self._is_plain and any(reply.batch is None for reply in _replies(self.calls, timeout_s)):
            return super().get(timeout_s)
        wanted = None if keys is None else frozenset(keys)
        return join_stripes([stripe.load(wanted, timeout_s) for stripe in self.stripes])

    def __len__(self) -> int:
        """Number of rows; waits for the result's header, not for its data."""
        return self.stripes[0].num_rows()

    def select(self, keys: Iterable[str]) -> DataProtoFuture:
        """These keys only."""
        wanted = frozenset(keys)
        return self._with(replace(stripe, keys=intersection(stripe.keys, wanted)) for stripe in self.stripes)

    def union(self, other: DataProto | DataProtoFuture) -> DataProtoFuture:
        """With the keys of another batch of as many rows, which win where both have a key."""
        return self._with((*self.stripes, *stripes_of(other)))

    def reorder(self, indices: Sequence[int] | npt.NDArray[Any]) -> DataProtoFuture:
        """The rows with these numbers, in this order."""
        order = np.asarray(indices, dtype=np.int64)
        return self._with(
            replace(stripe, order=order if stripe.order is None else stripe.order[order]) for stripe in self.stripes
        )

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """As many parts of equal size. Waits for the header, to know the number of rows."""
        total = len(self)
        if chunks < 1 or total % chunks:
            raise DataError(f"{total} rows cannot be cut into {chunks} equal parts")
        return [self.reorder(part) for part in np.arange(total).reshape(chunks, -1)]

    @staticmethod
    def concat(futures: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """The rows of all, one after another. They must be results as calls returned them."""
        if not futures or not all(future._is_plain for future in futures):
            raise DataError("only futures as calls returned them can be concatenated; get() the others first")
        return DataProtoFuture([call for future in futures for call in future.calls])

    def _with(self, stripes: Iterable[Stripe]) -> DataProtoFuture:
        return DataProtoFuture(self.calls, stripes)


def stripes_of(batch: DataProto | DataProtoFuture) -> tuple[Stripe, ...]:
    return batch.stripes if isinstance(batch, DataProtoFuture) else (Stripe(batch),)


def _replies(calls: Iterable[Pending], timeout_s: float | None) -> list[Reply]:
    return [reply for call in calls for reply in call.replies(timeout_s)]


def collect_first(results: list[Any]) -> Any:
    """The only rank's result."""
    return results[0]


def collect_list(results: list[Any]) -> list[Any]:
    """The results in rank order."""
    return results


def collect_batches(results: list[Any]) -> Any:
    """What the ranks of a cut batch returned, put together: batches and lists joined, others in a list."""
    if all(isinstance(result, DataProto) for result in results):
        return DataProto.concat(results)
    if all(isinstance(result, list) for result in results):
        return [item for result in results for item in result]
    return None if all(result is None for result in results) else results


def join_stripes(parts: Sequence[DataProto]) -> DataProto:
    """One batch of all the keys; a later part wins where two have a key. A part without keys has no rows to match."""
    if len({len(part) for part in parts if part.columns()}) > 1:
        sizes = ", ".join(f"{sorted(part.columns())}: {len(part)}" for part in parts)
        raise DataError(f"batches of different numbers of rows cannot be one batch: {sizes}")
    columns, meta_info = {}, {}
    for part in parts:
        columns.update(part.columns())
        meta_info.update(part.meta_info)
    widest = max(parts, key=lambda part: (part.batch is not None, len(part.columns())))
    return widest.like(columns, len(widest), meta_info)


def intersection(one: Keys, other: Keys) -> Keys:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def rows_with_keys(batch: DataProto, rows: RowNumbers | None, keys: Keys) -> DataProto:
    """These rows (None: all) of those of the keys that it has."""
    columns = {key: column for key, column in batch.columns().items() if keys is None or key in keys}
    chosen = batch.like(columns, len(batch))
    without_rows = len(chosen) < len(batch)  # none of its arrays is among the keys, so there is nothing to pick from
    return chosen if rows is None or without_rows else pick_rows(chosen, rows)
