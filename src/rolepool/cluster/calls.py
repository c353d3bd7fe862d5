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

from rolepool.cluster.answers import Answer, reason_of
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

Argument = object
"""An argument of a method. Only the method knows its type."""
Value = Any
"""A result of a method. Whoever wrote the method decides its type."""
Args = Sequence[Argument]
Kwargs = dict[str, Argument]


# Messages


class Share(NamedTuple):
    """Number `part` of the `parts` parts of a batch of `total` rows. All parts have the same size;
    the last ones are filled up with padding."""

    total: int
    parts: int
    part: int

    @property
    def size(self) -> int:
        """The number of rows, with padding: the quotient rounded up."""
        return -(-self.total // self.parts)

    @property
    def rows(self) -> range:
        """The rows of the part, without padding."""
        start = self.part * self.size
        return range(self.total)[start : start + self.size]

    @property
    def fetched(self) -> RowNumbers:
        """The rows that the worker fetches: those of the part, or the batch's first row if the part
        is only padding, because padding rows are copies of a row."""
        first = range(self.total)[:1]
        return np.array(self.rows or first, dtype=np.int64)


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
    collect: Callable[[list[Value]], Value]


class Split(NamedTuple):
    """Batches are split into so many equal parts, and this is the number of one of them."""

    parts: int
    part: int


UNSPLIT = Split(parts=1, part=0)


class Call(NamedTuple):
    """A method of a role, to be run by one worker."""

    role: str
    method: str
    args: Args
    kwargs: Kwargs
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

PackedReply = bytes | Reply
SentReply = tuple[PackedReply | Answer, Answer | None]
"""A reply, or the reference to it, and the reference to the data that is stored for it.

Ray delivers the reply with a message. The worker fetches the data if it needs it.
"""
Objects = list[SentReply]
"""The replies of a message. Its arguments have positions in this list."""


def pack_reply(reply: Reply) -> PackedReply:
    """A small reply as bytes, because Ray transports bytes several times faster than an object. A
    large one is returned unchanged."""
    is_large = reply.value is not None and reply.value.num_bytes > futures.INLINE_BYTES
    if is_large:
        return reply
    # Plain tuples, because pickle looks up every other class by its name.
    return pickle.dumps((tuple(reply.span), reply.value, reply.header))


def unpack_reply(packed: PackedReply, stored: Answer | None = None) -> Reply:
    if not isinstance(packed, bytes):
        return packed._replace(stored=stored)
    span, value, header = pickle.loads(packed)  # noqa: S301  # from our own workers
    return Reply(Span(*span), value, header, stored)


# The driver's side


def pack_call(
    call: Call,
    reads: Keys,
    parts: int,
    index: int,
    *,
    in_lists: bool,
) -> tuple[bytes, Objects]:
    """The message for the ranks of part number `index`, and its references.

    If `in_lists` is true, every argument is a list with one entry for each part. Otherwise batches
    are split.
    """
    objects: Objects = []
    if not call.args and not call.kwargs:
        return pickle.dumps(tuple(call)), objects
    split = UNSPLIT if in_lists else Split(parts, index)

    def pack(value: Argument) -> Argument:
        if in_lists:
            assert isinstance(value, list | tuple)  # the proxy has checked it
            value = value[index]
        return _pack_value(value, objects, reads, split)

    args = [pack(value) for value in call.args]
    kwargs = {name: pack(value) for name, value in call.kwargs.items()}
    packed_call = call._replace(args=args, kwargs=kwargs)
    return cloudpickle.dumps(tuple(packed_call)), objects


def _pack_value(value: Argument, objects: Objects, reads: Keys, split: Split) -> Argument:
    """An argument as it is sent. The replies that it needs are added to the objects."""
    if isinstance(value, DataProto | DataProtoFuture):
        stripes = []
        for stripe in futures.stripes_of(value):
            stripes.append(_pack_stripe(stripe, objects, reads, split))
        return BatchArgument(tuple(stripes), split.parts, split.part)
    if isinstance(value, CallFuture):
        if value.collect not in (futures.collect_first, list):
            raise DataError(
                f"{value!r} is collected by a function of the driver; pass the result of its get()"
            )
        where = _add_replies(value.calls, objects)
        return ResultArgument(where, value.collect)
    return value


def splittable(what: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of a method in a mode of `SPLITTING`; TensorDicts become batches.

    Raises a DataError that names the method (`what`) and the argument if it has rows that would not
    be split.
    """
    args = [tensordict_to_batch(value) for value in args]
    kwargs = {name: tensordict_to_batch(value) for name, value in kwargs.items()}
    all_values: list[tuple[int | str, Argument]] = [
        *enumerate(args),
        *kwargs.items(),
    ]
    others: list[tuple[int | str, Argument]] = []
    for name, value in all_values:
        if not isinstance(value, Batch):
            others.append((name, value))
    has_batch = len(others) < len(all_values)
    for name, value in others:
        # Without a batch, a list is probably meant as the rows.
        is_list_of_rows = isinstance(value, list | tuple) and not has_batch
        if _has_rows(value) or is_list_of_rows:
            kind = type(value).__name__
            raise DataError(
                f"{what}: argument {name} is a {kind}, which cannot be split over the ranks; pass "
                "rows in a DataProto or TensorDict, and what all ranks need in the meta_info of "
                "one. Dispatch.ONE_TO_ALL sends all arguments whole"
            )
    return args, kwargs


def _has_rows(value: Argument) -> bool:
    """Whether there is a batch, a tensor or an array in a value, at any depth."""
    if isinstance(value, dict):
        return any(map(_has_rows, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_rows, value))
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim > 0
    return isinstance(value, Batch | TensorDictBase)


def _pack_stripe(stripe: Stripe, objects: Objects, reads: Keys, split: Split) -> StripeArgument:
    source = stripe.source
    keys = futures.intersection(stripe.keys, reads)
    if not isinstance(source, DataProto) and stripe.order is None:
        # The driver does not wait for the number of rows: the worker splits the batch itself.
        where = _add_replies(source, objects)
        return StripeArgument(where, keys)
    share = Share(stripe.num_rows(), split.parts, split.part)
    rows = share.fetched
    if stripe.order is not None:
        rows = stripe.order[rows]
    if not isinstance(source, DataProto):
        where = _add_replies(source, objects)
        return StripeArgument(where, keys, share.total, rows)
    batch = futures.rows_with_keys(source, rows, keys)
    position = len(objects)
    objects.append(_as_reply(batch))
    where = slice(position, position + 1)
    return StripeArgument(where, keys, share.total)


def _as_reply(batch: DataProto) -> SentReply:
    """A batch of the driver as the reply of a rank. Its large columns are stored now."""
    _, header, large = futures.encode_result(batch)
    stored = None
    if large:
        stored = ray.put(large)
    return pack_reply(Reply(FROM_DRIVER, header=header)), stored


def _add_replies(calls: Iterable[Pending], objects: Objects) -> slice:
    """Add the replies of calls to the objects of a message. Returns their positions."""
    start = len(objects)
    for call in calls:
        objects.extend(call.objects)
    return slice(start, len(objects))


def sources_of(values: Iterable[Argument]) -> Iterator[Pending]:
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
    call: Call,
    direct: Sequence[PackedReply],
    stored: Sequence[Answer | None],
) -> tuple[Call, Share | None]:
    """The call with the values of its arguments, and which share of its batch this rank has."""
    replies = []
    for packed, data in zip(direct, stored, strict=True):
        replies.append(unpack_reply(packed, data))
    shares: list[Share] = []

    def resolve(argument: Argument) -> Argument:
        return _resolve(argument, replies, shares)

    args = [resolve(argument) for argument in call.args]
    kwargs = {name: resolve(argument) for name, argument in call.kwargs.items()}
    resolved = call._replace(args=args, kwargs=kwargs)
    # All batches of a call have the same number of parts, and a worker gets the same one of each.
    share = shares[0] if shares else None
    return resolved, share


def _resolve(argument: Argument, all_replies: Sequence[Reply], shares: list[Share]) -> Argument:
    """An argument's value on this worker. If it is a batch, its share is added to the list."""
    if isinstance(argument, ResultArgument):
        values = futures.values_of(all_replies[argument.where], fetch_stored)
        return argument.collect(values)
    if not isinstance(argument, BatchArgument):
        return argument
    if argument.parts == len(argument.stripes) == 1:
        (stripe,) = argument.stripes
        replies = all_replies[stripe.where]
        is_batch = all(reply.header is not None for reply in replies)
        if not is_batch:  # use what `get()` returns
            values = futures.values_of(replies, fetch_stored)
            return futures.collect_batches(values)
    share = _share_of(argument, all_replies)
    shares.append(share)
    parts = []
    for stripe in argument.stripes:
        rows = share.fetched if stripe.total is None else stripe.rows
        replies = all_replies[stripe.where]
        gathered = futures.gather_rows(replies, rows, stripe.keys, fetch_stored)
        parts.append(gathered)
    joined = futures.join_stripes(parts)
    num_padding = share.size - len(share.rows)
    padded = pad_rows(joined, num_padding)
    if len(padded) > share.size:
        # All rows of the part are padding, and the row that they are copies of is in front of them.
        padded = padded[1:]
    return batch_to_tensordict(padded)


def _share_of(argument: BatchArgument, all_replies: Sequence[Reply]) -> Share:
    """Which rows of its batch a worker gets."""
    totals = []
    for stripe in argument.stripes:
        total = stripe.total
        if total is None:
            replies = all_replies[stripe.where]
            total = futures.count_rows(replies)
        totals.append(total)
    if len(set(totals)) > 1:
        raise DataError(f"the parts of the batch have different numbers of rows: {totals}")
    return Share(totals[0], argument.parts, argument.part)


def without_padding(result: Value, share: Share | None) -> Value:
    """A result without the rows that came from padding.

    The result is a batch, list, tensor or array. It has as many rows as the share, or an integer
    multiple of them in row-major order. Any other result does not consist of rows, and is returned
    unchanged.
    """
    if share is None or not isinstance(result, DataProto | list | torch.Tensor | np.ndarray):
        return result
    num_real = len(share.rows)
    if num_real == share.size:  # there is no padding
        return result
    num_results = len(result)
    if num_results < share.size or num_results % share.size:
        return result
    num_results_per_row = num_results // share.size
    trimmed = result[: num_results_per_row * num_real]
    if isinstance(trimmed, DataProto) and IS_PADDING_KEY in trimmed.columns():
        trimmed.pop([IS_PADDING_KEY])
    return trimmed


# Both sides


def fetch_stored(replies: Sequence[Reply]) -> list[dict[str, Encoded]]:
    """The stored columns of these replies. If they are lost or do not arrive, a WorkerError names
    the process that made them."""
    if not replies:  # Ray would start if it does not run
        return []
    try:
        return list(ray.get([reply.stored for reply in replies], timeout=FETCH_TIMEOUT_S))
    except ObjectLostError as error:
        raise _loss_of(replies, error.object_ref_hex) from None
    except RayError as error:
        raise WorkerError(
            f"results of {replies[0].maker} could not be fetched: {reason_of(error)}"
        ) from None


def _loss_of(replies: Sequence[Reply], object_id: str) -> WorkerError:
    """The error about the reply whose stored columns, the object with this id, are lost."""
    lost = replies[0]
    for reply in replies:
        if reply.stored.hex() == object_id:
            lost = reply
            break
    return WorkerError(
        f"a result of {lost.maker} is lost because its node died",
        pool=lost.span.pool,
        role=lost.span.role,
        rank=lost.span.rank,
        node=lost.span.node,
        method=lost.span.method,
        is_death=True,
    )
