"""The ways from the actor's weights to the engines, and which of them a plan has.

A channel queues the calls of a transfer and returns. Each transfer ends with receipts, and `check`
compares them before anything is generated with the new weights. The ends of a channel in the
processes are methods of the roles.

The plan chooses the channel (`rolepool.placement.weight_ways`). Inside of one pool no weight leaves
its process. Between pools, the channel is a process group of both; shared memory remains for the
engines that do not take parts of weights, and for ranks that share a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from rolepool.placement.weight_ways import WeightWay
from rolepool.protocol import CallFuture
from rolepool.weights.digests import sum_of
from rolepool.weights.process_group import Sent
from rolepool.weights.receipts import Delivery, Receipt, check_parts, check_receipt
from rolepool.weights.routes import Held, Layout, Trainer, Weight

TENSORS_PER_CALL = 16
"""Tensors in one call of a transfer between pools, which is about two layers."""

Calls = Any
"""The proxy of a role. mypy cannot see its methods, which are those of the role's class."""


class Channel(ABC):
    """A way of the actor's weights to all engines of the rollout."""

    needs_send = True
    """Whether the engines keep their weights until the next `send`, whatever the actor does."""

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


def channel_of(
    way: WeightWay, actor: Calls, rollout: Calls, *, sends_changes: bool = False
) -> Channel:
    """A channel between these two roles."""
    if way is WeightWay.SAME_PROCESS:
        return SameProcess(actor, rollout)
    if way is WeightWay.SHARED_MEMORY:
        return SharedMemory(actor, rollout)
    return ProcessGroup(actor, rollout, sends_changes=sends_changes)


class SameProcess(Channel):
    """Actor and rollout share processes. Each process copies its weights inside, or copies nothing
    if its engine generates with the actor's own tensors."""

    needs_send = False
    _transfer: CallFuture | None = None
    _copies_nothing = False
    """Whether the engines of all ranks generate with the actor's own tensors, as their first
    receipts have said. Then nobody waits for later ones."""

    def send(self, version: int) -> list[CallFuture]:
        self._transfer = self._rollout.take_weights_here(version)
        return [self._transfer]

    def check(self) -> None:
        if self._rollout.group.world_size == 1:
            return  # the process compares both sides itself, and nobody waits for it
        if self._transfer is None or self._copies_nothing:
            return
        deliveries: list[Delivery] = self._transfer.get()
        # All ranks have gathered the same weights, so one of them says what these are.
        sent = next((one.sent for one in deliveries if one.sent is not None), None)
        if sent is not None:
            for rank, delivery in enumerate(deliveries):
                check_receipt(sent, delivery.got, _name_of(self._rollout, rank))
        receipts = [delivery.got for delivery in deliveries]
        self._copies_nothing = all(got is not None and got.is_shared for got in receipts)
        self._transfer = None


class SharedMemory(Channel):
    """Every rank of the actor puts its own rows into shared memory, a few layers at a time, and
    every process of the rollout reads what it needs from there. Ray sends them to other nodes.

    This cannot deadlock, because both pools get their calls in the same order, and no call waits
    for the other pool.
    """

    def __init__(self, actor: Calls, rollout: Calls) -> None:
        super().__init__(actor, rollout)
        weights: list[Weight] = actor.weights_to_send().get()
        starts = range(0, len(weights), TENSORS_PER_CALL)
        self._groups = [weights[start : start + TENSORS_PER_CALL] for start in starts]
        held: list[Held | None] = rollout.held_regions(weights).get()
        self._held = [regions for regions in held if regions is not None]
        """What each rank of the rollout holds; empty if the engine takes whole tensors."""
        self._version = 0
        self._sent: CallFuture | None = None
        self._got: CallFuture | None = None
        """The last call of the rollout, which returns the receipts."""

    def send(self, version: int) -> list[CallFuture]:
        exported = [self._actor.export_rows(group) for group in self._groups]
        self._version = version
        self._sent = self._actor.sent_receipt(version)
        versions = [*[None] * (len(self._groups) - 1), version]  # the last call gives the version
        taken = []
        for rows, version_or_none in zip(exported, versions, strict=True):
            taken.append(self._rollout.take_weights(rows, version_or_none))
        self._got = taken[-1]
        return taken

    def check(self) -> None:
        if self._sent is None or self._got is None:
            return
        got: list[Receipt | None] = self._got.get()
        of_ranks: list[Receipt] = self._sent.get()
        sent = Receipt(self._version, sum_of(receipt.digests for receipt in of_ranks))
        check_ranks(self._rollout, sent, got, self._held)
        self._sent = self._got = None


class ProcessGroup(Channel):
    """Every rank of the actor sends its own rows to those ranks of the rollout that hold them,
    through a process group of both pools (`rolepool.weights.process_group`). No rank gathers a
    weight.

    A transfer is one call in each pool, and the two calls wait for each other. So each of them
    begins when the other one can begin, too: it gets the result of an empty call of the other pool
    (`await_turn`). This cannot deadlock. Both pools get their calls in the same order, and what a
    call waits for was queued before all later calls of either pool. The same is true when the ranks
    meet.
    """

    def __init__(self, actor: Calls, rollout: Calls, *, sends_changes: bool = False) -> None:
        """With `sends_changes`, transfers after the first one send only what has changed."""
        super().__init__(actor, rollout)
        weights: list[Weight] = actor.weights_to_send().get()
        held: list[Held] = rollout.held_regions(weights).get()
        trainer = Trainer(actor.dims.world_size, actor.dims.shard)
        self._layout = Layout(weights, trainer, held, sends_changes)
        point = actor.open_meeting(self._layout.num_ranks, token_hex(16)).get()
        joined = [role.join_transfers(point, self._layout) for role in (actor, rollout)]
        for call in joined:
            call.get()
        self._version = 0
        self._turns: list[CallFuture] = []
        self._sent: CallFuture | None = None
        self._got: CallFuture | None = None

    def send(self, version: int) -> list[CallFuture]:
        of_actor = self._actor.await_turn()
        of_rollout = self._rollout.await_turn()
        self._turns = [of_actor, of_rollout]
        self._version = version
        self._sent = self._actor.send_weights(of_rollout, version)
        self._got = self._rollout.receive_weights(of_actor, version)
        return [self._sent, self._got]

    def check(self) -> None:
        if self._sent is None or self._got is None:
            return
        got: list[Receipt] = self._got.get()
        sent: list[Sent] = self._sent.get()
        for turn in self._turns:
            # They have ended. The watchdog learns from this how long such a call takes, and so
            # notices soon if a process that has stopped does not run the next one.
            turn.get()
        digests = sum_of(part.digests for part in sent)
        whole = Receipt(self._version, digests)
        check_ranks(self._rollout, whole, got, self._layout.engines)
        self._sent = self._got = None


def check_ranks(
    rollout: Calls,
    sent: Receipt,
    got: Sequence[Receipt | None],
    held: Sequence[Held],
) -> None:
    """Compare what was sent with what each rank of the rollout has got. `held` is what each of them
    holds; empty if their receipts are of whole weights."""
    names = [_name_of(rollout, rank) for rank in range(len(got))]
    if not held:
        for receipt, name in zip(got, names, strict=True):
            check_receipt(sent, receipt, name)
        return
    num_parts = rollout.dims.tp
    for first in range(0, len(got), num_parts):
        copy = slice(first, first + num_parts)
        parts = [receipt for receipt in got[copy] if receipt is not None]
        assert len(parts) == num_parts, "an engine that takes parts gives receipts"
        check_parts(sent, parts, held[copy], names[copy])


def _name_of(rollout: Calls, rank: int) -> str:
    return f"{rollout.group.name} rank {rank}"
