"""The two ends of a transfer of weights through a process group.

A `Sender` packs its rows of each weight into flat buffers and sends them. A `Receiver` copies what
arrives into the tensors of an engine. Both compute the routes when they are made
(`rolepool.weights.routes`). Two buffers take turns for each pair of ranks, so that one is packed or
unpacked while the other one travels. Does not know roles, models, nor who calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rolepool.weights.digests import Digest, Digests
from rolepool.weights.group import Parcel, TransferGroup
from rolepool.weights.regions import Region
from rolepool.weights.routes import Layout, Message, Packed, Weight, messages_of, own_region

BUCKET_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""The bytes that a rank packs, sends or unpacks at a time, by the type of its device."""
NUM_BUFFERS = 2
"""Messages of a pair of ranks that are in memory at a time: one travels, and one is packed or
unpacked."""

RowsOf = Callable[[Weight], Tensor]
"""Gives the own rows of a weight as a matrix, in the dtype in which it is sent."""
Messages = Mapping[int, Sequence[Message]]
"""What travels between this rank and each of its peers. The first messages of all peers travel at
the same time, then the second ones, and so on."""


class Sent(NamedTuple):
    """What a trainer rank says about a transfer."""

    digests: Mapping[str, Digest]
    """Of its own rows."""
    num_bytes: int
    """What it sent, to all engine ranks together."""


class Sender:
    """The end of a trainer rank."""

    def __init__(
        self,
        group: TransferGroup,
        layout: Layout,
        rank: int,
        device: str,
        bucket_bytes: int | None = None,
    ) -> None:
        self._group = group
        self._device = device
        most_bytes = layout.most_message_bytes(bucket_bytes or BUCKET_BYTES[device])
        self._messages: dict[int, list[Message]] = {}
        for receiver in range(len(layout.engines)):
            pieces = layout.pieces(rank, receiver, most_bytes)
            self._messages[layout.peer_of(receiver)] = messages_of(pieces, most_bytes)
        self._own: dict[str, Region] = {}
        """The own rows of each weight that has some."""
        for weight in layout.weights:
            region = own_region(weight, layout.trainer, rank)
            if region.num_elements:
                self._own[weight.name] = region

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    @torch.no_grad()
    def send(self, rows_of: RowsOf) -> Sent:
        """Send all weights. An error closes the group, so that no other rank waits for this
        one."""
        try:
            return self._send(rows_of)
        except BaseException:
            self._group.close()
            raise

    def _send(self, rows_of: RowsOf) -> Sent:
        rows: dict[str, Tensor] = {}
        """The own rows of those weights of which a part is still to be packed."""
        digests = Digests()
        last_uses = _last_uses(self._messages)
        buffers = _Buffers(self._messages, self._device)
        on_their_way: deque[list[dist.Work]] = deque()
        num_bytes = 0
        for number in range(_num_rounds(self._messages)):
            if len(on_their_way) == NUM_BUFFERS:
                self._group.wait(on_their_way.popleft())
            parcels: list[Parcel] = []
            for peer, message in _round_of(self._messages, number):
                parcel = buffers.parcel(peer, number, message)
                for weight in _weights_in(message):
                    if weight.name not in rows:
                        rows[weight.name] = rows_of(weight)
                self._pack(message, parcel.buffer, rows)
                parcels.append(parcel)
                num_bytes += message.num_bytes
            on_their_way.append(self._group.exchange(sends=parcels, number=number))
            # Digests are computed while the messages travel.
            for weight in last_uses[number]:
                self._add_digest(digests, weight, rows.pop(weight.name))
        while on_their_way:
            self._group.wait(on_their_way.popleft())
        return Sent(digests.read(), num_bytes)

    def _pack(self, message: Message, buffer: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Copy the pieces of a message into its buffer."""
        places: list[Tensor] = []
        contents: list[Tensor] = []
        for packed in message.pieces:
            weight, region = packed.piece
            places.append(_place_in(buffer, packed))
            contents.append(part_of(rows[weight.name], self._own[weight.name], region))
        torch._foreach_copy_(places, contents)

    def _add_digest(self, digests: Digests, weight: Weight, rows: Tensor) -> None:
        digests.add_part(weight.name, rows, self._own[weight.name], weight.shape)


class Receiver:
    """The end of an engine rank."""

    def __init__(
        self,
        group: TransferGroup,
        layout: Layout,
        rank: int,
        device: str,
        bucket_bytes: int | None = None,
    ) -> None:
        """`rank` is that among the engines."""
        self._group = group
        self._device = device
        self._weights = layout.weights
        self._held = layout.engines[rank]
        most_bytes = layout.most_message_bytes(bucket_bytes or BUCKET_BYTES[device])
        self._messages: dict[int, list[Message]] = {}
        for sender in range(layout.trainer.num_ranks):
            pieces = layout.pieces(sender, rank, most_bytes)
            self._messages[sender] = messages_of(pieces, most_bytes)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    @torch.no_grad()
    def receive(self, tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
        """Copy new weights into these tensors, which are what this rank holds of each weight.
        Returns the digests of its parts: of what is in the tensors then, or of what has arrived if
        a tensor has another dtype. An error closes the group."""
        try:
            return self._receive(tensors)
        except BaseException:
            self._group.close()
            raise

    def _receive(self, tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
        matrices = {name: as_matrix(tensor) for name, tensor in tensors.items()}
        digests = Digests()
        last_uses = _last_uses(self._messages)
        buffers = _Buffers(self._messages, self._device)
        on_their_way: deque[tuple[list[Parcel], list[dist.Work]]] = deque()

        def expect(number: int) -> None:
            """Begin to receive the messages of a round."""
            parcels: list[Parcel] = []
            for peer, message in _round_of(self._messages, number):
                parcels.append(buffers.parcel(peer, number, message))
            on_their_way.append((parcels, self._group.exchange(receives=parcels, number=number)))

        num_rounds = _num_rounds(self._messages)
        for number in range(min(NUM_BUFFERS, num_rounds)):
            expect(number)
        for number in range(num_rounds):
            parcels, works = on_their_way.popleft()
            self._group.wait(works)
            messages = [message for _, message in _round_of(self._messages, number)]
            for parcel, message in zip(parcels, messages, strict=True):
                self._unpack(message, parcel.buffer, matrices, digests)
            if number + NUM_BUFFERS < num_rounds:
                expect(number + NUM_BUFFERS)
            for weight in last_uses[number]:
                self._add_digest(digests, weight, matrices[weight.name])
        return digests.read()

    def _unpack(
        self, message: Message, buffer: Tensor, matrices: Mapping[str, Tensor], digests: Digests
    ) -> None:
        """Copy the pieces of a message into the tensors."""
        places: list[Tensor] = []
        contents: list[Tensor] = []
        for packed in message.pieces:
            weight, region = packed.piece
            matrix = matrices[weight.name]
            content = _place_in(buffer, packed)
            places.append(part_of(matrix, self._held[weight.name], region))
            contents.append(content)
            if matrix.dtype != content.dtype:
                digests.add_part(weight.name, content, region, weight.shape)
        torch._foreach_copy_(places, contents)

    def _add_digest(self, digests: Digests, weight: Weight, matrix: Tensor) -> None:
        """The digest of a weight that has arrived, if it has the dtype in which it was sent."""
        if matrix.dtype == dtype_of(weight):
            digests.add_part(weight.name, matrix, self._held[weight.name], weight.shape)


# Rounds


def _num_rounds(messages: Messages) -> int:
    return max((len(of_peer) for of_peer in messages.values()), default=0)


def _round_of(messages: Messages, number: int) -> Iterator[tuple[int, Message]]:
    """The messages that travel at the same time, with the peer of each of them."""
    for peer, of_peer in messages.items():
        if number < len(of_peer):
            yield peer, of_peer[number]


def _weights_in(message: Message) -> Iterator[Weight]:
    for packed in message.pieces:
        yield packed.piece.weight


def _last_uses(messages: Messages) -> list[list[Weight]]:
    """For each round the weights that no later round has a part of."""
    last_rounds: dict[Weight, int] = {}
    for of_peer in messages.values():
        for number, message in enumerate(of_peer):
            for weight in _weights_in(message):
                last_rounds[weight] = max(number, last_rounds.get(weight, 0))
    weights: list[list[Weight]] = [[] for _ in range(_num_rounds(messages))]
    for weight, number in last_rounds.items():
        weights[number].append(weight)
    return weights


class _Buffers:
    """The buffers of a transfer: a few for each peer, which take turns."""

    def __init__(self, messages: Messages, device: str) -> None:
        self._buffers: dict[int, list[Tensor]] = {}
        for peer, of_peer in messages.items():
            most_bytes = max((message.num_bytes for message in of_peer), default=0)
            count = min(NUM_BUFFERS, len(of_peer))
            self._buffers[peer] = [
                torch.empty(most_bytes, dtype=torch.uint8, device=device) for _ in range(count)
            ]

    def parcel(self, peer: int, number: int, message: Message) -> Parcel:
        """The buffer of this message, which is number `number` of its peer."""
        buffer = self._buffers[peer][number % NUM_BUFFERS]
        return Parcel(buffer[: message.num_bytes], peer)


# Views


def dtype_of(weight: Weight) -> torch.dtype:
    """The dtype in which a weight is sent."""
    dtype: torch.dtype = getattr(torch, weight.dtype)
    return dtype


def as_matrix(tensor: Tensor) -> Tensor:
    """The tensor as a matrix, without a copy: its first dimension are the rows."""
    if tensor.dim() == 0:
        return tensor.view(1, 1)
    return tensor.view(len(tensor), -1) if len(tensor) else tensor.view(0, 1)


def part_of(matrix: Tensor, held: Region, region: Region) -> Tensor:
    """A part of a matrix, which itself is the part `held` of a weight. Both regions are parts of the
    whole weight."""
    first_row, first_column = held.rows[0], held.columns[0]
    rows = slice(region.rows[0] - first_row, region.rows[1] - first_row)
    columns = slice(region.columns[0] - first_column, region.columns[1] - first_column)
    return matrix[rows, columns]


def _place_in(buffer: Tensor, packed: Packed) -> Tensor:
    """The place of a piece in the buffer of its message, as a matrix."""
    weight, region = packed.piece
    (first_row, end_row), (first_column, end_column) = region
    flat = buffer[packed.start : packed.start + packed.num_bytes].view(dtype_of(weight))
    return flat.view(end_row - first_row, end_column - first_column)
