"""Forward passes over prompt-and-response rows: log-probs and entropies, values, scores.

Owns which positions of a row mean what. A row is a left-padded prompt and a right-padded response; what is asked of a
model is always about response tokens. Packed and padded passes give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from rolepool.algorithm import entropy_from_logits, logprobs_from_logits

Batch = Mapping[str, Tensor]
"""input_ids, attention_mask and position_ids [rows, prompt + response]; responses [rows, response]."""


class TokenScores(NamedTuple):
    """Log-probs and, where asked for, entropies of response tokens [rows, response]; zero after the response's end."""

    log_probs: Tensor
    entropies: Tensor | None


def response_log_probs(
    model: nn.Module, batch: Batch, *, temperature: float, packed: bool, with_entropy: bool = False
) -> TokenScores:
    """Log-probs of the response tokens under the distribution that was sampled from, softmax(logits / temperature)."""
    labels, present = batch["responses"], _response_mask(batch)
    if packed:
        logits = _packed_logits(model, batch, _packed_index(batch)) / temperature
        log_probs = logprobs_from_logits(logits, labels[present])
        entropies = entropy_from_logits(logits) if with_entropy else None
        return TokenScores(_spread(log_probs, present), None if entropies is None else _spread(entropies, present))
    length = labels.shape[1]
    logits = model(**_padded_inputs(batch), logits_to_keep=length + 1).logits[:, :-1] / temperature
    log_probs = logprobs_from_logits(logits, labels) * present
    return TokenScores(log_probs, entropy_from_logits(logits) * present if with_entropy else None)


def response_values(model: nn.Module, batch: Batch, *, packed: bool) -> Tensor:
    """The value of the state before each response token [rows, response]; zero after the response's end."""
    present = _response_mask(batch)
    if packed:
        of_tokens: Tensor = model(**_packed_inputs(batch)).logits[0, :, 0]
        return _spread(of_tokens[_packed_index(batch)], present)
    length = present.shape[1]
    values: Tensor = model(**_padded_inputs(batch)).logits[:, -length - 1 : -1, 0]
    return values * present


def _response_mask(batch: Batch) -> Tensor:
    """Which response tokens are there: up to and with the end token."""
    return batch["attention_mask"][:, -batch["responses"].shape[1] :].bool()


def _padded_inputs(batch: Batch) -> dict[str, object]:
    names = ("input_ids", "attention_mask", "position_ids")
    return {**{name: batch[name] for name in names}, "use_cache": False}


def _packed_inputs(batch: Batch) -> dict[str, object]:
    """All real tokens in one row; positions start anew with every sequence, which is how the model tells them apart."""
    real = batch["attention_mask"].bool()
    return {
        "input_ids": batch["input_ids"][real].unsqueeze(0),
        "position_ids": batch["position_ids"][real].unsqueeze(0),
        "use_cache": False,
    }


def _packed_index(batch: Batch) -> Tensor:
    """For every response token that is there, the place in the packed row of the token before it."""
    real = batch["attention_mask"].long()
    place = real.flatten().cumsum(0).reshape(real.shape) - 1
    length = batch["responses"].shape[1]
    return place[:, -length:][_response_mask(batch)] - 1


def _packed_logits(model: nn.Module, batch: Batch, index: Tensor) -> Tensor:
    logits: Tensor = model(**_packed_inputs(batch), logits_to_keep=index).logits[0]
    return logits


def _spread(values: Tensor, present: Tensor) -> Tensor:
    """Values of the tokens that are there, back at their places; zero elsewhere."""
    spread = values.new_zeros(present.shape)
    return spread.masked_scatter(present, values)
