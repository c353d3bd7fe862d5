"""The vllm rollout engine: vLLM in a process beside that of the rollout, with a Python environment
of its own.

vLLM needs other versions of torch and transformers than rolepool. So the two exchange tokens
through a socket. New weights are passed on as a file in shared memory or, on a GPU, as handles of
the memory in which they are (CUDA IPC). Owns that process and what it is told. What runs in it is
`vllm_process`.
"""

import os
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor
from transformers.core_model_loading import revert_weight_conversion

from rolepool.config import Config
from rolepool.errors import ConfigError, RolepoolError
from rolepool.protocol.worker import WorkerContext
from rolepool.rollout.engine import ABILITIES, Completion, Request, Sampling, StreamedEngine
from rolepool.rollout.tensor_parallel import TensorParallel

_SCRIPT = Path(__file__).with_name("vllm_process.py")
_MISLEADING_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
)
"""Variables of this process that would mislead vLLM."""
_DEFAULT_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Variables that vLLM gets unless this process has them."""
_FIXED_ARGUMENTS = {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
"""Arguments that rolepool relies on: tokens only, and log-probs after temperature, top-k and
top-p."""
_STEPS_AT_ONCE = 8
"""Decode steps after which waiting requests join."""
_SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


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
    length = config.data.max_prompt_length + config.data.max_response_length
    arguments = {
        "model": str(Path(str(model_keys.path)).expanduser()),
        "trust_remote_code": model_keys.trust_remote_code,
        "hf_overrides": dict(model_keys.override_config),
        "dtype": "float32" if on_cpu else "bfloat16",
        "max_model_len": length,
        "max_num_seqs": keys.max_num_seqs,
        "max_num_batched_tokens": max(keys.max_num_batched_tokens, length),
        "enforce_eager": keys.enforce_eager or on_cpu,
        "gpu_memory_utilization": keys.gpu_memory_utilization,
        "enable_sleep_mode": not on_cpu,
    }
    arguments |= keys.engine_kwargs.vllm
    model = load_model()
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    if on_cpu and has_experts:
        problem = "vLLM cannot take new weights of a model with experts on a CPU"
        raise ConfigError(f"actor_rollout_ref.rollout.name=vllm: {problem}; use transformers")
    port = _shared_port(context)
    return VllmEngine(
        keys.vllm_python,
        arguments,
        model,
        gpu=None if on_cpu else context.device,
        group=(context.tp_rank, context.dims.tp, port),
    )


def _shared_port(context: WorkerContext) -> int:
    """A free port of this node, the same on all ranks of a tensor-parallel group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = torch.tensor(free.getsockname()[1], device=context.device)
        # The socket stays open until all ranks know the port, so that two groups of a node do not
        # get the same one.
        return int(TensorParallel.over_neighbours(context.dims.tp).first(port))


class VllmEngine(StreamedEngine):
    """Generates with vLLM in a process that `python`, the Python of vLLM's environment, runs.

    `arguments` are those of vLLM's class LLM. New weights are collected and checked in `model`, in
    host memory. With `gpu`, the name of a device, `model` is on that GPU while they arrive, and
    takes no memory at other times. `group` is the rank in a tensor-parallel group, its size, and a
    port of this node at which its ranks meet.
    """

    def __init__(
        self,
        python: str,
        arguments: dict[str, Any],
        model: nn.Module,
        gpu: str | None = None,
        group: tuple[int, int, int] = (0, 1, 0),
    ) -> None:
        super().__init__(model if gpu is None else model.to("meta"))
        self._gpu = gpu
        self.numbers = count()
        """The numbers of requests, of all sessions."""
        self.abilities = set(ABILITIES)
        if not arguments.get("enable_sleep_mode"):
            self.abilities.remove("sleep")
        ours, theirs = socket.socketpair()
        environment = {
            name: value for name, value in os.environ.items() if name not in _MISLEADING_VARIABLES
        }
        self._process = subprocess.Popen(
            [str(Path(python).expanduser()), "-P", str(_SCRIPT), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={
                **_DEFAULT_VARIABLES,
                **environment,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
        )
        theirs.close()
        self._connection: Any = Connection(ours.detach())
        self.close = weakref.finalize(self, _end, self._connection, self._process)
        transfer = {}
        if gpu is not None:
            transfer = {"weight_transfer_config": {"backend": "ipc"}}
        self.ask("start", {**arguments, **_FIXED_ARGUMENTS, **transfer}, *group)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        with self.session(sampling) as session:
            numbers = session.submit(requests)
            completions: dict[int, Completion] = {}
            while session.running:
                completions.update(session.step())
        return [completions[number] for number in numbers]

    @contextmanager
    def session(
        self, sampling: Sampling, num_requests: int = 0, max_tokens: int = 0
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

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None
    ) -> None:
        if self._gpu is not None and self._arriving is None:
            self.model.to_empty(device=self._gpu)
            self.model.tie_weights()
        super().update_weights(named_tensors, version)

    def have_arrived(self) -> None:
        if self._gpu is None:
            self._send_file()
        else:
            self._send_handles(self._gpu)
            self.model.to("meta")
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # vLLM needs the memory now

    def _send_file(self) -> None:
        """Pass weights on as a file in shared memory."""
        weights = file_weights(self.model)
        with tempfile.NamedTemporaryFile(dir=_SHARED_MEMORY, prefix="rolepool_weights_") as file:
            save_file(weights, file.name)
            self.ask("update", file.name)

    def _send_handles(self, gpu: str) -> None:
        """Pass weights on as handles of the GPU memory in which they are."""
        weights = file_weights(self.model)
        uuid = str(torch.cuda.get_device_properties(gpu).uuid)
        torch.cuda.synchronize()  # vLLM reads the memory, and does not wait for our copies
        handles = {name: _handle_of(weight, uuid) for name, weight in weights.items()}
        self.ask("update_by_handles", handles)

    def sleep(self) -> None:
        super().sleep()
        if "sleep" in self.abilities:
            self.ask("sleep")

    def wake(self) -> None:
        super().wake()
        if "sleep" in self.abilities:
            self.ask("wake", "weights", "kv_cache")

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of vLLM's process to a call."""
        try:
            self._connection.send((name, arguments))
            answer, problem = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise RolepoolError(
                f"vLLM's process ended with exit code {code}; its output says why"
            ) from None
        if problem is not None:
            raise RuntimeError(f"vLLM failed in `{name}`:\n{problem}")
        return answer


class _Session:
    """Requests to vLLM with one way to choose tokens."""

    def __init__(self, engine: VllmEngine, sampling: Sampling) -> None:
        self._engine = engine
        self._sampling = sampling
        self._stops = [] if sampling.ignore_eos else list(sampling.stop_token_ids)
        self._settings: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": self._stops}
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
            max_tokens = request.num_new(self._sampling)
            settings = {**self._settings, "seed": request.seed, "max_tokens": max_tokens}
            # Python's own numbers, because the other environment may have another numpy.
            token_ids = [int(token) for token in request.token_ids]
            messages.append((number, token_ids, settings))
        self._engine.ask("submit", messages)
        self.running.update(numbers)
        return numbers

    def step(self) -> list[tuple[int, Completion]]:
        ended = self._engine.ask("run", _STEPS_AT_ONCE)
        self.running.difference_update(number for number, _, _ in ended)
        return [
            (number, self._engine.completion(tokens, log_probs, self._stops))
            for number, tokens, log_probs in ended
        ]


def file_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a model under the names in its files, which vLLM knows. In transformers some
    have other names, and the experts of a layer are one tensor."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    converted: dict[str, Tensor] = revert_weight_conversion(model, named)
    return {name: weight.contiguous() for name, weight in converted.items()}


def _handle_of(weight: Tensor, uuid: str) -> tuple[str, list[int], dict[str, Any]]:
    """What vLLM's interface for CUDA IPC is told about a tensor: dtype, shape, and the handle of
    its memory by GPU."""
    dtype = str(weight.dtype).removeprefix("torch.")
    _, handle = reduce_tensor(weight)
    return dtype, list(weight.shape), {uuid: handle}


def _end(connection: Any, process: "subprocess.Popen[bytes]") -> None:
    """End vLLM's process, which stops by itself when the connection closes."""
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    process.kill()
