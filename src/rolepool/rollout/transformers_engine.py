"""The transformers rollout engine: any causal language model that transformers can load, with its
own forward pass.

A batch of left-padded rows is decoded until all have ended; rows that have ended leave it when half
of them have. It is slower than the native engine and knows every architecture. Owns this loop.
Tokens are chosen as in the native engine.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.errors import ConfigError
from rolepool.protocol.part_times import part, work_of
from rolepool.protocol.worker import WorkerContext
from rolepool.rollout.engine import Completion, Request, Sampling, StreamedEngine
from rolepool.rollout.sampling import choose, log_prob_dtype, seed_streams
from rolepool.rollout.tensor_parallel import HfModule


def transformers_engine(
    config: Config,
    context: WorkerContext,
    load_model: Callable[[], nn.Module],
    shared_model: nn.Module | None,
) -> "TransformersEngine":
    """The engine of one rank, with the weights of the shared model, or with a model of its own."""
    max_num_seqs = config.actor_rollout_ref.rollout.max_num_seqs
    if shared_model is None:
        own_model = load_model().requires_grad_(False).to(context.device)
        return TransformersEngine(own_model, max_num_seqs)
    # Modules of its own with the same tensors, because the trainer's modules may only run packed
    # rows.
    tensors = chain(shared_model.parameters(), shared_model.buffers())
    not_copied = {id(tensor): tensor for tensor in tensors}
    model: HfModule = copy.deepcopy(shared_model, not_copied)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return TransformersEngine(model, max_num_seqs, shared_weights=True)


class TransformersEngine(StreamedEngine):
    """Generates with `model`, a causal language model of transformers, at most `max_num_seqs`
    sequences at a time."""

    def __init__(
        self,
        model: HfModule,
        max_num_seqs: int,
        shared_weights: bool = False,
    ) -> None:
        super().__init__(model.eval())
        self.shared_weights = shared_weights
        self.max_num_seqs = max_num_seqs
        self._accepted = inspect.signature(model.forward).parameters
        """The arguments that the model knows."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.raise_if_not_ready()
        # Prompts of similar lengths are computed together, because shorter ones are padded.
        num_requests = len(requests)
        lengths = [len(request.token_ids) for request in requests]
        order = sorted(range(num_requests), key=lengths.__getitem__)
        completions: dict[int, Completion] = {}
        with torch.inference_mode():
            for start in range(0, num_requests, self.max_num_seqs):
                indices = order[start : start + self.max_num_seqs]
                batch = [requests[index] for index in indices]
                responses = self._respond(batch, sampling)
                completions.update(zip(indices, responses, strict=True))
        return [completions[index] for index in range(num_requests)]

    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Complete requests as one batch."""
        device = next(self.model.parameters()).device
        stop_ids: Sequence[int] = ()
        if not sampling.ignore_eos:
            stop_ids = sampling.stop_token_ids
        stops = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        limits = [request.num_new(sampling) for request in requests]
        limits_b = torch.tensor(limits).to(device)
        seeds = [request.seed for request in requests]
        streams_b = seed_streams(seeds).to(device)
        size_bn = (len(requests), max(limits))
        tokens_bn = torch.zeros(size_bn, dtype=torch.int64, device=device)
        log_probs_bn = torch.zeros(size_bn, dtype=log_prob_dtype(self.model.dtype), device=device)
        num_new_b = torch.zeros_like(limits_b)

        inputs = _left_padded(requests, device)
        cache = None
        # The rows of the results that the rows of the batch are. Some of them may have ended.
        rows = torch.arange(len(requests), device=device)
        is_running = torch.ones_like(rows, dtype=torch.bool)
        lengths = [len(request.token_ids) for request in requests]
        work = ("prefill", *work_of(lengths))
        for step in range(tokens_bn.shape[1]):
            with part(*work):
                logits_bv, cache = self._forward(inputs, cache)
                token_b, log_prob_b = choose(
                    logits_bv,
                    streams_b=streams_b[rows],
                    steps_b=torch.full_like(rows, step),
                    sampling=sampling,
                )
            running = rows[is_running]
            tokens_bn[running, step] = token_b[is_running]
            log_probs_bn[running, step] = log_prob_b[is_running]
            num_new_b[running] += 1

            has_stopped = torch.isin(token_b, stops)
            has_room = limits_b[rows] > step + 1
            is_running = is_running & ~has_stopped & has_room
            num_running = int(is_running.sum())
            if num_running == 0:
                break
            inputs = _next_inputs(inputs, token_b)
            num_columns = inputs["attention_mask"].shape[1]
            work = ("decode", num_running, num_running * num_columns)
            half_has_ended = 2 * num_running <= len(rows)
            if half_has_ended and _can_drop_rows(cache):
                cache.batch_select_indices(is_running)
                for name, tensor in inputs.items():
                    inputs[name] = tensor[is_running]
                rows = rows[is_running]
                is_running = is_running[is_running]
        all_tokens = tokens_bn.cpu().numpy()
        all_log_probs = log_probs_bn.cpu().numpy()
        nums_new = num_new_b.tolist()
        completions: list[Completion] = []
        results = zip(all_tokens, all_log_probs, nums_new, strict=True)
        for tokens, log_probs, num_new in results:
            completion = self.completion(
                tokens[:num_new],
                log_probs[:num_new],
                stop_ids,
            )
            completions.append(completion)
        return completions

    def _forward(self, inputs: dict[str, Tensor], cache: Any) -> tuple[Tensor, Any]:
        """Logits of the last token of each row, and the cache. A model gets only the arguments that
        it knows."""
        known: dict[str, Any] = {}
        for name, value in {"logits_to_keep": 1, **inputs}.items():
            if name in self._accepted:
                known[name] = value
        outputs = self.model(past_key_values=cache, use_cache=True, **known)
        if outputs.get("past_key_values") is None:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name=transformers: {type(self.model).__name__} returns "
                "no key-value cache; choose another model"
            )
        return outputs.logits[:, -1], outputs.past_key_values


def _can_drop_rows(cache: Any) -> bool:
    """Whether rows that have ended can be removed from the cache. Not every kind of layer can."""
    return all(hasattr(layer, "batch_select_indices") for layer in cache.layers)


def _left_padded(requests: Sequence[Request], device: torch.device) -> dict[str, Tensor]:
    """A model's inputs: all prompts, each padded on the left to the longest."""
    lengths = [len(request.token_ids) for request in requests]
    lengths_b = torch.tensor(lengths)
    longest = int(lengths_b.max())
    num_padding_b1 = longest - lengths_b[:, None]
    mask_bt = torch.arange(longest) >= num_padding_b1
    ids_bt = torch.zeros(mask_bt.shape, dtype=torch.int64)
    for row, request in enumerate(requests):
        is_prompt = mask_bt[row]
        ids_bt[row, is_prompt] = torch.as_tensor(request.token_ids)
    num_tokens_bt = mask_bt.cumsum(dim=1)
    positions_bt = (num_tokens_bt - 1).clamp(min=0)
    return {
        "input_ids": ids_bt.to(device),
        "attention_mask": mask_bt.long().to(device),
        "position_ids": positions_bt.to(device),
    }


def _next_inputs(inputs: dict[str, Tensor], token_b: Tensor) -> dict[str, Tensor]:
    """The inputs of the next step: one token of each row."""
    mask_bt = inputs["attention_mask"]
    ones_b1 = mask_bt.new_ones(len(mask_bt), 1)
    last_positions_b1 = inputs["position_ids"][:, -1:]
    return {
        "input_ids": token_b[:, None],
        "attention_mask": torch.cat((mask_bt, ones_b1), dim=1),
        "position_ids": last_positions_b1 + 1,
    }
