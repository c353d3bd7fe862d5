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
from rolepool.protocol.remote import Column, Producer, RemoteBatch, Reply, gather_rows

Order = npt.NDArray[np.int64]


class Pending(Protocol):
    """A call under way on the ranks of a group."""

    @property
    def what(self) -> str:
        """The call in words, for errors."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the call, or of all whose replies count as one's."""

    @property
    def refs(self) -> Sequence[Any]:
        """Handles of the replies of the ranks that answer, for handing them to another call unseen."""

    def replies(self, timeout_s: float | None) -> list[Reply]:
        """Wait for the ranks that answer, in rank order. Raises WorkerError."""

    def spans(self, timeout_s: float | None) -> list[Span]:
        """Wait for all ranks; what each did."""

    def is_done(self) -> bool:
        """Whether every rank has answered or failed."""

    def fetch(self, columns: Sequence[tuple[Column, Producer]]) -> list[Any]:
        """The values of columns of its replies."""


class CallFuture:
    """The result of a call. `get()` waits for it. Given to another call, it is waited for there."""

    def __init__(self, pending: Pending, collect: Callable[[list[Any]], Any]) -> None:
        self.pending = pending
        self.collect = collect

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for every rank and return the result. Raises WorkerError when a rank failed or died."""
        return self.collect([value_of(reply, self.pending) for reply in self.pending.replies(timeout_s)])

    def spans(self, timeout_s: float | None = None) -> list[Span]:
        """Wait, and say what every rank did from when to when."""
        return self.pending.spans(timeout_s)

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        return self.pending.is_done()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.pending.what}>"


def value_of(reply: Reply, pending: Pending) -> Any:
    """A single rank's result with its data."""
    if reply.batch is None:
        return reply.value
    return gather_rows([reply.batch], range(reply.batch.num_rows), None, pending.fetch)


@dataclass(frozen=True, eq=False)
class Stripe:
    """Some keys of a batch, for all of its rows: in a call's result, or here. `order` picks and orders the rows."""

    pending: Pending | None
    local: DataProto | None
    keys: frozenset[str] | None = None
    order: Order | None = None

    @property
    def is_whole_result(self) -> bool:
        """Whether this is all that a call returned, as it returned it."""
        return self.local is None and self.keys is None and self.order is None

    def num_rows(self) -> int:
        """Waits for the headers of a result where nothing else tells."""
        if self.order is not None:
            return len(self.order)
        return len(self.local) if self.local is not None else sum(batch.num_rows for batch in self.batches(None))

    def batches(self, timeout_s: float | None) -> list[RemoteBatch]:
        assert self.pending is not None
        replies = self.pending.replies(timeout_s)
        strange = [reply for reply in replies if reply.batch is None]
        if strange:
            raise DataError(f"{strange[0].producer} returned {type(strange[0].value).__name__}, and a batch is needed")
        return [reply.batch for reply in replies if reply.batch is not None]

    def load(self, keys: frozenset[str] | None, timeout_s: float | None) -> DataProto:
        wanted = intersection(self.keys, keys)
        if self.local is not None:
            return rows_with_keys(self.local, self.order, wanted)
        assert self.pending is not None
        rows = range(self.num_rows()) if self.order is None else self.order
        return gather_rows(self.batches(timeout_s), rows, wanted, self.pending.fetch)


class DataProtoFuture(CallFuture):
    """A batch before it is there. Given to another call, its data goes from worker to worker and not through here.

    `select`, `union`, `reorder`, `chunk` and `concat` return new futures and move nothing. Unlike on DataProto, none
    of them changes the future it is called on.
    """

    def __init__(self, pending: Pending, stripes: tuple[Stripe, ...] | None = None) -> None:
        super().__init__(pending, collect_batches)
        self.stripes = stripes or (Stripe(pending, None),)

    def get(self, timeout_s: float | None = None, keys: Iterable[str] | None = None) -> Any:
        """Wait, fetch (these keys only) and return the batch.

        A method that returned lists gives them joined, one that returned anything else a list of its results.
        """
        replies = self.pending.replies(timeout_s)
        if self._is_plain() and any(reply.batch is None for reply in replies):
            return self.collect([value_of(reply, self.pending) for reply in replies])
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
        more = other.stripes if isinstance(other, DataProtoFuture) else (Stripe(None, other),)
        return self._with((*self.stripes, *more))

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
        if not futures or not all(future._is_plain() for future in futures):
            raise DataError("only futures as calls returned them can be concatenated; get() the others first")
        return DataProtoFuture(_Joined([future.pending for future in futures]))

    def _is_plain(self) -> bool:
        return len(self.stripes) == 1 and self.stripes[0].is_whole_result

    def _with(self, stripes: Iterable[Stripe]) -> DataProtoFuture:
        return DataProtoFuture(self.pending, tuple(stripes))


class _Joined:
    """Several calls whose replies count as one's."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self.parts = parts

    @property
    def what(self) -> str:
        return " and ".join(part.what for part in self.parts)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(number for part in self.parts for number in part.numbers)

    @property
    def refs(self) -> list[Any]:
        return [ref for part in self.parts for ref in part.refs]

    def replies(self, timeout_s: float | None) -> list[Reply]:
        return [reply for part in self.parts for reply in part.replies(timeout_s)]

    def spans(self, timeout_s: float | None) -> list[Span]:
        return [span for part in self.parts for span in part.spans(timeout_s)]

    def is_done(self) -> bool:
        return all(part.is_done() for part in self.parts)

    def fetch(self, columns: Sequence[tuple[Column, Producer]]) -> list[Any]:
        return self.parts[0].fetch(columns)


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
    if len({len(part) for part in parts if _keys_of(part)}) > 1:
        sizes = ", ".join(f"{sorted(_keys_of(part))}: {len(part)}" for part in parts)
        raise DataError(f"batches of different numbers of rows cannot be one batch: {sizes}")
    joined = parts[0]
    for part in parts[1:]:
        kept = _keys_of(joined) - _keys_of(part)
        joined = with_keys(joined, frozenset(kept))
        joined.meta_info = {key: value for key, value in joined.meta_info.items() if key not in part.meta_info}
        joined = joined.union(part)
    return joined


def intersection(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    """Keys that both allow; None allows all."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def with_keys(batch: DataProto, keys: frozenset[str] | None) -> DataProto:
    """The batch with those of the keys that it has."""
    if keys is None:
        return batch
    tensors = [] if batch.batch is None else [key for key in batch.batch.keys() if key in keys]  # noqa: SIM118
    return batch.select(tensors, [key for key in batch.non_tensor_batch if key in keys])


def rows_with_keys(batch: DataProto, rows: Order | None, keys: frozenset[str] | None) -> DataProto:
    """These rows (None: all) of those of the keys that it has."""
    chosen = with_keys(batch, keys)
    without_rows = len(chosen) < len(batch)  # none of its arrays is among the keys, so there is nothing to pick from
    return chosen if rows is None or without_rows else chosen[rows]


def _keys_of(batch: DataProto) -> set[str]:
    return {*([] if batch.batch is None else batch.batch.keys()), *batch.non_tensor_batch}
