"""Rows of a batch brought to the device, and packed: without padding, one sequence after another.

Owns where each token of a packed row comes from. It is worked out in host memory from the attention mask, which
therefore stays there: the host never waits for the device while it prepares a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]
"""input_ids, attention_mask and position_ids [rows, prompt + response]; responses [rows, response]."""


def rows_on(device: str, batch: Batch, rows: Sequence[int]) -> dict[str, Tensor]:
    """Some rows of a batch in host memory on the device, but for their attention mask, which stays."""
    taken = {key: value[rows] for key, value in batch.items()}
    return {key: value if key == "attention_mask" else on_device(value, device) for key, value in taken.items()}


def on_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A tensor of host memory on the device, without waiting for what the device still has to do."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Packing:
    """How rows are packed. Indices are on the device and flat."""

    tokens: Tensor
    """Of the rows' real tokens."""
    responses: Tensor
    """Of the response tokens that are there, in [rows, response]."""
    before_responses: Tensor
    """For each of those, the place in the packed row of the token before it."""
    starts: Tensor
    """Where in the packed row sequences start, and its end."""
    longest: int

    @classmethod
    def of(cls, attention_mask: Tensor, response_length: int, device: torch.device) -> Packing:
        real = attention_mask.bool()
        lengths = real.sum(dim=1)
        lengths = lengths[lengths > 0]
        places = real.flatten().cumsum(0).reshape(real.shape) - 1
        is_response = real[:, -response_length:]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        return cls(
            tokens=on_device(real.flatten().nonzero().flatten(), device),
            responses=on_device(is_response.flatten().nonzero().flatten(), device),
            before_responses=on_device(places[:, -response_length:][is_response] - 1, device),
            starts=on_device(starts, device),
            longest=int(lengths.max()),
        )
