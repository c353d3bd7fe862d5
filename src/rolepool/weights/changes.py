"""What changed in a piece of a weight since the last transfer: positions and new values.

Owns how changes are found, how they lie in a message, and how they are written into an engine's
tensor. A value counts as changed if one of its bits differs, so nothing is lost: also a zero that
changes its sign is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rolepool.weights.routes import Piece

POSITION_BYTES = 4
MOST_SHARE = 0.5
"""Changes are sent if they take at most this share of the piece's bytes; otherwise all of the piece
is sent. They are all in memory before the first of them is sent, so this bounds their memory, too."""
_VALUE_ALIGNMENT = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers whose equality is that of all bits, by the bytes of an element."""


class Changes(NamedTuple):
    """The changed values of a piece."""

    positions: Tensor
    """In the piece, row by row, as 32-bit integers."""
    values: Tensor


def encoded_bytes(piece: Piece, num_changed: int) -> int:
    """The bytes with which a piece with so many changes is sent."""
    if is_sent_whole(piece, num_changed):
        return piece.num_bytes
    return _values_start(num_changed) + num_changed * piece.weight.element_bytes


def is_sent_whole(piece: Piece, num_changed: int) -> bool:
    """Whether all of a piece is sent instead of its changes."""
    num_bytes = _values_start(num_changed) + num_changed * piece.weight.element_bytes
    return num_bytes > MOST_SHARE * piece.num_bytes


def _values_start(num_changed: int) -> int:
    """Where the values begin. The positions are before them."""
    end = POSITION_BYTES * num_changed
    return -(-end // _VALUE_ALIGNMENT) * _VALUE_ALIGNMENT


def differences(new: Tensor, old: Tensor) -> Tensor:
    """Which values differ, as a matrix of truth values."""
    bits = _BITS[new.element_size()]
    return new.view(bits) != old.view(bits)


def find_changes(
    pieces: Mapping[Piece, tuple[Tensor, Tensor]],
) -> tuple[dict[Piece, int], dict[Piece, Changes]]:
    """The number of changes of each piece, and the changes of those that are not sent whole. Pieces
    are given with their new values and with what differs, both as matrices. Waits for the device
    once."""
    if not pieces:
        return {}, {}
    sums = torch.stack([torch.count_nonzero(differs) for _, differs in pieces.values()])
    counts = dict(zip(pieces, sums.tolist(), strict=True))
    changes: dict[Piece, Changes] = {}
    for piece, (new, differs) in pieces.items():
        count = counts[piece]
        if count == 0 or is_sent_whole(piece, count):
            continue
        # With a known size, the device does not have to tell it again.
        positions = torch.nonzero_static(differs.flatten(), size=count)[:, 0]
        num_columns = new.shape[1]
        values = new[positions // num_columns, positions % num_columns]
        changes[piece] = Changes(positions.to(torch.int32), values)
    return counts, changes


def places_of_changes(content: Tensor, num_changed: int, dtype: torch.dtype) -> Changes:
    """The positions and values in the bytes of a message, as views."""
    positions = content[: POSITION_BYTES * num_changed].view(torch.int32)
    start = _values_start(num_changed)
    values = content[start : start + num_changed * dtype.itemsize].view(dtype)
    return Changes(positions, values)


def apply_changes(part: Tensor, changes: Changes) -> None:
    """Write changes into a part of a weight."""
    positions = changes.positions.long()
    if part.is_contiguous():
        part.view(-1)[positions] = changes.values
        return
    num_columns = part.shape[1]
    part[positions // num_columns, positions % num_columns] = changes.values
