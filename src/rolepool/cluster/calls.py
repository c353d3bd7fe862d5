"""The form in which a call travels to a worker: the method, and arguments that may be rows of a batch.

Owns the message types and turning them into values on the worker's side. Knows nothing of groups.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError

from rolepool.errors import DataError, WorkerError
from rolepool.protocol.batching import IS_PADDING_KEY, pad_rows
from rolepool.protocol.data import DataProto
from rolepool.protocol.futures import collect_batches, join_stripes
from rolepool.protocol.remote import Column, Producer, RemoteBatch, Reply, gather_rows
from rolepool.protocol.rows import Share

FETCH_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class StripeArgument:
    """Some keys of a batch, for the rows of one share of it.

    Among the call's objects it is, from `first` on, either one DataProto with just those rows (`count` is None), or
    the replies of all ranks that made the batch, of which the worker fetches what it needs. `rows` are the rows by
    number, where they are not simply the share's. `total` is the number of rows of the batch, where the driver knew.
    """

    first: int
    count: int | None
    keys: frozenset[str] | None
    rows: npt.NDArray[np.int64] | None
    total: int | None


@dataclass(frozen=True, slots=True)
class BatchArgument:
    """Part `index` of `parts` of a batch; (1, 0) is the whole."""

    stripes: tuple[StripeArgument, ...]
    parts: int
    index: int


@dataclass(frozen=True, slots=True)
class ResultArgument:
    """The collected result of another call that is not a batch: its replies lie among the objects."""

    first: int
    count: int
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


def pack_call(call: Call) -> bytes:
    """A call as bytes, which Ray passes on several times faster than an object; made once for all ranks."""
    packed: bytes = cloudpickle.dumps(call)
    return packed


def unpack_call(packed: bytes) -> Call:
    call: Call = pickle.loads(packed)  # noqa: S301  # from our own driver, over Ray's channel
    return call


def pack_reply(reply: Reply) -> bytes | Reply:
    """A small reply as bytes. One that refers to objects stays as it is: Ray must see the references, to count them."""
    refers = reply.batch is not None and any(column.ref is not None for column in reply.batch.columns.values())
    return reply if refers or reply.value is not None else pickle.dumps(reply)


def unpack_reply(packed: bytes | Reply) -> Reply:
    if isinstance(packed, bytes):
        packed = pickle.loads(packed)  # noqa: S301  # from our own workers, over Ray's channel
    assert isinstance(packed, Reply)
    return packed


def resolve(argument: Any, objects: Sequence[Any]) -> tuple[Any, Share | None]:
    """An argument's value on this worker; of a batch also which share it is."""
    if isinstance(argument, BatchArgument):
        return _resolve_batch(argument, objects)
    if isinstance(argument, ResultArgument):
        replies = _replies(objects, argument.first, argument.count)
        return argument.collect([_value_of(reply) for reply in replies]), None
    return argument, None


def _resolve_batch(argument: BatchArgument, objects: Sequence[Any]) -> tuple[Any, Share | None]:
    first = argument.stripes[0]
    if len(argument.stripes) == 1 and first.count is not None:
        replies = _replies(objects, first.first, first.count)
        if any(reply.batch is None for reply in replies):
            return _resolve_other_results(argument, replies)
    totals = [_total(stripe, objects) for stripe in argument.stripes]
    if len(set(totals)) > 1:
        raise DataError(f"the parts of the batch have different numbers of rows: {totals}")
    share = Share(totals[0], argument.parts, argument.index)
    batch = join_stripes([_rows_of(stripe, share, objects) for stripe in argument.stripes])
    if share.num_real == 0 and share.size:
        return pad_rows(batch, share.size)[1:], share
    return pad_rows(batch, share.padding), share


def _resolve_other_results(argument: BatchArgument, replies: Sequence[Reply]) -> tuple[Any, None]:
    """A call that could have returned a batch returned something else: hand on what `get()` would have given."""
    if argument.parts > 1:
        raise DataError(f"{replies[0].producer} returned {type(replies[0].value).__name__}, and a batch is needed")
    return collect_batches([_value_of(reply) for reply in replies]), None


def _replies(objects: Sequence[Any], first: int, count: int) -> list[Reply]:
    return [unpack_reply(packed) for packed in objects[first : first + count]]


def _batches(stripe: StripeArgument, objects: Sequence[Any]) -> list[RemoteBatch]:
    assert stripe.count is not None
    replies = _replies(objects, stripe.first, stripe.count)
    for reply in replies:
        if reply.batch is None:
            raise DataError(f"{reply.producer} returned {type(reply.value).__name__}, and a batch is needed")
    return [reply.batch for reply in replies if reply.batch is not None]


def _total(stripe: StripeArgument, objects: Sequence[Any]) -> int:
    if stripe.total is not None:
        return stripe.total
    return sum(batch.num_rows for batch in _batches(stripe, objects))


def _rows_of(stripe: StripeArgument, share: Share, objects: Sequence[Any]) -> DataProto:
    if stripe.count is None:
        batch: DataProto = objects[stripe.first]
        return batch
    rows = share.fetched if stripe.rows is None else stripe.rows
    return gather_rows(_batches(stripe, objects), rows, stripe.keys, fetch_columns)


def _value_of(reply: Reply) -> Any:
    if reply.batch is None:
        return reply.value
    return gather_rows([reply.batch], range(reply.batch.num_rows), None, fetch_columns)


def without_padding(result: Any, share: Share | None) -> Any:
    """A result without the rows that came from padding: of a batch, list, tensor or array with as many rows as the
    share, or a whole multiple of them in row-major order. Anything else is not rows, and is left as it is."""
    if share is None or not share.padding or not isinstance(result, DataProto | list | torch.Tensor | np.ndarray):
        return result
    num_rows = len(result)
    if num_rows == 0 or num_rows % share.size:
        return result
    trimmed = result[: num_rows // share.size * share.num_real]
    if isinstance(trimmed, DataProto) and trimmed.batch is not None and IS_PADDING_KEY in trimmed.batch.keys():  # noqa: SIM118
        del trimmed.batch[IS_PADDING_KEY]
    return trimmed


def fetch_columns(columns: Sequence[tuple[Column, Producer]]) -> list[Any]:
    """The values of columns, wherever they are. An object that died with its producer is a WorkerError naming it."""
    refs = {column.ref: producer for column, producer in columns if column.ref is not None}
    try:
        stored = dict(zip(refs, ray.get(list(refs), timeout=FETCH_TIMEOUT_S), strict=True))
    except ObjectLostError as error:
        raise _lost(error, columns) from None
    except GetTimeoutError:
        raise WorkerError(
            f"results of {columns[0][1]} did not arrive within {FETCH_TIMEOUT_S:.0f} s; is the network up?"
        ) from None
    except RayError as error:
        raise WorkerError(f"results of {columns[0][1]} could not be fetched: {error}") from None
    objects = {ref: encoded.decode() for ref, encoded in stored.items()}
    return [
        objects[column.ref][column.name] if column.inline is None else column.inline.decode() for column, _ in columns
    ]


def _lost(error: ObjectLostError, columns: Sequence[tuple[Column, Producer]]) -> WorkerError:
    lost = [
        producer for column, producer in columns if column.ref is not None and column.ref.hex() == error.object_ref_hex
    ]
    producer = (lost or [producer for _, producer in columns])[0]
    return producer.error(f"a result of {producer} is lost, for its process died")
