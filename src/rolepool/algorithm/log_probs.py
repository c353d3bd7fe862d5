"""Log-probabilities and entropies from hidden states and the head, without all logits at once.

With a vocabulary of 150,000 the logits of a micro-batch take more memory than the rest. `LinearLogProbs` computes them
for some tokens at a time, reduces them to numbers per token, and recomputes them in the backward pass. Arithmetic
on 16-bit logits is in float32. Does not know models or masks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a faster version of a function."""


class LinearLogProbs:
    """log p(label) and the entropy of softmax(hidden @ weight.T / temperature), for each row of hidden.

    At most `max_logits` logits exist at a time, but at least those of one row. `compiled` is applied to the functions
    that compute with them; their second argument is the weight.
    """

    def __init__(self, max_logits: int, compiled: Compile = lambda function: function) -> None:
        self.max_logits = max_logits
        self.score, self.differentiate = compiled(_score), compiled(_differentiate)

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """hidden is [tokens, size], weight [vocabulary, size], labels [tokens]. Both results are [tokens], in float32
        if hidden has 16 bits."""
        return _Function.apply(hidden, weight, labels, temperature, self)  # type: ignore[no-any-return, no-untyped-call]

    def pieces(self, num_tokens: int, vocab_size: int) -> Iterator[slice]:
        """As few pieces as possible, of about the same size, because a small last piece would need its own kernels."""
        most = max(1, self.max_logits // vocab_size)
        size = -(-num_tokens // max(1, -(-num_tokens // most)))
        for start in range(0, num_tokens, max(1, size)):
            yield slice(start, start + size)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, how: LinearLogProbs
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_sums, log_probs, entropies = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        for piece in how.pieces(len(hidden), len(weight)):
            scores = how.score(hidden[piece], weight, labels[piece], temperature)
            log_sums[piece], log_probs[piece], entropies[piece] = scores
        ctx.save_for_backward(hidden, weight, labels, log_sums, entropies)
        ctx.temperature, ctx.how = temperature, how
        ctx.set_materialize_grads(False)  # the entropies' gradient is half the work and seldom needed
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, log_sums, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = grads
        of_log_probs = torch.zeros_like(log_sums) if of_log_probs is None else of_log_probs
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in float32, because in 16 bits the last of many pieces would be lost.
        grad_weight = torch.zeros_like(weight, dtype=log_sums.dtype) if ctx.needs_input_grad[1] else None
        for piece in ctx.how.pieces(len(hidden), len(weight)):
            per_token = (tensor[piece] for tensor in (labels, log_sums, entropies, of_log_probs))
            of_entropies_here = None if of_entropies is None else of_entropies[piece]
            grad_logits = ctx.how.differentiate(hidden[piece], weight, ctx.temperature, *per_token, of_entropies_here)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[piece])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[piece])
            del grad_logits  # before the next ones are computed
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _score(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each token, with the largest logit m and s = sum_v e^(z_v - m): m + log s, log p(label) and the entropy.

    log p(label) = z_label - m - log s, and H = log s - sum_v e^(z_v - m) (z_v - m) / s; a logit of -inf adds 0.
    """
    logits = hidden @ weight.T
    z = precise(logits) * (1 / temperature)
    largest = z.amax(dim=-1)
    below = z - largest.unsqueeze(-1)
    weights = below.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    log_probs = precise(chosen) * (1 / temperature) - largest - log_total
    weighted = torch.where(weights == 0, 0, weights * below).sum(dim=-1)
    return largest + log_total, log_probs, log_total - weighted / total


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
    """Gradients of the logits: d log p(label) / dz_v = [v = label] - p_v and dH / dz_v = -p_v (log p_v + H)."""
    logits = hidden @ weight.T
    log_p = precise(logits) * (1 / temperature) - log_sum.unsqueeze(-1)
    p = log_p.exp()
    places = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    is_label = places == labels.int().unsqueeze(-1)
    slope = of_log_probs.unsqueeze(-1)
    grad = torch.where(is_label, slope, 0) - p * slope
    used = slope != 0
    if of_entropies is not None:
        surprise = torch.where(p == 0, 0, log_p + entropies.unsqueeze(-1))
        grad = grad - p * surprise * of_entropies.unsqueeze(-1)
        used = used | (of_entropies.unsqueeze(-1) != 0)
    # NaN logits of a masked token must not reach a gradient.
    return torch.where(used, grad * (1 / temperature), 0).to(logits.dtype)


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other; a GPU adds the product of 16-bit matrices in float32."""
    if total.is_cuda and one.dtype != total.dtype:
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
    else:
        total += one @ other


def precise(numbers: Tensor) -> Tensor:
    """In at least float32, because sums in 16 bits over a vocabulary or a row would accumulate rounding errors."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))
