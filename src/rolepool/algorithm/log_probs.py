"""Log-probabilities and entropies: from logits, or from hidden states and the head without all logits at once.

With a vocabulary of 150,000 the logits of a pass take more memory than the rest of it. `LinearLogProbs` makes them some
tokens at a time, turns them into numbers per token, and makes them again in the backward pass. 16-bit logits are
computed with in float32. Knows no model and no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What makes a faster function of the same meaning."""


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """log p(label) = z_label - logsumexp(z). logits are [..., vocabulary], labels [...] with ids inside it."""
    return torch.log_softmax(_precise(logits), dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v; a logit of -inf adds 0."""
    log_p = torch.log_softmax(_precise(logits), dim=-1)
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)


class LinearLogProbs:
    """log p(label) and the entropy of softmax(hidden @ weight.T / temperature), for each row of hidden.

    `max_logits` bounds how many logits there are at a time; a row's are never cut. `compiled` is applied to what makes
    them and computes with them.
    """

    def __init__(self, max_logits: int, compiled: Compile = lambda function: function) -> None:
        self.max_logits = max_logits
        self.score, self.differentiate = compiled(_score), compiled(_differentiate)

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """hidden is [tokens, size], weight [vocabulary, size], labels [tokens]. Both results are [tokens], in float32
        where hidden has 16 bits."""
        scores: tuple[Tensor, Tensor] = _Function.apply(hidden, weight, labels, temperature, self)  # type: ignore[no-untyped-call]
        return scores

    def pieces(self, num_tokens: int, vocab_size: int) -> Iterator[slice]:
        step = max(1, self.max_logits // vocab_size)
        for start in range(0, num_tokens, step):
            yield slice(start, start + step)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, how: LinearLogProbs
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        largest, log_sums, log_probs, entropies = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(4))
        for piece in how.pieces(len(hidden), len(weight)):
            scores = how.score(hidden[piece], weight, labels[piece], temperature)
            largest[piece], log_sums[piece], log_probs[piece], entropies[piece] = scores
        ctx.save_for_backward(hidden, weight, labels, largest, log_sums, entropies)
        ctx.temperature, ctx.how = temperature, how
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, *of_tokens = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Many pieces are added up: in 16 bits the sum would lose what the last ones add.
        grad_weight = torch.zeros_like(weight, dtype=of_tokens[0].dtype) if ctx.needs_input_grad[1] else None
        for piece in ctx.how.pieces(len(hidden), len(weight)):
            grad_logits = ctx.how.differentiate(
                hidden[piece],
                weight,
                labels[piece],
                ctx.temperature,
                *(tensor[piece] for tensor in (*of_tokens, *grads)),
            )
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[piece])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[piece]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _score(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each token: the largest logit m, log s for s = sum_v e^(z_v - m), log p(label) and the entropy.

    log p(label) = z_label - m - log s, and H = log s - sum_v e^(z_v - m) (z_v - m) / s; a logit of -inf adds 0.
    """
    logits = hidden @ weight.T
    z = _precise(logits) / temperature
    largest = z.amax(dim=-1)
    below = z - largest.unsqueeze(-1)
    weights = below.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    log_probs = _precise(chosen) / temperature - largest - log_total
    weighted = torch.where(weights == 0, 0, weights * below).sum(dim=-1)
    return largest, log_total, log_probs, log_total - weighted / total


def _differentiate(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    largest: Tensor,
    log_total: Tensor,
    entropies: Tensor,
    grad_log_probs: Tensor,
    grad_entropies: Tensor,
) -> Tensor:
    """Gradients of the logits: d log p(label) / dz_v = [v = label] - p_v and dH / dz_v = -p_v (log p_v + H)."""
    logits = hidden @ weight.T
    log_p = _precise(logits) / temperature - largest.unsqueeze(-1) - log_total.unsqueeze(-1)
    p = log_p.exp()
    of_log_prob, of_entropy = grad_log_probs.unsqueeze(-1), grad_entropies.unsqueeze(-1)
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    surprise = torch.where(p == 0, 0, log_p + entropies.unsqueeze(-1))
    grad = torch.where(is_label, of_log_prob, 0) - p * (of_log_prob + of_entropy * surprise)
    used = (of_log_prob != 0) | (of_entropy != 0)  # NaN logits of a masked token stay there
    return torch.where(used, grad / temperature, 0).to(logits.dtype)


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
