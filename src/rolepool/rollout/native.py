"""The native rollout engine: batched decoding with a KV cache, finished rows leave and waiting requests enter.

Owns the schedule: which requests run, when prompts are prefilled, when a row ends. Does not know how a layer is
computed (`decoder`), how a token is chosen (`sampling`), nor where new weights come from.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rolepool.errors import DataError, RolepoolError
from rolepool.protocol.parts import part
from rolepool.rollout.decoder import Decoder, Piece, Weights
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


class NativeEngine:
    """Generates with `model`, a Hugging Face causal language model of a known architecture, on the model's device.

    The model's weights are read anew by each `generate`. With `shared_weights` they are the trainer's own. `fuse`
    runs with a temporary copy of the weights that are applied to the same input, side by side; None does so on CPU,
    where the number of operations counts. `cache_bytes` is asked how large a new cache may be; None lets it have
    `max_num_seqs` slots. With `shard` the model is that part of one whose ranks are `parallel`; all of them make the
    same calls, and all generate what the first does.
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
    ) -> None:
        self._model, self._shard = model, shard
        self._parallel = parallel or TensorParallel()
        self._decoder = Decoder(model, self._parallel)
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._cache_bytes = cache_bytes
        self._fuse = fuse
        self._version = version
        self._cache: SlotCache | None = None
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
                return _Generation(
                    self._decoder,
                    self._parallel,
                    self._take_cache(requests, sampling),
                    requests,
                    sampling,
                    max_num_batched_tokens=self._max_num_batched_tokens,
                    fuse=self._decoder.device.type == "cpu" if self._fuse is None else self._fuse,
                    version=self._version,
                    progress=progress,
                ).run()
        except BaseException:
            self._cache = None  # it may hold NaN, which would outlive the weights it came from
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


class _Generation:
    """One call of `generate`."""

    def __init__(
        self,
        decoder: Decoder,
        parallel: TensorParallel,
        cache: SlotCache,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        max_num_batched_tokens: int,
        fuse: bool,
        version: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._decoder, self._parallel, self._cache = decoder, parallel, cache
        self._requests, self._sampling, self._version = requests, sampling, version
        self._max_num_batched_tokens = max_num_batched_tokens
        self._weights: Weights = decoder.weights(cache.length, fuse)
        self._num_slots = min(cache.num_slots, len(requests))
        self._stops = () if sampling.ignore_eos else sampling.stop_token_ids
        longest = max(_num_new(request, sampling) for request in requests)
        self._rows = Rows(self._num_slots, longest, self._stops, decoder.device)
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
                    self._step()
            for index in rows.finished():
                self._complete(index)
            self._report()
        self._report(last=True)
        return [completion for completion in self._completions if completion is not None]

    def _is_time_to_admit(self) -> bool:
        num_free = self._num_slots - self._rows.num_running
        enough = min(len(self._waiting), max(1, self._num_slots // _REFILL_FRACTION))
        return bool(self._waiting) and (num_free >= enough or not self._rows.num_running)

    def _admit(self) -> None:
        """Prefill waiting prompts into all free slots, and sample the first token of each."""
        first = self._rows.num_running
        entering = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._num_slots - first))]
        prompts = [self._requests[index].token_ids for index in entering]
        for index, prompt in zip(entering, prompts, strict=True):
            self._rows.enter(index, len(prompt), _num_new(self._requests[index], self._sampling))
        self._rows.start(first, [len(prompt) for prompt in prompts], self._streams[entering])
        for pieces in _passes(prompts, self._max_num_batched_tokens):
            tokens = [token for slot, start, count in pieces for token in prompts[slot][start : start + count]]
            placed = [piece._replace(slot=first + piece.slot) for piece in pieces]
            tokens_t = torch.tensor(tokens, device=self._decoder.device)
            hidden = self._decoder.prefill(self._weights, self._cache, tokens_t, placed)
            # Pieces are in the order of rows, and only the last of a pass may stop short of its prompt's end.
            ends_short = pieces[-1].start + pieces[-1].num_tokens < len(prompts[pieces[-1].slot])
            num_whole = len(pieces) - ends_short
            if num_whole:
                self._sample(slice(placed[0].slot, placed[0].slot + num_whole), hidden[:num_whole])

    def _step(self) -> None:
        """Run the newest token of every row, and sample the next."""
        rows, running = self._rows, slice(0, self._rows.num_running)
        hidden = self._decoder.decode(
            self._weights,
            self._cache,
            rows.tokens[running],
            rows.positions[running],
            rows.indices[running],
            rows.length,
        )
        rows.tick()
        self._sample(running, hidden)

    def _sample(self, rows: slice, hidden: Tensor) -> None:
        logits = self._decoder.logits(self._weights, hidden)
        tokens, log_probs = choose(logits, self._rows.streams[rows], self._rows.steps[rows], self._sampling)
        # What the first rank chose holds: ranks that disagree on a token would part ways, and wait for each other.
        self._rows.record(rows, self._parallel.first(tokens), log_probs)

    def _complete(self, index: int) -> None:
        request, tokens, log_probs = self._rows.take(index)
        if not all(map(math.isfinite, log_probs)):
            raise RolepoolError(
                f"request {request}: the model's logits are not finite (weights version {self._version}): "
                "its weights hold NaN or have diverged"
            )
        reason: FinishReason = "stop" if tokens[-1] in self._stops else "length"
        self._completions[request] = Completion(tokens, log_probs, reason, self._version)
        self._rows.leave(index, self._cache)
        self._num_finished += 1
        self._num_tokens += len(tokens)

    def _report(self, last: bool = False) -> None:
        if self._progress is None or not (last or time.monotonic() - self._reported_s >= _PROGRESS_INTERVAL_S):
            return
        num_tokens = self._num_tokens + self._rows.num_tokens
        self._progress(Progress(len(self._requests), self._num_finished, self._rows.num_running, num_tokens))
        self._reported_s = time.monotonic()


def _num_new(request: Request, sampling: Sampling) -> int:
    return sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens


def _passes(prompts: Sequence[Sequence[int]], max_num_tokens: int) -> Iterator[list[Piece]]:
    """Cut prompts into passes of at most `max_num_tokens` tokens, in order; `slot` is the prompt's index."""
    pieces: list[Piece] = []
    room = max_num_tokens
    for index, prompt in enumerate(prompts):
        start = 0
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
