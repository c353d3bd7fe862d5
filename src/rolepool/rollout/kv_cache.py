"""The KV cache and the running samples of a generation: one slot of the cache and one row of the
batch for each.

Owns the storage of both: keys and values, the tokens sampled so far, and where each row ends. Does
not know the model, how attention reads the cache, nor which requests wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolepool.models.packing import on_device

_UNUSED_ROW = [0, -1, 0, 0, 0, 0]
"""State of a row that is not in use: it has ended, and its position is -1."""

Leave = Callable[[int, int, npt.NDArray[np.int64]], None]
"""Called with request, slot and tokens of a row that has ended."""


@dataclass(frozen=True)
class CacheShape:
    """What a model stores for each token."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def slot_bytes(self, length: int) -> int:
        """Bytes of keys and values of so many tokens."""
        num_numbers = self.num_layers * self.num_heads * self.head_dim * length
        return 2 * num_numbers * self.dtype.itemsize


class SlotCache:
    """`num_slots` slots of `length` tokens each."""

    def __init__(self, shape: CacheShape, num_slots: int, length: int) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.length = length
        size = (
            shape.num_layers,
            num_slots,
            shape.num_heads,
            length,
            shape.head_dim,
        )
        # Zeros, because masked values are multiplied by zero, and uninitialized memory may contain
        # NaN.
        self._keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros_like(self._keys)
        # A line is one token of one head of one slot, so `write` can store with one index.
        key_lines = self._keys.flatten(1, 3)
        value_lines = self._values.flatten(1, 3)
        self._lines = list(zip(key_lines, value_lines, strict=True))
        heads_h = torch.arange(shape.num_heads, device=shape.device)
        self._head_offsets_h = heads_h * length

    def fits(self, shape: CacheShape, num_slots: int, length: int) -> bool:
        """Whether it has at least so many slots of at least this length."""
        has_slots = self.num_slots >= num_slots
        has_length = self.length >= length
        return self.shape == shape and has_slots and has_length

    @property
    def place(self) -> list[int]:
        """What a kernel needs to find the cache: addresses of keys and values, number of slots,
        length of a slot."""
        return [
            self._keys.data_ptr(),
            self._values.data_ptr(),
            self.num_slots,
            self.length,
        ]

    def places(self, slots_t: Tensor, positions_t: Tensor) -> Tensor:
        """Where `write` stores tokens; the same for all layers, so it is computed once."""
        lines_of_slot = self.shape.num_heads * self.length
        first_t = slots_t * lines_of_slot + positions_t
        places_th = first_t[:, None] + self._head_offsets_h
        return places_th.view(-1)

    def write(
        self,
        layer: int,
        places: Tensor,
        keys_thd: Tensor,
        values_thd: Tensor,
    ) -> None:
        key_lines, value_lines = self._lines[layer]
        head_dim = self.shape.head_dim
        key_lines.index_copy_(0, places, keys_thd.reshape(-1, head_dim))
        value_lines.index_copy_(0, places, values_thd.reshape(-1, head_dim))

    def read(
        self,
        layer: int,
        slots: slice,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (slots, heads, length, head_dim) of the first `length` tokens, as
        views."""
        keys_nhld = self._keys[layer, slots, :, :length]
        values_nhld = self._values[layer, slots, :, :length]
        return keys_nhld, values_nhld

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot into another."""
        for storage in (self._keys, self._values):
            tokens = storage[:, source, :, :length]
            storage[:, target, :, :length] = tokens

    def copy_all(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """The same for many slots, of which none is a source and a target. A GPU copies them with
        one kernel."""
        if not sources:
            return
        if not self._keys.is_cuda:
            for source, target, length in zip(sources, targets, lengths, strict=True):
                self.copy(source, target, length)
            return
        from rolepool.rollout import kernels  # here, because it needs Triton

        copies = torch.tensor([sources, targets, lengths])
        kernels.copy_slots(self._keys, self._values, on_device(copies, self.shape.device))


class _Row(NamedTuple):
    """What the host knows about a running sample. The clock counts the decode steps of the
    generation."""

    request: int
    slot: int
    zero_clock: int
    """Clock minus length: what the clock would have shown when the sample had no token in the
    cache."""
    last_clock: int
    """The clock when its last token is sampled, if no stop token comes first."""


class _NumberOnItsWay:
    """A number that a GPU computes and copies to the host meanwhile."""

    def __init__(self, number: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._number = number
        if number.is_cuda:
            self._number = torch.empty_like(number, device="cpu", pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> int:
        """Wait until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)


class DecodeBatch:
    """Space for `num_rows` running samples of up to `max_new_tokens` tokens each; each row has a
    slot of the cache. `dtype` is that of log-probs.

    Rows 0 to `num_running` - 1 are in use. A row that has ended takes no more tokens, so further
    steps do not change it until the host checks. The host counts steps to know the progress of rows
    without asking the GPU. With `scattered` a row keeps its first slot; otherwise row i is always
    in slot i.
    """

    def __init__(
        self,
        num_rows: int,
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        device: torch.device,
        scattered: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_rows = num_rows
        self.max_new_tokens = max_new_tokens
        self.stop_token_ids = stop_token_ids
        self._device = device
        self._scattered = scattered
        self._unused = torch.tensor(_UNUSED_ROW, device=device)[:, None]
        self._state = self._unused.repeat(1, num_rows)
        (
            self.tokens,
            self.positions,
            self.steps,
            self.limits,
            self.streams,
            self.slots,
        ) = self._state
        """For each row: the token to run next, its position, the number of sampled tokens, the
        number at which the row ends (lowered by a stop token), the seed of its random numbers, and
        its slot of the cache."""
        # The last column takes what rows that have ended still sample.
        size = (num_rows, max_new_tokens + 1)
        self._sampled = torch.zeros(size, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(size, dtype=dtype, device=device)
        self._stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
        self._rows: list[_Row] = []
        self._clock = 0
        self._ended_before: _NumberOnItsWay | None = None
        """How many rows had ended when `count_ended` was called the last time. None if rows have
        entered or left since."""
        self._recount()
        self._by_kernel: Callable[[slice, Tensor, Tensor], None] | None = None
        """Records the next tokens on a GPU."""
        if self._state.is_cuda:
            self._by_kernel = self._recording_kernel()

    def _recording_kernel(self) -> Callable[[slice, Tensor, Tensor], None]:
        from rolepool.rollout import kernels  # here, because it needs Triton

        tensors = kernels.BatchTensors(
            tokens=self.tokens,
            positions=self.positions,
            steps=self.steps,
            limits=self.limits,
            slots=self.slots,
            sampled=self._sampled,
            log_probs=self._log_probs,
            stops=self._stops,
        )
        return partial(kernels.record, tensors)

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def length(self) -> int:
        """Tokens of the longest row, including the one to run next; may be more if rows have
        ended."""
        return self._clock - self._min_zero_clock + 1

    @property
    def num_steps_left(self) -> int:
        """Number of steps after which all rows have ended."""
        return self._last_end - self._clock

    def num_steps_until(self, num_ended: int) -> int:
        """Number of steps after which so many rows have reached their limit."""
        last_clocks = sorted(row.last_clock for row in self._rows)
        return max(0, last_clocks[num_ended - 1] - self._clock)

    def count_ended(self) -> int:
        """A number of rows that have ended, for a host that does not want to wait for a GPU: those
        that have reached their limit, which it knows, or those that had ended when it called this
        the last time, whichever are more."""
        num_at_limit = sum(row.last_clock <= self._clock for row in self._rows)
        if not self.stop_token_ids:
            return num_at_limit
        num_before = 0 if self._ended_before is None else self._ended_before.read()
        has_ended = self.steps[: self.num_running] >= self.limits[: self.num_running]
        self._ended_before = _NumberOnItsWay(has_ended.sum())
        return max(num_at_limit, num_before)

    def enter(
        self,
        requests: Sequence[int],
        prompt_lengths: Sequence[int],
        limits: Sequence[int],
        streams: Sequence[int],
    ) -> list[int]:
        """Add rows, whose first tokens are sampled before the next step. Returns their slots."""
        first_row = self.num_running
        num_new = len(requests)
        taken = {row.slot for row in self._rows}
        free = [slot for slot in range(self.num_rows) if slot not in taken]
        slots = free[:num_new]
        new_rows = zip(
            requests,
            slots,
            prompt_lengths,
            limits,
            strict=True,
        )
        for request, slot, length, limit in new_rows:
            zero_clock = self._clock - length
            last_clock = self._clock + limit - 1
            self._rows.append(_Row(request, slot, zero_clock, last_clock))
        last_positions = [length - 1 for length in prompt_lengths]
        # No row has sampled a token yet, so the tokens to run next are not known.
        zeros = [0] * num_new
        columns = [
            zeros,
            last_positions,
            zeros,
            limits,
            streams,
            slots,
        ]
        state = on_device(torch.tensor(columns), self._device)
        self._state[:, first_row : first_row + num_new] = state
        self._recount()
        return slots

    def tick(self) -> None:
        """Count one decode step."""
        self._clock += 1

    def record(self, rows: slice, tokens: Tensor, log_probs: Tensor) -> None:
        """Append the next token to each of `rows` that has not ended."""
        if self._by_kernel is not None:
            self._by_kernel(rows, tokens, log_probs)
            return
        steps = self.steps[rows]
        limits = self.limits[rows]
        slots = self.slots[rows]
        is_active = steps < limits
        # Rows that have ended store into the last column instead of being left out, because a
        # captured step cannot copy numbers of rows from the host.
        columns = steps.masked_fill(~is_active, self.max_new_tokens)
        places = (slots, columns)
        self._sampled.index_put_(places, tokens)
        self._log_probs.index_put_(places, log_probs)
        earlier_tokens = self.tokens[rows]
        self.tokens[rows] = torch.where(is_active, tokens, earlier_tokens)
        self.positions[rows].add_(is_active)
        steps.add_(is_active)
        if self.stop_token_ids:
            is_stop_token = (tokens[:, None] == self._stops).any(dim=1)
            ends_now = is_stop_token & is_active
            limits.copy_(torch.where(ends_now, steps, limits))

    def pop_finished(
        self,
        cache: SlotCache,
        leave: Leave | None = None,
    ) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.floating]]]:
        """Remove the rows that have ended. Returns request, tokens and log-probs of each. `leave`
        is called before that for each, while the slots still hold their tokens."""
        if not self.stop_token_ids and self._clock < self._next_end:
            return []
        num_running = self.num_running
        # One copy to the host, because it waits for the GPU.
        progress = torch.stack((self.steps[:num_running], self.limits[:num_running]))
        steps, limits = progress.tolist()
        ended = [index for index in range(num_running) if steps[index] >= limits[index]]
        if not ended:
            return []
        ended_rows = [self._rows[index] for index in ended]
        counts: list[int] = [steps[index] for index in ended]
        slots = on_device(torch.tensor([row.slot for row in ended_rows]), self._device)
        # All ended rows are copied to the host at once, as far as the longest of them goes.
        longest = max(counts)
        sampled = self._sampled[slots, :longest].cpu().numpy()
        log_probs = self._log_probs[slots, :longest].cpu().numpy()
        samples = []
        for place, row in enumerate(ended_rows):
            count = counts[place]
            tokens = sampled[place, :count]
            log_probs_of_row = log_probs[place, :count]
            samples.append((row.request, tokens, log_probs_of_row))
            if leave is not None:
                leave(row.request, row.slot, tokens)
        self._remove(ended, cache)
        self._recount()
        return samples

    def _remove(self, ended: list[int], cache: SlotCache) -> None:
        """Remove these rows; the last rows take their places."""
        num_before = self.num_running
        came_from = list(range(num_before))
        for index in sorted(ended, reverse=True):
            self._rows[index] = self._rows[-1]
            came_from[index] = came_from[-1]
            self._rows.pop()
            came_from.pop()
        num_left = self.num_running
        sources = on_device(torch.tensor(came_from, dtype=torch.int64), self._device)
        self._state[:, :num_left] = self._state[:, sources]
        self._state[:, num_left:num_before] = self._unused
        if self._scattered:
            return
        for index, source in enumerate(came_from):
            if index != source:
                self._move_to_own_slot(index, source, cache)

    def _move_to_own_slot(
        self,
        index: int,
        old_slot: int,
        cache: SlotCache,
    ) -> None:
        """Move a row that took another row's place to that row's slot. Its old slot is behind all
        other rows."""
        row = self._rows[index]
        last_clock = min(self._clock, row.last_clock)
        num_tokens = last_clock - row.zero_clock
        cache.copy(old_slot, index, num_tokens)
        for storage in (self._sampled, self._log_probs):
            storage[index] = storage[old_slot]
        self._rows[index] = row._replace(slot=index)
        self.slots[index] = index

    def _recount(self) -> None:
        """Find out again when rows end and which is the longest."""
        last_clocks = [row.last_clock for row in self._rows]
        zero_clocks = [row.zero_clock for row in self._rows]
        self._next_end = min(last_clocks, default=self._clock)
        self._last_end = max(last_clocks, default=self._clock)
        self._min_zero_clock = min(zero_clocks, default=self._clock)
        self._ended_before = None
