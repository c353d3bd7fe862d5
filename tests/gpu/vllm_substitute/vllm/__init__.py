"""A substitute for the few names of vLLM 0.32 that `rolepool.rollout.vllm_process` uses, for
machines without vLLM.

It generates with the transformers engine. On a GPU, new weights come as handles of GPU memory,
which it opens as vLLM does; on a CPU they come as a file. It frees the memory of its weights while
it sleeps, and fails if calls come in an order that vLLM does not allow.

Variables make its start differ: it waits until a file exists (VLLM_SUBSTITUTE_WAITS_FOR), or fails
with a text (VLLM_SUBSTITUTE_FAILS). With VLLM_SUBSTITUTE_OTHERS_ALLOCATE, it falls asleep as vLLM
does if another process allocates memory meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import AutoModelForCausalLM

from rolepool.rollout.engine import Request, Sampling
from rolepool.rollout.transformers_engine import TransformersEngine

SamplingParams = SimpleNamespace


MOST_WAIT_S = 120.0


class LLM:
    def __init__(
        self,
        model: str,
        dtype: str,
        weight_transfer_config: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        assert weight_transfer_config in (None, {"backend": "ipc"})
        assert arguments["distributed_executor_backend"] == "uni"
        _start_slowly_or_fail()
        self._device = "cpu" if weight_transfer_config is None else "cuda"
        self.model_executor = SimpleNamespace(sleeping_tags=set())
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        loaded = loaded.to(self._device).requires_grad_(False)
        self._engine = TransformersEngine(loaded, 64)
        self._requests: list[tuple[str, list[int], Any]] = []
        self._updating = self._is_ready_for_weights = False

    def collective_rpc(self, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """Call a function with the worker, which is this object too. Returns the results of all
        workers."""
        return [function(SimpleNamespace(model_runner=self), *args)]

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert "weights" not in self.model_executor.sleeping_tags
        parameters = dict(self._engine.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights_iterator:
                parameters.pop(name).copy_(weight)
        assert not parameters, f"missing: {list(parameters)}"

    def get_model(self) -> Any:
        return SimpleNamespace()  # without the packed head of vLLM's models on a CPU

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        assert request == {"init_info": {}}
        self._is_ready_for_weights = True

    def start_weight_update(self) -> None:
        assert self._is_ready_for_weights and not self._updating
        assert "weights" not in self.model_executor.sleeping_tags
        self._updating = True

    def update_weights(self, request: dict[str, Any]) -> None:
        assert self._updating
        update = request["update_info"]
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        parameters = dict(self._engine.model.named_parameters())
        entries = zip(
            *(update[key] for key in ("names", "dtype_names", "shapes", "ipc_handles")), strict=True
        )
        with torch.no_grad():
            for name, dtype, shape, handle in entries:
                arguments = list(handle[uuid])
                arguments[6] = 0  # the device
                weight = rebuild_cuda_tensor(*arguments)
                assert str(weight.dtype) == f"torch.{dtype}" and list(weight.shape) == shape
                parameters.pop(name).copy_(weight)
        assert not parameters, f"missing: {list(parameters)}"
        torch.cuda.synchronize()

    def finish_weight_update(self) -> None:
        assert self._updating
        self._updating = False

    def reset_prefix_cache(self) -> None:
        assert not self._updating

    def sleep(self, level: int) -> None:
        assert level == 1 and not self.model_executor.sleeping_tags
        self._engine.model.cpu()
        if self._device == "cuda":
            torch.cuda.empty_cache()
        assert "VLLM_SUBSTITUTE_OTHERS_ALLOCATE" not in os.environ, (
            "Memory usage increased after sleeping."
        )
        self.model_executor.sleeping_tags = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        (tag,) = tags
        asleep = self.model_executor.sleeping_tags
        if tag not in asleep:
            return  # vLLM writes a warning
        assert tag == "weights" or "weights" not in asleep, "the weights wake up first"
        asleep.remove(tag)
        self._engine.model.to(self._device)

    @property
    def llm_engine(self) -> LLM:
        return self

    def add_request(self, number: str, prompt: dict[str, list[int]], params: Any) -> None:
        self._requests.append((number, prompt["prompt_token_ids"], params))

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def abort_request(self, numbers: list[str]) -> None:
        self._requests = [request for request in self._requests if request[0] not in numbers]

    def step(self) -> list[Any]:
        """Generate the first request that waits."""
        assert not self.model_executor.sleeping_tags and not self._updating
        number, prompt, one = self._requests.pop(0)
        greedy, stops = one.temperature == 0, tuple(one.stop_token_ids)
        top_p, top_k = (1.0, -1) if greedy else (one.top_p, one.top_k)
        sampling = Sampling(
            one.temperature, top_p, top_k, not greedy, one.max_tokens, not stops, stops
        )
        (done,) = self._engine.generate([Request(prompt, one.seed)], sampling)
        tokens = done.token_ids.tolist()
        pairs = zip(tokens, done.log_probs.tolist(), strict=True)
        log_probs = [{token: SimpleNamespace(logprob=log_prob)} for token, log_prob in pairs]
        output = SimpleNamespace(token_ids=tokens, logprobs=log_probs)
        return [SimpleNamespace(request_id=number, finished=True, outputs=[output])]


def _start_slowly_or_fail() -> None:
    reason = os.environ.get("VLLM_SUBSTITUTE_FAILS")
    if reason is not None:
        raise ValueError(reason)
    signal = os.environ.get("VLLM_SUBSTITUTE_WAITS_FOR")
    deadline = time.monotonic() + MOST_WAIT_S
    while signal is not None and not Path(signal).exists():
        assert time.monotonic() < deadline, f"{signal} did not appear within {MOST_WAIT_S:g} s"
        time.sleep(0.05)
