"""Attention over packed sequences: many sequences in one row, each of which sees itself alone.

Owns the function that Hugging Face models call for it, and the arguments that tell it where sequences begin. A GPU
has a kernel for it, which makes no mask and does not repeat keys and values; elsewhere sequences are padded for it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rolepool.errors import RolepoolError

PACKED = "rolepool_packed"
"""`attn_implementation` of models whose passes are packed. No mask is made for it."""

# Newer versions of torch want to be told that there are fewer keys and values than queries; older ones do not ask.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_arguments(starts: Tensor, longest: int) -> dict[str, object]:
    """What a model's forward is given beside the packed row: where sequences start, and the length of the longest.

    `starts` are int32 [sequences + 1], the last of them the end. Models hand these arguments on to attention.
    """
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


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
    """Causal attention of [1, heads, tokens, head_dim] within each sequence; returns [1, tokens, heads, head_dim].

    With a window a token sees that many tokens, itself included.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise RolepoolError(
            f"{type(module).__name__} was not told where packed sequences start: write use_remove_padding=false"
        )
    if query.device.type == "cuda":
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        where = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        on_gpu: Any = varlen_attn(query, key, value, *where, scale=scaling, window_size=window, **_GROUPED)
        return on_gpu.unsqueeze(0), None
    return _padded_attention(query, key, value, scaling, sliding_window, cu_seq_lens_q), None


def _padded_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, starts: Tensor
) -> Tensor:
    """The same without a kernel for it: a call for all sequences whose lengths are between two powers of two."""
    lengths = starts.diff()
    sizes = lengths.float().log2().ceil()
    outputs, places = [], []
    for size in sizes.unique():
        is_here = sizes == size
        places_nl, real_nl = _padded_places(starts[:-1][is_here], lengths[is_here])
        query_n, key_n, value_n = (
            states[0].index_select(1, places_nl.flatten()).unflatten(1, places_nl.shape).transpose(0, 1)
            for states in (query, key, value)
        )
        outputs.append(_causal_attention(query_n, key_n, value_n, scaling, window)[real_nl])
        places.append(places_nl[real_nl])
    return torch.cat(outputs)[torch.cat(places).argsort()].unsqueeze(0)


def _padded_places(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of sequences as rows, padded at their ends, where no token before looks; and which are not padding."""
    columns_l = torch.arange(int(lengths.max()), device=lengths.device)
    real_nl = columns_l < lengths[:, None]
    return torch.where(real_nl, starts[:, None] + columns_l, 0), real_nl


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Attention of [rows, heads, tokens, head_dim]; returns [rows, tokens, heads, head_dim]."""
    length, mask = query.shape[2], None
    if window is not None and window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    outputs = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return outputs.transpose(1, 2)


def is_packed(model: Any) -> bool:
    """Whether the model was loaded for packed passes."""
    return bool(model.config._attn_implementation == PACKED)


AttentionInterface.register(PACKED, packed_attention)
