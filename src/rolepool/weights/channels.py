"""The ways from the actor's weights to the engines, and which of them a plan has.

A channel queues the calls of a transfer and returns. Each transfer ends with receipts, and `check`
compares them before anything is generated with the new weights. The ends of a channel in the
processes are methods of the roles: the actor's `export_weights` and `sent_receipt`, the rollout's
`take_weights` and `take_weights_here`.

There are two channels. A third one, through a process group of actor and rollout, has the same two
methods and its own branch in `channel_of`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rolepool.placement import Plan, Role
from rolepool.protocol import CallFuture, DataProto
from rolepool.weights.receipts import Delivery, Receipt, check_receipt

TENSORS_PER_CALL = 16
"""Tensors in one call of a transfer between pools, which is about two layers."""

Calls = Any
"""The proxy of a role. mypy cannot see its methods, which are those of the role's class."""


class Channel(ABC):
    """A way of the actor's weights to all engines of the rollout."""

    def __init__(self, actor: Calls, rollout: Calls) -> None:
        self._actor = actor
        self._rollout = rollout

    @abstractmethod
    def send(self, version: int) -> list[CallFuture]:
        """Queue the transfer of the current weights. Returns the calls of the rollout. Later
        responses carry this version."""

    @abstractmethod
    def check(self) -> None:
        """Wait for the last transfer, and compare what was sent with what the engines have got.
        Raises WeightsDifferError if they differ."""


def channel_of(plan: Plan, actor: Calls, rollout: Calls) -> Channel:
    """The channel between these two roles, from the pools of the plan."""
    if plan.pool_of(Role.Actor) == plan.pool_of(Role.Rollout):
        return SameProcess(actor, rollout)
    return SharedMemory(actor, rollout)


class SameProcess(Channel):
    """Actor and rollout share processes. Each process copies its weights inside, or copies nothing
    if its engine generates with the actor's own tensors."""

    _transfer: CallFuture | None = None

    def send(self, version: int) -> list[CallFuture]:
        self._transfer = self._rollout.take_weights_here(version)
        return [self._transfer]

    def check(self) -> None:
        if self._transfer is None:
            return
        deliveries: list[Delivery] = self._transfer.get()
        # All ranks have gathered the same weights, so one of them says what these are.
        sent = next((one.sent for one in deliveries if one.sent is not None), None)
        if sent is not None:
            for rank, delivery in enumerate(deliveries):
                check_receipt(sent, delivery.got, _name_of(self._rollout, rank))
        self._transfer = None


class SharedMemory(Channel):
    """Weights go from the actor's rank 0 through shared memory to every process of the rollout, a
    few layers at a time. Ray sends them to other nodes.

    This cannot deadlock, because both pools get their calls in the same order, and no call waits
    for the other pool.
    """

    def __init__(self, actor: Calls, rollout: Calls) -> None:
        super().__init__(actor, rollout)
        names = [spec.name for spec in actor.weight_specs().get()]
        starts = range(0, len(names), TENSORS_PER_CALL)
        self._groups = [names[start : start + TENSORS_PER_CALL] for start in starts]
        self._sent: CallFuture | None = None
        self._got: CallFuture | None = None
        """The last call of the rollout, which returns the receipts."""

    def send(self, version: int) -> list[CallFuture]:
        exported = [self._actor.export_weights(*group) for group in self._groups]
        self._sent = self._actor.sent_receipt(version)
        versions = [*[None] * (len(self._groups) - 1), version]  # the last call gives the version
        taken = []
        for weights, version_or_none in zip(exported, versions, strict=True):
            taken.append(self._rollout.take_weights(weights, version_or_none))
        self._got = taken[-1]
        return taken

    def check(self) -> None:
        if self._sent is None or self._got is None:
            return
        receipts: Sequence[Receipt | None] = self._got.get()
        sent: Receipt = self._sent.get()
        for rank, got in enumerate(receipts):
            check_receipt(sent, got, _name_of(self._rollout, rank))
        self._sent = self._got = None


def _name_of(rollout: Calls, rank: int) -> str:
    return f"{rollout.group.name} rank {rank}"


# What travels through shared memory


def packed(tensors: Mapping[str, Tensor]) -> DataProto:
    """Weights as a batch of one row. Columns of a batch are kept in shared memory, and the processes
    that read them fetch them from there, not from the driver."""
    return DataProto.from_dict({name: tensor.unsqueeze(0) for name, tensor in tensors.items()})


def unpacked(batch: DataProto) -> Iterator[tuple[str, Tensor]]:
    """The weights of such a batch."""
    for name, row in batch.batch.items():
        yield name, row[0]
