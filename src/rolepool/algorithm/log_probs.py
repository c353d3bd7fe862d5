"""Log-probabilities and entropies from logits, without a second copy of the logits.

The logits of a micro-batch are often the largest tensor of a step. Both functions keep only the logits they were
given for the backward pass, work through them in pieces of bounded size, and compute half-precision logits in
float32. Neither knows of temperature (divide the logits first) or of masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAX_ELEMENTS_PER_PIECE = 1 << 25  # 128 MiB of float32: long enough rows for a GPU, small beside the logits


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """log p(label) = z_label - logsumexp(z). logits are [..., vocabulary], labels [...] with ids inside it.

    Half-precision logits give float32 log-probs; other types keep theirs.
    """
    log_probs: Tensor = _LogProbs.apply(logits, labels)  # type: ignore[no-untyped-call]
    return log_probs


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v = logsumexp(z) - sum_v p_v z_v; a logit of -inf adds 0.

    Half-precision logits give float32 entropies; other types keep theirs.
    """
    entropies: Tensor = _Entropy.apply(logits)  # type: ignore[no-untyped-call]
    return entropies


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        log_probs = torch.empty(labels.shape, dtype=_precise(logits), device=logits.device)
        for piece in _pieces(logits.shape):
            log_probs[piece] = _log_softmax(logits[piece]).gather(-1, labels[piece].unsqueeze(-1)).squeeze(-1)
        return log_probs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        """d log p_label / dz_v = [v = label] - p_v."""
        logits, labels = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for piece in _pieces(logits.shape):
            grad = grads[0][piece].unsqueeze(-1)
            gradient = _log_softmax(logits[piece]).exp_().mul_(-grad)
            gradient.scatter_add_(-1, labels[piece].unsqueeze(-1), grad)
            grad_logits[piece] = gradient.masked_fill_(grad == 0, 0)  # NaN logits of a masked token stay there
        return grad_logits, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        entropies = torch.empty(logits.shape[:-1], dtype=_precise(logits), device=logits.device)
        for piece in _pieces(logits.shape):
            log_p = _log_softmax(logits[piece])
            p = log_p.exp()
            entropies[piece] = -log_p.masked_fill_(p == 0, 0).mul_(p).sum(dim=-1)
        return entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        """dH / dz_v = -p_v (log p_v + H)."""
        (logits,) = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for piece in _pieces(logits.shape):
            grad = grads[0][piece].unsqueeze(-1)
            log_p = _log_softmax(logits[piece])
            p = log_p.exp()
            log_p.masked_fill_(p == 0, 0)
            entropy = -(p * log_p).sum(dim=-1, keepdim=True)
            grad_logits[piece] = log_p.add_(entropy).mul_(p).mul_(-grad).masked_fill_(grad == 0, 0)
        return grad_logits


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=_precise(logits))


def _pieces(shape: torch.Size) -> Iterator[tuple[slice, ...]]:
    """Indices that cut a [..., vocabulary] tensor into pieces of whole rows, each of bounded size where rows allow."""
    if len(shape) == 1:
        yield ()
        return
    elements_per_index = max(1, math.prod(shape[1:]))
    if len(shape) == 2 or elements_per_index <= MAX_ELEMENTS_PER_PIECE:
        step = max(1, MAX_ELEMENTS_PER_PIECE // elements_per_index)
        for start in range(0, shape[0], step):
            yield (slice(start, start + step),)
    else:
        for i in range(shape[0]):
            for inner in _pieces(shape[1:]):
                yield (slice(i, i + 1), *inner)
