"""The native rollout engine: batched decoding with a KV cache. Finished sequences leave, waiting
requests enter.

Owns the schedule: which requests run, when prompts are prefilled, when a sequence ends; and
capturing decode steps as CUDA graphs; and how the engine gets its model. Does not know how a layer
is computed (`decoder`), how a token is chosen (`sampling`), nor where new weights come from.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.config.model_files import num_positions
from rolepool.errors import DataError, RolepoolError, first_few
from rolepool.models.packing import on_device
from rolepool.placement.estimate import cache_room
from rolepool.protocol.worker import WorkerContext, free_bytes, part, work_of
from rolepool.rollout.decoder import Decoder, Piece, cache_shape, join_weights, refuse_unknown
from rolepool.rollout.engine import Completion, Request, Sampling, StreamedEngine
from rolepool.rollout.kv_cache import DecodeBatch, SlotCache
from rolepool.rollout.sampling import choose, seed_streams
from rolepool.rollout.tensor_parallel import Shard, TensorParallel

_REFILL_FRACTION = 8
"""Prompts enter when an eighth of the slots is free, because prefilling one short prompt takes
about as long as prefilling several."""
_CHECK_INTERVAL = 8
"""Decode steps on a GPU between checks for finished sequences. The host waits for the GPU only at
these checks; a sequence that samples a stop token waits for half of these steps on average."""
_PATIENCE_STEPS = 8
"""Decode steps of a session after which a few waiting requests join. They join earlier if they are
an eighth of the running ones, because a prefill takes about as long as a decode step."""
_MAX_PROBLEMS = 5


def native_engine(
    config: Config,
    context: WorkerContext,
    load_model: Callable[[], nn.Module],
    shared_model: nn.Module | None,
) -> "NativeEngine":
    """The engine of one rank, with the shared model, or with this rank's shard of a model of its
    own.

    `load_model` loads the policy in the dtype for rollouts, in host memory. `shared_model` is the
    actor's own model if the engine may generate with it directly, and None otherwise.
    """
    keys = config.actor_rollout_ref.rollout
    model, shard = shared_model, None
    if model is None:
        loaded: Any = load_model()
        refuse_unknown(loaded)
        shard = Shard(loaded.config, context.tp_size, context.tp_rank)
        shard.keep_own_part(
            loaded
        )  # before it moves, so that a GPU never holds more than its shard
        model = loaded.requires_grad_(False).to(context.device)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def room_on_gpu() -> int:
        """Bytes that a cache may take now on this process's GPU."""
        share = int(torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction())
        return cache_room(share, free_bytes("cuda"), num_bytes, keys.gpu_memory_utilization)

    limits = (keys.max_num_seqs, keys.max_num_batched_tokens)
    room = None if context.device == "cpu" else room_on_gpu
    is_shared = shared_model is not None
    parallel = TensorParallel.over_neighbours(context.tp_size)
    return NativeEngine(
        model, *limits, is_shared, room, shard, parallel, enforce_eager=keys.enforce_eager
    )


@dataclass(frozen=True)
class _DecodeState:
    """What a GPU keeps between calls, because captured steps refer to it by address."""

    addresses: tuple[int, ...]
    """Addresses of the model's weights."""
    decoder: Decoder
    batch: DecodeBatch
    graphs: "StepGraphs | None"


@dataclass(eq=False, repr=False)
class NativeEngine(StreamedEngine):
    """Generates with `model`, a Hugging Face causal language model of a known architecture, on the
    model's device.

    Each `generate` uses the model's current weights. With `shared_weights` they are the trainer's
    own weights.

    `max_num_seqs` sequences run at the same time, fewer if `cache_bytes` (asked before a cache is
    allocated) allows fewer. A prefill micro-batch has at most `max_num_batched_tokens` tokens. On a
    GPU the engine's own weights that are applied to the same input are joined once, without a copy,
    and decode steps are captured in CUDA graphs, unless `enforce_eager` is set or the model is
    tensor-parallel. With `shard` the model is this rank's part, and all ranks of `parallel` make
    the same calls; the first rank chooses the tokens.
    """

    model: Any
    max_num_seqs: int
    max_num_batched_tokens: int
    shared_weights: bool = False
    cache_bytes: Callable[[], int] | None = None
    shard: Shard | None = None
    parallel: TensorParallel = field(default_factory=TensorParallel)
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        refuse_unknown(self.model)
        super().__init__(self.model)
        config = self.model.config
        self._max_positions, self._vocab_size = num_positions(config.to_dict()), config.vocab_size
        self._on_gpu = cache_shape(self.model).device.type == "cuda"
        self._check_interval = _CHECK_INTERVAL if self._on_gpu else 1
        self._captures = self._on_gpu and not self.enforce_eager and self.parallel.size == 1
        if self._on_gpu and not self.shared_weights:
            join_weights(self.model)
        self._cache: SlotCache | None = None
        self._state: _DecodeState | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.raise_if_not_ready()
        self._check_requests(requests, sampling)
        if not requests:
            return []
        max_new_tokens = max(_num_new(request, sampling) for request in requests)
        length = max(len(request.token_ids) + _num_new(request, sampling) for request in requests)
        completions: dict[int, Completion] = {}
        with self._running(
            replace(sampling, max_new_tokens=max_new_tokens), len(requests), 0, length
        ) as generation:
            numbers = generation.enqueue(requests, sampling)
            while len(completions) < len(requests):
                completions.update(generation.step())
        return [completions[number] for number in numbers]

    @contextmanager
    def session(
        self, sampling: Sampling, num_requests: int, max_tokens: int
    ) -> Iterator["_Generation"]:
        """Requests join and leave between decode steps. The cache has a second slot for each
        conversation, which keeps its tokens between turns; with too little memory, the
        conversations that ended first are computed again."""
        self.raise_if_not_ready()
        with self._running(
            sampling, num_requests, num_requests, max_tokens, _PATIENCE_STEPS
        ) as generation:
            yield generation

    @contextmanager
    def _running(self, *arguments: Any) -> Iterator["_Generation"]:
        try:
            yield _Generation(self, *arguments)
        except BaseException:
            # The cache may contain NaN, which would stay there after the weights change. Sequences
            # are still running.
            self._cache = self._state = None
            raise

    def sleep(self) -> None:
        """The next `generate` allocates the cache again, because it knows the size."""
        super().sleep()
        self._cache = None

    def _check_requests(self, requests: Sequence[Request], sampling: Sampling) -> None:
        problems = []
        limit, vocab_size = self._max_positions, self._vocab_size
        for index, request in enumerate(requests):
            num_new, num_prompt = _num_new(request, sampling), len(request.token_ids)
            if num_new < 1:
                problems.append(f"request {index}: max_new_tokens={num_new}: must be 1 or more")
            if not num_prompt or min(request.token_ids) < 0 or max(request.token_ids) >= vocab_size:
                problems.append(
                    f"request {index}: the prompt must have tokens, with ids in 0..{vocab_size - 1}"
                )
            if num_prompt + num_new > limit:
                given = f"a prompt of {num_prompt} and {num_new} new tokens"
                most = f"the {limit} positions of the model (max_position_embeddings)"
                problems.append(f"request {index}: {given} are more than {most}")
        if problems:
            raise DataError(first_few(problems, _MAX_PROBLEMS, "\n").splitlines())

    def _take_cache(self, num_slots: int, length: int) -> SlotCache:
        """The cache of the last call if it is large enough, else a new one, of the same size on all
        ranks."""
        shape = cache_shape(self.model)
        cache = self._cache
        if (
            cache is None
            or cache.shape != shape
            or cache.num_slots < num_slots
            or cache.length < length
        ):
            self._cache = cache = (
                None  # before the new one is allocated, so that both never exist at once
            )
            if self.cache_bytes is not None:
                num_bytes = self.parallel.smallest(self.cache_bytes(), shape.device)
                num_slots = min(num_slots, num_bytes // shape.slot_bytes(length))
                if num_slots < 1:
                    raise RolepoolError(
                        f"the rollout's KV cache may use {num_bytes:,} bytes, but one sequence of {length} tokens "
                        f"needs {shape.slot_bytes(length):,}: raise actor_rollout_ref.rollout.gpu_memory_utilization, "
                        "or shorten data.max_prompt_length or data.max_response_length"
                    )
            self._cache = cache = SlotCache(shape, num_slots, length)
        return cache

    def _take_state(self, cache: SlotCache, num_new: int, stops: tuple[int, ...]) -> _DecodeState:
        """On a GPU the state of the last call if it fits this call too, else a new one."""
        before = self._state
        addresses = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        num_rows = cache.num_slots
        if before is not None and before.addresses == addresses:
            has_positions = before.decoder.num_positions >= cache.length
            has_room = before.batch.num_rows >= num_rows and before.batch.max_new_tokens >= num_new
            if has_positions and has_room and before.batch.stop_token_ids == stops:
                return before
            num_rows, num_new = (
                max(num_rows, before.batch.num_rows),
                max(num_new, before.batch.max_new_tokens),
            )
        self._state = before = None  # frees its graphs before others are captured
        length, device = cache.length, cache.shape.device
        if self._on_gpu:  # with room for longer sequences in later calls
            length = min(self._max_positions, 2 ** (length - 1).bit_length())
        decoder = Decoder(self.model, self.parallel, length)
        batch = DecodeBatch(num_rows, num_new, stops, device, scattered=self._on_gpu)
        state = _DecodeState(addresses, decoder, batch, StepGraphs() if self._captures else None)
        if self._on_gpu:
            self._state = state
        return state


class _Kept(NamedTuple):
    """Where the tokens of a conversation are between its turns."""

    slot: int
    token_ids: npt.NDArray[np.int64]


class _Prefill(NamedTuple):
    """A prompt, how many of its tokens are kept from the turn before, and the requests that have
    it."""

    start: int
    prompt: tuple[int, ...]
    requests: list[int]


class _Generation:
    """One call of `generate`, or one session."""

    def __init__(
        self,
        engine: NativeEngine,
        sampling: Sampling,
        num_rows: int,
        num_kept: int,
        length: int,
        patience: int = 0,
    ) -> None:
        """`num_rows` requests may run at the same time, in slots of `length` tokens. `num_kept`
        more slots keep the tokens of conversations between their turns."""
        self._engine, self._sampling, self._length, self._patience = (
            engine,
            sampling,
            length,
            patience,
        )
        num_rows = min(engine.max_num_seqs, num_rows)
        self._cache = engine._take_cache(num_rows + num_kept, length)
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        state = engine._take_state(self._cache, sampling.max_new_tokens, stops)
        self._decoder, self._batch, self._graphs = state.decoder, state.batch, state.graphs
        if engine._on_gpu:
            self._decoder.locate(self._cache)
        self._num_slots = min(self._cache.num_slots, num_rows)
        self._free = list(range(self._num_slots, min(self._cache.num_slots, num_rows + num_kept)))
        self._kept: dict[int, _Kept] = {}
        self._requests: dict[int, tuple[Request, int, int]] = {}
        """The requests that have not ended, each with its limit and the seed of its random
        numbers."""
        self._waiting: deque[int] = deque()
        self._num_submitted = self._num_steps = 0
        """All requests so far, and the decode steps since requests joined."""

    def submit(self, requests: Sequence[Request]) -> Sequence[int]:
        self._engine._check_requests(requests, self._sampling)
        longest = max(
            len(request.token_ids) + _num_new(request, self._sampling) for request in requests
        )
        if longest > self._length:
            raise DataError(
                f"a request for {longest} tokens does not fit into a session for {self._length}"
            )
        return self.enqueue(requests, self._sampling)

    def enqueue(self, requests: Sequence[Request], sampling: Sampling) -> Sequence[int]:
        """The same for requests that were checked; `sampling` has their limit."""
        numbers = range(self._num_submitted, self._num_submitted + len(requests))
        streams = seed_streams([request.seed for request in requests]).tolist()
        for number, request, stream in zip(numbers, requests, streams, strict=True):
            self._requests[number] = request, _num_new(request, sampling), stream
        self._waiting.extend(numbers)
        self._num_submitted += len(requests)
        return numbers

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Prefill the waiting requests that find a slot, or decode; the requests that have ended
        since."""
        if self._can_admit():
            prefills = self._entering()
            with part(
                "prefill", *work_of(len(prefill.prompt) - prefill.start for prefill in prefills)
            ):
                self._admit(prefills)
        else:
            num_steps = min(self._engine._check_interval, self._batch.num_steps_left)
            num_tokens = num_steps * self._batch.num_running
            with part("decode", num_tokens, num_tokens * self._batch.length, num_pieces=num_steps):
                for _ in range(num_steps):
                    self._step()
        completions = []
        for number, tokens, log_probs in self._batch.pop_finished(self._cache, self._keep):
            del self._requests[number]
            completions.append(
                (number, self._engine.completion(tokens, log_probs, self._batch.stop_token_ids))
            )
        return completions

    def _can_admit(self) -> bool:
        num_running, num_waiting = self._batch.num_running, len(self._waiting)
        num_free = self._num_slots - num_running
        is_worth_it = (
            num_waiting * _REFILL_FRACTION >= num_running or self._num_steps >= self._patience
        )
        num_wanted = min(num_waiting, max(1, self._num_slots // _REFILL_FRACTION))
        return num_waiting > 0 and (not num_running or (num_free >= num_wanted and is_worth_it))

    def _entering(self) -> list[_Prefill]:
        """The prompts of the waiting requests that free slots take now. Prompts that continue after
        the same number of tokens are neighbours, because they are computed together."""
        num_free = self._num_slots - self._batch.num_running
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for number in [self._waiting.popleft() for _ in range(min(len(self._waiting), num_free))]:
            by_prompt.setdefault(tuple(self._requests[number][0].token_ids), []).append(number)
        found = [
            _Prefill(self._num_kept(group[0]), prompt, group) for prompt, group in by_prompt.items()
        ]
        return sorted(found, key=lambda one: (one.start, len(one.prompt) if one.start else 0))

    def _admit(self, prefills: Sequence[_Prefill]) -> None:
        """Prefill prompts, each once and without the tokens that are kept, and sample the first
        token of each row."""
        first, self._num_steps = self._batch.num_running, 0
        starts, prompts, groups = zip(*prefills, strict=True)
        # First one request of each prompt, so that prefilled rows are adjacent; then the requests
        # that share a prompt.
        members = [(place, group[0]) for place, group in enumerate(groups)]
        members += [(place, number) for place, group in enumerate(groups) for number in group[1:]]
        places, order = zip(*members, strict=True)
        _, limits, streams = zip(*(self._requests[number] for number in order), strict=True)
        lengths = [len(prompts[place]) for place in places]
        slots = self._batch.enter(order, lengths, limits, streams)
        for number, slot, start in zip(order, slots, starts, strict=False):
            if start:
                self._cache.copy(self._kept[self._conversation(number)].slot, slot, start)
        micro_batches = _split_prompts(prompts, starts, self._engine.max_num_batched_tokens)
        final = torch.cat([self._prefill(prompts, pieces, slots) for pieces in micro_batches])
        for row in range(len(prompts), len(order)):
            self._cache.copy(slots[places[row]], slots[row], lengths[row])
        self._sample(
            slice(first, first + len(order)), final[on_device(torch.tensor(places), final.device)]
        )

    def _conversation(self, number: int) -> int:
        """The conversation of a request; -1 if it has none, which is never kept."""
        conversation = self._requests[number][0].conversation
        return -1 if conversation is None else conversation

    def _num_kept(self, number: int) -> int:
        """The number of tokens of a request that are kept from the turn before it. At least one
        token must be run."""
        kept = self._kept.get(self._conversation(number))
        if kept is None:
            return 0
        ids = np.asarray(
            self._requests[number][0].token_ids[:-1][: len(kept.token_ids)], dtype=np.int64
        )
        differences = np.flatnonzero(ids != kept.token_ids[: len(ids)])
        return int(differences[0]) if len(differences) else len(ids)

    def _keep(self, number: int, slot: int, tokens: npt.NDArray[np.int64]) -> None:
        """Keep what was computed for a conversation, which is all but its last token: in its own
        slot, in a free one, or in that of the conversation that was kept first."""
        conversation = self._conversation(number)
        if conversation < 0 or not (self._free or self._kept):
            return
        if conversation in self._kept:
            target = self._kept.pop(conversation).slot
        else:
            target = self._free.pop() if self._free else self._kept.pop(next(iter(self._kept))).slot
        ids = np.concatenate(
            [np.asarray(self._requests[number][0].token_ids, dtype=np.int64), tokens[:-1]]
        )
        self._cache.copy(slot, target, len(ids))
        self._kept[conversation] = _Kept(target, ids)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], pieces: list[Piece], slots: Sequence[int]
    ) -> Tensor:
        """Run pieces of prompts; the final states of prompts that end in this micro-batch."""
        tokens = chain.from_iterable(
            prompts[number][start : start + count] for number, start, count in pieces
        )
        # Through numpy, because `torch.tensor` takes ten times as long for a list.
        tokens_t = on_device(torch.from_numpy(np.fromiter(tokens, np.int64)), self._decoder.device)
        placed = [piece._replace(slot=slots[piece.slot]) for piece in pieces]
        final = self._decoder.prefill(self._cache, tokens_t, placed)
        # Only the last piece of a micro-batch may end before its prompt does.
        ends_early = pieces[-1].start + pieces[-1].num_tokens < len(prompts[pieces[-1].slot])
        return final[: len(pieces) - ends_early]

    def _step(self) -> None:
        """Run the newest token of every row, and sample the next one."""
        num_rows = self._batch.num_running
        if self._engine._on_gpu:
            num_rows = bucket_of(num_rows, self._batch.num_rows)

        def decode() -> None:
            rows, batch, length = (
                slice(0, num_rows),
                self._batch,
                min(self._batch.length, self._cache.length),
            )
            inputs = (batch.tokens[rows], batch.positions[rows], batch.slots[rows])
            self._sample(rows, self._decoder.decode(self._cache, *inputs, length))

        if self._graphs is None:
            decode()
        else:
            how = self._sampling
            self._graphs.run(
                (num_rows, how.is_greedy, how.temperature, how.top_k, how.top_p), decode
            )
        self._batch.tick()
        self._num_steps += 1

    def _sample(self, rows: slice, final: Tensor) -> None:
        logits = self._decoder.head(final)
        tokens, log_probs = choose(
            logits, self._batch.streams[rows], self._batch.steps[rows], self._sampling
        )
        # All ranks take the first rank's tokens: ranks that disagree would make different calls and
        # hang.
        self._batch.record(rows, self._engine.parallel.first(tokens), log_probs)


class StepGraphs:
    """Decode steps as CUDA graphs, captured once for each key and replayed. They share one memory
    pool, because only one runs at a time. The tensors of a step must keep their addresses."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run the step: the first time directly, which compiles its kernels, later from a graph."""
        if key not in self._graphs:
            self._graphs[key] = None
            step()
            return
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = torch.cuda.CUDAGraph()
            # Other threads of the process, such as a memory monitor, may use CUDA at the same time.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        graph.replay()


def bucket_of(num_rows: int, most: int) -> int:
    """The batch size to use for `num_rows` rows: at least that many, rounded up to one of few
    sizes, because each size is a graph."""
    if num_rows <= 32:
        return min(1 << (num_rows - 1).bit_length(), most)
    grain = 32 if num_rows <= 256 else 64
    return min(-(-num_rows // grain) * grain, most)


def _num_new(request: Request, sampling: Sampling) -> int:
    return sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens


def _split_prompts(
    prompts: Sequence[Sequence[int]], starts: Sequence[int], max_num_tokens: int
) -> Iterator[list[Piece]]:
    """Split prompts, each from its start on, into micro-batches of at most `max_num_tokens` tokens,
    in order; `slot` is the prompt's index. A prompt is divided only if it is longer than a
    micro-batch."""
    pieces: list[Piece] = []
    room = max_num_tokens
    for index, (prompt, first) in enumerate(zip(prompts, starts, strict=True)):
        start = first
        while start < len(prompt):
            num_left = len(prompt) - start
            if room == 0 or (pieces and start == first and room < num_left <= max_num_tokens):
                yield pieces
                pieces, room = [], max_num_tokens
            count = min(room, num_left)
            pieces.append(Piece(index, start, count))
            start += count
            room -= count
    yield pieces
