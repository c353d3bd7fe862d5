"""The running samples of a generation, one row each: what was sampled so far and where each row ends.

Rows 0 to `num_running` - 1 are in use, and row i is slot i of the cache. All rows take one step at a time, so the host
knows lengths and limits by counting and reads nothing from the device to learn them. Does not know the model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rolepool.rollout.kv_cache import SlotCache


class Row(NamedTuple):
    """What the host knows of a running sample. `clock` counts the decode steps of the generation."""

    request: int
    zero_clock: int
    """Clock minus length: where the clock would have stood when the sample had no token in the cache."""
    first_clock: int
    """When its first token was sampled."""
    last_clock: int
    """When its last token is sampled, if no stop token comes first."""


class Rows:
    """Room for `num_rows` running samples of up to `max_new_tokens` tokens each."""

    def __init__(self, num_rows: int, max_new_tokens: int, stop_token_ids: tuple[int, ...], device: torch.device):
        self._device = device
        self._state = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.steps, self.streams = self._state
        """The token to run next, its position, how many tokens were sampled, and the seed of the sample's numbers."""
        self.indices = torch.arange(num_rows, device=device)
        self._sampled = torch.zeros(num_rows, max_new_tokens, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(num_rows, max_new_tokens, device=device)
        self._stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
        self._rows: list[Row] = []
        self._clock = 0
        self._min_zero_clock = self._next_end = 0

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def length(self) -> int:
        """Tokens of the longest row, the one to run next included."""
        return self._clock - self._min_zero_clock + 1

    @property
    def num_tokens(self) -> int:
        """Sampled by the running rows."""
        return sum(self._clock - row.first_clock + 1 for row in self._rows)

    def enter(self, request: int, prompt_length: int, max_new_tokens: int) -> int:
        """A new row, whose prompt is in the cache and whose first token is sampled before the next step."""
        self._rows.append(
            Row(request, self._clock - prompt_length, self._clock, self._clock + max_new_tokens - 1),
        )
        self._recount()
        return self.num_running - 1

    def start(self, first: int, prompt_lengths: list[int], streams: Tensor) -> None:
        """Set the device's state of new rows, from row `first` on."""
        rows = slice(first, first + len(prompt_lengths))
        self.positions[rows] = torch.tensor(prompt_lengths, device=self._device) - 1
        self.steps[rows] = 0
        self.streams[rows] = streams.to(self._device)

    def tick(self) -> None:
        """A decode step has run on all rows."""
        self._clock += 1

    def record(self, rows: slice, tokens: Tensor, log_probs: Tensor) -> None:
        """Take the next token of each of `rows`."""
        places = (self.indices[rows], self.steps[rows])
        self._sampled.index_put_(places, tokens)
        self._log_probs.index_put_(places, log_probs)
        self.tokens[rows] = tokens
        self.positions[rows] += 1
        self.steps[rows] += 1

    def finished(self) -> list[int]:
        """Rows that have ended, the last first."""
        ended = {i for i, row in enumerate(self._rows) if row.last_clock <= self._clock} if self._is_due() else set()
        if self._stops.numel():
            stopped = (self.tokens[: self.num_running, None] == self._stops).any(dim=1)
            ended.update(stopped.nonzero()[:, 0].tolist())
        return sorted(ended, reverse=True)

    def take(self, index: int) -> tuple[int, list[int], list[float]]:
        """Request, tokens and log-probs of a row."""
        row = self._rows[index]
        count = self._clock - row.first_clock + 1
        return row.request, self._sampled[index, :count].tolist(), self._log_probs[index, :count].tolist()

    def leave(self, index: int, cache: SlotCache) -> None:
        """Close the row by moving the last one into its place."""
        last = self._rows.pop()
        source = self.num_running
        if index != source:
            self._rows[index] = last
            cache.move(source, index, self._clock - last.zero_clock)
            self._state[:, index] = self._state[:, source]
            count = self._clock - last.first_clock + 1
            for storage in (self._sampled, self._log_probs):
                storage[index, :count] = storage[source, :count]
        self._recount()

    def _is_due(self) -> bool:
        return self._next_end <= self._clock

    def _recount(self) -> None:
        self._min_zero_clock = min((row.zero_clock for row in self._rows), default=self._clock)
        self._next_end = min((row.last_clock for row in self._rows), default=self._clock)
