"""The form in which a call travels to a worker: the method, and arguments that may be rows of a batch.

Owns the message types, turning values, batches and futures into them on the driver's side, and into values again on
the worker's. A batch of the driver's is written into shared memory once per part; a future's data is only pointed to.
Knows nothing of groups.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError

from rolepool.errors import DataError, WorkerError
from rolepool.protocol.batching import IS_PADDING_KEY, pad_rows
from rolepool.protocol.data import DataProto
from rolepool.protocol.encoding import Encoded
from rolepool.protocol.futures import (
    CallFuture,
    DataProtoFuture,
    Keys,
    Pending,
    Stripe,
    collect_batches,
    collect_first,
    collect_list,
    intersection,
    join_stripes,
    rows_with_keys,
    stripes_of,
)
from rolepool.protocol.remote import Producer, Reply, RowNumbers, Share, batches_of, gather_rows, value_of

FETCH_TIMEOUT_S = 600.0


# Messages


@dataclass(frozen=True, slots=True)
class StripeArgument:
    """Some keys of a batch, for the rows of one share of it.

    `where` is the place, among the call's objects, of a DataProto with just those keys and rows; or those of the
    replies of all ranks that made the batch, of which the worker fetches what it needs: `rows` by number, where they
    are not simply the share's. `total` is the number of rows of the batch, where the driver knew.
    """

    where: int | slice
    total: int | None
    keys: Keys = None
    rows: RowNumbers | None = None


@dataclass(frozen=True, slots=True)
class BatchArgument:
    """Part `index` of `parts` of a batch; (1, 0) is the whole."""

    stripes: tuple[StripeArgument, ...]
    parts: int
    index: int


@dataclass(frozen=True, slots=True)
class ResultArgument:
    """The collected result of another call that is not a batch: its replies lie among the objects."""

    where: slice
    collect: Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A method of a role, to be run by one worker."""

    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    queued_s: float
    number: int
    after: tuple[int, ...]
    """Numbers of the calls whose results it is given."""
    one_answer_per_dp_group: bool
    returns_rows: bool
    """Whether results have a row for each row that was sent, so that those of padding are to be removed."""


def pack_reply(reply: Reply) -> bytes | Reply:
    """A small reply as bytes. One that refers to objects stays as it is: Ray must see the references, to count them."""
    columns = [] if reply.batch is None else reply.batch.columns.values()
    refers = any(not isinstance(column, Encoded) for column in columns)
    return reply if refers or reply.value is not None else pickle.dumps(reply)


def unpack_reply(packed: bytes | Reply) -> Reply:
    if isinstance(packed, bytes):
        packed = pickle.loads(packed)  # noqa: S301  # from our own workers, over Ray's channel
    assert isinstance(packed, Reply)
    return packed


# The driver's side


def pack_argument(value: Any, objects: list[Any], reads: Keys, parts: int = 1, index: int = 0) -> Any:
    """A value as it travels; of a batch part `index` of `parts`. What it refers to is added to the call's objects."""
    if isinstance(value, DataProto | DataProtoFuture):
        stripes = [_pack_stripe(stripe, objects, reads, parts, index) for stripe in stripes_of(value)]
        return BatchArgument(tuple(stripes), parts, index)
    if isinstance(value, CallFuture):
        if value.collect not in (collect_first, collect_list):
            raise DataError(f"{value!r} is put together by a function of the driver; hand on what its get() returns")
        return ResultArgument(_add_replies(value.calls, objects), value.collect)
    return value


def _pack_stripe(stripe: Stripe, objects: list[Any], reads: Keys, parts: int, index: int) -> StripeArgument:
    keys = intersection(stripe.keys, reads)
    if not isinstance(stripe.source, DataProto) and stripe.order is None:
        return StripeArgument(_add_replies(stripe.source, objects), None, keys)
    share = Share(stripe.num_rows(), parts, index)
    rows = share.fetched if stripe.order is None else stripe.order[share.fetched]
    if not isinstance(stripe.source, DataProto):
        return StripeArgument(_add_replies(stripe.source, objects), share.total, keys, rows)
    objects.append(ray.put(rows_with_keys(stripe.source, rows, keys)))
    return StripeArgument(len(objects) - 1, share.total)


def _add_replies(calls: Iterable[Pending], objects: list[Any]) -> slice:
    start = len(objects)
    objects.extend(ref for call in calls for ref in call.refs)
    return slice(start, len(objects))


def sources_of(values: Iterable[Any]) -> Iterator[Pending]:
    """The calls whose results are among the arguments."""
    for value in values:
        if isinstance(value, CallFuture):
            yield from value.sources
        elif isinstance(value, list | tuple):
            yield from sources_of(value)


# The worker's side


def resolve(argument: Any, objects: Sequence[Any]) -> tuple[Any, Share | None]:
    """An argument's value on this worker; of a batch also which share it is."""
    if isinstance(argument, ResultArgument):
        return argument.collect([value_of(reply, fetch_columns) for reply in _replies(argument.where, objects)]), None
    if not isinstance(argument, BatchArgument):
        return argument, None
    first = argument.stripes[0]
    if argument.parts == 1 and len(argument.stripes) == 1 and isinstance(first.where, slice):
        replies = _replies(first.where, objects)
        if any(reply.batch is None for reply in replies):  # it could have been a batch; hand on what `get()` would
            return collect_batches([value_of(reply, fetch_columns) for reply in replies]), None
    totals = [_total(stripe, objects) for stripe in argument.stripes]
    if len(set(totals)) > 1:
        raise DataError(f"the parts of the batch have different numbers of rows: {totals}")
    share = Share(totals[0], argument.parts, argument.index)
    batch = join_stripes([_rows_of(stripe, share, objects) for stripe in argument.stripes])
    if share.num_real == 0 and share.size:
        return pad_rows(batch, share.size)[1:], share
    return pad_rows(batch, share.padding), share


def _replies(where: slice, objects: Sequence[Any]) -> list[Reply]:
    return [unpack_reply(packed) for packed in objects[where]]


def _total(stripe: StripeArgument, objects: Sequence[Any]) -> int:
    if stripe.total is not None:
        return stripe.total
    assert isinstance(stripe.where, slice)
    return sum(batch.num_rows for batch in batches_of(_replies(stripe.where, objects)))


def _rows_of(stripe: StripeArgument, share: Share, objects: Sequence[Any]) -> DataProto:
    if isinstance(stripe.where, int):
        batch: DataProto = objects[stripe.where]
        return batch
    rows = share.fetched if stripe.rows is None else stripe.rows
    return gather_rows(batches_of(_replies(stripe.where, objects)), rows, stripe.keys, fetch_columns)


def without_padding(result: Any, share: Share | None) -> Any:
    """A result without the rows that came from padding: of a batch, list, tensor or array with as many rows as the
    share, or a whole multiple of them in row-major order. Anything else is not rows, and is left as it is."""
    if share is None or not share.padding or not isinstance(result, DataProto | list | torch.Tensor | np.ndarray):
        return result
    per_row, rest = divmod(len(result), share.size)
    if per_row == 0 or rest:
        return result
    trimmed = result[: per_row * share.num_real]
    if isinstance(trimmed, DataProto) and IS_PADDING_KEY in trimmed.columns():
        trimmed.pop([IS_PADDING_KEY])
    return trimmed


def reason_of(error: BaseException) -> str:
    """Ray's words on one line, without the paragraph of causes it could think of."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and ":" not in line[:20]]
    text = " ".join(lines) or str(error)
    return text.split("Some common causes include")[0].strip()


def fetch_columns(columns: Sequence[tuple[Any, Producer]]) -> list[Any]:
    """The values of columns, wherever they are. An object that died with its producer is a WorkerError naming it."""
    makers = {column: producer for column, producer in columns if not isinstance(column, Encoded)}
    try:
        stored = dict(zip(makers, ray.get(list(makers), timeout=FETCH_TIMEOUT_S), strict=True))
    except ObjectLostError as error:
        lost = [producer for ref, producer in makers.items() if ref.hex() == error.object_ref_hex]
        producer = (lost or list(makers.values()))[0]
        raise producer.error(f"a result of {producer} is lost, for its process died") from None
    except GetTimeoutError:
        raise WorkerError(
            f"results of {columns[0][1]} did not arrive within {FETCH_TIMEOUT_S:.0f} s; is the network up?"
        ) from None
    except RayError as error:
        raise WorkerError(f"results of {columns[0][1]} could not be fetched: {reason_of(error)}") from None
    return [(column if isinstance(column, Encoded) else stored[column]).decode() for column, _ in columns]
