"""The rows of a micro-batch on the device: their tokens, one row after another without padding.

Owns where each token of a row is, in the flat tokens and in padded tensors. That is worked out in host memory from the
lengths of rows, so the host never waits for the device while it prepares a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rolepool.models.attention import packed_arguments
from rolepool.protocol.ragged import INPUT_IDS, NUM_PROMPT_TOKENS, ragged, ragged_parts


def on_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A tensor of host memory on the device, without waiting for what the device still has to do."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class TokenRows:
    """Prompt-and-response rows. What is computed for response tokens is flat: all rows, one after another."""

    ids: Tensor
    """All tokens, flat, on the device."""
    lengths: Tensor
    """The tokens of each row. This and what follows is in host memory."""
    num_response: Tensor
    """The response tokens of each row."""
    row_of_token: Tensor
    position_of_token: Tensor
    is_response: Tensor
    """Which tokens belong to responses."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], device: str) -> TokenRows:
        """The rows of a batch in host memory."""
        ids, offsets = ragged_parts(batch[INPUT_IDS])
        num_prompt, lengths = batch[NUM_PROMPT_TOKENS], offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions = torch.arange(len(ids)) - offsets[rows]
        is_response = positions >= num_prompt[rows]
        return cls(on_device(ids, device), lengths, lengths - num_prompt, rows, positions, is_response)

    @property
    def responses(self) -> Tensor:
        """The response tokens."""
        return self.ids[self._on_device(self.is_response.nonzero()[:, 0])]

    def packed_inputs(self) -> tuple[dict[str, object], Tensor]:
        """A model's inputs with all tokens in one row, and the place in it of the token before each response token."""
        lengths = self.lengths[self.lengths > 0]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        inputs = {
            "input_ids": self.ids.unsqueeze(0),
            "position_ids": self._on_device(self.position_of_token).unsqueeze(0),
            **packed_arguments(self._on_device(starts), int(lengths.max())),
        }
        return inputs, self._on_device(self.is_response.nonzero()[:, 0] - 1)

    def padded_inputs(self, pad_token_id: int = 0) -> tuple[dict[str, object], Tensor]:
        """The same with one row each, padded on the right to the longest; places count through all rows."""
        width = int(self.lengths.max())
        is_real = torch.arange(width) < self.lengths[:, None]
        places = self.row_of_token * width + self.position_of_token
        ids = self.ids.new_full((is_real.numel(),), pad_token_id).index_copy(0, self._on_device(places), self.ids)
        inputs: dict[str, object] = {
            "input_ids": ids.view(is_real.shape),
            "attention_mask": self._on_device(is_real.long()),
        }
        return inputs, self._on_device(places[self.is_response] - 1)

    def pad(self, of_responses: Tensor) -> Tensor:
        """Values of response tokens as [rows, longest response], with zeros after the end of each response."""
        width = int(self.num_response.max())
        first = self.lengths - self.num_response
        places = self.row_of_token * width + self.position_of_token - first[self.row_of_token]
        padded = of_responses.new_zeros(len(self.lengths) * width)
        return padded.index_copy(0, self._on_device(places[self.is_response]), of_responses).view(
            len(self.lengths), width
        )

    def ragged(self, of_responses: Tensor) -> Tensor:
        """Values of response tokens as a ragged column."""
        return ragged(of_responses, self._on_device(self.num_response))

    def _on_device(self, tensor: Tensor) -> Tensor:
        return on_device(tensor, self.ids.device)
