"""The running samples of a generation, one row each: the tokens sampled so far, and where each row ends.

Rows 0 to `num_running` - 1 are in use. A row that has ended takes no more tokens, so further steps do not change it
until the host checks. The host counts steps to know the progress of rows without asking the GPU. Does not know the
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolepool.models.packing import on_device
from rolepool.rollout.kv_cache import SlotCache

_UNUSED_ROW = [0, -1, 0, 0, 0, 0]
"""State of a row that is not in use: it has ended, and its position is -1."""


class Row(NamedTuple):
    """What the host knows about a running sample. Its clock counts the decode steps of the generation."""

    request: int
    slot: int
    zero_clock: int
    """Clock minus length: what the clock would have shown when the sample had no token in the cache."""
    last_clock: int
    """The clock when its last token is sampled, if no stop token comes first."""


class FinishedSample(NamedTuple):
    """A sample that has ended."""

    request: int
    tokens: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]


class DecodeBatch:
    """Space for `num_rows` running samples of up to `max_new_tokens` tokens each; each row has a slot of the cache.

    With `scattered` a row keeps its first slot; otherwise row i is always in slot i.
    """

    def __init__(
        self,
        num_rows: int,
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        device: torch.device,
        scattered: bool,
    ) -> None:
        self.num_rows, self.max_new_tokens, self.stop_token_ids = num_rows, max_new_tokens, stop_token_ids
        self._device, self._scattered = device, scattered
        self._unused = torch.tensor(_UNUSED_ROW, device=device)[:, None]
        self._state = self._unused.repeat(1, num_rows)
        self.tokens, self.positions, self.steps, self.limits, self.streams, self.slots = self._state
        """For each row: the token to run next, its position, the number of sampled tokens, the number at which the row
        ends (lowered by a stop token), the seed of its random numbers, and its slot of the cache."""
        # The last column takes what rows that have ended still sample.
        self._sampled = torch.zeros(num_rows, max_new_tokens + 1, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(num_rows, max_new_tokens + 1, device=device)
        self._stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
        self._rows: list[Row] = []
        self._free = list(range(num_rows))[::-1]
        self._clock = 0
        self._min_zero_clock = self._next_end = self._last_end = 0

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def length(self) -> int:
        """Tokens of the longest row, including the one to run next; may be more if rows have ended."""
        return self._clock - self._min_zero_clock + 1

    @property
    def num_steps_left(self) -> int:
        """Number of steps after which all rows have ended."""
        return self._last_end - self._clock

    def fits(self, num_rows: int, max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> bool:
        has_room = self.num_rows >= num_rows and self.max_new_tokens >= max_new_tokens
        return has_room and self.stop_token_ids == stop_token_ids

    def enter(
        self, requests: Sequence[int], prompt_lengths: Sequence[int], limits: Sequence[int], streams: Tensor
    ) -> list[int]:
        """Add rows, whose first tokens are sampled before the next step. Returns their slots."""
        rows = slice(self.num_running, self.num_running + len(requests))
        slots = [self._free.pop() for _ in requests]
        for request, slot, length, limit in zip(requests, slots, prompt_lengths, limits, strict=True):
            self._rows.append(Row(request, slot, self._clock - length, self._clock + limit - 1))
        last_positions = [length - 1 for length in prompt_lengths]
        zeros = [0] * len(requests)
        state = torch.tensor([zeros, last_positions, zeros, list(limits), streams.tolist(), slots])
        self._state[:, rows] = on_device(state, self._device)
        self._recount()
        return slots

    def tick(self) -> None:
        """Count one decode step."""
        self._clock += 1

    def record(self, rows: slice, tokens: Tensor, log_probs: Tensor) -> None:
        """Append the next token to each of `rows` that has not ended."""
        steps, limits = self.steps[rows], self.limits[rows]
        is_active = steps < limits
        # A captured step cannot copy numbers from the host.
        places = (self.slots[rows], steps.masked_fill(~is_active, self.max_new_tokens))
        self._sampled.index_put_(places, tokens)
        self._log_probs.index_put_(places, log_probs)
        self.tokens[rows] = torch.where(is_active, tokens, self.tokens[rows])
        self.positions[rows].add_(is_active)
        steps.add_(is_active)
        if self.stop_token_ids:
            is_stop = (tokens[:, None] == self._stops).any(dim=1) & is_active
            limits.copy_(torch.where(is_stop, steps, limits))

    def finished(self) -> list[int]:
        """Rows that have ended."""
        if not self.stop_token_ids and self._clock < self._next_end:
            return []
        running = slice(0, self.num_running)
        ended: list[int] = (self.steps[running] >= self.limits[running]).nonzero()[:, 0].tolist()
        return ended

    def take(self, indices: Sequence[int]) -> list[FinishedSample]:
        """The samples of rows that have ended."""
        slots = torch.tensor([self._rows[index].slot for index in indices], device=self._device)
        counts = self.steps[torch.tensor(indices, device=self._device)].tolist()
        most = max(counts)
        sampled, log_probs = (storage[slots, :most].cpu().numpy() for storage in (self._sampled, self._log_probs))
        return [
            FinishedSample(self._rows[index].request, sampled[i, :count], log_probs[i, :count])
            for i, (index, count) in enumerate(zip(indices, counts, strict=True))
        ]

    def leave(self, indices: Sequence[int], cache: SlotCache) -> None:
        """Remove rows; the last rows take their places."""
        num_before, came_from = self.num_running, list(range(self.num_running))
        for index in sorted(indices, reverse=True):
            self._free.append(self._rows[index].slot)
            self._rows[index], came_from[index] = self._rows[-1], came_from[-1]
            self._rows.pop()
            came_from.pop()
        remaining = slice(0, self.num_running)
        self._state[:, remaining] = self._state[:, torch.tensor(came_from, dtype=torch.int64, device=self._device)]
        self._state[:, self.num_running : num_before] = self._unused
        if not self._scattered:
            self._move_slots(came_from, cache)
        if not (self._scattered and self._rows):  # else the free slots are not the last ones
            self._free = list(range(self.num_running, self.num_rows))[::-1]
        self._recount()

    def _move_slots(self, came_from: list[int], cache: SlotCache) -> None:
        """Move each row that took another row's place to that row's slot. Its old slot is behind all remaining rows."""
        for index, source in enumerate(came_from):
            if index != source:
                row = self._rows[index]
                cache.copy(source, index, min(self._clock, row.last_clock) - row.zero_clock)
                for storage in (self._sampled, self._log_probs):
                    storage[index] = storage[source]
                self._rows[index] = row._replace(slot=index)
                self.slots[index] = index

    def _recount(self) -> None:
        self._min_zero_clock = min((row.zero_clock for row in self._rows), default=self._clock)
        self._next_end = min((row.last_clock for row in self._rows), default=self._clock)
        self._last_end = max((row.last_clock for row in self._rows), default=self._clock)
