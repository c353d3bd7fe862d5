"""Forward passes over prompt-and-response rows: log-probs and entropies, values.

A row is a prompt and a response; what is asked of a model is always about response tokens. Packed and padded passes
give the same numbers.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from rolepool.algorithm.log_probs import LinearLogProbs, precise
from rolepool.models.compiling import compiled_for_weight
from rolepool.models.packing import TokenRows
from rolepool.placement.estimate import LOGITS_AT_ONCE

TOKEN_SCORES = "token_scores"
"""The method that `add_token_scores` gives a model. Sharding gathers weights for it as it does for `forward`."""
LOGITS_AT_ONCE_UNCOMPILED = 2**25
"""Here each step of the arithmetic makes a tensor of its own."""


class TokenScores(NamedTuple):
    """Log-probs and entropies of the response tokens of all rows, flat."""

    log_probs: Tensor
    entropies: Tensor


def response_log_probs(model: nn.Module, rows: TokenRows, *, temperature: float, packed: bool) -> TokenScores:
    """Log-probs of the response tokens under the distribution that was sampled from, softmax(logits / temperature)."""
    inputs, places = rows.packed_inputs() if packed else rows.padded_inputs()
    scores = getattr(model, TOKEN_SCORES)({**inputs, "use_cache": False}, places, rows.responses, temperature)
    return TokenScores(*scores)


def response_values(model: nn.Module, rows: TokenRows, *, packed: bool) -> Tensor:
    """The value of the state before each response token, flat."""
    inputs, places = rows.packed_inputs() if packed else rows.padded_inputs()
    values: Tensor = model(**inputs, use_cache=False).logits[..., 0]
    return precise(values.flatten()[places])


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
