"""How a role cuts its rows into passes: by a number of rows, by tokens, or by what fits where the user said nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rolepool.models.micro_batches import balanced, by_rows, num_passes
from rolepool.models.sharding import max_over_ranks

TOKENS_THAT_FIT = 16_384
"""Tokens of a pass where the user left the micro-batch size open: small for a GPU, enough to keep it busy."""


def cut_into_passes(
    attention_mask: Tensor, *, rows_per_pass: int | None, max_tokens: int | None, device: str
) -> list[list[int]]:
    """Rows of each pass. Every rank makes the same number of passes, as sharded passes need all ranks together."""
    num_rows, width = attention_mask.shape
    if max_tokens is None:
        return by_rows(num_rows, rows_per_pass or max(1, TOKENS_THAT_FIT // width))
    lengths: Sequence[int] = attention_mask.sum(dim=1).tolist()
    return balanced(lengths, max_over_ranks(num_passes(lengths, max_tokens), device))
