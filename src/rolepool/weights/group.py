"""A process group of the ranks of two pools, through which weights travel.

It exists beside the process groups of the pools: gloo between CPUs, NCCL between GPUs. Owns how
ranks meet, how messages are exchanged, and how a wait ends if a rank of the other pool has died.
Does not know what is in a message.

The backend's own objects are used, because a group of torch.distributed must have been made by
ranks of the default group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rolepool.errors import RolepoolError
from rolepool.protocol.aborting import register_abortable, unregister_abortable

CONNECT_TIMEOUT = timedelta(seconds=60)
"""The time in which the store must answer. It was opened before any rank is asked to join."""
JOIN_TIMEOUT_S = 1800.0
"""The time in which all ranks must meet. The watchdog of the run finds a stopped process earlier."""
EXCHANGE_TIMEOUT = timedelta(seconds=JOIN_TIMEOUT_S)
"""The same for a message, by the backend itself."""
POLL_S = 0.005
SPIN_S = 0.002
"""How long a rank asks again and again whether a message has arrived, before it sleeps between two
questions. Most messages on a GPU take less."""

UNUSED_NUMBER = 2**31 - 1
"""The number of a message that nobody sends."""

Backend = Any
"""`ProcessGroupGloo` or `ProcessGroupNCCL`. A torch for CPUs does not have the second one."""


class TransferError(RolepoolError):
    """A transfer of weights ended, because another rank has died or has left it."""


class MeetingPoint(NamedTuple):
    """Where the ranks of a group find each other."""

    address: str
    port: int
    secret: str
    """Begins all keys in the store. Other programs that can reach the store do not know it."""


class Parcel(NamedTuple):
    """A message on its way: a flat buffer, and the rank at its other end."""

    buffer: Tensor
    peer: int


class TransferGroup:
    """A rank's end of the group. After an error or `abort` it cannot be used any more."""

    def __init__(self, point: MeetingPoint, rank: int, num_ranks: int, device: str) -> None:
        """Meet the other ranks. Raises TransferError if they do not come in time."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._on_gpu = device != "cpu"
        self._backend: Backend | None = None
        self._abort_reason: str | None = None
        register_abortable(self)
        try:
            store = self._meet(point)
            self._backend = _make_backend(store, rank, num_ranks, on_gpu=self._on_gpu)
            self._check(device)
        except RuntimeError as error:  # DistStoreError and DistNetworkError are RuntimeErrors
            self.close()
            raise TransferError(self._line_about(error)) from None
        except BaseException:
            self.close()
            raise

    def _meet(self, point: MeetingPoint) -> PrefixStore:
        """The store of the group, after all ranks have come to it. Without this, a rank that waits
        for a dead one inside of the backend could not be aborted."""
        server = TCPStore(point.address, point.port, is_master=False, timeout=CONNECT_TIMEOUT)
        store = PrefixStore(point.secret, server)
        store.set(f"came/{self._rank}", "1")
        keys = [f"came/{rank}" for rank in range(self._num_ranks)]
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while not store.check(keys):
            self._raise_if_aborted()
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise TransferError(
                    f"weights: ranks {missing} of {self._num_ranks} did not join the transfer within "
                    f"{JOIN_TIMEOUT_S:g} s; see why they are late in their logs"
                )
            time.sleep(POLL_S)
        return store

    def _check(self, device: str) -> None:
        """Exchange a number between all ranks. NCCL connects them with the first exchange, in which
        all of them must take part; in a transfer some ranks may have nothing to send."""
        ones = torch.ones(1, device=device)
        self.wait([self._used_backend.allreduce([ones])])
        assert int(ones) == self._num_ranks

    @property
    def _used_backend(self) -> Backend:
        self._raise_if_aborted()
        assert self._backend is not None, "the group was closed"
        return self._backend

    def _raise_if_aborted(self) -> None:
        if self._abort_reason is not None:
            raise TransferError(f"weights: the transfer was aborted: {self._abort_reason}")

    def exchange(
        self, sends: Sequence[Parcel] = (), receives: Sequence[Parcel] = (), *, number: int
    ) -> list[dist.Work]:
        """Begin to send and receive these messages, and do not wait for them. Both ends of a
        message give it the same number."""
        backend = self._used_backend
        if not (sends or receives):
            return []
        if self._on_gpu:
            # NCCL needs one group call for all of them, because each message occupies a stream.
            backend._start_coalescing()
        works: list[dist.Work] = []
        for buffer, peer in receives:
            works.append(backend.recv([buffer], peer, number))
        for buffer, peer in sends:
            works.append(backend.send([buffer], peer, number))
        if self._on_gpu:
            work = backend._end_coalescing()
            works = [] if work is None else [work]
        return works

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait until these messages have been exchanged. On a GPU, kernels that are queued after
        this see what has arrived."""
        for work in works:
            if self._on_gpu:
                self._poll(work)
            self._raise_if_aborted()
            try:
                work.wait()
            except RuntimeError as error:
                self._raise_if_aborted()
                raise TransferError(self._line_about(error)) from None

    def _poll(self, work: dist.Work) -> None:
        """Wait for NCCL without being inside of it, because it would wait for a dead rank for
        ever."""
        start_s = time.monotonic()
        while not work.is_completed():
            self._raise_if_aborted()
            if time.monotonic() - start_s > SPIN_S:
                time.sleep(SPIN_S / 10)

    def _line_about(self, error: BaseException) -> str:
        reason = str(error).strip().splitlines()[0]
        return f"weights: the transfer lost another rank, which has died or failed ({reason})"

    # The end

    def abort(self, reason: str) -> None:
        """End the wait of another thread, and the group. Ranks that wait for this one get an error,
        too."""
        self._abort_reason = self._abort_reason or reason
        backend = self._backend
        if backend is None:
            return
        if self._on_gpu:
            backend.abort()
            return
        # `abort` of gloo does nothing. A wait that times out closes all connections of the group,
        # and so ends the waits of all threads and of all peers. Nothing has this number.
        peer = (self._rank + 1) % self._num_ranks
        with suppress(RuntimeError):
            unused = torch.empty(1)
            backend.recv([unused], peer, UNUSED_NUMBER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Leave the group."""
        unregister_abortable(self)
        self.abort("the group was closed")
        self._backend = None


def _make_backend(store: PrefixStore, rank: int, num_ranks: int, *, on_gpu: bool) -> Backend:
    """The connections to all ranks."""
    if not on_gpu:
        return dist.ProcessGroupGloo(store, rank, num_ranks, EXCHANGE_TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = EXCHANGE_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)
