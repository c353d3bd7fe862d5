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


def load_policy(
    path: str | None, *, dtype: torch.dtype, trust_remote_code: bool, overrides: dict[str, Any]
) -> nn.Module:
    """A causal language model."""
    return _load(AutoModelForCausalLM, "actor_rollout_ref.model.path", path, dtype, trust_remote_code, overrides)


def load_critic(path: str | None, *, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    """The trunk of a language model and a head of one value per token, random at first where none is saved."""
    overrides = {"num_labels": 1, "classifier_dropout": 0.0}
    return _load(AutoModelForTokenClassification, "critic.model.path", path, dtype, trust_remote_code, overrides)


def load_reward_model(path: str | None, *, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    """A sequence classifier with one output: the score of the whole text."""
    overrides = {"num_labels": 1}
    return _load(
        AutoModelForSequenceClassification, "reward_model.model.path", path, dtype, trust_remote_code, overrides
    )


def _load(
    auto: Any, key: str, path: str | None, dtype: torch.dtype, trust_remote_code: bool, overrides: dict[str, Any]
) -> nn.Module:
    if path is None:
        raise ConfigError(f"{key}=null: no model is set; give a folder or a hub id")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **overrides)
        with _quiet():
            model: nn.Module = auto.from_pretrained(
                path, config=config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
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
