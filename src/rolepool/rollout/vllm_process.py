"""vLLM in a process of its own, which the vllm engine starts with the Python of vLLM's environment.

    python -P vllm_process.py FD

Reads calls from the socket FD and answers each. Ends when the socket closes, also while vLLM starts.
Owns what vLLM is asked to do. That environment does not have rolepool, so this file imports nothing
from it, and all arguments are plain data. It loads one file of rolepool, which needs only torch.
"""

import functools
import importlib.util
import os
import select
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm import LLM, SamplingParams  # is in the other environment
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_SLEEP_TAGS = {"weights", "kv_cache"}
_OTHERS_ALLOCATED = "Memory usage increased after sleeping"
_LONGEST_SUMMARY = 500

PlainDigests = dict[str, tuple[str, tuple[int, ...], int]]
"""The digests of tensors as plain data: dtype, shape and number."""
Handle = dict[str, tuple[object, ...]]
"""The handle of a tensor's memory, by the id of its GPU."""


class Server:
    """The calls that can be made."""

    def start(
        self,
        arguments: dict[str, object],
        rank: int,
        size: int,
        port: int,
    ) -> None:
        """The first call. The others need what it makes."""

        class OneOfGroup(ExecutorWithExternalLauncher):  # type: ignore[misc]  # mypy cannot see the base
            """Runs one rank. All ranks of the group get the same calls."""

            def _distributed_args(self) -> tuple[str, int, int]:
                return f"tcp://127.0.0.1:{port}", rank, 0

        executor: object = OneOfGroup if size > 1 else "uni"
        self._llm = LLM(
            **arguments,
            tensor_parallel_size=size,
            distributed_executor_backend=executor,
        )
        # All ranks have opened this shared memory, and nobody could remove it after a kill.
        for memory in Path("/dev/shm").glob(f"{port}-*-cpushm_*"):
            memory.unlink(missing_ok=True)
        self._engine = self._llm.llm_engine
        self._asleep: set[str] = set()
        """What sleeps: weights, kv_cache."""
        if "weight_transfer_config" in arguments:
            self._llm.init_weight_transfer_engine({"init_info": {}})

    def submit(self, requests: Sequence[tuple[int, list[int], dict[str, object]]]) -> None:
        """Add requests: the number of each, its prompt and its settings."""
        common = {
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
            "ignore_eos": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        for number, token_ids, settings in requests:
            params = SamplingParams(**{**common, **settings})
            prompt = {"prompt_token_ids": token_ids}
            self._engine.add_request(str(number), prompt, params)

    def run(self, num_steps: int) -> list[tuple[int, list[int], list[float]]]:
        """Decode so many times. Returns number, tokens and log-probs of the requests that have
        ended; no log-probs if the settings of a request say `logprobs: None`."""
        ended = []
        while num_steps > 0 and self._engine.has_unfinished_requests():
            num_steps -= 1
            # Because of FINAL_ONLY there is no output before a request has ended.
            for output in self._engine.step():
                sample = output.outputs[0]
                tokens = list(sample.token_ids)
                log_probs = []
                if sample.logprobs is not None:
                    for token, entry in zip(tokens, sample.logprobs, strict=True):
                        log_probs.append(entry[token].logprob)
                ended.append((int(output.request_id), tokens, log_probs))
        return ended

    def abort(self, numbers: Sequence[int]) -> None:
        self._engine.abort_request([str(number) for number in numbers])

    def update(self, file: str) -> PlainDigests:
        """Take all weights from a safetensors file, and drop what was computed with the old ones.
        Returns the digests of what was in the file. vLLM joins weights when it loads them, so
        nobody can compare what it has then."""
        self.wake("weights")
        # The worker runs in this process.
        (digests,) = self._llm.collective_rpc(_reload, args=(file,))
        self._llm.reset_prefix_cache()
        received: PlainDigests = digests
        return received

    def update_by_handles(
        self,
        weights: dict[str, tuple[str, list[int], Handle]],
        for_digests: dict[str, Handle],
    ) -> PlainDigests:
        """The same with the dtype, the shape and the memory of each weight, for vLLM's interface
        for CUDA IPC. `for_digests` has further handles of the same memory, because each handle may
        be opened once only."""
        # They stay open until vLLM has opened the same memory, so that it is mapped once.
        received = {name: _opened(handle) for name, handle in for_digests.items()}
        digests = _digests_of(received.items())
        dtypes, shapes, handles = map(list, zip(*weights.values(), strict=True))
        update = {
            "names": list(weights),
            "dtype_names": dtypes,
            "shapes": shapes,
            "ipc_handles": handles,
        }
        self.wake("weights")
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": update})
        self._llm.finish_weight_update()
        self._llm.reset_prefix_cache()
        del received
        return digests

    def sleep(self) -> None:
        try:
            self._llm.sleep(level=1)
        except AssertionError as error:
            # vLLM 0.32 looks at the free memory of the whole GPU after it has freed its own, and
            # fails if another process has allocated more meanwhile. All that it did not do then is
            # to note that it sleeps.
            if _OTHERS_ALLOCATED not in str(error):
                raise
            self._engine.model_executor.sleeping_tags |= _SLEEP_TAGS
        self._asleep = set(_SLEEP_TAGS)

    def wake(self, *tags: str) -> None:
        """Wake up those of the tags that are asleep, in this order."""
        for tag in tags:
            if tag in self._asleep:
                self._llm.wake_up(tags=[tag])
                self._asleep.remove(tag)


def _reload(worker: Any, file: str) -> PlainDigests:
    weights = load_file(file)
    digests = _digests_of(weights.items())
    worker.model_runner.reload_weights(weights_iterator=iter(weights.items()))
    head = getattr(worker.model_runner.get_model(), "lm_head", None)
    if head is not None:
        # On a CPU it has a packed copy of its weight, which vLLM 0.32 keeps if the weight is tied.
        head.quant_method.process_weights_after_loading(head)
    return digests


def _opened(handle: Handle) -> torch.Tensor:
    """The tensor in the GPU memory of a handle, as vLLM opens it."""
    (arguments,) = map(list, handle.values())
    arguments[6] = torch.cuda.current_device()  # the index of the GPU may differ in the sender
    tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return tensor


def _digests_of(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> PlainDigests:
    """The digests of tensors as plain data, because the classes of this process are not those of
    the engine."""
    digests = _load_digests().digests_of(named_tensors)
    return {name: tuple(digest) for name, digest in digests.items()}


@functools.cache
def _load_digests() -> ModuleType:
    """rolepool's module `digests`, which needs nothing else of rolepool."""
    package = Path(__file__).parents[1]
    file = package / "weights" / "digests.py"
    spec = importlib.util.spec_from_file_location("rolepool_digests", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _end_with(fd: int) -> None:
    """End this process when the engine's end of the socket closes."""
    hang_up = select.poll()
    hang_up.register(fd, select.POLLHUP)
    hang_up.poll()
    os._exit(0)


def main() -> None:
    fd = int(sys.argv[1])
    # vLLM may take minutes to start, and would hold the GPU's memory for an engine that has gone.
    threading.Thread(target=_end_with, args=(fd,), daemon=True).start()
    connection: Any = Connection(fd)
    server = Server()
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:  # the engine has ended
            os._exit(0)
        try:
            call = getattr(server, name)
            answer = call(*arguments)
            connection.send((answer, None))
        except Exception as error:
            details = "".join(traceback.format_exception(error))
            if name == "start":
                sys.stderr.write(details)
            summary = " ".join(f"{type(error).__name__}: {error}".split())
            connection.send((None, (summary[:_LONGEST_SUMMARY], details)))


if __name__ == "__main__":
    main()
