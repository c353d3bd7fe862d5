"""Small models of many architectures, with random weights, for tests of engines and of packed
rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from rolepool.config import Config, load_config

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_DEEPSEEK |= {
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
_DEEPSEEK |= {"qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {},
    "deepseek_v3": _DEEPSEEK,
    "gemma": {"head_dim": 8},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "num_hidden_layers": 6},
    "glm4": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "granite": {"logits_scaling": 4.0},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "olmo3": {"sliding_window": 7},
    "phi3": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "smollm3": {},
}
"""What a small model of each `model_type` has besides `SIZES`."""


def make_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A causal language model in which every weight matters."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(
        model_type, **{**SIZES, **SETTINGS[model_type], **changes}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases away from where they start
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write_model(
    folder: Path, model_type: str, tokenizer_of: Path | None = None, **changes: Any
) -> str:
    """Write such a model into a folder, with a tokenizer if its folder is given."""
    if tokenizer_of is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
        tokenizer.save_pretrained(folder)
        changes = {"vocab_size": len(tokenizer), **changes}
    make_model(model_type, **changes).save_pretrained(folder)
    return str(folder)


def config_of(folder: str) -> Config:
    """A config with the model of this folder."""
    return load_config([], [f"actor_rollout_ref.model.path={folder}"]).config
