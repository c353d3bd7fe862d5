"""The native rollout engine: batched decoding with a KV cache, in the process of the rollout.

Owns the engine's model, its cache, and what it keeps between calls. Does not know which requests
run when (`generation`), how a layer is computed (`decoder`), nor where new weights come from.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from rolepool.config import Config
from rolepool.config.model_files import num_positions
from rolepool.errors import DataError, RolepoolError, first_few
from rolepool.placement.estimate import cache_room
from rolepool.protocol.out_of_memory import free_bytes
from rolepool.protocol.worker import WorkerContext
from rolepool.rollout.decoder import Decoder, cache_shape, join_weights, refuse_unknown
from rolepool.rollout.engine import Completion, Request, Sampling, StreamedEngine
from rolepool.rollout.generation import Generation, Machinery, Schedule
from rolepool.rollout.kv_cache import DecodeBatch, SlotCache
from rolepool.rollout.sampling import log_prob_dtype
from rolepool.rollout.step_graphs import StepGraphs
from rolepool.rollout.tensor_parallel import HfModule, Shard, TensorParallel

_GPU_CHECK_INTERVAL = 4
"""Decode steps on a GPU between checks for finished sequences in a call of `generate`. A check sees
the sequences that had ended at the one before, so that the host does not wait for the GPU: a
sequence that samples a stop token waits for 1.5 times as many steps on average."""
_SESSION_CHECK_INTERVAL = 8
"""The same in a session. There the host waits for the GPU at each check, because somebody waits for
what has ended; a sequence waits for half of these steps on average."""
_SESSION_PATIENCE_STEPS = 8
"""Decode steps of a session after which a few waiting requests join. A call of `generate` does not
wait, because nobody else can submit requests."""
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
    model = shared_model
    shard = None
    if model is None:
        loaded: HfModule = load_model()
        refuse_unknown(loaded)
        shard = Shard(loaded.config, context.dims.tp, context.tp_rank)
        # Before the model moves, so that a GPU never holds more than its shard.
        shard.keep_own_part(loaded)
        model = loaded.requires_grad_(False).to(context.device)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def room_on_gpu() -> int:
        """Bytes that a cache may take now on this process's GPU."""
        _, total_bytes = torch.cuda.mem_get_info()
        fraction = torch.cuda.get_per_process_memory_fraction()
        share_bytes = int(total_bytes * fraction)
        return cache_room(
            share_bytes,
            free_bytes("cuda"),
            model_bytes,
            keys.gpu_memory_utilization,
        )

    return NativeEngine(
        model,
        max_num_seqs=keys.max_num_seqs,
        max_num_batched_tokens=keys.max_num_batched_tokens,
        shared_weights=shared_model is not None,
        cache_bytes=None if context.device == "cpu" else room_on_gpu,
        shard=shard,
        parallel=TensorParallel.over_neighbours(context.dims.tp),
        enforce_eager=keys.enforce_eager,
    )


@dataclass(frozen=True)
class _DecodeState:
    """What a GPU keeps between calls, because captured steps refer to it by address."""

    addresses: tuple[int, ...]
    """Addresses of the model's weights."""
    decoder: Decoder
    batch: DecodeBatch
    graphs: StepGraphs | None

    def fits(
        self,
        num_rows: int,
        length: int,
        num_new: int,
        stops: tuple[int, ...],
    ) -> bool:
        """Whether a call with these sizes can use it."""
        has_positions = self.decoder.num_positions >= length
        has_rows = self.batch.num_rows >= num_rows
        has_columns = self.batch.max_new_tokens >= num_new
        is_large_enough = has_positions and has_rows and has_columns
        return is_large_enough and self.batch.stop_token_ids == stops


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
    the same calls; the first rank chooses the tokens. `decoder_type` runs the forward passes.
    """

    def __init__(
        self,
        model: HfModule,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        shared_weights: bool = False,
        cache_bytes: Callable[[], int] | None = None,
        shard: Shard | None = None,
        parallel: TensorParallel | None = None,
        enforce_eager: bool = False,
        decoder_type: type[Decoder] = Decoder,
    ) -> None:
        refuse_unknown(model)
        super().__init__(model)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.shared_weights = shared_weights
        self.cache_bytes = cache_bytes
        self.shard = shard
        self.parallel = parallel or TensorParallel()
        self._decoder_type = decoder_type
        self._max_positions = num_positions(model.config.to_dict())
        self._vocab_size = model.config.vocab_size
        self._on_gpu = cache_shape(model).device.type == "cuda"
        self.check_interval = _GPU_CHECK_INTERVAL if self._on_gpu else 1
        self.session_check_interval = _SESSION_CHECK_INTERVAL if self._on_gpu else 1
        self.for_throughput = self._on_gpu
        self._captures = self._on_gpu and not enforce_eager and self.parallel.size == 1
        if self._on_gpu and not shared_weights:
            join_weights(model)
        self._cache: SlotCache | None = None
        self._state: _DecodeState | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.raise_if_not_ready()
        self._check_requests(requests, sampling)
        if not requests:
            return []
        num_requests = len(requests)
        length = 0
        most_new = 0
        for request in requests:
            num_new = request.num_new(sampling)
            length = max(length, len(request.token_ids) + num_new)
            most_new = max(most_new, num_new)
        longest = replace(sampling, max_new_tokens=most_new)
        completions: dict[int, Completion] = {}
        with self._running(
            longest,
            num_requests,
            length,
            check_interval=self.check_interval,
            for_throughput=self.for_throughput,
        ) as generation:
            numbers = generation.enqueue(requests, sampling)
            while len(completions) < num_requests:
                completions.update(generation.step())
        return [completions[number] for number in numbers]

    @contextmanager
    def session(
        self,
        sampling: Sampling,
        num_requests: int,
        max_tokens: int,
    ) -> Iterator[Generation]:
        """Requests join and leave between decode steps. The cache has a second slot for each
        conversation, which keeps its tokens between turns; with too little memory, the
        conversations that ended first are computed again."""
        self.raise_if_not_ready()
        with self._running(
            sampling,
            num_requests=num_requests,
            length=max_tokens,
            check_interval=self.session_check_interval,
            num_kept=num_requests,
            patience_steps=_SESSION_PATIENCE_STEPS,
        ) as generation:
            yield generation

    @contextmanager
    def _running(
        self,
        sampling: Sampling,
        num_requests: int,
        length: int,
        check_interval: int,
        num_kept: int = 0,
        patience_steps: int = 0,
        for_throughput: bool = False,
    ) -> Iterator[Generation]:
        """A generation with a cache for its requests."""
        schedule = Schedule(
            num_slots=min(self.max_num_seqs, num_requests),
            num_kept=num_kept,
            length=length,
            max_num_batched_tokens=self.max_num_batched_tokens,
            patience_steps=patience_steps,
            check_interval=check_interval,
            for_throughput=for_throughput,
        )
        try:
            machinery = self._take_machinery(schedule, sampling)
            yield Generation(self, machinery, sampling, schedule, self._check_requests)
        except BaseException:
            # The cache may contain NaN, which would stay there after the weights change. Sequences
            # are still running.
            self._cache = None
            self._state = None
            raise

    def sleep(self) -> None:
        """The next `generate` allocates the cache again, because it knows the size."""
        super().sleep()
        self._cache = None

    def _check_requests(self, requests: Sequence[Request], sampling: Sampling) -> None:
        problems = []
        vocab_size = self._vocab_size
        for index, request in enumerate(requests):
            token_ids = request.token_ids
            num_new = request.num_new(sampling)
            num_prompt = len(token_ids)
            if num_new < 1:
                problems.append(f"request {index}: max_new_tokens={num_new}: must be 1 or more")
            if not num_prompt or min(token_ids) < 0 or max(token_ids) >= vocab_size:
                problems.append(
                    f"request {index}: the prompt must have tokens, with ids in 0..{vocab_size - 1}"
                )
            if num_prompt + num_new > self._max_positions:
                problems.append(
                    f"request {index}: a prompt of {num_prompt} and {num_new} new tokens are more "
                    f"than the {self._max_positions} positions of the model "
                    "(max_position_embeddings)"
                )
        if problems:
            raise DataError(first_few(problems, _MAX_PROBLEMS, "\n").splitlines())

    def _take_machinery(self, schedule: Schedule, sampling: Sampling) -> Machinery:
        """Cache, decoder and batch of a call, with those of the last call if they are large
        enough."""
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        num_slots = schedule.num_slots + schedule.num_kept
        cache = self._take_cache(num_slots, schedule.length)
        state = self._take_state(cache, sampling.max_new_tokens, stops)
        if self._on_gpu:
            state.decoder.locate(cache)
        return Machinery(
            cache=cache,
            decoder=state.decoder,
            batch=state.batch,
            graphs=state.graphs,
            parallel=self.parallel,
        )

    def _take_cache(self, num_slots: int, length: int) -> SlotCache:
        """The cache of the last call if it is large enough, else a new one, of the same size on all
        ranks."""
        shape = cache_shape(self.model)
        last = self._cache
        if last is not None and last.fits(shape, num_slots, length):
            return last
        # Freed before the new one is allocated, so that both never exist at once.
        self._cache = last = None
        if self.cache_bytes is not None:
            num_bytes = self.parallel.smallest(self.cache_bytes(), shape.device)
            slot_bytes = shape.slot_bytes(length)
            num_slots = min(num_slots, num_bytes // slot_bytes)
            if num_slots < 1:
                raise RolepoolError(
                    f"the rollout's KV cache may use {num_bytes:,} bytes, but one sequence of "
                    f"{length} tokens needs {slot_bytes:,}: raise "
                    "actor_rollout_ref.rollout.gpu_memory_utilization, or shorten "
                    "data.max_prompt_length or data.max_response_length"
                )
        self._cache = SlotCache(shape, num_slots, length)
        return self._cache

    def _take_state(
        self,
        cache: SlotCache,
        num_new: int,
        stops: tuple[int, ...],
    ) -> _DecodeState:
        """On a GPU the state of the last call if it fits this call too, else a new one."""
        parameters = self.model.parameters()
        addresses = tuple(parameter.data_ptr() for parameter in parameters)
        num_rows = cache.num_slots
        length = cache.length
        last = self._state
        if last is not None and last.addresses == addresses:
            if last.fits(num_rows, length, num_new, stops):
                return last
            # Large enough for both calls, so that calls that take turns keep it.
            num_rows = max(num_rows, last.batch.num_rows)
            num_new = max(num_new, last.batch.max_new_tokens)
        # Frees its graphs before others are captured.
        self._state = last = None
        if self._on_gpu:
            # With room for longer sequences in later calls.
            next_power_of_2 = 2 ** (length - 1).bit_length()
            length = min(self._max_positions, next_power_of_2)
        batch = DecodeBatch(
            num_rows,
            max_new_tokens=num_new,
            stop_token_ids=stops,
            device=cache.shape.device,
            scattered=self._on_gpu,
            dtype=log_prob_dtype(cache.shape.dtype),
        )
        state = _DecodeState(
            addresses=addresses,
            decoder=self._decoder_type(self.model, self.parallel, length),
            batch=batch,
            graphs=StepGraphs() if self._captures else None,
        )
        if self._on_gpu:
            self._state = state
        return state
