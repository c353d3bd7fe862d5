"""Which models the native rollout engine can run, and over how many tensor-parallel ranks.

Owns what can be said from a model's config.json, before a process starts. The engine itself is in `rolepool.rollout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings in which a position's angles do not depend on the longest sequence of the batch."""


def why_not_native(content: Mapping[str, Any]) -> str | None:
    """Why the native engine cannot run the model that a config.json describes; None if it can, or if the file does not
    say what the model is."""
    model_type = content.get("model_type")
    if model_type is not None and model_type not in MODEL_TYPES:
        return f"the native rollout engine cannot run model_type {model_type}; it runs {', '.join(MODEL_TYPES)}"
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        return f"the native rollout engine cannot run rotary embeddings of type {rope_type}; it runs " + ", ".join(
            ROPE_TYPES
        )
    return None


def why_not_parallel(num_heads: int, num_kv_heads: int, inner_size: int, size: int) -> str | None:
    """Why a model cannot be divided over `size` tensor-parallel ranks, and which sizes work; None if it can be."""
    fits = [
        ranks
        for ranks in range(1, num_heads + 1)
        if num_heads % ranks == 0
        and inner_size % ranks == 0
        and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)
    ]
    if size in fits:
        return None
    return (
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: cannot divide the model's {num_heads} heads, "
        f"{num_kv_heads} key-value heads and {inner_size} inner features of the MLP evenly; "
        f"use {' or '.join(map(str, fits))}"
    )
