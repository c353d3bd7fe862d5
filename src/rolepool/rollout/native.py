"""The native rollout engine: batched decoding with a KV cache, finished rows leave and waiting requests enter.

Owns the schedule: which requests run, when prompts are prefilled, when a row ends. Does not know how a layer is
computed (`decoder`), how a token is chosen (`sampling`), nor where new weights come from.
"""

from __future__ import annotations

import time
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
from rolepool.rollout.decoder import Decoder, Piece, Weights, lay_side_by_side
from rolepool.rollout.engine import Capabilities, Completion, FinishReason, Progress, Request, Sampling
from rolepool.rollout.kv_cache import SlotCache
from rolepool.rollout.rows import Rows
from rolepool.rollout.sampling import choose, seed_streams
from rolepool.rollout.tensor_parallel import Shard, TensorParallel
from rolepool.rollout.weights import WeightStream

_PROGRESS_INTERVAL_S = 0.5
_REFILL_FRACTION = 8
"""Prompts enter when an eighth of the slots is free: a prefill pass costs about as much for one short prompt as for
several, and the slots it waits for are few."""
_CHECK_INTERVAL = 8
"""Decode steps on a GPU between looks at which rows have ended: the host waits for the GPU once in so many steps, and
a row that meets a stop token idles for half as many."""


@dataclass(frozen=True)
class _Standing:
    """What outlives a call, as steps that were captured refer to it by address."""

    addresses: tuple[int, ...]
    """Of the model's weights."""
    weights: Weights
    num_positions: int
    rows: Rows
    graphs: gpu.StepGraphs | None


class NativeEngine:
    """Generates with `model`, a Hugging Face causal language model of a known architecture, on the model's device.

    The model's weights are read anew by each `generate`. With `shared_weights` they are the trainer's own. `fuse`
    runs with a temporary copy of the weights that are applied to the same input, side by side; None does so on CPU,
    where the number of operations counts. On a GPU weights of the engine's own are laid side by side once, without a
    copy, and decode steps are captured in CUDA graphs for the life of the engine, unless `enforce_eager`, and of a
    model that is not cut over ranks. `cache_bytes` is asked how large a new cache may be; None lets it have
    `max_num_seqs` slots. With `shard` the model is that part of one whose ranks are `parallel`; all of them make the
    same calls, and all generate what the first does. Every `check_interval` steps it is seen which rows have ended;
    None waits for several steps on a GPU only.
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
        self._model, self._shard = model, shard
        self._parallel = parallel or TensorParallel()
        self._decoder = Decoder(model, self._parallel)
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._cache_bytes = cache_bytes
        self._fuse = fuse
        self._version = version
        self._cache: SlotCache | None = None
        self._standing: _Standing | None = None
        by_kernels = gpu.has_kernels(self._decoder.device)
        self._check_interval = check_interval or (_CHECK_INTERVAL if by_kernels else 1)
        self._captures = self._decoder.device.type == "cuda" and not enforce_eager and self._parallel.size == 1
        if by_kernels and not shared_weights:
            lay_side_by_side(model)
        self._asleep = False
        self._arriving: WeightStream | None = None
        self._half_updated = False
        self.capabilities = Capabilities(
            top_p=True, top_k=True, per_sample_seeds=True, sleep=True, shared_weights=shared_weights
        )

    @property
    def version(self) -> int:
        return self._version

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        if self._asleep:
            raise RolepoolError("the rollout engine is asleep: wake it before it generates")
        if self._half_updated:
            raise RolepoolError(
                "the last weight update failed halfway or has not ended: update the weights before generating"
            )
        self._refuse_unfit(requests, sampling)
        if not requests:
            return []
        try:
            with torch.inference_mode(), _in_eval_mode(self._model):
                cache = self._take_cache(requests, sampling)
                return _Generation(
                    self._decoder,
                    self._parallel,
                    cache,
                    self._take_standing(cache, requests, sampling),
                    requests,
                    sampling,
                    max_num_batched_tokens=self._max_num_batched_tokens,
                    check_interval=self._check_interval,
                    version=self._version,
                    progress=progress,
                ).run()
        except BaseException:
            # The cache may hold NaN, which would outlive the weights it came from, and rows are still running.
            self._cache = self._standing = None
            raise

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None) -> None:
        if not self.capabilities.shared_weights:
            self._half_updated = True
            # Taken out while it is at work: after an error the next update begins anew.
            stream, self._arriving = self._arriving or WeightStream(self._model, self._shard), None
            stream.take(named_tensors)
            if version is None:
                self._arriving = stream
                return
            stream.end()
            self._half_updated = False
        if version is not None:
            self._version = version

    def sleep(self) -> None:
        self._cache = None
        self._asleep = True

    def wake(self) -> None:
        """The cache itself is taken by the next `generate`, which knows its size."""
        self._asleep = False

    def _refuse_unfit(self, requests: Sequence[Request], sampling: Sampling) -> None:
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
            more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
            raise DataError(problems[:5] + more)

    def _take_cache(self, requests: Sequence[Request], sampling: Sampling) -> SlotCache:
        """The cache of the last call if it is large enough, else a new one, of the same size on all ranks."""
        length = max(len(request.token_ids) + _num_new(request, sampling) for request in requests)
        num_slots = min(self._max_num_seqs, len(requests))
        shape = self._decoder.cache_shape
        if self._cache is None or not self._cache.fits(shape, num_slots, length):
            self._cache = None  # before the new one is made, so that both never exist at once
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

    def _take_standing(self, cache: SlotCache, requests: Sequence[Request], sampling: Sampling) -> _Standing:
        """On a GPU what the last call used, if it serves this one too."""
        device, before = self._decoder.device, self._standing
        by_kernels = gpu.has_kernels(device)
        fuse = not by_kernels if self._fuse is None else self._fuse
        addresses = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        num_rows, num_new = cache.num_slots, max(_num_new(request, sampling) for request in requests)
        if before is not None and by_kernels and not fuse and before.addresses == addresses:
            if before.num_positions >= cache.length and before.rows.fits(num_rows, num_new, stops):
                return before
            num_rows, num_new = max(num_rows, before.rows.num_rows), max(num_new, before.rows.max_new_tokens)
        self._standing = before = None  # with its graphs, before others are captured
        num_positions = cache.length
        if by_kernels:  # with room for longer sequences to come
            num_positions = min(self._decoder.max_positions, 2 ** (cache.length - 1).bit_length())
        standing = _Standing(
            addresses,
            self._decoder.weights(num_positions, fuse),
            num_positions,
            Rows(num_rows, num_new, stops, device, scattered=by_kernels),
            gpu.StepGraphs() if self._captures else None,
        )
        if by_kernels:
            self._standing = standing
        return standing


class _Generation:
    """One call of `generate`."""

    def __init__(
        self,
        decoder: Decoder,
        parallel: TensorParallel,
        cache: SlotCache,
        standing: _Standing,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        max_num_batched_tokens: int,
        check_interval: int,
        version: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._decoder, self._parallel, self._cache = decoder, parallel, cache
        self._requests, self._sampling, self._version = requests, sampling, version
        self._max_num_batched_tokens, self._check_interval = max_num_batched_tokens, check_interval
        self._weights, self._rows, self._graphs = standing.weights, standing.rows, standing.graphs
        self._by_kernels = gpu.has_kernels(decoder.device)
        if self._by_kernels:
            decoder.find(cache)
        self._num_slots = min(cache.num_slots, len(requests))
        self._streams = seed_streams([request.seed for request in requests])
        self._waiting = deque(range(len(requests)))
        self._completions: list[Completion | None] = [None] * len(requests)
        self._num_finished = self._num_tokens = 0
        self._progress, self._reported_s = progress, time.monotonic()

    def run(self) -> list[Completion]:
        rows = self._rows
        while self._waiting or rows.num_running:
            if self._is_time_to_admit():
                with part("prefill"):
                    self._admit()
            else:
                with part("decode"):
                    for _ in range(min(self._check_interval, rows.num_steps_left)):
                        self._step()
            self._complete(rows.finished())
            self._report()
        self._report(last=True)
        return [completion for completion in self._completions if completion is not None]

    def _is_time_to_admit(self) -> bool:
        num_free = self._num_slots - self._rows.num_running
        enough = min(len(self._waiting), max(1, self._num_slots // _REFILL_FRACTION))
        return bool(self._waiting) and (num_free >= enough or not self._rows.num_running)

    def _admit(self) -> None:
        """Prefill waiting prompts into all free slots, each prompt once, and sample the first token of each row."""
        first = self._rows.num_running
        entering = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._num_slots - first))]
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index in entering:
            by_prompt.setdefault(tuple(self._requests[index].token_ids), []).append(index)
        prompts, groups = list(by_prompt), list(by_prompt.values())
        # One of each prompt first, so that what is prefilled stands side by side; then those that share it.
        members = [(number, group[0]) for number, group in enumerate(groups)]
        members += [(number, index) for number, group in enumerate(groups) for index in group[1:]]
        numbers, order = [number for number, _ in members], [index for _, index in members]
        limits = [_num_new(self._requests[index], self._sampling) for index in order]
        lengths = [len(prompts[number]) for number in numbers]
        slots = self._rows.enter(order, lengths, limits, self._streams[order])
        passes = _passes(prompts, self._max_num_batched_tokens)
        final = torch.cat([self._prefill(prompts, pieces, slots) for pieces in passes])
        for row in range(len(prompts), len(order)):
            self._cache.copy(slots[numbers[row]], slots[row], lengths[row])
        self._sample(slice(first, first + len(order)), final[on_device(torch.tensor(numbers), final.device)])

    def _prefill(self, prompts: Sequence[Sequence[int]], pieces: list[Piece], slots: Sequence[int]) -> Tensor:
        """Run pieces of prompts; the final states of prompts that end in this pass."""
        tokens = gpu.tensor_of(prompts[number][start : start + count] for number, start, count in pieces)
        placed = [piece._replace(slot=slots[piece.slot]) for piece in pieces]
        tokens_t = on_device(tokens, self._decoder.device)
        final = self._decoder.prefill(self._weights, self._cache, tokens_t, placed)
        # Only the last piece of a pass may stop short of its prompt's end.
        ends_short = pieces[-1].start + pieces[-1].num_tokens < len(prompts[pieces[-1].slot])
        return final[: len(pieces) - ends_short]

    def _step(self) -> None:
        """Run the newest token of every row, and sample the next."""
        num_rows = self._rows.num_running
        if self._by_kernels:
            num_rows = gpu.bucket_of(num_rows, self._rows.num_rows)
        if self._graphs is None:
            self._decode(slice(0, num_rows))
        else:
            how = self._sampling
            key = (num_rows, how.is_greedy, how.temperature, how.top_k, how.top_p)
            self._graphs.run(key, lambda: self._decode(slice(0, num_rows)))
        self._rows.tick()

    def _decode(self, running: slice) -> None:
        rows = self._rows
        final = self._decoder.decode(
            self._weights,
            self._cache,
            rows.tokens[running],
            rows.positions[running],
            rows.slots[running],
            min(rows.length, self._cache.length),
        )
        self._sample(running, final)

    def _sample(self, rows: slice, final: Tensor) -> None:
        logits = self._decoder.logits(self._weights, final)
        tokens, log_probs = choose(logits, self._rows.streams[rows], self._rows.steps[rows], self._sampling)
        # What the first rank chose holds: ranks that disagree on a token would part ways, and wait for each other.
        self._rows.record(rows, self._parallel.first(tokens), log_probs)

    def _complete(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        for request, tokens, log_probs in self._rows.take(indices):
            if not np.isfinite(log_probs).all():
                raise RolepoolError(
                    f"request {request}: the model's logits are not finite (weights version {self._version}): "
                    "its weights hold NaN or have diverged"
                )
            reason: FinishReason = "stop" if tokens[-1] in self._rows.stop_token_ids else "length"
            self._completions[request] = Completion(tokens, log_probs, reason, self._version)
            self._num_finished += 1
            self._num_tokens += len(tokens)
        self._rows.leave(indices, self._cache)

    def _report(self, last: bool = False) -> None:
        if self._progress is None or not (last or time.monotonic() - self._reported_s >= _PROGRESS_INTERVAL_S):
            return
        num_tokens = self._num_tokens + self._rows.num_tokens
        self._progress(Progress(len(self._requests), self._num_finished, self._rows.num_running, num_tokens))
        self._reported_s = time.monotonic()


def _num_new(request: Request, sampling: Sampling) -> int:
    return sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens


def _passes(prompts: Sequence[Sequence[int]], max_num_tokens: int) -> Iterator[list[Piece]]:
    """Cut prompts into passes of at most `max_num_tokens` tokens, in order; `slot` is the prompt's index. Only a
    prompt that is longer than a pass is cut in two."""
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
    """Without dropout inside the block; afterwards every module trains again that did before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
