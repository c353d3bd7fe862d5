"""The native rollout engine: batched decoding with a KV cache. Finished sequences leave, waiting requests enter.

Owns the schedule: which requests run, when prompts are prefilled, when a sequence ends. Does not know how a layer is
computed (`decoder`), how a token is chosen (`sampling`), nor where new weights come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rolepool.errors import DataError, RolepoolError
from rolepool.models.packing import on_device
from rolepool.protocol.parts import part
from rolepool.rollout import gpu
from rolepool.rollout.decode_batch import DecodeBatch
from rolepool.rollout.decoder import Decoder, Piece, Weights, join_weights
from rolepool.rollout.engine import Completion, FinishReason, Request, Sampling
from rolepool.rollout.kv_cache import SlotCache
from rolepool.rollout.sampling import choose, seed_streams
from rolepool.rollout.tensor_parallel import Shard, TensorParallel
from rolepool.rollout.weights import WeightStream

_REFILL_FRACTION = 8
"""Prompts enter when an eighth of the slots is free, because prefilling one short prompt takes about as long as
prefilling several."""
_CHECK_INTERVAL = 8
"""Decode steps on a GPU between checks for finished sequences. The host waits for the GPU only at these checks; a
sequence that meets a stop token idles for half of them on average."""
_MAX_PROBLEMS = 5


@dataclass(frozen=True)
class _DecodeState:
    """What is kept between calls, because captured steps refer to it by address."""

    addresses: tuple[int, ...]
    """Addresses of the model's weights."""
    weights: Weights
    num_positions: int
    batch: DecodeBatch
    graphs: gpu.StepGraphs | None


class NativeEngine:
    """Generates with `model`, a Hugging Face causal language model of a known architecture, on the model's device.

    Each `generate` uses the model's current weights. With `shared_weights` they are the trainer's own weights.

    `max_num_seqs` sequences run at the same time, fewer if `cache_bytes` (asked before a cache is allocated) allows
    fewer. A prefill micro-batch has at most `max_num_batched_tokens` tokens. `fuse` copies weights that are applied to
    the same input into one matrix for the duration of a call; None does so on CPU, where the number of operations
    matters. On a GPU the engine's own weights are joined once, without a copy, and decode steps are captured in CUDA
    graphs, unless `enforce_eager` is set or the model is tensor-parallel. With `shard` the model is this rank's part,
    and all ranks of `parallel` make the same calls; the first rank chooses the tokens. `check_interval` is the number
    of steps between checks for finished sequences; None chooses it for the device.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        shared_weights: bool = False,
        cache_bytes: Callable[[], int] | None = None,
        fuse: bool | None = None,
        version: int = 0,
        shard: Shard | None = None,
        parallel: TensorParallel | None = None,
        enforce_eager: bool = False,
        check_interval: int | None = None,
    ) -> None:
        self.shared_weights, self.version = shared_weights, version
        self._model, self._shard = model, shard
        self._parallel = parallel or TensorParallel()
        self._decoder = Decoder(model, self._parallel)
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._cache_bytes = cache_bytes
        self._by_kernels = gpu.has_kernels(self._decoder.device)
        self._fuse = not self._by_kernels if fuse is None else fuse
        self._check_interval = check_interval or (_CHECK_INTERVAL if self._by_kernels else 1)
        self._captures = self._decoder.device.type == "cuda" and not enforce_eager and self._parallel.size == 1
        if self._by_kernels and not shared_weights:
            join_weights(model)
        self._cache: SlotCache | None = None
        self._state: _DecodeState | None = None
        self._asleep = False
        self._arriving: WeightStream | None = None
        self._half_updated = False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if self._asleep:
            raise RolepoolError("the rollout engine is asleep: wake it before it generates")
        if self._half_updated:
            raise RolepoolError(
                "the last weight update failed halfway or has not ended: update the weights before generating"
            )
        self._check_requests(requests, sampling)
        if not requests:
            return []
        try:
            with torch.inference_mode(), _in_eval_mode(self._model):
                cache = self._take_cache(requests, sampling)
                return _Generation(self, cache, self._take_state(cache, requests, sampling), requests, sampling).run()
        except BaseException:
            # The cache may contain NaN, which would outlive these weights, and sequences are still running.
            self._cache = self._state = None
            raise

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None) -> None:
        if not self.shared_weights:
            self._half_updated = True
            # Taken out while tensors are copied, so that the next update after an error starts from the beginning.
            stream, self._arriving = self._arriving or WeightStream(self._model, self._shard), None
            stream.take(named_tensors)
            if version is None:
                self._arriving = stream
                return
            stream.end()
            self._half_updated = False
        if version is not None:
            self.version = version

    def sleep(self) -> None:
        self._cache = None
        self._asleep = True

    def wake(self) -> None:
        """The next `generate` allocates the cache, because it knows the size."""
        self._asleep = False

    def _check_requests(self, requests: Sequence[Request], sampling: Sampling) -> None:
        problems = []
        limit, vocab_size = self._decoder.max_positions, self._decoder.vocab_size
        for index, request in enumerate(requests):
            num_new, num_prompt = _num_new(request, sampling), len(request.token_ids)
            if num_new < 1:
                problems.append(f"request {index}: max_new_tokens={num_new}: must be 1 or more")
            if not num_prompt:
                problems.append(f"request {index}: the prompt has no token")
            elif min(request.token_ids) < 0 or max(request.token_ids) >= vocab_size:
                problems.append(f"request {index}: the prompt has token ids outside of 0..{vocab_size - 1}")
            if num_prompt + num_new > limit:
                problems.append(
                    f"request {index}: a prompt of {num_prompt} and {num_new} new tokens are more than the "
                    f"{limit} positions of the model (max_position_embeddings)"
                )
        if problems:
            more = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
            raise DataError(problems[:_MAX_PROBLEMS] + more)

    def _take_cache(self, requests: Sequence[Request], sampling: Sampling) -> SlotCache:
        """The cache of the last call if it is large enough, else a new one, of the same size on all ranks."""
        length = max(len(request.token_ids) + _num_new(request, sampling) for request in requests)
        num_slots = min(self._max_num_seqs, len(requests))
        shape = self._decoder.cache_shape
        if self._cache is None or not self._cache.fits(shape, num_slots, length):
            self._cache = None  # before the new one is allocated, so that both never exist at once
            if self._cache_bytes is not None:
                num_bytes = self._parallel.smallest(self._cache_bytes(), shape.device)
                num_slots = min(num_slots, num_bytes // shape.slot_bytes(length))
                if num_slots < 1:
                    raise RolepoolError(
                        f"the rollout's KV cache may take {num_bytes:,} bytes, and one sequence of {length} tokens "
                        f"needs {shape.slot_bytes(length):,}: raise actor_rollout_ref.rollout.gpu_memory_utilization, "
                        "or shorten data.max_prompt_length or data.max_response_length"
                    )
            self._cache = SlotCache(shape, num_slots, length)
        return self._cache

    def _take_state(self, cache: SlotCache, requests: Sequence[Request], sampling: Sampling) -> _DecodeState:
        """On a GPU the state of the last call if it fits this call too, else a new one."""
        before = self._state
        addresses = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        num_rows, num_new = cache.num_slots, max(_num_new(request, sampling) for request in requests)
        if before is not None and not self._fuse and before.addresses == addresses:
            if before.num_positions >= cache.length and before.batch.fits(num_rows, num_new, stops):
                return before
            num_rows, num_new = max(num_rows, before.batch.num_rows), max(num_new, before.batch.max_new_tokens)
        self._state = before = None  # frees its graphs before others are captured
        num_positions = cache.length
        if self._by_kernels:  # with room for longer sequences in later calls
            num_positions = min(self._decoder.max_positions, 2 ** (cache.length - 1).bit_length())
        state = _DecodeState(
            addresses,
            self._decoder.weights(num_positions, self._fuse),
            num_positions,
            DecodeBatch(num_rows, num_new, stops, self._decoder.device, scattered=self._by_kernels),
            gpu.StepGraphs() if self._captures else None,
        )
        if self._by_kernels:
            self._state = state
        return state


class _Generation:
    """One call of `generate`."""

    def __init__(
        self,
        engine: NativeEngine,
        cache: SlotCache,
        state: _DecodeState,
        requests: Sequence[Request],
        sampling: Sampling,
    ) -> None:
        self._engine, self._decoder, self._cache = engine, engine._decoder, cache
        self._requests, self._sampling = requests, sampling
        self._weights, self._batch, self._graphs = state.weights, state.batch, state.graphs
        if engine._by_kernels:
            self._decoder.locate(cache)
        self._num_slots = min(cache.num_slots, len(requests))
        self._streams = seed_streams([request.seed for request in requests])
        self._waiting = deque(range(len(requests)))
        self._completions: dict[int, Completion] = {}

    def run(self) -> list[Completion]:
        while self._waiting or self._batch.num_running:
            if self._is_time_to_admit():
                with part("prefill"):
                    self._admit()
            else:
                with part("decode"):
                    for _ in range(min(self._engine._check_interval, self._batch.num_steps_left)):
                        self._step()
            self._complete(self._batch.finished())
        return [self._completions[index] for index in range(len(self._requests))]

    def _is_time_to_admit(self) -> bool:
        num_free = self._num_slots - self._batch.num_running
        enough = min(len(self._waiting), max(1, self._num_slots // _REFILL_FRACTION))
        return bool(self._waiting) and (num_free >= enough or not self._batch.num_running)

    def _admit(self) -> None:
        """Prefill waiting prompts into all free slots, each prompt once, and sample the first token of each row."""
        first = self._batch.num_running
        entering = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._num_slots - first))]
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index in entering:
            by_prompt.setdefault(tuple(self._requests[index].token_ids), []).append(index)
        prompts, groups = list(by_prompt), list(by_prompt.values())
        # First one request of each prompt, so that prefilled rows are adjacent; then the requests that share a prompt.
        members = [(number, group[0]) for number, group in enumerate(groups)]
        members += [(number, index) for number, group in enumerate(groups) for index in group[1:]]
        numbers, order = [number for number, _ in members], [index for _, index in members]
        limits = [_num_new(self._requests[index], self._sampling) for index in order]
        lengths = [len(prompts[number]) for number in numbers]
        slots = self._batch.enter(order, lengths, limits, self._streams[order])
        micro_batches = _split_prompts(prompts, self._engine._max_num_batched_tokens)
        final = torch.cat([self._prefill(prompts, pieces, slots) for pieces in micro_batches])
        for row in range(len(prompts), len(order)):
            self._cache.copy(slots[numbers[row]], slots[row], lengths[row])
        self._sample(slice(first, first + len(order)), final[on_device(torch.tensor(numbers), final.device)])

    def _prefill(self, prompts: Sequence[Sequence[int]], pieces: list[Piece], slots: Sequence[int]) -> Tensor:
        """Run pieces of prompts; the final states of prompts that end in this micro-batch."""
        tokens = gpu.tensor_of(prompts[number][start : start + count] for number, start, count in pieces)
        placed = [piece._replace(slot=slots[piece.slot]) for piece in pieces]
        tokens_t = on_device(tokens, self._decoder.device)
        final = self._decoder.prefill(self._weights, self._cache, tokens_t, placed)
        # Only the last piece of a micro-batch may end before its prompt does.
        ends_early = pieces[-1].start + pieces[-1].num_tokens < len(prompts[pieces[-1].slot])
        return final[: len(pieces) - ends_early]

    def _step(self) -> None:
        """Run the newest token of every row, and sample the next one."""
        num_rows = self._batch.num_running
        if self._engine._by_kernels:
            num_rows = gpu.bucket_of(num_rows, self._batch.num_rows)
        if self._graphs is None:
            self._decode(slice(0, num_rows))
        else:
            how = self._sampling
            key = (num_rows, how.is_greedy, how.temperature, how.top_k, how.top_p)
            self._graphs.run(key, lambda: self._decode(slice(0, num_rows)))
        self._batch.tick()

    def _decode(self, running: slice) -> None:
        batch, length = self._batch, min(self._batch.length, self._cache.length)
        tokens_b, positions_b, slots_b = batch.tokens[running], batch.positions[running], batch.slots[running]
        self._sample(running, self._decoder.decode(self._weights, self._cache, tokens_b, positions_b, slots_b, length))

    def _sample(self, rows: slice, final: Tensor) -> None:
        logits = self._weights.head(final)
        tokens, log_probs = choose(logits, self._batch.streams[rows], self._batch.steps[rows], self._sampling)
        # All ranks take the first rank's tokens: ranks that disagree would make different calls and hang.
        self._batch.record(rows, self._engine._parallel.first(tokens), log_probs)

    def _complete(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        version = self._engine.version
        for request, tokens, log_probs in self._batch.take(indices):
            if not np.isfinite(log_probs).all():
                raise RolepoolError(
                    f"request {request}: the model's logits are not finite (weights version {version}): "
                    "its weights contain NaN or have diverged"
                )
            reason: FinishReason = "stop" if tokens[-1] in self._batch.stop_token_ids else "length"
            self._completions[request] = Completion(tokens, log_probs, reason, version)
        self._batch.leave(indices, self._cache)


def _num_new(request: Request, sampling: Sampling) -> int:
    return sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens


def _split_prompts(prompts: Sequence[Sequence[int]], max_num_tokens: int) -> Iterator[list[Piece]]:
    """Split prompts into micro-batches of at most `max_num_tokens` tokens, in order; `slot` is the prompt's index.
    A prompt is divided only if it is longer than a micro-batch."""
    pieces: list[Piece] = []
    room = max_num_tokens
    for index, prompt in enumerate(prompts):
        start = 0
        if pieces and room < len(prompt) <= max_num_tokens:
            yield pieces
            pieces, room = [], max_num_tokens
        while start < len(prompt):
            count = min(room, len(prompt) - start)
            pieces.append(Piece(index, start, count))
            start += count
            room -= count
            if not room:
                yield pieces
                pieces, room = [], max_num_tokens
    if pieces:
        yield pieces


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; then every module returns to its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
