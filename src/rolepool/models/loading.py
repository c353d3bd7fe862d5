"""Models from Hugging Face folders: a policy, a critic, a reward model.

Owns which class a role's model has, and that every weight comes from the model's files, except a critic's new head.
Code from a model folder runs only if the user allows it.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.modeling_layers import GenericForTokenClassification
from transformers.utils import logging as transformers_logging

from rolepool.config.model_files import why_no_model
from rolepool.errors import ConfigError, explained, first_few
from rolepool.models.packing import add_token_scores
from rolepool.models.sharding import PACKED

CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config keys of models whose logits are not just the last hidden state times the head."""
UNREADABLE = (ValueError, TypeError, KeyError, SafetensorError, StrictDataclassError)
"""What transformers raises, besides OSError, if it cannot load a model from a folder."""
FIX = "give a model's folder or hub id"


def read_model_config(
    key: str, path: str | None, *, trust_remote_code: bool, overrides: dict[str, Any]
) -> transformers.PretrainedConfig:
    """The config of the model at `path`, the value of `key`. A folder with missing or damaged files is an error."""
    if (reason := why_no_model(key, path)) is not None:
        raise ConfigError(reason)
    folder = Path(str(path)).expanduser()
    problem = "is neither a folder nor a model on the hub"
    if folder.is_dir():
        problem = f"cannot be loaded with {overrides}" if overrides else "cannot be loaded"
    settings = {"trust_remote_code": trust_remote_code, **overrides}
    with explained(f"{key}={path}: {problem}", FIX, *UNREADABLE):
        config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(str(folder), **settings)
    for file in sorted(folder.glob("*.safetensors")):
        # Opening a file checks it.
        with explained(f"{key}={path}: {file.name} is damaged", "copy it again", *UNREADABLE), safe_open(file, "pt"):
            pass
    return config


def load_policy(
    path: str | None, *, dtype: torch.dtype, trust_remote_code: bool, overrides: dict[str, Any], packed: bool = False
) -> nn.Module:
    """A causal language model that also has `token_scores`. Its batches are packed or padded."""
    key = "actor_rollout_ref.model.path"
    model: Any = _load(transformers.AutoModelForCausalLM, key, path, dtype, trust_remote_code, overrides, packed)
    head, config = model.get_output_embeddings(), model.config
    is_plain = isinstance(head, nn.Linear) and head.bias is None
    is_plain = is_plain and all(getattr(config, name, None) in (None, 1) for name in CHANGES_LOGITS)
    return add_token_scores(model, has_plain_head=is_plain)


def load_critic(path: str | None, *, dtype: torch.dtype, trust_remote_code: bool, packed: bool) -> nn.Module:
    """The trunk of a language model and a head with one value per token, random if the folder has none."""
    overrides, auto = {"num_labels": 1, "classifier_dropout": 0.0}, transformers.AutoModelForTokenClassification
    return _load(auto, "critic.model.path", path, dtype, trust_remote_code, overrides, packed)


def load_reward_model(path: str | None, *, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    """A sequence classifier with one output, the score of the whole text."""
    overrides, auto = {"num_labels": 1}, transformers.AutoModelForSequenceClassification
    return _load(auto, "reward_model.model.path", path, dtype, trust_remote_code, overrides, packed=False)


def _load(
    auto: Any, key: str, path: str | None, dtype: torch.dtype, trusted: bool, overrides: dict[str, Any], packed: bool
) -> nn.Module:
    config = read_model_config(key, path, trust_remote_code=trusted, overrides=overrides)
    has_new_head = auto is transformers.AutoModelForTokenClassification
    settings = {
        "config": config,
        "dtype": dtype,
        "trust_remote_code": trusted,
        "attn_implementation": PACKED if packed else None,  # None is sdpa if the model has it
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are reported in `info`, and are errors below
    }
    model: nn.Module
    with explained(f"{key}={path}: cannot be loaded", FIX, *UNREADABLE), ExitStack() as restored:
        # Without progress bars and without transformers' report of new weights, which are checked below.
        restored.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
        restored.callback(transformers_logging.enable_progress_bar)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        model_class = _token_classifier(config) if has_new_head else auto
        model, info = model_class.from_pretrained(str(Path(str(path)).expanduser()), **settings)
    trunk = f"{model.base_model_prefix}."
    missing = [name for name in info["missing_keys"] if name.startswith(trunk) or not has_new_head]
    of_other_shape = [name for name, *_ in info["mismatched_keys"]]
    for names, reason in ((missing, "are not in its files"), (of_other_shape, "have another shape in its files")):
        if names:
            raise ConfigError(
                f"{key}={path}: weights of a {type(model).__name__} {reason} ({first_few(sorted(names), 3)}), so they "
                "would be random; give such a model with all its weights; override_config must not change its shape"
            )
    damaged = [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    if damaged:
        what = f"weights are not finite ({first_few(damaged, 3)}), so every result would be NaN"
        raise ConfigError(f"{key}={path}: {what}; copy the model again, or give one from before its training diverged")
    # With dropout, old and new log-probs of the same weights would differ.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _token_classifier(config: transformers.PretrainedConfig) -> Any:
    """The class of a critic. Some models of transformers have none; theirs has the same parts as those of others."""
    kind = type(config)
    if kind in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING or kind not in transformers.MODEL_MAPPING:
        return transformers.AutoModelForTokenClassification
    trunk: Any = transformers.MODEL_MAPPING[kind]
    family = next(base for base in trunk.__mro__[1:] if issubclass(base, transformers.PreTrainedModel))
    return type(f"{trunk.__name__}ForTokenClassification", (GenericForTokenClassification, family), {})


def _is_finite(weight: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite. Takes no memory of the weight's size."""
    return weight.numel() == 0 or all(bound.isfinite().item() for bound in weight.detach().aminmax())
