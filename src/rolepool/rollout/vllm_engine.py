"""The vllm rollout engine: vLLM in a process beside that of the rollout, with a Python environment of its own.

vLLM needs other versions of torch and transformers than rolepool. So the two exchange tokens through a socket, and
weights as files in shared memory. Owns that process and what it is told. What runs in it is `vllm_process`.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.errors import RolepoolError
from rolepool.models.loading import policy_without_weights
from rolepool.protocol.worker import WorkerContext, part
from rolepool.rollout.engine import ABILITIES, Completion, Request, Sampling
from rolepool.rollout.streamed import StreamedEngine

_SCRIPT = Path(__file__).with_name("vllm_process.py")
_OF_OUR_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
"""Variables of this process that would mislead vLLM."""
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
_DEFAULTS |= {"OMP_NUM_THREADS": "1"}


def vllm_engine(
    config: Config, context: WorkerContext, load_model: Callable[[], nn.Module], shared_model: nn.Module | None
) -> "VllmEngine":
    """The engine of one rank. vLLM loads the model itself."""
    keys, model_keys, data = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, config.data
    trusted, overrides, on_cpu = model_keys.trust_remote_code, dict(model_keys.override_config), context.device == "cpu"
    length = data.max_prompt_length + data.max_response_length
    arguments = {
        "model": str(Path(str(model_keys.path)).expanduser()),
        "trust_remote_code": trusted,
        "hf_overrides": overrides,
        "dtype": "float32" if on_cpu else "bfloat16",
        "max_model_len": length,
        "max_num_seqs": keys.max_num_seqs,
        "max_num_batched_tokens": max(keys.max_num_batched_tokens, length),
        "enforce_eager": keys.enforce_eager or on_cpu,
        "gpu_memory_utilization": keys.gpu_memory_utilization,
        "enable_sleep_mode": not on_cpu and keys.free_cache_engine,
        **keys.engine_kwargs.vllm,
    }
    model = policy_without_weights(model_keys.path, trust_remote_code=trusted, overrides=overrides)
    return VllmEngine(keys.vllm_python, arguments, model)


class VllmEngine(StreamedEngine):
    """Generates with vLLM in a process that `python`, the Python of vLLM's environment, runs.

    `arguments` are those of vLLM's class LLM. `model` has the names and shapes of all weights; its tensors are empty.
    """

    def __init__(self, python: str, arguments: dict[str, Any], model: nn.Module) -> None:
        super().__init__(model)
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self.abilities = set(ABILITIES) if self._can_sleep else set(ABILITIES) - {"sleep"}
        shared_memory = Path("/dev/shm")
        self._folder = tempfile.mkdtemp(prefix="rolepool_", dir=shared_memory if shared_memory.is_dir() else None)
        self._files: list[str] = []
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_OUR_RANKS}
        environment = {**_DEFAULTS, **environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [str(Path(python).expanduser()), "-P", str(_SCRIPT), str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        except OSError as error:
            key = f"actor_rollout_ref.rollout.vllm_python={python}"
            raise RolepoolError(f"{key}: cannot be started ({error}); run scripts/setup_vllm.sh") from None
        theirs.close()
        self._connection: Any = Connection(ours.detach())
        self.close = weakref.finalize(self, _end, self._connection, self._process, self._folder)
        fixed = {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
        self._ask("start", {**arguments, **fixed, "distributed_executor_backend": "uni"})

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.raise_if_not_ready()
        stops = [] if sampling.ignore_eos else list(sampling.stop_token_ids)
        shared = {"temperature": 0.0} if sampling.is_greedy else {"temperature": sampling.temperature}
        if not sampling.is_greedy:
            shared |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
        settings = [
            {**shared, "seed": request.seed, "stop_token_ids": stops}
            | {"max_tokens": request.max_new_tokens or sampling.max_new_tokens}
            for request in requests
        ]
        prompts = [list(map(int, request.token_ids)) for request in requests]
        with part("decode"):
            answers = self._ask("generate", prompts, settings) if requests else []
        completions = []
        for tokens, log_probs in answers:
            if not np.isfinite(log_probs).all():
                problem = f"the model's logits are not finite (weights version {self.version})"
                raise RolepoolError(f"{problem}: its weights contain NaN or have diverged")
            numbers = np.array(tokens, dtype=np.int64), np.array(log_probs, dtype=np.float32)
            completions.append(Completion(*numbers, "stop" if tokens[-1] in stops else "length", self.version))
        return completions

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None) -> None:
        try:
            super().update_weights(named_tensors, version)
        except BaseException:
            self._remove_files()
            raise

    def received(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one call, which are also written to a file. Tied weights are written once."""
        written: dict[str, Tensor] = {}
        places = set()
        for name, tensor in named_tensors:
            yield name, tensor
            if tensor.data_ptr() not in places:
                written[name] = tensor.detach().cpu().contiguous()
                places.add(tensor.data_ptr())
        if written:
            self._files.append(str(Path(self._folder, f"{len(self._files)}.safetensors")))
            save_file(written, self._files[-1])

    def have_received(self) -> None:
        self._ask("update", self._files)
        self._remove_files()

    def sleep(self) -> None:
        super().sleep()
        if self._can_sleep:
            self._ask("sleep")

    def wake(self) -> None:
        super().wake()
        if self._can_sleep:
            self._ask("wake")

    def _remove_files(self) -> None:
        for file in self._files:
            Path(file).unlink(missing_ok=True)
        self._files.clear()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer of vLLM's process to a call."""
        try:
            self._connection.send((name, arguments))
            answer, problem = self._connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            code = self._process.returncode
            raise RolepoolError(f"vLLM's process ended with exit code {code}; its output says why") from None
        if problem is not None:
            raise RuntimeError(f"vLLM failed in `{name}`:\n{problem}")
        return answer


def _end(connection: Any, process: "subprocess.Popen[bytes]", folder: str) -> None:
    """End vLLM's process, which stops when the connection closes, and remove its files."""
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    process.kill()
    shutil.rmtree(folder, ignore_errors=True)
