"""The vllm rollout engine: vLLM in a process beside that of the rollout, with a Python environment
of its own.

vLLM needs other versions of torch and transformers than rolepool. So the two exchange tokens
through a socket. New weights are passed on as a file in shared memory or, on a GPU, as handles of
the memory in which they are (CUDA IPC). Owns what vLLM is told. The process and the socket are the
business of `vllm_client`.
"""

import math
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor
from transformers.core_model_loading import revert_weight_conversion

from rolepool.config import Config
from rolepool.config.model_files import ShapeUnknown
from rolepool.errors import ConfigError, first_few
from rolepool.placement import ParallelDims, Role
from rolepool.placement.estimate import BF16, cache_room, generation_memory, shape_of
from rolepool.protocol.worker import WorkerContext
from rolepool.rollout.engine import ABILITIES, Completion, Request, Sampling, StreamedEngine
from rolepool.rollout.tensor_parallel import HfModule, TensorParallel
from rolepool.rollout.vllm_client import START_TIMEOUT_S, PlainDigests, VllmClient
from rolepool.units import show_bytes
from rolepool.weights.digests import Digest, digests_of
from rolepool.weights.receipts import WeightsDifferError, differences_between

_FIXED_ARGUMENTS = {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
"""Arguments that rolepool relies on: tokens only, and log-probs after temperature, top-k and
top-p."""
_STEPS_AT_ONCE = 8
"""Decode steps after which waiting requests join."""
_SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
_BLOCK_TOKENS = 16
"""Tokens in a block of vLLM's cache. A sequence takes whole blocks."""
_LEAST_UTILIZATION = 0.01
"""vLLM does not start if less than this fraction of the GPU is free. Nothing else depends on it,
because the size of the cache is given in bytes."""


def vllm_engine(
    config: Config,
    context: WorkerContext,
    load_model: Callable[[], nn.Module],
    shared_model: nn.Module | None,
) -> "VllmEngine":
    """The engine of one rank. vLLM loads the model, too. If ranks share one copy of the weights,
    each has a vLLM with a part of them, and all make the same calls."""
    keys = config.actor_rollout_ref.rollout
    model_keys = config.actor_rollout_ref.model
    on_cpu = context.device == "cpu"
    length = config.tokens_of_longest_row
    model_folder = Path(str(model_keys.path)).expanduser()
    arguments = {
        "model": str(model_folder),
        "trust_remote_code": model_keys.trust_remote_code,
        "hf_overrides": dict(model_keys.override_config),
        "dtype": "float32" if on_cpu else "bfloat16",
        "max_model_len": length,
        "max_num_seqs": keys.max_num_seqs,
        "max_num_batched_tokens": max(keys.max_num_batched_tokens, length),
        "enforce_eager": keys.enforce_eager or on_cpu,
        "enable_sleep_mode": not on_cpu,
    }
    if not on_cpu:
        # Otherwise vLLM would measure which memory is free, while other roles allocate and free it.
        arguments["gpu_memory_utilization"] = _LEAST_UTILIZATION
        arguments["kv_cache_memory_bytes"] = _cache_bytes(config, context.dims, load_model)
    arguments |= keys.engine_kwargs.vllm
    gpu = None if on_cpu else context.device
    client = start_vllm(
        keys.vllm_python,
        arguments,
        gpu=gpu,
        group=(context.tp_rank, context.dims.tp, _shared_port(context)),
        start_timeout_s=keys.vllm_start_timeout_s,
    )
    try:
        model = load_model()
        has_experts = any(".experts." in name for name, _ in model.named_parameters())
        if on_cpu and has_experts:
            problem = "vLLM cannot take new weights of a model with experts on a CPU"
            raise ConfigError(f"actor_rollout_ref.rollout.name=vllm: {problem}; use transformers")
        return VllmEngine(client, model, gpu)
    except BaseException:
        client.close()
        raise


def start_vllm(
    python: str,
    arguments: Mapping[str, object],
    gpu: str | None = None,
    group: tuple[int, int, int] = (0, 1, 0),
    start_timeout_s: float = START_TIMEOUT_S,
) -> VllmClient:
    """Start vLLM with what rolepool relies on in addition to `arguments`, and do not wait for it.
    With `gpu`, the name of a device, new weights will come as handles of its memory."""
    needed: dict[str, object] = dict(_FIXED_ARGUMENTS)
    if gpu is not None:
        needed["weight_transfer_config"] = {"backend": "ipc"}
    return VllmClient(
        python,
        {**arguments, **needed},
        group,
        start_timeout_s,
    )


def _cache_bytes(config: Config, dims: ParallelDims, load_model: Callable[[], nn.Module]) -> int:
    """The size of the KV cache on this process's GPU: room for `max_num_seqs` sequences of full
    length, or what `gpu_memory_utilization` leaves beside the weights, if that is less."""
    keys = config.actor_rollout_ref.rollout
    _, total_bytes = torch.cuda.mem_get_info()
    fraction = torch.cuda.get_per_process_memory_fraction()
    share_bytes = int(total_bytes * fraction)
    utilization = keys.gpu_memory_utilization
    try:
        shape = shape_of(config, Role.Rollout)
    except ShapeUnknown:
        parameters = load_model().parameters()
        num_params = sum(parameter.numel() for parameter in parameters)
        weights_bytes = BF16 * num_params // dims.tp
        free_bytes = share_bytes - weights_bytes
        return cache_room(share_bytes, free_bytes, weights_bytes, utilization)
    memory = generation_memory(
        config,
        shape,
        dims,
        keys.max_num_seqs,
        limit=None,
        room=None,
    )
    free_bytes = share_bytes - memory.weights
    room_bytes = cache_room(share_bytes, free_bytes, memory.weights, utilization)
    length = config.tokens_of_longest_row
    # One block more for each sequence, because vLLM keeps one block for itself.
    num_blocks = math.ceil(length / _BLOCK_TOKENS) + 1
    tokens_in_blocks = _BLOCK_TOKENS * num_blocks
    wanted_bytes = memory.kv_cache * tokens_in_blocks // length
    least_bytes = wanted_bytes // keys.max_num_seqs
    if room_bytes < least_bytes:
        key = f"actor_rollout_ref.rollout.gpu_memory_utilization={utilization:g}"
        raise ConfigError(
            f"{key}: {show_bytes(room_bytes)} of the pool's {show_bytes(share_bytes)} remain for "
            f"vLLM's KV cache, and one sequence needs {show_bytes(least_bytes)}; raise it"
        )
    return min(room_bytes, wanted_bytes)


def _shared_port(context: WorkerContext) -> int:
    """A free port of this node, the same on all ranks of a tensor-parallel group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _, number = free.getsockname()
        port = torch.tensor(number, device=context.device)
        group = TensorParallel.over_neighbours(context.dims.tp)
        # The socket stays open until all ranks know the port, so that two groups of a node do not
        # get the same one.
        return int(group.first(port))


class VllmEngine(StreamedEngine):
    """Generates with vLLM in the process of `client`, which may still be starting.

    New weights are collected and checked in `model`, in host memory. With `gpu`, the name of a
    device, `model` is on that GPU while they arrive, and takes no memory at other times.
    """

    def __init__(
        self,
        client: VllmClient,
        model: nn.Module,
        gpu: str | None = None,
    ) -> None:
        super().__init__(model if gpu is None else model.to("meta"))
        self._client = client
        self._gpu = gpu
        self.numbers = count()
        """The numbers of requests, of all sessions."""
        self.abilities = set(ABILITIES)
        if not client.arguments.get("enable_sleep_mode"):
            self.abilities.remove("sleep")
        self.ask = client.ask
        self.close = client.close

    def await_start(self, wait_s: float) -> str | None:
        return self._client.await_start(wait_s)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        with self.session(sampling) as session:
            numbers = session.submit(requests)
            completions: dict[int, Completion] = {}
            while session.running:
                completions.update(session.step())
        return [completions[number] for number in numbers]

    @contextmanager
    def session(
        self,
        sampling: Sampling,
        num_requests: int = 0,
        max_tokens: int = 0,
    ) -> Iterator["_Session"]:
        """Requests join and leave between decode steps. vLLM itself keeps the tokens of earlier
        turns."""
        self.raise_if_not_ready()
        session = _Session(self, sampling)
        try:
            yield session
        finally:
            if session.running:  # an error ended the session
                self.ask("abort", list(session.running))

    def begin_update(self) -> None:
        if self._gpu is not None:
            self.model.to_empty(device=self._gpu)
            self.model.tie_weights()

    def have_arrived(self, digests: Mapping[str, Digest]) -> None:
        self._pass_on(digests)
        if self._gpu is not None:
            self.model.to("meta")
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # vLLM needs the memory now

    def _pass_on(self, digests: Mapping[str, Digest]) -> None:
        """Pass the weights on to vLLM, and compare what it has got. The run compares the weights
        that have arrived here."""
        weights = file_weights(self.model)
        sent = self._digests_of(weights, digests)
        if self._gpu is None:
            got = self._send_file(weights)
        else:
            got = self._send_handles(weights, self._gpu)
        received = {name: Digest(*plain) for name, plain in got.items()}
        differences = list(differences_between(sent, received))
        if differences:
            raise WeightsDifferError(
                "weights changed on their way to the process of vLLM: "
                f"{first_few(differences, 3, '; ')}; see docs/troubleshooting.md, under Weights"
            )

    def _digests_of(
        self,
        weights: Mapping[str, Tensor],
        digests: Mapping[str, Digest],
    ) -> dict[str, Digest]:
        """The digests of weights under the names in files. Most weights are the model's own, whose
        digests are known."""
        own = dict(self.model.named_parameters())
        known: dict[str, Digest] = {}
        converted: dict[str, Tensor] = {}
        for name, weight in weights.items():
            is_own = name in own and own[name].data_ptr() == weight.data_ptr()
            digest = digests.get(name) if is_own else None
            if digest is not None and digest.dtype == _dtype_name(weight):
                known[name] = digest
            else:
                converted[name] = weight
        return known | digests_of(converted.items())

    def _send_file(self, weights: dict[str, Tensor]) -> PlainDigests:
        """Pass weights on as a file in shared memory. Returns the digests of what vLLM read."""
        with tempfile.NamedTemporaryFile(dir=_SHARED_MEMORY, prefix="rolepool_weights_") as file:
            save_file(weights, file.name)
            digests: PlainDigests = self.ask("update", file.name)
        return digests

    def _send_handles(self, weights: dict[str, Tensor], gpu: str) -> PlainDigests:
        """Pass weights on as handles of the GPU memory in which they are. Returns the digests of
        what vLLM sees there."""
        uuid = str(torch.cuda.get_device_properties(gpu).uuid)
        torch.cuda.synchronize()  # vLLM reads the memory, and does not wait for our copies
        # torch keeps memory until each of its handles was opened and closed exactly once. The
        # process opens it twice, for vLLM and for the digests, so it gets two handles.
        for_vllm = {name: _handle_of(weight, uuid) for name, weight in weights.items()}
        for_digests = {}
        for name, weight in weights.items():
            _, _, handle = _handle_of(weight, uuid)
            for_digests[name] = handle
        digests: PlainDigests = self.ask("update_by_handles", for_vllm, for_digests)
        return digests

    def sleep(self) -> None:
        super().sleep()
        if "sleep" in self.abilities:
            self.ask("sleep")

    def wake(self) -> None:
        super().wake()
        if "sleep" in self.abilities:
            self.ask("wake", "weights", "kv_cache")


class _Session:
    """Requests to vLLM with one way to choose tokens."""

    def __init__(self, engine: VllmEngine, sampling: Sampling) -> None:
        self._engine = engine
        self._sampling = sampling
        self._stops: list[int] = []
        if not sampling.ignore_eos:
            self._stops = list(sampling.stop_token_ids)
        self._settings: dict[str, object] = {
            "temperature": 0.0,
            "stop_token_ids": self._stops,
        }
        if not sampling.is_greedy:
            self._settings["temperature"] = sampling.temperature
            self._settings["top_p"] = sampling.top_p
            self._settings["top_k"] = sampling.top_k
        self.running: set[int] = set()
        """The numbers of requests that have not ended."""

    def submit(self, requests: Sequence[Request]) -> Sequence[int]:
        numbers = list(islice(self._engine.numbers, len(requests)))
        messages = []
        for number, request in zip(numbers, requests, strict=True):
            settings = {
                **self._settings,
                "seed": request.seed,
                "max_tokens": request.num_new(self._sampling),
            }
            # Python's own numbers, because the other environment may have another numpy.
            token_ids = [int(token) for token in request.token_ids]
            messages.append((number, token_ids, settings))
        self._engine.ask("submit", messages)
        self.running.update(numbers)
        return numbers

    def step(self) -> list[tuple[int, Completion]]:
        ended = self._engine.ask("run", _STEPS_AT_ONCE)
        self.running.difference_update(number for number, _, _ in ended)
        completions: list[tuple[int, Completion]] = []
        for number, tokens, log_probs in ended:
            completion = self._engine.completion(tokens, log_probs, self._stops)
            completions.append((number, completion))
        return completions


def file_weights(model: HfModule) -> dict[str, Tensor]:
    """The weights of a model under the names in its files, which vLLM knows. In transformers some
    have other names, and the experts of a layer are one tensor."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    converted: dict[str, Tensor] = revert_weight_conversion(model, named)
    return {name: weight.contiguous() for name, weight in converted.items()}


def _handle_of(weight: Tensor, uuid: str) -> tuple[str, list[int], dict[str, object]]:
    """What vLLM's interface for CUDA IPC is told about a tensor: dtype, shape, and the handle of
    its memory by GPU."""
    _, handle = reduce_tensor(weight)
    return _dtype_name(weight), list(weight.shape), {uuid: handle}


def _dtype_name(weight: Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")
