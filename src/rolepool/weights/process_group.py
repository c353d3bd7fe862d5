"""The two ends of a transfer of weights through a process group.

A `Sender` packs its rows of each weight into flat buffers and sends them. A `Receiver` copies what
arrives into the tensors of an engine. Both compute the routes when they are made
(`rolepool.weights.routes`). Two buffers take turns for each pair of ranks, so that one is packed or
unpacked while the other one travels. Does not know roles, models, nor who calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rolepool.errors import DataError
from rolepool.weights.changes import (
    Changes,
    apply_changes,
    differences,
    encoded_bytes,
    find_changes,
    is_sent_whole,
    places_of_changes,
)
from rolepool.weights.digests import Digest, Digests
from rolepool.weights.group import Parcel, TransferGroup
from rolepool.weights.messages import (
    NUM_BUFFERS,
    Buffers,
    Messages,
    as_matrix,
    bytes_of,
    dtype_of,
    last_uses,
    num_rounds,
    part_of,
    place_in,
    round_of,
)
from rolepool.weights.regions import Region
from rolepool.weights.routes import Layout, Message, Packed, Piece, Weight, messages_of, own_region

BUCKET_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""The bytes that a rank packs, sends or unpacks at a time, by the type of its device."""
COUNTS_NUMBER = 2**30
"""The number of the message with counts of changes. The messages with values count from 0."""

RowsOf = Callable[[Weight], Tensor]
"""Gives the own rows of a weight as a matrix, in the dtype in which it is sent."""


class Sent(NamedTuple):
    """What a trainer rank says about a transfer."""

    digests: Mapping[str, Digest]
    """The digests of its own rows."""
    num_bytes: int
    """What it sent, to all engine ranks together."""
    num_values: int
    """The values of its own rows."""
    num_changed: int | None
    """How many of them differ from those of the last transfer; None if they were not compared."""


class _End:
    """What both ends have in common."""

    def __init__(
        self,
        group: TransferGroup,
        layout: Layout,
        pieces: Mapping[int, list[Piece]],
        device: str,
        most_bytes: int,
    ) -> None:
        """`pieces` are those of each peer."""
        self._group = group
        self._device = device
        self._weights = {weight.name: weight for weight in layout.weights}
        self._sends_changes = layout.sends_changes
        self._pieces = pieces
        self._most_bytes = most_bytes
        self._is_first = True
        """Whether no transfer has ended yet. The first one sends all values."""

    @property
    def _sends_all(self) -> bool:
        return self._is_first or not self._sends_changes

    def _messages(self, counts: Mapping[int, Sequence[int]] | None) -> dict[int, list[Message]]:
        """What each peer gets or sends: all values, or the changes, of which there are so many in
        each piece."""
        messages: dict[int, list[Message]] = {}
        for peer, pieces in self._pieces.items():
            sizes = None
            if counts is not None:
                sizes = list(map(encoded_bytes, pieces, counts[peer]))
            messages[peer] = messages_of(pieces, self._most_bytes, sizes)
        return messages

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


class Sender(_End):
    """The end of a trainer rank. If it sends changes, it keeps what it sent last of its own
    rows."""

    def __init__(
        self,
        group: TransferGroup,
        layout: Layout,
        rank: int,
        device: str,
        bucket_bytes: int | None = None,
    ) -> None:
        most_bytes = layout.most_message_bytes(bucket_bytes or BUCKET_BYTES[device])
        pieces: dict[int, list[Piece]] = {}
        for receiver in range(len(layout.engines)):
            pieces[layout.peer_of(receiver)] = layout.pieces(rank, receiver, most_bytes)
        super().__init__(group, layout, pieces, device, most_bytes)
        self._own: dict[str, Region] = {}
        """The own rows of each weight that has some."""
        for weight in layout.weights:
            region = own_region(weight, layout.trainer, rank)
            if region.num_elements:
                self._own[weight.name] = region
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def send(self, rows_of: RowsOf) -> Sent:
        """Send all weights, or what has changed since the last transfer. An error closes the group,
        so that no other rank waits for this one."""
        try:
            sent = self._send_all(rows_of) if self._sends_all else self._send_changes(rows_of)
        except BaseException:
            self._group.close()
            raise
        self._is_first = False
        return sent

    def _send_all(self, rows_of: RowsOf) -> Sent:
        messages = self._messages(counts=None)
        last = last_uses(messages)
        digests = Digests()
        rows: dict[str, Tensor] = {}
        """The own rows of those weights of which a part is still to be packed."""

        def content_of(packed: Packed) -> Tensor:
            weight, region = packed.piece
            if weight.name not in rows:
                rows[weight.name] = rows_of(weight)
            return part_of(rows[weight.name], self._own[weight.name], region)

        def end_round(number: int) -> None:
            # Digests are computed while the messages of the round travel.
            for weight in last[number]:
                own_rows = rows.pop(weight.name)
                self._add_digest(digests, weight, own_rows)
                if self._sends_changes:
                    # A copy, because these may be the tensors of the model.
                    self._kept[weight.name] = own_rows.clone()

        def pack(message: Message, buffer: Tensor) -> None:
            places = [place_in(buffer, packed) for packed in message.pieces]
            contents = [content_of(packed) for packed in message.pieces]
            torch._foreach_copy_(places, contents)

        num_bytes = self._send_messages(messages, pack, end_round)
        return Sent(digests.read(), num_bytes, self._num_values, num_changed=None)

    def _send_changes(self, rows_of: RowsOf) -> Sent:
        digests = Digests()
        num_changed = torch.zeros((), dtype=torch.int64, device=self._device)
        counts: dict[Piece, int] = {}
        changes: dict[Piece, Changes] = {}
        for weights in self._weights_by_size():
            compared: dict[Piece, tuple[Tensor, Tensor]] = {}
            for weight in weights:
                own = self._own[weight.name]
                new = rows_of(weight)
                differs = differences(new, self._kept[weight.name])
                num_changed += torch.count_nonzero(differs)
                self._add_digest(digests, weight, new)
                for piece in self._pieces_of(weight):
                    region = piece.region
                    compared[piece] = (part_of(new, own, region), part_of(differs, own, region))
                # What is sent is read from here.
                self._kept[weight.name].copy_(new)
            counts_of_some, changes_of_some = find_changes(compared)
            counts |= counts_of_some
            changes |= changes_of_some

        counts_of_peers = {
            peer: [counts[piece] for piece in pieces] for peer, pieces in self._pieces.items()
        }
        self._send_counts(counts_of_peers)

        def pack(message: Message, buffer: Tensor) -> None:
            places: list[Tensor] = []
            contents: list[Tensor] = []
            for packed in message.pieces:
                weight, region = packed.piece
                if packed.piece not in changes:
                    places.append(place_in(buffer, packed))
                    contents.append(
                        part_of(self._kept[weight.name], self._own[weight.name], region)
                    )
                    continue
                found = changes[packed.piece]
                place = bytes_of(buffer, packed)
                places += places_of_changes(place, len(found.positions), found.values.dtype)
                contents += found
            torch._foreach_copy_(places, contents)

        num_bytes = self._send_messages(self._messages(counts_of_peers), pack)
        return Sent(digests.read(), num_bytes, self._num_values, int(num_changed))

    def _send_counts(self, counts: Mapping[int, Sequence[int]]) -> None:
        """Tell each peer how many changes each of its pieces has."""
        parcels: list[Parcel] = []
        for peer, of_peer in counts.items():
            if of_peer:
                numbers = torch.tensor(of_peer, dtype=torch.int32, device=self._device)
                parcels.append(Parcel(numbers, peer))
        self._group.wait(self._group.exchange(sends=parcels, number=COUNTS_NUMBER))

    def _send_messages(
        self,
        messages: Messages,
        pack: Callable[[Message, Tensor], None],
        end_round: Callable[[int], None] = lambda number: None,
    ) -> int:
        """Send all messages. `pack` fills the buffer of a message, and `end_round` is called when
        those of a round are on their way. Returns their bytes."""
        buffers = Buffers(messages, self._device)
        on_their_way: deque[list[dist.Work]] = deque()
        num_bytes = 0
        for number in range(num_rounds(messages)):
            if len(on_their_way) == NUM_BUFFERS:
                self._group.wait(on_their_way.popleft())
            parcels: list[Parcel] = []
            for peer, message in round_of(messages, number):
                parcel = buffers.parcel(peer, number, message)
                pack(message, parcel.buffer)
                parcels.append(parcel)
                num_bytes += message.num_bytes
            on_their_way.append(self._group.exchange(sends=parcels, number=number))
            end_round(number)
        while on_their_way:
            self._group.wait(on_their_way.popleft())
        return num_bytes

    def _weights_by_size(self) -> Iterator[list[Weight]]:
        """The weights with own rows, in groups of about a bucket, which are compared at a time."""
        group: list[Weight] = []
        num_bytes = 0
        for name, region in self._own.items():
            weight = self._weights[name]
            group.append(weight)
            num_bytes += region.num_elements * weight.element_bytes
            if num_bytes >= BUCKET_BYTES[self._device]:
                yield group
                group = []
                num_bytes = 0
        yield group

    def _pieces_of(self, weight: Weight) -> Iterator[Piece]:
        """The pieces of a weight for all peers. Peers that hold the same have the same pieces."""
        return iter(self._pieces_by_name.get(weight.name, ()))

    @cached_property
    def _pieces_by_name(self) -> dict[str, dict[Piece, None]]:
        by_name: dict[str, dict[Piece, None]] = {}
        for pieces in self._pieces.values():
            for piece in pieces:
                by_name.setdefault(piece.weight.name, {})[piece] = None
        return by_name

    @property
    def _num_values(self) -> int:
        return sum(region.num_elements for region in self._own.values())

    def _add_digest(self, digests: Digests, weight: Weight, rows: Tensor) -> None:
        digests.add_part(weight.name, rows, self._own[weight.name], weight.shape)


class Receiver(_End):
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
        most_bytes = layout.most_message_bytes(bucket_bytes or BUCKET_BYTES[device])
        pieces: dict[int, list[Piece]] = {}
        for sender in range(layout.trainer.num_ranks):
            pieces[sender] = layout.pieces(sender, rank, most_bytes)
        super().__init__(group, layout, pieces, device, most_bytes)
        self._held = layout.engines[rank]

    @torch.no_grad()
    def receive(self, tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
        """Copy new weights into these tensors, which are what this rank holds of each weight.
        Returns the digests of its parts: of what is in the tensors then, or of what has arrived if
        a tensor has another dtype. An error closes the group."""
        matrices: dict[str, Tensor] = {}
        for name, region in self._held.items():
            if region.num_elements:
                matrices[name] = as_matrix(tensors[name])
                self._check_dtype(name, matrices[name])
        try:
            digests = self._receive(matrices)
        except BaseException:
            self._group.close()
            raise
        self._is_first = False
        return digests

    def _check_dtype(self, name: str, matrix: Tensor) -> None:
        """Raise DataError if changes cannot be written into this tensor."""
        sent = self._weights[name].dtype
        if self._sends_changes and matrix.dtype != getattr(torch, sent):
            raise DataError(
                f"weights: {name} is sent as {sent}, and the engine has it as {matrix.dtype}, so its "
                "changes have no meaning there; set actor_rollout_ref.rollout.weights=full"
            )

    def _receive(self, matrices: Mapping[str, Tensor]) -> dict[str, Digest]:
        digests = Digests()
        counts: dict[int, list[int]] | None = None
        counts_of_pieces: dict[Piece, int] = {}
        if not self._sends_all:
            counts = self._receive_counts()
            for peer, pieces in self._pieces.items():
                counts_of_pieces |= zip(pieces, counts[peer], strict=True)
        messages = self._messages(counts)
        last = last_uses(messages)
        waiting = dict.fromkeys(matrices)
        """The weights whose digests are still to be computed."""

        def unpack(message: Message, buffer: Tensor) -> None:
            places: list[Tensor] = []
            contents: list[Tensor] = []
            for packed in message.pieces:
                weight, region = packed.piece
                matrix = matrices[weight.name]
                part = part_of(matrix, self._held[weight.name], region)
                count = counts_of_pieces.get(packed.piece)
                if count is not None and not is_sent_whole(packed.piece, count):
                    found = bytes_of(buffer, packed)
                    apply_changes(part, places_of_changes(found, count, part.dtype))
                    continue
                content = place_in(buffer, packed)
                places.append(part)
                contents.append(content)
                if matrix.dtype != content.dtype:
                    # The next message of this peer is written over it.
                    digests.add_part(weight.name, content, region, weight.shape, at_once=True)
            if places:
                torch._foreach_copy_(places, contents)

        def end_round(number: int) -> None:
            for weight in last[number]:
                del waiting[weight.name]
                self._add_digest(digests, weight, matrices[weight.name])

        self._receive_messages(messages, unpack, end_round)
        for name in waiting:  # nothing of them has changed
            self._add_digest(digests, self._weights[name], matrices[name])
        return digests.read()

    def _receive_counts(self) -> dict[int, list[int]]:
        """How many changes each piece of each peer has."""
        parcels: list[Parcel] = []
        for peer, pieces in self._pieces.items():
            if pieces:
                numbers = torch.empty(len(pieces), dtype=torch.int32, device=self._device)
                parcels.append(Parcel(numbers, peer))
        self._group.wait(self._group.exchange(receives=parcels, number=COUNTS_NUMBER))
        counts: dict[int, list[int]] = {peer: [] for peer in self._pieces}
        for numbers, peer in parcels:
            counts[peer] = numbers.tolist()
        return counts

    def _receive_messages(
        self,
        messages: Messages,
        unpack: Callable[[Message, Tensor], None],
        end_round: Callable[[int], None],
    ) -> None:
        """Receive all messages. `unpack` empties the buffer of a message, and `end_round` is called
        after each round."""
        buffers = Buffers(messages, self._device)
        on_their_way: deque[tuple[list[Parcel], list[dist.Work]]] = deque()

        def expect(number: int) -> None:
            """Begin to receive the messages of a round."""
            parcels: list[Parcel] = []
            for peer, message in round_of(messages, number):
                parcels.append(buffers.parcel(peer, number, message))
            on_their_way.append((parcels, self._group.exchange(receives=parcels, number=number)))

        total = num_rounds(messages)
        for number in range(min(NUM_BUFFERS, total)):
            expect(number)
        for number in range(total):
            parcels, works = on_their_way.popleft()
            self._group.wait(works)
            of_round = [message for _, message in round_of(messages, number)]
            for parcel, message in zip(parcels, of_round, strict=True):
                unpack(message, parcel.buffer)
            if number + NUM_BUFFERS < total:
                expect(number + NUM_BUFFERS)
            end_round(number)

    def _add_digest(self, digests: Digests, weight: Weight, matrix: Tensor) -> None:
        """The digest of a weight that has arrived, if it has the dtype in which it was sent."""
        if matrix.dtype == dtype_of(weight):
            digests.add_part(weight.name, matrix, self._held[weight.name], weight.shape)
