"""Forward passes over prompt-and-response rows: log-probs and entropies, values, scores.

Owns which positions of a row mean what. A row is a left-padded prompt and a right-padded response; what is asked of a
model is always about response tokens. Packed and padded passes give the same numbers.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rolepool.algorithm import LinearLogProbs
from rolepool.algorithm.log_probs import precise
from rolepool.models.attention import packed_arguments
from rolepool.models.compiling import compiled_for_weight
from rolepool.models.packing import Batch, Packing, on_device
from rolepool.placement.memory import LOGITS_AT_ONCE

TOKEN_SCORES = "token_scores"
"""The method that `add_token_scores` gives a model. Sharding gathers weights for it as it does for `forward`."""
LOGITS_AT_ONCE_UNCOMPILED = 2**25
"""Here each step of the arithmetic makes a tensor of its own."""


class TokenScores(NamedTuple):
    """Log-probs and entropies of response tokens [rows, response]; zero after the response's end."""

    log_probs: Tensor
    entropies: Tensor


def response_log_probs(model: nn.Module, batch: Batch, *, temperature: float, packed: bool) -> TokenScores:
    """Log-probs of the response tokens under the distribution that was sampled from, softmax(logits / temperature)."""
    labels, score = batch["responses"], getattr(model, TOKEN_SCORES)
    if packed:
        packing = Packing.of(batch["attention_mask"], labels.shape[1], labels.device)
        labels_t = labels.flatten()[packing.responses]
        scores = score(_packed_inputs(batch, packing), packing.before_responses, labels_t, temperature)
        return TokenScores(*(_spread(of_tokens, packing, labels) for of_tokens in scores))
    num_rows, length = labels.shape
    width = batch["attention_mask"].shape[1]
    row_starts = width * torch.arange(num_rows, device=labels.device)[:, None]
    before = row_starts + torch.arange(width - length - 1, width - 1, device=labels.device)
    scores = score(_padded_inputs(batch), before.flatten(), labels.flatten(), temperature)
    present = _response_mask(batch)
    return TokenScores(*(of_tokens.view(labels.shape) * present for of_tokens in scores))


def response_values(model: nn.Module, batch: Batch, *, packed: bool) -> Tensor:
    """The value of the state before each response token [rows, response]; zero after the response's end."""
    length = batch["responses"].shape[1]
    if packed:
        packing = Packing.of(batch["attention_mask"], length, batch["responses"].device)
        of_tokens: Tensor = model(**_packed_inputs(batch, packing)).logits[0, :, 0]
        return _spread(precise(of_tokens[packing.before_responses]), packing, batch["responses"])
    values: Tensor = model(**_padded_inputs(batch)).logits[:, -length - 1 : -1, 0]
    return precise(values) * _response_mask(batch)


def add_token_scores(model: nn.Module) -> nn.Module:
    """Give a language model the method `token_scores`, which goes from the trunk to scores without all the logits."""
    model.token_scores = MethodType(_token_scores, model)  # type: ignore[assignment]
    return model


def _token_scores(
    model: Any, inputs: dict[str, object], places: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy, after the token at each place of the inputs, counted through all rows."""
    hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)[places]
    return _linear_log_probs(hidden.is_cuda)(hidden, model.get_output_embeddings().weight, labels, temperature)


@cache
def _linear_log_probs(on_gpu: bool) -> LinearLogProbs:
    return LinearLogProbs(LOGITS_AT_ONCE, compiled_for_weight) if on_gpu else LinearLogProbs(LOGITS_AT_ONCE_UNCOMPILED)


def _response_mask(batch: Batch) -> Tensor:
    """Which response tokens are there: up to and with the end token."""
    responses = batch["responses"]
    return on_device(batch["attention_mask"][:, -responses.shape[1] :].bool(), responses.device)


def _padded_inputs(batch: Batch) -> dict[str, object]:
    input_ids = batch["input_ids"]
    return {
        "input_ids": input_ids,
        "attention_mask": on_device(batch["attention_mask"], input_ids.device),
        "position_ids": batch["position_ids"],
        "use_cache": False,
    }


def _packed_inputs(batch: Batch, packing: Packing) -> dict[str, object]:
    """All real tokens in one row; positions start anew with every sequence."""
    names = ("input_ids", "position_ids")
    rows = {name: batch[name].flatten()[packing.tokens].unsqueeze(0) for name in names}
    return {**rows, **packed_arguments(packing.starts, packing.longest), "use_cache": False}


def _spread(of_tokens: Tensor, packing: Packing, responses: Tensor) -> Tensor:
    """Values of the response tokens that are there, back at their places; zero elsewhere."""
    flat = of_tokens.new_zeros(responses.numel()).index_copy(0, packing.responses, of_tokens)
    return flat.view(responses.shape)
