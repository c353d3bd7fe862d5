"""What a model's config.json says before a process starts: its shape, its parameters, and whether it can be run.

Owns counting parameters, and which models the native rollout engine can run. `config.model_files` finds and reads the
file; the engine itself is in `rolepool.rollout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolepool.config.model_files import ShapeUnknown as ShapeUnknown
from rolepool.config.model_files import entry_of, read_model_file

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings in which a position's angles do not depend on the longest sequence of the batch."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs, such as Llama, Mistral, Qwen and DeepSeek-LLM."""

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
    def attention_width(self) -> int:
        """Numbers per token that attention reads and returns: queries, keys, values and outputs."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def mlp_width(self) -> int:
        """Numbers per token inside the MLP, in all experts that compute the token."""
        return self.intermediate_size * self.num_active_experts

    @property
    def layer_params(self) -> int:
        """The four projections of attention with their biases, the three of every expert, the router and two norms."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.attention_bias else 0
        router = self.num_experts if self.num_experts > 1 else 0
        widths = self.attention_width + 3 * self.intermediate_size * self.num_experts + router + 2
        return self.hidden_size * widths + biases

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Parameters of a language model: layers, embedding, last norm, and an output head if it is not tied."""
        num_embeddings = 1 if self.tied_embeddings else 2
        return self.num_layers * self.layer_params + num_embeddings * self.embedding_params + self.hidden_size

    @property
    def num_scalar_head_params(self) -> int:
        """Parameters of a value or reward model, whose output head has one output."""
        return self.num_layers * self.layer_params + self.embedding_params + 2 * self.hidden_size


def read_shape(path: str | None, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape of the model at a path, with entries of its config.json replaced. Raises ShapeUnknown."""
    content = read_model_file(path, overrides)
    try:
        hidden_size, num_heads = entry_of(content, "hidden_size"), entry_of(content, "num_attention_heads")
        return ModelShape(
            hidden_size=hidden_size,
            num_layers=entry_of(content, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=entry_of(content, "num_key_value_heads", default=num_heads),
            head_dim=entry_of(content, "head_dim", default=hidden_size // num_heads),
            intermediate_size=entry_of(content, "moe_intermediate_size", "intermediate_size"),
            vocab_size=entry_of(content, "vocab_size"),
            tied_embeddings=bool(content.get("tie_word_embeddings", False)),
            attention_bias=bool(content.get("attention_bias", content.get("model_type") == "qwen2")),
            num_experts=entry_of(content, "num_experts", "num_local_experts", "n_routed_experts", default=1),
            num_active_experts=entry_of(content, "num_experts_per_tok", default=1),
        )
    except ValueError as error:
        raise ShapeUnknown(f"config.json of {path} does not describe a Llama-like decoder ({error})") from error


def why_not_native(content: Mapping[str, Any]) -> str | None:
    """Why the native engine cannot run the model of a config.json; None if it can, or if the file does not say."""
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    for what, value, supported in (
        ("model_type", content.get("model_type") or MODEL_TYPES[0], MODEL_TYPES),
        ("rotary embeddings of type", rope.get("rope_type") or rope.get("type") or "default", ROPE_TYPES),
    ):
        if value not in supported:
            return f"the native rollout engine cannot run {what} {value}; it runs {', '.join(supported)}"
    return None


def why_not_parallel(num_heads: int, num_kv_heads: int, inner_size: int, size: int) -> str | None:
    """Why a model cannot be split over `size` tensor-parallel ranks, and which sizes work; None if it can."""
    sizes = [ranks for ranks in range(1, num_heads + 1) if num_heads % ranks == 0 and inner_size % ranks == 0]
    fits = [ranks for ranks in sizes if num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0]
    if size in fits:
        return None
    key, use = "actor_rollout_ref.rollout.tensor_model_parallel_size", " or ".join(map(str, fits))
    model = f"{num_heads} heads, {num_kv_heads} key-value heads and {inner_size} inner features of the MLP"
    return f"{key}={size}: cannot split the model's {model} evenly; use {use}"
