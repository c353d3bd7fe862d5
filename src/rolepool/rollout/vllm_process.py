"""vLLM in a process of its own, which the vllm engine starts with the Python of vLLM's environment.

    python -P vllm_process.py FD

Reads calls from the socket FD and answers each, until the socket closes. Owns what vLLM is asked to do. That
environment does not have rolepool, so this file imports nothing from it, and all arguments are plain data.
"""

import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from safetensors.torch import load_file
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # is in the other environment
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher  # type: ignore[import-not-found]


class Server:
    """The calls that can be made."""

    def __init__(self, arguments: dict[str, Any], rank: int, size: int, port: int) -> None:
        class OneOfGroup(ExecutorWithExternalLauncher):  # type: ignore[misc]  # its base is in the other environment
            """Runs one rank. All ranks of the group get the same calls."""

            def _distributed_args(self) -> tuple[str, int, int]:
                return f"tcp://127.0.0.1:{port}", rank, 0

        executor: Any = OneOfGroup if size > 1 else "uni"
        self._llm = LLM(**arguments, tensor_parallel_size=size, distributed_executor_backend=executor)
        self._asleep = set[str]()
        if "weight_transfer_config" in arguments:
            self._llm.init_weight_transfer_engine({"init_info": {}})

    def generate(self, prompts: Sequence[list[int]], settings: Sequence[dict[str, Any]]) -> list[Any]:
        """Tokens and their log-probs for each prompt."""
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [SamplingParams(logprobs=0, detokenize=False, ignore_eos=True, **one) for one in settings]
        answers = []
        for output in self._llm.generate(inputs, params, use_tqdm=False):
            completion: Any = output.outputs[0]
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            answers.append((list(completion.token_ids), [entry[token].logprob for token, entry in pairs]))
        return answers

    def update(self, file: str) -> None:
        """Take all weights from a safetensors file, and drop what was computed with the old ones."""
        self.wake("weights")
        self._llm.collective_rpc(_reload, args=(file,))
        self._llm.reset_prefix_cache()

    def update_by_handles(self, weights: dict[str, tuple[str, list[int], dict[str, Any]]]) -> None:
        """The same with the dtype, the shape and the memory of each weight, for vLLM's interface for CUDA IPC."""
        dtypes, shapes, handles = map(list, zip(*weights.values(), strict=True))
        update = {"names": list(weights), "dtype_names": dtypes, "shapes": shapes, "ipc_handles": handles}
        self.wake("weights")
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": update})
        self._llm.finish_weight_update()
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        self._llm.sleep(level=1)
        self._asleep = {"weights", "kv_cache"}

    def wake(self, *tags: str) -> None:
        """Wake up those of the tags that are asleep, in this order."""
        for tag in tags:
            if tag in self._asleep:
                self._llm.wake_up(tags=[tag])
                self._asleep.remove(tag)


def _reload(worker: Any, file: str) -> None:
    worker.model_runner.reload_weights(weights_iterator=iter(load_file(file).items()))
    head = getattr(worker.model_runner.get_model(), "lm_head", None)
    if head is not None:  # on a CPU it has a packed copy of its weight, which vLLM 0.32 keeps if the weight is tied
        head.quant_method.process_weights_after_loading(head)


def main() -> None:
    connection: Any = Connection(int(sys.argv[1]))
    server: Any = None
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:  # the engine has ended
            return
        try:
            answer = (Server if name == "start" else getattr(server, name))(*arguments)
            server, answer = (answer, None) if name == "start" else (server, answer)
            connection.send((answer, None))
        except Exception as error:
            connection.send((None, "".join(traceback.format_exception(error))))


if __name__ == "__main__":
    main()
