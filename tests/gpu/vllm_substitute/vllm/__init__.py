"""A substitute for the few names of vLLM 0.32 that `rolepool.rollout.vllm_process` uses, for GPU machines without vLLM.

It generates with the transformers engine. New weights come as handles of GPU memory, which it opens as vLLM does. It
frees the memory of its weights while it sleeps, and fails if calls come in an order that vLLM does not allow.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import AutoModelForCausalLM

from rolepool.rollout.engine import Request, Sampling
from rolepool.rollout.transformers_engine import TransformersEngine

SamplingParams = SimpleNamespace


class LLM:
    def __init__(self, model: str, dtype: str, weight_transfer_config: dict[str, str], **arguments: Any) -> None:
        assert weight_transfer_config == {"backend": "ipc"} and arguments["distributed_executor_backend"] == "uni"
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).cuda()
        self._engine = TransformersEngine(loaded.requires_grad_(False), 64)
        self._asleep: set[str] = set()
        self._updating = self._is_ready_for_weights = False

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        assert request == {"init_info": {}}
        self._is_ready_for_weights = True

    def start_weight_update(self) -> None:
        assert self._is_ready_for_weights and not self._updating and "weights" not in self._asleep
        self._updating = True

    def update_weights(self, request: dict[str, Any]) -> None:
        assert self._updating
        update = request["update_info"]
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        parameters = dict(self._engine.model.named_parameters())
        entries = zip(*(update[key] for key in ("names", "dtype_names", "shapes", "ipc_handles")), strict=True)
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
        assert level == 1 and not self._asleep
        self._engine.model.cpu()
        torch.cuda.empty_cache()
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        (tag,) = tags
        assert tag == "weights" or "weights" not in self._asleep, "the weights wake up first"
        self._asleep.remove(tag)
        self._engine.model.cuda()

    def generate(self, inputs: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        assert not self._asleep and not self._updating and not use_tqdm
        outputs = []
        for prompt, one in zip(inputs, params, strict=True):
            greedy = one.temperature == 0
            top_p, top_k = (1.0, -1) if greedy else (one.top_p, one.top_k)
            stops = tuple(one.stop_token_ids)
            sampling = Sampling(one.temperature, top_p, top_k, not greedy, one.max_tokens, not stops, stops)
            (done,) = self._engine.generate([Request(prompt["prompt_token_ids"], one.seed)], sampling)
            pairs = zip(done.token_ids.tolist(), done.log_probs.tolist(), strict=True)
            log_probs = [{token: SimpleNamespace(logprob=log_prob)} for token, log_prob in pairs]
            outputs.append(
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=done.token_ids.tolist(), logprobs=log_probs)])
            )
        return outputs
