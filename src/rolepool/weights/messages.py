"""The messages of a transfer in memory: which of them travel at the same time, their buffers, and
the places of weights in them.

Does not know what is done with a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rolepool.weights.group import Parcel
from rolepool.weights.regions import Region
from rolepool.weights.routes import Message, Packed, Weight

NUM_BUFFERS = 2
"""Messages of a pair of ranks that are in memory at a time: one travels, and one is packed or
unpacked."""
Messages = Mapping[int, Sequence[Message]]
"""What travels between this rank and each of its peers. The first messages of all peers travel at
the same time, then the second ones, and so on."""


# Rounds


def num_rounds(messages: Messages) -> int:
    return max((len(of_peer) for of_peer in messages.values()), default=0)


def round_of(messages: Messages, number: int) -> Iterator[tuple[int, Message]]:
    """The messages that travel at the same time, with the peer of each of them."""
    for peer, of_peer in messages.items():
        if number < len(of_peer):
            yield peer, of_peer[number]


def weights_in(message: Message) -> Iterator[Weight]:
    for packed in message.pieces:
        yield packed.piece.weight


def last_uses(messages: Messages) -> list[list[Weight]]:
    """For each round the weights that no later round has a part of."""
    last_rounds: dict[Weight, int] = {}
    for of_peer in messages.values():
        for number, message in enumerate(of_peer):
            for weight in weights_in(message):
                last_rounds[weight] = max(number, last_rounds.get(weight, 0))
    weights: list[list[Weight]] = [[] for _ in range(num_rounds(messages))]
    for weight, number in last_rounds.items():
        weights[number].append(weight)
    return weights


class Buffers:
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


def bytes_of(buffer: Tensor, packed: Packed) -> Tensor:
    """The bytes of a piece in the buffer of its message."""
    return buffer[packed.start : packed.start + packed.num_bytes]


def place_in(buffer: Tensor, packed: Packed) -> Tensor:
    """The place of a piece that is sent whole, as a matrix."""
    weight, region = packed.piece
    (first_row, end_row), (first_column, end_column) = region
    flat = bytes_of(buffer, packed).view(dtype_of(weight))
    return flat.view(end_row - first_row, end_column - first_column)
