"""Models from Hugging Face folders: a policy, a critic, a reward model.

Owns which class a role's model has. Weights are safetensors; code that comes with a model runs only when the user said
so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils import logging as transformers_logging

from rolepool.errors import ConfigError
from rolepool.models.attention import PACKED
from rolepool.models.forward import add_token_scores

CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of models in whose logits there is more than the last hidden state times the head."""


def load_policy(
    path: str | None, *, dtype: torch.dtype, trust_remote_code: bool, overrides: dict[str, Any], packed: bool = False
) -> nn.Module:
    """A causal language model that also has `token_scores`. Passes through it are packed, or padded."""
    key = "actor_rollout_ref.model.path"
    model: Any = _load(AutoModelForCausalLM, key, path, dtype, trust_remote_code, overrides, packed)
    found = [name for name in CHANGES_LOGITS if getattr(model.config, name, None) not in (None, 1)]
    head = model.get_output_embeddings()
    if found or not isinstance(head, nn.Linear) or head.bias is not None:
        reason = f"it has {found[0]}" if found else "its head is not a plain linear map"
        raise ConfigError(f"{key}={path}: log-probs of this model are not known ({reason}); choose another model")
    return add_token_scores(model)


def load_critic(path: str | None, *, dtype: torch.dtype, trust_remote_code: bool, packed: bool) -> nn.Module:
    """The trunk of a language model and a head of one value per token, random at first where none is saved."""
    overrides = {"num_labels": 1, "classifier_dropout": 0.0}
    key = "critic.model.path"
    return _load(AutoModelForTokenClassification, key, path, dtype, trust_remote_code, overrides, packed)


def load_reward_model(path: str | None, *, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    """A sequence classifier with one output: the score of the whole text."""
    overrides = {"num_labels": 1}
    key = "reward_model.model.path"
    return _load(AutoModelForSequenceClassification, key, path, dtype, trust_remote_code, overrides, packed=False)


def _load(
    auto: Any,
    key: str,
    path: str | None,
    dtype: torch.dtype,
    trust_remote_code: bool,
    overrides: dict[str, Any],
    packed: bool,
) -> nn.Module:
    if path is None:
        raise ConfigError(f"{key}=null: no model is set; give a folder or a hub id")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **overrides)
        with _quiet():
            model: nn.Module = auto.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                attn_implementation=PACKED if packed else "sdpa",
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: cannot be loaded ({_line(error)})") from None
    # Dropout would make old and new log-probs of the same weights differ.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and without the report that a critic's head is new, which it is meant to be."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
