"""vLLM in a process of its own, which the vllm engine starts with the Python of vLLM's environment.

    python -P vllm_process.py FD

Reads calls from the socket FD and answers each, until the socket closes. Owns what vLLM is asked to do. That
environment does not have rolepool, so this file imports nothing from it, and all arguments are plain data.
"""

import sys
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from safetensors import safe_open
from vllm import LLM, SamplingParams

GPU_TAGS = ("weights", "kv_cache")
"""What sleeps on a GPU, in the order in which it wakes up."""


class Server:
    """The calls that can be made."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._llm, self._asleep = LLM(**arguments), set[str]()

    def generate(self, prompts: Sequence[Sequence[int]], settings: Sequence[dict[str, Any]]) -> list[Any]:
        """Tokens and their log-probs for each prompt."""
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        more = {"logprobs": 0, "detokenize": False, "ignore_eos": True}  # stop tokens are given with each request
        params = [SamplingParams(**{**more, **one}) for one in settings]
        answers = []
        for output in self._llm.generate(inputs, params, use_tqdm=False):
            completion: Any = output.outputs[0]
            log_probs = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs)]
            answers.append((list(completion.token_ids), log_probs))
        return answers

    def update(self, files: Sequence[str]) -> None:
        """Take all weights from safetensors files, and drop what was computed with the old ones."""
        self._wake("weights")
        self._llm.collective_rpc(_reload, args=(files,))
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        self._llm.sleep(level=1)
        self._asleep = set(GPU_TAGS)

    def wake(self) -> None:
        for tag in GPU_TAGS:
            self._wake(tag)

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)


def _reload(worker: Any, files: Sequence[str]) -> None:
    def tensors() -> Iterator[tuple[str, Any]]:
        for file in files:
            with safe_open(file, "pt") as opened:
                yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118

    worker.model_runner.reload_weights(weights_iterator=tensors())
    head = getattr(worker.model_runner.get_model(), "lm_head", None)
    if head is not None:  # on a CPU it has a packed copy of its weight, which vLLM 0.32 keeps if the weight is tied
        head.quant_method.process_weights_after_loading(head)


def main() -> None:
    connection: Any = Connection(int(sys.argv[1]))
    server: Server | None = None
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:  # the engine has ended
            return
        try:
            if server is None:
                server, answer = Server(*arguments), None
            else:
                answer = getattr(server, name)(*arguments)
            connection.send((answer, None))
        except Exception as error:
            connection.send((None, "".join(traceback.format_exception(error))))


if __name__ == "__main__":
    main()
