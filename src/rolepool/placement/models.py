"""The shape of a model, read from its config.json: what memory estimates are computed from.

Owns finding the file (a folder, or the local Hugging Face cache; nothing is ever downloaded) and counting parameters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolepool.errors import RolepoolError


class ShapeUnknown(RolepoolError):
    """The model's shape cannot be told; the message says why."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs, as Llama, Mistral, Qwen and DeepSeek-LLM are."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    attention_bias: bool
    num_experts: int = 1
    num_active_experts: int = 1

    @property
    def attention_params(self) -> int:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * q + 2 * kv) + (q + 2 * kv if self.attention_bias else 0)

    @property
    def mlp_params(self) -> int:
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        return 3 * self.hidden_size * self.intermediate_size * self.num_experts + router

    @property
    def layer_params(self) -> int:
        return self.attention_params + self.mlp_params + 2 * self.hidden_size

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def trunk_params(self) -> int:
        """All but the output head."""
        return self.num_layers * self.layer_params + self.embedding_params + self.hidden_size

    @property
    def num_params(self) -> int:
        """A language model's parameters."""
        return self.trunk_params + (0 if self.tied_embeddings else self.embedding_params)

    @property
    def num_scalar_head_params(self) -> int:
        """A value or reward model's parameters: the trunk and a head of one output."""
        return self.trunk_params + self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, in 16 bits."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2


def read_shape(path: str | None, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape of a model folder or of a hub id that lies in the local cache. Raises ShapeUnknown with the reason."""
    file, content = read_model_file(path, overrides)
    try:
        return _shape_of(content)
    except (KeyError, TypeError) as error:
        raise ShapeUnknown(
            f"{file} does not describe a Llama-like decoder ({error} is missing or of another type)"
        ) from error


def read_num_positions(path: str | None, overrides: Mapping[str, Any] | None = None) -> int:
    """The tokens that a sequence may have. Raises ShapeUnknown where that is not known."""
    file, content = read_model_file(path, overrides)
    try:
        return num_positions(content)
    except (KeyError, TypeError) as error:
        raise ShapeUnknown(f"{file} does not say how many positions the model has ({error})") from error


def num_positions(content: Mapping[str, Any]) -> int:
    """Of a model with this config: what it says, or as far as its rotary embeddings are stretched."""
    said = _size(content, "max_position_embeddings", "n_positions")
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    stretched = rope.get("original_max_position_embeddings", said) * rope.get("factor", 1)
    return max(said, int(stretched))


def read_model_file(path: str | None, overrides: Mapping[str, Any] | None) -> tuple[Path, dict[str, Any]]:
    """A model's config.json and its content, with entries replaced. Raises ShapeUnknown with the reason."""
    if path is None:
        raise ShapeUnknown("no model path is set")
    file = _find_config(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeUnknown(f"{file} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ShapeUnknown(f"{file} is not a JSON object")
    return file, {**content, **(overrides or {})}


def _find_config(path: str) -> Path:
    try:
        folder = Path(path).expanduser()
        if (folder / "config.json").is_file():
            return folder / "config.json"
        if folder.is_dir():
            raise ShapeUnknown(f"{path} has no config.json")
        cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
        snapshots = (cache / f"models--{path.replace('/', '--')}" / "snapshots").glob("*/config.json")
        newest = max(snapshots, key=lambda file: file.stat().st_mtime, default=None)
    except (OSError, ValueError, RuntimeError) as error:
        raise ShapeUnknown(f"{path} cannot be looked up ({error})") from error
    if newest is None:
        raise ShapeUnknown(f"{path} is not on disk, and plan never downloads")
    return newest


def _shape_of(content: dict[str, Any]) -> ModelShape:
    hidden_size, num_heads = _size(content, "hidden_size"), _size(content, "num_attention_heads")
    return ModelShape(
        hidden_size=hidden_size,
        num_layers=_size(content, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_size(content, "num_key_value_heads", default=num_heads),
        head_dim=_size(content, "head_dim", default=hidden_size // num_heads),
        intermediate_size=_size(content, "moe_intermediate_size", "intermediate_size"),
        vocab_size=_size(content, "vocab_size"),
        tied_embeddings=bool(content.get("tie_word_embeddings", False)),
        attention_bias=bool(content.get("attention_bias", content.get("model_type") == "qwen2")),
        num_experts=_size(content, "num_experts", "num_local_experts", "n_routed_experts", default=1),
        num_active_experts=_size(content, "num_experts_per_tok", default=1),
    )


def _size(content: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of the entries that is there and not null or 0; models spell "none of these" in all three ways."""
    name = next((name for name in names if content.get(name)), None)
    if name is None:
        if default is None:
            raise KeyError(names[-1])
        return default
    value = content[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise TypeError(f"{name}={value}")
    return value
