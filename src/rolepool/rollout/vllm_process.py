"""vLLM in a process of its own, which the vllm engine starts with the Python of vLLM's environment.

    python -P vllm_process.py FD

Reads calls from the socket FD and answers each, until the socket closes. Owns what vLLM is asked to do. That
environment does not have rolepool, so this file imports nothing from it, and all arguments are plain data.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from safetensors.torch import load_file
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # is in the other environment


class Server:
    """The calls that can be made."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._llm, self._asleep = LLM(**arguments), set[str]()

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
            os._exit(0)
        try:
            answer = (Server if name == "start" else getattr(server, name))(*arguments)
            server, answer = (answer, None) if name == "start" else (server, answer)
            connection.send((answer, None))
        except Exception as error:
            connection.send((None, "".join(traceback.format_exception(error))))


if __name__ == "__main__":
    main()
