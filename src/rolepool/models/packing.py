"""Forward passes over prompt-and-response rows, packed or padded: log-probs, entropies and values
of response tokens.

Owns where each token of a row is, in the flat tokens and in padded tensors, and the attention that
Hugging Face models call for packed sequences. Places of tokens are computed in host memory from the
lengths of rows, so the host never waits for the device while it prepares a micro-batch. Packed and
padded passes give the same numbers.

With a vocabulary of 150,000 the logits of a micro-batch take more memory than the rest.
`LinearLogProbs` computes them for some tokens at a time, reduces them to numbers per token, and
recomputes them in the backward pass. Arithmetic on 16-bit logits is in float32.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rolepool.errors import RolepoolError
from rolepool.models.sharding import PACKED, TOKEN_SCORES, compiled_for_weight
from rolepool.placement.estimate import LOGITS_AT_ONCE
from rolepool.protocol.batching import IS_PADDING_KEY
from rolepool.protocol.columns import (
    INPUT_IDS,
    LOSS_MASK,
    NUM_PROMPT_TOKENS,
    RESPONSE_MASK,
    Ragged,
    lengths_of,
    offsets_of,
    pad_ragged,
    ragged,
    ragged_parts,
    sampled_mask,
)

Inputs = dict[str, Any]
"""Arguments of a model's forward pass."""
LOGITS_AT_ONCE_UNCOMPILED = 2**25
"""Fewer than `LOGITS_AT_ONCE`, because without a compiler each step of the arithmetic allocates a
tensor."""

# Newer versions of torch need this if keys have fewer heads than queries; older versions do not
# have the argument.
_GROUPED: dict[str, Any] = {}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    _GROUPED["enable_gqa"] = True


def on_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Copy a tensor from host memory to the device, without waiting for what the device still has
    to do."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def kept_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """[rows, longest response]: the response tokens that count in losses, which are those that
    nobody has rejected."""
    mask = sampled_tokens(batch)
    if LOSS_MASK in batch:
        mask = mask & pad_ragged(batch[LOSS_MASK])
    return mask


def sampled_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """[rows, longest response]: the response tokens that were sampled; none of a row that pads the
    batch."""
    num_response = lengths_of(batch[INPUT_IDS]) - batch[NUM_PROMPT_TOKENS]
    mask = sampled_mask(batch.get(RESPONSE_MASK), num_response)
    if IS_PADDING_KEY not in batch:
        return mask
    return mask & ~batch[IS_PADDING_KEY][:, None]


class TokenRows:
    """The rows of a micro-batch: prompts and responses. Values for response tokens are flat: row
    after row."""

    def __init__(self, batch: Mapping[str, Tensor], device: str) -> None:
        """`batch` is in host memory. Only `ids` are copied to the device."""
        ids, offsets = ragged_parts(batch[INPUT_IDS])
        num_prompt = batch[NUM_PROMPT_TOKENS]
        num_rows = len(num_prompt)
        self.ids = on_device(ids, device)
        """All tokens, flat."""
        self.lengths = offsets.diff()
        """Number of tokens of each row."""
        self.num_response = self.lengths - num_prompt
        """Number of response tokens of each row."""
        self._batch = batch
        rows = torch.arange(num_rows)
        self._rows = torch.repeat_interleave(rows, self.lengths)
        """The row of each of all tokens."""
        starts = offsets[self._rows]
        self._positions = torch.arange(len(ids)) - starts
        """The place of each of all tokens in its row."""
        is_response = self._positions >= num_prompt[self._rows]
        self._places_of_responses = is_response.nonzero()[:, 0]

    @property
    def responses(self) -> Tensor:
        """The response tokens."""
        places = self._on_device(self._places_of_responses)
        return self.ids[places]

    @property
    def is_sampled(self) -> Tensor:
        """The response tokens that the policy sampled: [rows, longest response]."""
        mask = sampled_mask(self._batch.get(RESPONSE_MASK), self.num_response)
        return self._on_device(mask)

    def packed_inputs(self) -> tuple[Inputs, Tensor]:
        """A model's inputs with all tokens in one row, and the place in it of the token before each
        response token."""
        lengths = self.lengths[self.lengths > 0]
        offsets = offsets_of(lengths).int()
        starts = self._on_device(offsets)
        longest = int(lengths.max())
        inputs = {
            "input_ids": self.ids.unsqueeze(0),
            "position_ids": self._on_device(self._positions).unsqueeze(0),
            # Models pass these to attention: where sequences start (and the last one ends), and
            # the longest length.
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        places_before = self._places_of_responses - 1
        return inputs, self._on_device(places_before)

    def padded_inputs(self, pad_token_id: int = 0) -> tuple[Inputs, Tensor]:
        """A model's inputs with a row for each row of the micro-batch, padded on the right to the
        longest, and the place of the token before each response token, counted through all rows."""
        num_rows = len(self.lengths)
        width = int(self.lengths.max())
        num_places = num_rows * width
        places = self._rows * width + self._positions
        padding = self.ids.new_full((num_places,), pad_token_id)
        ids = padding.index_copy(0, self._on_device(places), self.ids)
        columns = torch.arange(width)
        is_real = columns < self.lengths[:, None]
        inputs = {
            "input_ids": ids.view(num_rows, width),
            "attention_mask": self._on_device(is_real.long()),
        }
        places_before = places[self._places_of_responses] - 1
        return inputs, self._on_device(places_before)

    def pad(self, of_responses: Tensor) -> Tensor:
        """Values of response tokens as [rows, longest response], with zeros after the end of each
        response."""
        num_rows = len(self.lengths)
        width = int(self.num_response.max())
        num_prompt = self.lengths - self.num_response
        positions_in_response = self._positions - num_prompt[self._rows]
        places_of_all = self._rows * width + positions_in_response
        places = self._on_device(places_of_all[self._places_of_responses])
        padding = of_responses.new_zeros(num_rows * width)
        flat = padding.index_copy(0, places, of_responses)
        return flat.view(num_rows, width)

    def ragged(self, of_responses: Tensor) -> Ragged:
        """Values of response tokens as a ragged column."""
        return ragged(of_responses, self._on_device(self.num_response))

    def _on_device(self, tensor: Tensor) -> Tensor:
        return on_device(tensor, self.ids.device)


TokenScores = tuple[Tensor, Tensor]
"""Log-probs and entropies of the response tokens of all rows, flat."""


def response_log_probs(
    model: nn.Module,
    rows: TokenRows,
    *,
    temperature: float,
    packed: bool,
) -> TokenScores:
    """Log-probs and entropies of response tokens under the distribution that was sampled from,
    softmax(logits / temperature)."""
    inputs, places = rows.packed_inputs() if packed else rows.padded_inputs()
    score: Callable[..., TokenScores] = getattr(model, TOKEN_SCORES)
    return score(
        {**inputs, "use_cache": False},
        places,
        rows.responses,
        temperature,
    )


def response_values(model: nn.Module, rows: TokenRows, *, packed: bool) -> Tensor:
    """The value of the state before each response token, flat."""
    inputs, places = rows.packed_inputs() if packed else rows.padded_inputs()
    values: Tensor = model(**inputs, use_cache=False).logits[..., 0]
    return precise(values.flatten()[places])


def add_token_scores(model: nn.Module, has_plain_head: bool = True) -> nn.Module:
    """Give a language model the method `token_scores`. It computes scores without all logits at
    once if logits are just the last hidden states times the weight of the head."""
    scores = _token_scores if has_plain_head else _scores_from_logits
    setattr(model, TOKEN_SCORES, MethodType(scores, model))
    return model


def _token_scores(
    model: Any,
    inputs: Inputs,
    places: Tensor,
    labels: Tensor,
    temperature: float,
) -> TokenScores:
    """Log-prob of each label and entropy, after the token at each place of the inputs, counted
    through all rows."""
    outputs = model.base_model(**inputs)
    hidden_of_all = outputs.last_hidden_state.flatten(0, 1)
    hidden = hidden_of_all[places]
    # Freed before the logits are computed.
    del outputs, hidden_of_all
    weight = model.get_output_embeddings().weight
    log_probs_of = _linear_log_probs(hidden.is_cuda)
    return log_probs_of(hidden, weight, labels, temperature)


def _scores_from_logits(
    model: Any,
    inputs: Inputs,
    places: Tensor,
    labels: Tensor,
    temperature: float,
) -> TokenScores:
    """Log-prob of each label and entropy, from the logits that the model returns for all tokens at
    once."""
    # The class's function, because the model's own `forward` may cast and gather weights, as is
    # done for this method.
    forward = type(model).forward
    logits_of_all = forward(model, **inputs).logits.flatten(0, 1)
    logits = precise(logits_of_all[places]) / temperature
    log_p = logits.log_softmax(dim=-1)
    chosen = log_p.gather(-1, labels.unsqueeze(-1))
    log_probs = chosen.squeeze(-1)
    # entr(p) is -p log p, and 0 for p = 0.
    entropies = torch.special.entr(log_p.exp()).sum(dim=-1)
    return log_probs, entropies


# Log-probs and entropies from hidden states and the head, without all logits at once


class LinearLogProbs:
    """log p(label) and the entropy of softmax(hidden @ weight.T / temperature), for each row of
    hidden.

    At most `max_logits` logits exist at a time, but at least those of one row. `compiled` is
    applied to the functions that compute with them; their second argument is the weight.
    """

    def __init__(
        self,
        max_logits: int,
        compiled: Callable[..., Any] = lambda function: function,
    ) -> None:
        self.max_logits = max_logits
        self.score = compiled(_score)
        self.differentiate = compiled(_differentiate)

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """hidden is [tokens, size], weight [vocabulary, size], labels [tokens]. Both results are
        [tokens], in float32 if hidden has 16 bits."""
        function: Callable[..., tuple[Tensor, Tensor]] = _Function.apply
        return function(hidden, weight, labels, temperature, self)

    def pieces(self, num_tokens: int, vocab_size: int) -> Iterator[slice]:
        """As few pieces as possible, of about the same size, because a small last piece would need
        its own kernels."""
        if num_tokens == 0:
            return
        most = max(1, self.max_logits // vocab_size)
        num_pieces = math.ceil(num_tokens / most)
        size = math.ceil(num_tokens / num_pieces)
        for start in range(0, num_tokens, size):
            yield slice(start, start + size)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        how: LinearLogProbs,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_sums = hidden.new_empty(len(hidden), dtype=dtype)
        log_probs = torch.empty_like(log_sums)
        entropies = torch.empty_like(log_sums)
        for piece in how.pieces(len(hidden), len(weight)):
            scores = how.score(
                hidden[piece],
                weight,
                labels[piece],
                temperature,
            )
            log_sums[piece], log_probs[piece], entropies[piece] = scores
        ctx.save_for_backward(hidden, weight, labels, log_sums, entropies)
        ctx.temperature = temperature
        ctx.how = how
        # The entropies' gradient is half the work and seldom needed.
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(
        ctx: Any,
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, log_sums, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = grads
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(log_sums)
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = None
        if needs_hidden:
            grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if needs_weight:
            # Summed in float32, because in 16 bits the last of many pieces would be lost.
            grad_weight = torch.zeros_like(weight, dtype=log_sums.dtype)
        for piece in ctx.how.pieces(len(hidden), len(weight)):
            # By position, because the second argument is the weight (see `compiled`).
            grad_logits = ctx.how.differentiate(
                hidden[piece],
                weight,
                ctx.temperature,
                labels[piece],
                log_sums[piece],
                entropies[piece],
                of_log_probs[piece],
                None if of_entropies is None else of_entropies[piece],
            )
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[piece])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[piece])
            del grad_logits  # before the next ones are computed
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        # The labels, the temperature and `how` have no gradients.
        return grad_hidden, grad_weight, None, None, None


def _score(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """For each token, with the largest logit m and s = sum_v e^(z_v - m): m + log s, log p(label)
    and the entropy.

    log p(label) = z_label - m - log s, and H = log s - sum_v e^(z_v - m) (z_v - m) / s; a logit of
    -inf adds 0.
    """
    logits = hidden @ weight.T
    factor = 1 / temperature
    z = precise(logits) * factor
    largest = z.amax(dim=-1)
    below = z - largest.unsqueeze(-1)
    weights = below.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    log_sum = largest + log_total

    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    chosen_z = precise(chosen) * factor
    log_probs = chosen_z - largest - log_total

    weighted = torch.where(weights == 0, 0, weights * below).sum(dim=-1)
    entropies = log_total - weighted / total
    return log_sum, log_probs, entropies


def _differentiate(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    labels: Tensor,
    log_sum: Tensor,
    entropies: Tensor,
    of_log_probs: Tensor,
    of_entropies: Tensor | None,
) -> Tensor:
    """Gradients of the logits: d log p(label) / dz_v = [v = label] - p_v and dH / dz_v = -p_v (log
    p_v + H)."""
    logits = hidden @ weight.T
    factor = 1 / temperature
    log_p = precise(logits) * factor - log_sum.unsqueeze(-1)
    p = log_p.exp()
    vocab_size = logits.shape[-1]
    places = torch.arange(vocab_size, device=logits.device, dtype=torch.int32)
    is_label = places == labels.int().unsqueeze(-1)
    slope = of_log_probs.unsqueeze(-1)
    grad = torch.where(is_label, slope, 0) - p * slope
    used = slope != 0
    if of_entropies is not None:
        slope_of_entropies = of_entropies.unsqueeze(-1)
        surprise = torch.where(p == 0, 0, log_p + entropies.unsqueeze(-1))
        grad = grad - p * surprise * slope_of_entropies
        used = used | (slope_of_entropies != 0)
    # NaN logits of a masked token must not reach a gradient.
    grad = torch.where(used, grad * factor, 0)
    return grad.to(logits.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; a GPU adds the product of 16-bit matrices in float32."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def precise(numbers: Tensor) -> Tensor:
    """In at least float32, because sums in 16 bits over a vocabulary or a row would accumulate
    rounding errors."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


@cache
def _linear_log_probs(on_gpu: bool) -> LinearLogProbs:
    if on_gpu:
        return LinearLogProbs(LOGITS_AT_ONCE, compiled_for_weight)
    return LinearLogProbs(LOGITS_AT_ONCE_UNCOMPILED)


# Attention within packed sequences


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention of [1, heads, tokens, head_dim] within each sequence; returns [1, tokens,
    heads, head_dim].

    With a window a token attends to that many tokens, including itself. A GPU has a kernel for
    packed sequences, which needs no mask and does not repeat keys and values. On a CPU sequences
    are padded.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        problem = f"{type(module).__name__} was not told where packed sequences start"
        raise RolepoolError(f"{problem}: write use_remove_padding=false")
    if query.device.type == "cuda":
        # Tokens before and after that a token attends to, except itself; -1 is all.
        window = (-1, 0)
        if sliding_window is not None:
            window = (sliding_window - 1, 0)
        # [tokens, heads, head_dim]
        output: Any = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=window,
            **_GROUPED,
        )
        return output.unsqueeze(0), None
    padded_output = _padded_attention(
        (query, key, value),
        scaling=scaling,
        window=sliding_window,
        starts=cu_seq_lens_q,
    )
    return padded_output, None


def _padded_attention(
    qkv: Sequence[Tensor],
    scaling: float | None,
    window: int | None,
    starts: Tensor,
) -> Tensor:
    """Attention within packed sequences on a CPU: one call for all sequences whose lengths are
    between two powers of two."""
    lengths = starts.diff()
    sizes = lengths.float().log2().ceil()
    outputs = []
    places = []
    for size in sizes.unique():
        is_here = sizes == size
        lengths_n = lengths[is_here]
        starts_n = starts[:-1][is_here]
        length = int(lengths_n.max())
        columns_l = torch.arange(length, device=starts.device)
        mask = None
        # Sequences are padded at their ends, so no real token attends to padding.
        real_nl = columns_l < lengths_n[:, None]
        places_nl = torch.where(real_nl, starts_n[:, None] + columns_l, 0)
        query_nhld, key_nhld, value_nhld = (_rows_at(states, places_nl) for states in qkv)
        if window is not None and window < length:
            ones_ll = torch.ones(length, length, dtype=torch.bool, device=starts.device)
            mask = ones_ll.tril().triu(1 - window)
        outputs_nhld = F.scaled_dot_product_attention(
            query_nhld,
            key_nhld,
            value_nhld,
            mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        outputs_nlhd = outputs_nhld.transpose(1, 2)
        outputs.append(outputs_nlhd[real_nl])
        places.append(places_nl[real_nl])
    order = torch.cat(places).argsort()
    ordered = torch.cat(outputs)[order]
    return ordered.unsqueeze(0)


def _rows_at(states: Tensor, places_nl: Tensor) -> Tensor:
    """The packed states [1, heads, tokens, head_dim] at these places, as [rows, heads, length,
    head_dim]."""
    flat = states[0].index_select(1, places_nl.flatten())
    rows: Tensor = flat.unflatten(1, places_nl.shape)
    return rows.transpose(0, 1)


# Hugging Face makes no mask for an attention of this name.
AttentionInterface.register(PACKED, packed_attention)
