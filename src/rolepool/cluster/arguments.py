"""The driver's side of a call's arguments: what is put into shared memory, and what is only pointed to.

Owns turning values, batches and futures into the message types of `calls`. A batch of the driver's is written once
per part; a future's data is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rolepool.cluster.calls import BatchArgument, ResultArgument, StripeArgument
from rolepool.errors import DataError
from rolepool.protocol.data import DataProto
from rolepool.protocol.futures import (
    CallFuture,
    DataProtoFuture,
    Pending,
    Stripe,
    collect_first,
    collect_list,
    intersection,
    rows_with_keys,
    with_keys,
)
from rolepool.protocol.rows import Share

Keys = frozenset[str] | None
Named = tuple[int | str, Any]
"""An argument by its position or name."""


@dataclass(eq=False)
class ArgumentList:
    """What one rank gets, or several that get the same."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    objects: list[Any] = field(default_factory=list)

    def add(self, name: int | str, value: Any) -> None:
        if isinstance(name, int):
            self.args = (*self.args, value)
        else:
            self.kwargs[name] = value

    def add_objects(self, objects: Sequence[Any]) -> int:
        """Append objects and return the position of the first."""
        self.objects.extend(objects)
        return len(self.objects) - len(objects)


def cut_batch(named: Named, lists: Sequence[ArgumentList], reads: Keys) -> None:
    """Give each list its part of a batch; what is not a batch goes to all as it is."""
    name, value = named
    if not isinstance(value, DataProto | DataProtoFuture):
        whole(named, lists, reads)
        return
    stripes = value.stripes if isinstance(value, DataProtoFuture) else (Stripe(None, value),)
    for index, arguments in enumerate(lists):
        cut = tuple(_cut_stripe(stripe, arguments, len(lists), index, reads) for stripe in stripes)
        arguments.add(name, BatchArgument(cut, len(lists), index))


def _cut_stripe(stripe: Stripe, arguments: ArgumentList, parts: int, index: int, reads: Keys) -> StripeArgument:
    keys = intersection(stripe.keys, reads)
    known = stripe.local is not None or stripe.order is not None
    share = Share(stripe.num_rows(), parts, index) if known else None
    rows = None if share is None or stripe.order is None else stripe.order[share.fetched.start : share.fetched.stop]
    if stripe.local is None:
        assert stripe.pending is not None
        first = arguments.add_objects(stripe.pending.refs)
        return StripeArgument(first, len(stripe.pending.refs), keys, rows, share.total if share else None)
    assert share is not None
    chosen = rows_with_keys(stripe.local, rows, keys)
    part = chosen if rows is not None else _range_of(chosen, share.fetched)
    return StripeArgument(arguments.add_objects([ray.put(part)]), None, None, None, share.total)


def _range_of(batch: DataProto, rows: range) -> DataProto:
    return batch if len(rows) == len(batch) else batch[rows.start : rows.stop]


def whole(named: Named, lists: Sequence[ArgumentList], reads: Keys) -> None:
    """Give every list the whole value. A batch is written into shared memory once, however many lists there are."""
    name, value = named
    if isinstance(value, DataProto):
        stored = ray.put(with_keys(value, reads))
        for arguments in lists:
            stripe = StripeArgument(arguments.add_objects([stored]), None, None, None, len(value))
            arguments.add(name, BatchArgument((stripe,), 1, 0))
    elif isinstance(value, DataProtoFuture):
        for arguments in lists:
            stripes = tuple(_cut_stripe(stripe, arguments, 1, 0, reads) for stripe in value.stripes)
            arguments.add(name, BatchArgument(stripes, 1, 0))
    elif isinstance(value, CallFuture):
        if value.collect not in (collect_first, collect_list):
            raise DataError(f"{value!r} is put together by a function of the driver; hand on what its get() returns")
        for arguments in lists:
            first = arguments.add_objects(value.pending.refs)
            arguments.add(name, ResultArgument(first, len(value.pending.refs), value.collect))
    else:
        for arguments in lists:
            arguments.add(name, value)


def sources_of(values: Sequence[Any]) -> list[Pending]:
    """The calls whose results are among the arguments."""
    found: list[Pending] = []
    for value in values:
        if isinstance(value, DataProtoFuture):
            found.extend(stripe.pending for stripe in value.stripes if stripe.pending is not None)
        elif isinstance(value, CallFuture):
            found.append(value.pending)
        elif isinstance(value, list | tuple):
            found.extend(sources_of(value))
    return found
