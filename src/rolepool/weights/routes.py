"""Which trainer rank sends which part of which weight to which engine rank.

The trainer holds shards of rows (FSDP2), or copies. An engine rank holds all of a weight, or the
part that tensor parallelism gives it. From these few numbers every rank computes the same routes
when a channel opens, so no transfer has to send them. Pure Python: knows neither tensors nor
processes.

Each element of a weight has one owner among the trainer's ranks. The owner sends it to every engine
rank that holds it, and says its digest. Ranks with the same rows divide them, so they share the
work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rolepool.weights.regions import Region, whole_region

ALIGNMENT_BYTES = 16
"""Every piece of a message begins at a multiple of this, so that it can be read in its dtype."""

Held = Mapping[str, Region]
"""The part of each weight that an engine rank holds, by the weight's name."""


class Weight(NamedTuple):
    """What the routes of a weight depend on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype in which it is sent, as torch names it."""
    element_bytes: int
    is_sharded: bool
    """Whether FSDP2 divides its rows. Otherwise every rank of the trainer has all of it."""

    @property
    def whole(self) -> Region:
        return whole_region(self.shape)


class Trainer(NamedTuple):
    """How the ranks of the trainer divide a model. Ranks with the same number modulo `num_shards`
    hold the same shard."""

    num_ranks: int
    num_shards: int


class Piece(NamedTuple):
    """A part of a weight that goes from one rank to another in one message."""

    weight: Weight
    region: Region

    @property
    def num_bytes(self) -> int:
        return self.region.num_elements * self.weight.element_bytes


class Packed(NamedTuple):
    """A piece and its place in a message."""

    piece: Piece
    start: int
    num_bytes: int


class Message(NamedTuple):
    """Some pieces, one after another in one buffer."""

    pieces: tuple[Packed, ...]
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """Everything that routes depend on."""

    weights: Sequence[Weight]
    trainer: Trainer
    engines: Sequence[Held]
    """What each engine rank holds."""
    sends_changes: bool = False
    """Whether transfers after the first one send what has changed, where that is shorter."""

    @property
    def num_ranks(self) -> int:
        """The ranks of the trainer, and after them those of the engines."""
        return self.trainer.num_ranks + len(self.engines)

    def peer_of(self, engine: int) -> int:
        """The rank in the group of an engine rank."""
        return self.trainer.num_ranks + engine

    def pieces(self, sender: int, receiver: int, most_bytes: int) -> list[Piece]:
        """What trainer rank `sender` sends to engine rank `receiver`. A piece has at most so many
        bytes, or one row."""
        held = self.engines[receiver]
        pieces: list[Piece] = []
        for weight in self.weights:
            own = own_region(weight, self.trainer, sender)
            common = own.overlap(held[weight.name])
            if common is not None:
                pieces += cut(Piece(weight, common), most_bytes)
        return pieces

    def most_message_bytes(self, bucket_bytes: int) -> int:
        """The size of a message with which no rank has more than a bucket on its way at a time."""
        num_peers = max(self.trainer.num_ranks, len(self.engines))
        return max(ALIGNMENT_BYTES, bucket_bytes // num_peers)


def own_region(weight: Weight, trainer: Trainer, rank: int) -> Region:
    """The rows of a weight that a trainer rank sends, and whose digest it says."""
    whole = weight.whole
    num_shards = trainer.num_shards if weight.is_sharded else 1
    shard = shard_rows(whole.rows, num_shards, rank % num_shards)
    num_copies = trainer.num_ranks // num_shards
    return Region(shard_rows(shard, num_copies, rank // num_shards), whole.columns)


def rows_in_shard(weight: Weight, trainer: Trainer, rank: int) -> tuple[int, int]:
    """The same rows, counted from the first row of the rank's shard."""
    num_shards = trainer.num_shards if weight.is_sharded else 1
    start, _ = shard_rows(weight.whole.rows, num_shards, rank % num_shards)
    first, end = own_region(weight, trainer, rank).rows
    return first - start, end - start


def shard_rows(rows: tuple[int, int], num_parts: int, part: int) -> tuple[int, int]:
    """One of equal parts of some rows, as torch.chunk and FSDP2 cut them: the last parts may be
    shorter, or empty."""
    first, end = rows
    length = -(-(end - first) // num_parts)
    start = min(end, first + part * length)
    return start, min(end, start + length)


def cut(piece: Piece, most_bytes: int) -> Iterator[Piece]:
    """The piece in blocks of rows of at most so many bytes, or of one row."""
    (first, end), columns = piece.region
    row_bytes = piece.num_bytes // (end - first)
    rows_at_once = max(1, most_bytes // row_bytes)
    for start in range(first, end, rows_at_once):
        rows = (start, min(end, start + rows_at_once))
        yield Piece(piece.weight, Region(rows, columns))


def messages_of(
    pieces: Sequence[Piece], most_bytes: int, sizes: Sequence[int] | None = None
) -> list[Message]:
    """These pieces, in their order, in messages of at most so many bytes, or of one piece. `sizes`
    has the bytes of each piece if they are not sent as they are; 0 leaves a piece out."""
    if sizes is None:
        sizes = [piece.num_bytes for piece in pieces]
    messages: list[Message] = []
    packed: list[Packed] = []
    end = 0
    for piece, num_bytes in zip(pieces, sizes, strict=True):
        if num_bytes == 0:
            continue
        start = aligned(end)
        if packed and start + num_bytes > most_bytes:
            messages.append(Message(tuple(packed), end))
            packed = []
            start = 0
        packed.append(Packed(piece, start, num_bytes))
        end = start + num_bytes
    if packed:
        messages.append(Message(tuple(packed), end))
    return messages


def aligned(position: int) -> int:
    """The next position at which a piece may begin."""
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
