"""The schedule of the native engine: which requests run, when prompts are prefilled, and when a
sequence ends.

Finished sequences leave the batch, and waiting requests enter it, between decode steps. Requests
with the same prompt share its prefill. Does not know how a layer is computed (`decoder`), how a
token is chosen (`sampling`), nor where the cache and the weights come from (`native`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolepool.errors import DataError
from rolepool.models.packing import on_device
from rolepool.protocol.part_times import part, work_of
from rolepool.rollout.conversation_cache import ConversationCache
from rolepool.rollout.decoder import Decoder, Piece
from rolepool.rollout.engine import Completion, Request, Sampling, StreamedEngine
from rolepool.rollout.kv_cache import DecodeBatch, SlotCache
from rolepool.rollout.sampling import choose, seed_streams
from rolepool.rollout.step_graphs import StepGraphs, bucket_of
from rolepool.rollout.tensor_parallel import TensorParallel

_REFILL_FRACTION = 8
_REFILL_FRACTION_FOR_THROUGHPUT = 12
"""Prompts enter when this part of the slots is free, because prefilling one short prompt takes
about as long as prefilling several."""
_MOST_STEPS_AT_ONCE = 64
"""Decode steps whose work is recorded together. It is counted from the tokens that the rows have at
the beginning."""


@dataclass(frozen=True)
class Schedule:
    """How many requests run at the same time, and when others join them."""

    num_slots: int
    """Requests that may run at the same time."""
    num_kept: int
    """Further slots, which keep the tokens of conversations between their turns."""
    length: int
    """The largest number of tokens of a request, with its prompt."""
    max_num_batched_tokens: int
    """The largest number of tokens of a micro-batch that prefills."""
    patience_steps: int
    """Decode steps after which a few waiting requests join. They join earlier if they are an eighth
    of the running ones."""
    check_interval: int
    """Decode steps between two checks for sequences that have ended."""
    for_throughput: bool
    """Whether only the time matters until all requests have ended, and nobody waits for one of
    them. Then those that may become longest start first, because otherwise few rows would run at
    the end. A sequence that has ended stays in the batch until removing it is of use: until enough
    requests can join, or until steps get smaller. So the host needs to wait for the GPU less
    often."""


class Machinery(NamedTuple):
    """What a generation runs on."""

    cache: SlotCache
    decoder: Decoder
    batch: DecodeBatch
    graphs: StepGraphs | None
    """Replays decode steps; None runs them directly."""
    parallel: TensorParallel


TokenIds = npt.NDArray[np.int64]


class _Entry(NamedTuple):
    """A request that has not ended."""

    prompt: TokenIds
    conversation: int | None
    num_new: int
    """The largest number of tokens that it samples."""
    stream: int
    """The initial state of its random numbers."""


class _Prefill(NamedTuple):
    """A prompt, how many of its tokens are kept from the turn before, and the requests that have
    it."""

    start: int
    prompt: TokenIds
    numbers: list[int]


class Generation:
    """One call of `generate`, or one session. `check_requests` raises an error if the model cannot
    run the requests."""

    def __init__(
        self,
        engine: StreamedEngine,
        machinery: Machinery,
        sampling: Sampling,
        schedule: Schedule,
        check_requests: Callable[[Sequence[Request], Sampling], None],
    ) -> None:
        self._engine = engine
        self._cache = machinery.cache
        self._decoder = machinery.decoder
        self._batch = machinery.batch
        self._graphs = machinery.graphs
        self._parallel = machinery.parallel
        self._sampling = sampling
        self._schedule = schedule
        self._check_requests = check_requests
        # The cache may have fewer slots than asked for, if memory is short, or more, if it is that
        # of an earlier call.
        num_in_cache = self._cache.num_slots
        self._num_slots = min(num_in_cache, schedule.num_slots)
        end_of_kept = min(num_in_cache, schedule.num_slots + schedule.num_kept)
        slots_of_kept = range(self._num_slots, end_of_kept)
        self._conversations = ConversationCache(self._cache, slots_of_kept)
        self._entries: dict[int, _Entry] = {}
        """The requests that have not ended, by number."""
        self._waiting: deque[int] = deque()
        """The numbers of those that do not run yet."""
        self._num_submitted = 0
        self._num_steps = 0
        """Decode steps since requests joined."""

    def submit(self, requests: Sequence[Request]) -> Sequence[int]:
        self._check_requests(requests, self._sampling)
        longest = 0
        for request in requests:
            num_tokens = len(request.token_ids) + request.num_new(self._sampling)
            longest = max(longest, num_tokens)
        if longest > self._schedule.length:
            raise DataError(
                f"a request for {longest} tokens does not fit into a session for "
                f"{self._schedule.length}"
            )
        return self.enqueue(requests, self._sampling)

    def enqueue(self, requests: Sequence[Request], sampling: Sampling) -> Sequence[int]:
        """The same for requests that were checked; `sampling` has their limit."""
        first = self._num_submitted
        numbers = range(first, first + len(requests))
        seeds = [request.seed for request in requests]
        streams = seed_streams(seeds).tolist()
        for number, request, stream in zip(numbers, requests, streams, strict=True):
            # An array, which becomes a tensor without a copy of single numbers.
            prompt = np.asarray(request.token_ids, dtype=np.int64)
            self._entries[number] = _Entry(
                prompt=prompt,
                conversation=request.conversation,
                num_new=request.num_new(sampling),
                stream=stream,
            )
        order = list(numbers)
        if self._schedule.for_throughput:
            order.sort(key=lambda number: -self._entries[number].num_new)
        self._waiting.extend(order)
        self._num_submitted += len(requests)
        return numbers

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Prefill the waiting requests that find a slot, or decode; the requests that have ended
        since."""
        if self._can_admit():
            prefills = self._next_prefills()
            lengths = (len(prefill.prompt) - prefill.start for prefill in prefills)
            with part("prefill", *work_of(lengths)):
                self._admit(prefills)
        else:
            self._decode()
        completions: list[tuple[int, Completion]] = []
        if not self._removes_ended():
            return completions
        stops = self._batch.stop_token_ids
        finished = self._batch.pop_finished(self._cache, self._keep)
        for number, tokens, log_probs in finished:
            del self._entries[number]
            completion = self._engine.completion(tokens, log_probs, stops)
            completions.append((number, completion))
        return completions

    def _can_admit(self) -> bool:
        num_running = self._batch.num_running
        num_waiting = len(self._waiting)
        if num_waiting == 0:
            return False
        if num_running == 0:
            return True
        # A prefill takes about as long as a decode step, so it should add enough requests.
        num_free = self._num_slots - num_running
        num_wanted = self._num_to_join()
        are_many = num_waiting * _REFILL_FRACTION >= num_running
        waited_long = self._num_steps >= self._schedule.patience_steps
        return num_free >= num_wanted and (are_many or waited_long)

    def _num_to_join(self) -> int:
        """The smallest number of waiting requests that join together."""
        fraction = _REFILL_FRACTION
        if self._schedule.for_throughput:
            fraction = _REFILL_FRACTION_FOR_THROUGHPUT
        part_of_slots = max(1, self._num_slots // fraction)
        return min(len(self._waiting), part_of_slots)

    # Leaving

    def _removes_ended(self) -> bool:
        """Whether to look for sequences that have ended and to remove them."""
        if not self._schedule.for_throughput or self._batch.num_running == 0:
            return True
        return self._batch.count_ended() >= self._num_ended_of_use()

    def _num_ended_of_use(self) -> int:
        """The smallest number of ended sequences whose removal is of use."""
        num_running = self._batch.num_running
        if self._waiting:
            num_free = self._num_slots - num_running
            return max(1, self._num_to_join() - num_free)
        size = bucket_of(num_running, self._num_slots)
        num_left = num_running - 1
        while num_left > 0 and bucket_of(num_left, self._num_slots) == size:
            num_left -= 1
        return num_running - num_left

    # Entering

    def _next_prefills(self) -> list[_Prefill]:
        """The prompts of the waiting requests that free slots take now."""
        num_free = self._num_slots - self._batch.num_running
        num_next = min(len(self._waiting), num_free)
        numbers_of: dict[bytes, list[int]] = {}
        """By the tokens of the prompt."""
        for _ in range(num_next):
            number = self._waiting.popleft()
            tokens = self._entries[number].prompt.tobytes()
            numbers_of.setdefault(tokens, []).append(number)
        prefills: list[_Prefill] = []
        for numbers in numbers_of.values():
            first = self._entries[numbers[0]]
            start = self._conversations.num_kept(first.conversation, first.prompt)
            prefill = _Prefill(
                start=start,
                prompt=first.prompt,
                numbers=numbers,
            )
            prefills.append(prefill)

        def order(prefill: _Prefill) -> tuple[int, int]:
            # Prompts that continue after the same number of tokens are neighbours, because they are
            # computed together. Whole prompts keep their order.
            length = len(prefill.prompt) if prefill.start > 0 else 0
            return prefill.start, length

        return sorted(prefills, key=order)

    def _admit(self, prefills: Sequence[_Prefill]) -> None:
        """Prefill prompts, each once and without the tokens that are kept, and sample the first
        token of each row."""
        self._num_steps = 0
        first_row = self._batch.num_running
        # First one request of each prompt, so that prefilled rows are adjacent; then the requests
        # that share a prompt.
        numbers = [prefill.numbers[0] for prefill in prefills]
        prompt_of_row = list(range(len(prefills)))
        for index, prefill in enumerate(prefills):
            others = prefill.numbers[1:]
            numbers.extend(others)
            prompt_of_row.extend([index] * len(others))
        entries = [self._entries[number] for number in numbers]
        lengths = [len(entry.prompt) for entry in entries]
        slots = self._batch.enter(
            requests=numbers,
            prompt_lengths=lengths,
            limits=[entry.num_new for entry in entries],
            streams=[entry.stream for entry in entries],
        )
        for prefill, entry, slot in zip(prefills, entries, slots, strict=False):
            if prefill.start > 0 and entry.conversation is not None:
                self._conversations.restore(entry.conversation, slot, prefill.start)
        micro_batches = _split_prompts(prefills, self._schedule.max_num_batched_tokens)
        final = torch.cat([self._prefill(prefills, pieces, slots) for pieces in micro_batches])
        first_copy = len(prefills)
        self._cache.copy_all(
            sources=[slots[prompt] for prompt in prompt_of_row[first_copy:]],
            targets=slots[first_copy:],
            lengths=lengths[first_copy:],
        )
        prompts = on_device(torch.tensor(prompt_of_row), final.device)
        rows = slice(first_row, first_row + len(numbers))
        self._sample(rows, final[prompts])

    def _prefill(
        self,
        prefills: Sequence[_Prefill],
        pieces: list[Piece],
        slots: Sequence[int],
    ) -> Tensor:
        """Run pieces of prompts; the final states of prompts that end in this micro-batch."""
        parts: list[TokenIds] = []
        placed: list[Piece] = []
        for piece in pieces:
            index, start, count = piece
            prompt = prefills[index].prompt
            parts.append(prompt[start : start + count])
            placed.append(piece._replace(slot=slots[index]))
        tokens = torch.from_numpy(np.concatenate(parts))
        tokens_t = on_device(tokens, self._decoder.device)
        final = self._decoder.prefill(self._cache, tokens_t, placed)
        # Only the last piece of a micro-batch may end before its prompt does.
        last = pieces[-1]
        end = last.start + last.num_tokens
        last_prompt = prefills[last.slot].prompt
        if end < len(last_prompt):
            return final[:-1]
        return final

    # Decoding

    def _decode(self) -> None:
        """Run decode steps until the next check for sequences that have ended."""
        num_steps = min(self._num_steps_to_check(), self._batch.num_steps_left)
        num_tokens = num_steps * self._batch.num_running
        num_attended = num_tokens * self._batch.length
        with part("decode", num_tokens, num_attended, num_pieces=num_steps):
            for _ in range(num_steps):
                self._step()

    def _num_steps_to_check(self) -> int:
        """The number of steps until the next check for sequences that have ended."""
        interval = self._schedule.check_interval
        if not self._schedule.for_throughput:
            return interval
        if not self._batch.stop_token_ids:
            # Then all ends are known.
            interval = _MOST_STEPS_AT_ONCE
        num_ended = self._num_ended_of_use()
        return min(interval, max(1, self._batch.num_steps_until(num_ended)))

    def _step(self) -> None:
        """Run the newest token of every row, and sample the next one."""
        batch = self._batch
        num_rows = batch.num_running
        if self._decoder.skips_unused_rows:
            # At most the slots of this generation, and not the rows of the batch, which may be that
            # of a larger call: the size decides how a GPU rounds, and a run that was resumed must
            # compute the same as one that was not.
            num_rows = bucket_of(num_rows, self._num_slots)
        rows = slice(0, num_rows)

        def decode() -> None:
            final = self._decoder.decode(
                self._cache,
                tokens_b=batch.tokens[rows],
                positions_b=batch.positions[rows],
                slots_b=batch.slots[rows],
                length=min(batch.length, self._cache.length),
            )
            self._sample(rows, final)

        if self._graphs is None:
            decode()
        else:
            how = self._sampling
            key = (
                num_rows,
                how.is_greedy,
                how.temperature,
                how.top_k,
                how.top_p,
            )
            self._graphs.run(key, decode)
        batch.tick()
        self._num_steps += 1

    def _sample(self, rows: slice, final: Tensor) -> None:
        """Sample the next token of rows, from the final states of their newest tokens."""
        logits = self._decoder.head(final)
        streams = self._batch.streams[rows]
        steps = self._batch.steps[rows]
        tokens, log_probs = choose(logits, streams, steps, self._sampling)
        # All ranks take the first rank's tokens: ranks that disagree would make different calls and
        # hang.
        tokens = self._parallel.first(tokens)
        self._batch.record(rows, tokens, log_probs)

    def _keep(
        self,
        number: int,
        slot: int,
        tokens: npt.NDArray[np.int64],
    ) -> None:
        """Keep what was computed for the conversation of a request that has ended: all tokens
        except the last, which was sampled and not run."""
        entry = self._entries[number]
        if entry.conversation is not None:
            token_ids = np.concatenate([entry.prompt, tokens[:-1]])
            self._conversations.keep(entry.conversation, slot, token_ids)


def _split_prompts(prefills: Sequence[_Prefill], max_num_tokens: int) -> Iterator[list[Piece]]:
    """Split prompts, each from its start on, into micro-batches of at most `max_num_tokens` tokens,
    in order; `slot` is the prompt's index. A prompt is divided only if it is longer than a
    micro-batch."""
    pieces: list[Piece] = []
    room = max_num_tokens
    for index, prefill in enumerate(prefills):
        start = prefill.start
        while start < len(prefill.prompt):
            num_left = len(prefill.prompt) - start
            is_whole = start == prefill.start
            is_undivided = is_whole and num_left <= max_num_tokens
            fits_into_next = len(pieces) > 0 and is_undivided and num_left > room
            if room == 0 or fits_into_next:
                yield pieces
                pieces = []
                room = max_num_tokens
            count = min(room, num_left)
            pieces.append(Piece(index, start, count))
            start += count
            room -= count
    yield pieces
