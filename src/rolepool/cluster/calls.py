"""The messages of a call: the method and its arguments on the way to a worker, and the worker's
reply.

The driver turns values, batches and futures into a message, and the worker turns the message into
values again. A batch of the driver is sent like the reply of a rank: it is written once for each
part. The data of a future is not copied: the message only has references to it.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.exceptions import ObjectLostError, RayError
from tensordict.base import TensorDictBase

from rolepool.errors import DataError, WorkerError
from rolepool.metrics.spans import DRIVER, Span
from rolepool.protocol import Dispatch, Encoded, futures
from rolepool.protocol.batching import IS_PADDING_KEY, pad_rows
from rolepool.protocol.data import DataProto, batch_to_tensordict, tensordict_to_batch
from rolepool.protocol.futures import (
    CallFuture,
    DataProtoFuture,
    Keys,
    Pending,
    Reply,
    RowNumbers,
    Stripe,
)

FETCH_TIMEOUT_S = 600.0


# Messages


class Share(NamedTuple):
    """Number `part` of the `parts` parts of a batch of `total` rows. All parts have the same size;
    the last ones are filled up with padding."""

    total: int
    parts: int
    part: int

    @property
    def size(self) -> int:
        return -(-self.total // self.parts)

    @property
    def rows(self) -> range:
        return range(self.total)[self.part * self.size :][: self.size]

    @property
    def fetched(self) -> RowNumbers:
        """The rows that the worker fetches: those of the part, or the batch's first row if the part
        is only padding."""
        return np.array(self.rows or range(self.total)[:1], dtype=np.int64)


class StripeArgument(NamedTuple):
    """Some keys of a batch, for the rows of one share of it.

    `where` has the positions of the replies of all ranks that made the batch. `total` is the number
    of rows of the whole batch; if the driver did not know it, the worker fetches the rows of its
    share. Otherwise it fetches the rows with the numbers `rows` (None: all).
    """

    where: slice
    keys: Keys
    total: int | None = None
    rows: RowNumbers | None = None


class BatchArgument(NamedTuple):
    """Number `part` of `parts` equal parts of a batch."""

    stripes: tuple[StripeArgument, ...]
    parts: int
    part: int


class ResultArgument(NamedTuple):
    """The collected result, not a batch, of another call whose replies are at these positions."""

    where: slice
    collect: Callable[[list[Any]], Any]


class Call(NamedTuple):
    """A method of a role, to be run by one worker."""

    role: str
    method: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    queued_s: float
    number: int
    after: tuple[int, ...]
    """Numbers of the calls whose results are its arguments."""


PER_DP_GROUP = (Dispatch.DP_COMPUTE, Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC)
"""Modes in which only the first rank of each data-parallel group returns a result."""

Batch = DataProto | DataProtoFuture
SPLITTING = (Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC)
"""Modes in which batches are split."""

FROM_DRIVER = Span(DRIVER, "trainer", 0, "call", 0.0, 0.0, 0.0, node=DRIVER)
"""The span in place of a rank's span, if the driver sends a batch itself."""

Objects = list[tuple[Any, Any]]
"""Replies of a message, or references to them: pairs of a reply and the data that is stored for it.

Ray delivers the first of each pair with the message. The worker fetches the second one if it needs
it.
"""


def pack_reply(reply: Reply) -> bytes | Reply:
    """A small reply as bytes, because Ray transports bytes several times faster than an object. A
    large one is returned unchanged."""
    is_large = reply.value is not None and reply.value.num_bytes > futures.INLINE_BYTES
    # Plain tuples, because pickle looks up every other class by its name.
    return reply if is_large else pickle.dumps((tuple(reply.span), reply.value, reply.header))


def unpack_reply(packed: bytes | Reply, stored: Any = None) -> Reply:
    if not isinstance(packed, bytes):
        return packed._replace(stored=stored)
    span, value, header = pickle.loads(packed)  # noqa: S301  # from our own workers
    return Reply(Span(*span), value, header, stored)


# The driver's side


def pack_call(
    call: Call, reads: Keys, parts: int, index: int, *, in_lists: bool
) -> tuple[bytes, Objects]:
    """The message for the ranks of part number `index`, and its references.

    If `in_lists` is true, every argument is a list with one entry for each part. Otherwise batches
    are split.
    """
    objects: Objects = []
    if not call.args and not call.kwargs:
        return pickle.dumps(tuple(call)), objects
    split = (1, 0) if in_lists else (parts, index)

    def pack(value: Any) -> Any:
        value = value[index] if in_lists else value
        if isinstance(value, DataProto | DataProtoFuture):
            stripes = [
                _pack_stripe(stripe, objects, reads, *split) for stripe in futures.stripes_of(value)
            ]
            return BatchArgument(tuple(stripes), *split)
        if isinstance(value, CallFuture):
            if value.collect not in (futures.collect_first, list):
                raise DataError(
                    f"{value!r} is collected by a function of the driver; pass the result of its get()"
                )
            return ResultArgument(_add_replies(value.calls, objects), value.collect)
        return value

    args = [pack(value) for value in call.args]
    kwargs = {name: pack(value) for name, value in call.kwargs.items()}
    return cloudpickle.dumps(tuple(call._replace(args=args, kwargs=kwargs))), objects


def splittable(
    what: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a method in a mode of `SPLITTING`; TensorDicts become batches.

    Raises a DataError that names the method (`what`) and the argument if it has rows that would not
    be split.
    """
    args, kwargs = (
        [*map(tensordict_to_batch, args)],
        {key: tensordict_to_batch(one) for key, one in kwargs.items()},
    )
    others = [
        item for item in (*enumerate(args), *kwargs.items()) if not isinstance(item[1], Batch)
    ]
    has_batch = len(others) < len(args) + len(kwargs)
    for name, value in others:
        if _has_rows(value) or (isinstance(value, list | tuple) and not has_batch):
            problem = (
                f"argument {name} is a {type(value).__name__}, which cannot be split over the ranks"
            )
            fix = "pass rows in a DataProto or TensorDict, and what all ranks need in the meta_info of one"
            raise DataError(
                f"{what}: {problem}; {fix}. Dispatch.ONE_TO_ALL sends all arguments whole"
            )
    return args, kwargs


def _has_rows(value: Any) -> bool:
    """Whether there is a batch, a tensor or an array in a value, at any depth."""
    if isinstance(value, list | tuple | dict):
        return any(map(_has_rows, value.values() if isinstance(value, dict) else value))
    is_column = isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0
    return is_column or isinstance(value, Batch | TensorDictBase)


def _pack_stripe(
    stripe: Stripe, objects: Objects, reads: Keys, parts: int, index: int
) -> StripeArgument:
    keys = futures.intersection(stripe.keys, reads)
    if not isinstance(stripe.source, DataProto) and stripe.order is None:
        return StripeArgument(_add_replies(stripe.source, objects), keys)
    share = Share(stripe.num_rows(), parts, index)
    rows = share.fetched if stripe.order is None else stripe.order[share.fetched]
    if not isinstance(stripe.source, DataProto):
        return StripeArgument(_add_replies(stripe.source, objects), keys, share.total, rows)
    _, header, large = futures.encode_result(futures.rows_with_keys(stripe.source, rows, keys))
    objects.append(
        (pack_reply(Reply(FROM_DRIVER, header=header)), ray.put(large) if large else None)
    )
    return StripeArgument(slice(len(objects) - 1, len(objects)), keys, share.total)


def _add_replies(calls: Iterable[Any], objects: Objects) -> slice:
    start = len(objects)
    objects.extend(pair for call in calls for pair in call.objects)
    return slice(start, len(objects))


def sources_of(values: Iterable[Any]) -> Iterator[Pending]:
    """The calls whose results are among the arguments."""
    for value in values:
        if isinstance(value, CallFuture):
            yield from value.sources
        elif isinstance(value, list | tuple):
            yield from sources_of(value)


# The worker's side


def unpack_call(packed: bytes) -> Call:
    return Call(*pickle.loads(packed))  # noqa: S301  # from our own driver, over Ray's channel


def resolve_arguments(
    call: Call, direct: Sequence[Any], stored: Sequence[Any]
) -> tuple[Call, Share | None]:
    """The call with the values of its arguments, and which share of its batch this rank has."""
    objects = [unpack_reply(one, data) for one, data in zip(direct, stored, strict=True)]
    shares: list[Share] = []
    args = [_resolve(argument, objects, shares) for argument in call.args]
    kwargs = {name: _resolve(argument, objects, shares) for name, argument in call.kwargs.items()}
    return call._replace(args=args, kwargs=kwargs), shares[0] if shares else None


def _resolve(argument: Any, objects: Sequence[Reply], shares: list[Share]) -> Any:
    """An argument's value on this worker. If it is a batch, its share is added to the list."""
    if isinstance(argument, ResultArgument):
        return argument.collect(futures.values_of(objects[argument.where], fetch_stored))
    if not isinstance(argument, BatchArgument):
        return argument
    replies = objects[argument.stripes[0].where]
    is_batch = all(reply.header is not None for reply in replies)
    if argument.parts == len(argument.stripes) == 1 and not is_batch:  # use what `get()` returns
        return futures.collect_batches(futures.values_of(replies, fetch_stored))
    totals = [
        futures.count_rows(objects[one.where]) if one.total is None else one.total
        for one in argument.stripes
    ]
    if len(set(totals)) > 1:
        raise DataError(f"the parts of the batch have different numbers of rows: {totals}")
    share = Share(totals[0], argument.parts, argument.part)
    shares.append(share)
    parts = []
    for stripe in argument.stripes:
        rows = share.fetched if stripe.total is None else stripe.rows
        parts.append(futures.gather_rows(objects[stripe.where], rows, stripe.keys, fetch_stored))
    padded = pad_rows(futures.join_stripes(parts), share.size - len(share.rows))
    # If all rows of the part are padding, the row that they are copies of is in front of them.
    return batch_to_tensordict(padded[1:] if len(padded) > share.size else padded)


def without_padding(result: Any, share: Share | None) -> Any:
    """A result without the rows that came from padding.

    The result is a batch, list, tensor or array. It has as many rows as the share, or an integer
    multiple of them in row-major order. Any other result does not consist of rows, and is returned
    unchanged.
    """
    if share is None or not isinstance(result, DataProto | list | torch.Tensor | np.ndarray):
        return result
    num_real = len(share.rows)
    if num_real == share.size or len(result) < share.size or len(result) % share.size:
        return result
    trimmed = result[: len(result) // share.size * num_real]
    if isinstance(trimmed, DataProto) and IS_PADDING_KEY in trimmed.columns():
        trimmed.pop([IS_PADDING_KEY])
    return trimmed


# Ray's errors


def reason_of(error: BaseException) -> str:
    """Ray's message in one line, without its list of possible causes."""
    lines = [
        line.strip() for line in str(error).splitlines() if line.strip() and ":" not in line[:20]
    ]
    return (" ".join(lines) or str(error)).split("Some common causes include")[0].strip()


def fetch_stored(replies: Sequence[Reply]) -> list[dict[str, Encoded]]:
    """The stored columns of these replies. If they are lost or do not arrive, a WorkerError names
    the process that made them."""
    try:
        return list(ray.get([reply.stored for reply in replies], timeout=FETCH_TIMEOUT_S))
    except ObjectLostError as error:
        lost = next(
            (one for one in replies if one.stored.hex() == error.object_ref_hex), replies[0]
        )
        where = {
            name: getattr(lost.span, name) for name in ("pool", "role", "rank", "node", "method")
        }
        raise WorkerError(
            f"a result of {lost.maker} is lost because its node died", **where, is_death=True
        ) from None
    except RayError as error:
        raise WorkerError(
            f"results of {replies[0].maker} could not be fetched: {reason_of(error)}"
        ) from None
