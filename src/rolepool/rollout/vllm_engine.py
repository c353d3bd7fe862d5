"""The vllm rollout engine: vLLM in a process beside that of the rollout, with a Python environment of its own.

vLLM needs other versions of torch and transformers than rolepool. So the two exchange tokens through a socket, and
weights as a file in shared memory. Owns that process and what it is told. What runs in it is `vllm_process`.
"""

import os
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from rolepool.config import Config
from rolepool.errors import RolepoolError
from rolepool.protocol.worker import WorkerContext
from rolepool.rollout.engine import ABILITIES, Completion, Request, Sampling
from rolepool.rollout.streamed import StreamedEngine

_SCRIPT = Path(__file__).with_name("vllm_process.py")
_OF_OUR_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
"""Variables of this process that would mislead vLLM."""
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
_FIXED = {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs", "distributed_executor_backend": "uni"}
_SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def vllm_engine(
    config: Config, context: WorkerContext, load_model: Callable[[], nn.Module], shared_model: nn.Module | None
) -> "VllmEngine":
    """The engine of one rank. vLLM loads the model, too."""
    keys, model_keys, on_cpu = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, context.device == "cpu"
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
    return VllmEngine(keys.vllm_python, {**arguments, **keys.engine_kwargs.vllm}, load_model())


class VllmEngine(StreamedEngine):
    """Generates with vLLM in a process that `python`, the Python of vLLM's environment, runs.

    `arguments` are those of vLLM's class LLM. `model` is a copy of the model in host memory, in which new weights are
    collected and checked.
    """

    def __init__(self, python: str, arguments: dict[str, Any], model: nn.Module) -> None:
        super().__init__(model)
        self.abilities = set(ABILITIES) - (set() if arguments.get("enable_sleep_mode") else {"sleep"})
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_OUR_RANKS}
        self._process = subprocess.Popen(
            [str(Path(python).expanduser()), "-P", str(_SCRIPT), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**_DEFAULTS, **environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        theirs.close()
        self._connection: Any = Connection(ours.detach())
        self.close = weakref.finalize(self, _end, self._connection, self._process)
        self._ask("start", {**arguments, **_FIXED})

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.raise_if_not_ready()
        stops = [] if sampling.ignore_eos else list(sampling.stop_token_ids)
        how: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": stops}
        if not sampling.is_greedy:
            how |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        limit = sampling.max_new_tokens
        settings = [{**how, "seed": one.seed, "max_tokens": one.max_new_tokens or limit} for one in requests]
        prompts = [list(map(int, request.token_ids)) for request in requests]
        answers = self._ask("generate", prompts, settings)
        return [self.completion(tokens, log_probs, stops) for tokens, log_probs in answers]

    def have_arrived(self) -> None:
        with tempfile.NamedTemporaryFile(dir=_SHARED_MEMORY, prefix="rolepool_weights_") as file:
            save_file({name: weight.detach() for name, weight in self.model.named_parameters()}, file.name)
            self._ask("update", file.name)

    def sleep(self) -> None:
        super().sleep()
        if "sleep" in self.abilities:
            self._ask("sleep")

    def wake(self) -> None:
        super().wake()
        if "sleep" in self.abilities:
            self._ask("wake", "weights", "kv_cache")

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer of vLLM's process to a call."""
        try:
            self._connection.send((name, arguments))
            answer, problem = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise RolepoolError(f"vLLM's process ended with exit code {code}; its output says why") from None
        if problem is not None:
            raise RuntimeError(f"vLLM failed in `{name}`:\n{problem}")
        return answer


def _end(connection: Any, process: "subprocess.Popen[bytes]") -> None:
    """End vLLM's process, which stops by itself when the connection closes."""
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    process.kill()
