"""Models from Hugging Face folders: a policy, a critic, a reward model.

Owns which class a role's model has, and that every weight comes from the model's files, except a
critic's new head, or from a saved state that is loaded afterwards. A model is named by a section of
the config, such as `critic.model`. Code from its folder runs only if the user allows it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GenericForTokenClassification
from transformers.utils import logging as transformers_logging

from rolepool.config import Config
from rolepool.config.model_files import why_no_model
from rolepool.config.model_keys import PolicyModelConfig, RewardModelModelConfig
from rolepool.errors import ConfigError, explained, first_few
from rolepool.models.packing import add_token_scores
from rolepool.models.sharding import PACKED

CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config keys of models whose logits are not just the last hidden state times the head."""
UNREADABLE = (ValueError, TypeError, KeyError, SafetensorError, StrictDataclassError)
"""What transformers raises, besides OSError, if it cannot load a model from a folder."""
FIX = "give a model's folder or hub id"

AutoClass = Any
"""A class of transformers that makes models, such as `AutoModelForCausalLM`. They have no common
base."""


def read_model_config(
    config: Config,
    section: str,
    **entries: object,
) -> transformers.PretrainedConfig:
    """The config of the model that a section names, with these entries replaced. A folder with
    missing or damaged files is an error."""
    keys = config.at(section)
    key = f"{section}.path"
    path = keys.path
    reason = why_no_model(key, path)
    if reason is not None:
        raise ConfigError(reason)
    folder = Path(path).expanduser()
    overrides = dict(entries)
    if isinstance(keys, PolicyModelConfig):
        overrides = {**keys.override_config, **entries}
    if not folder.is_dir():
        problem = "is neither a folder nor a model on the hub"
    elif overrides:
        problem = f"cannot be loaded with {overrides}"
    else:
        problem = "cannot be loaded"
    settings = {"trust_remote_code": _is_trusted(config, section), **overrides}
    with explained(f"{key}={path}: {problem}", FIX, *UNREADABLE):
        model_config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(
            str(folder),
            **settings,
        )
    for file in sorted(folder.glob("*.safetensors")):
        # Opening a file checks it.
        problem = f"{key}={path}: {file.name} is damaged"
        with explained(problem, "copy it again", *UNREADABLE), safe_open(file, "pt"):
            pass
    return model_config


def _is_trusted(config: Config, section: str) -> bool:
    """Whether code from a model's folder may run. Only a reward model has a key of its own for
    it."""
    keys = config.at(section)
    if isinstance(keys, RewardModelModelConfig):
        return keys.trust_remote_code
    return config.actor_rollout_ref.model.trust_remote_code


def load_policy(
    config: Config,
    dtype: torch.dtype,
    *,
    packed: bool,
    reads_weights: bool = True,
) -> nn.Module:
    """A causal language model that also has `token_scores`. Its batches are packed or padded. With
    `reads_weights=False`, its weights are undefined until a saved state is loaded."""
    load = _load if reads_weights else _without_weights
    auto = transformers.AutoModelForCausalLM
    section = "actor_rollout_ref.model"
    model = load(config, section, auto, dtype, packed)
    return add_token_scores(model, has_plain_head=_has_plain_head(model))


def _has_plain_head(model: transformers.PreTrainedModel) -> bool:
    """Whether logits are just the last hidden states times the weight of the head."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    settings = [getattr(model.config, name, None) for name in CHANGES_LOGITS]
    return all(setting in (None, 1) for setting in settings)


def load_critic(
    config: Config,
    dtype: torch.dtype,
    *,
    packed: bool,
    reads_weights: bool = True,
) -> nn.Module:
    """The trunk of a language model and a head with one value per token, random if the folder has
    none. With `reads_weights=False`, its weights are undefined until a saved state is loaded."""
    load = _load if reads_weights else _without_weights
    auto = transformers.AutoModelForTokenClassification
    return load(
        config,
        "critic.model",
        auto,
        dtype,
        packed,
        num_labels=1,
        classifier_dropout=0.0,
    )


def load_reward_model(config: Config, section: str, dtype: torch.dtype) -> nn.Module:
    """A sequence classifier with one output, the score of the whole text."""
    auto = transformers.AutoModelForSequenceClassification
    return _load(
        config,
        section,
        auto,
        dtype,
        packed=False,
        num_labels=1,
    )


def _load(
    config: Config,
    section: str,
    auto: AutoClass,
    dtype: torch.dtype,
    packed: bool,
    **entries: object,
) -> transformers.PreTrainedModel:
    """The model of a section, with the weights of its files."""
    model_config = read_model_config(config, section, **entries)
    path = config.at(section).path
    where = f"{section}.path={path}"
    has_new_head = auto is transformers.AutoModelForTokenClassification
    settings = {
        "config": model_config,
        "dtype": dtype,
        "trust_remote_code": _is_trusted(config, section),
        "attn_implementation": PACKED if packed else None,  # None is sdpa if the model has it
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are reported in `info`, and are errors below
    }
    model: transformers.PreTrainedModel
    with explained(f"{where}: cannot be loaded", FIX, *UNREADABLE), _quiet_transformers():
        model_class = _token_classifier(model_config) if has_new_head else auto
        folder = Path(path).expanduser()
        model, info = model_class.from_pretrained(str(folder), **settings)

    missing = sorted(info["missing_keys"])
    if has_new_head:
        # The trunk must be complete. What is outside of it is the new head.
        prefix = f"{model.base_model_prefix}."
        missing = [name for name in missing if name.startswith(prefix)]
    _check_none(where, model, missing, "are not in its files")
    of_other_shape = sorted(name for name, *_ in info["mismatched_keys"])
    _check_none(where, model, of_other_shape, "have another shape in its files")

    damaged: list[str] = []
    for name, weight in model.named_parameters():
        if not _is_finite(weight):
            damaged.append(name)
    if damaged:
        what = f"weights are not finite ({first_few(damaged, 3)}), so every result would be NaN"
        raise ConfigError(
            f"{where}: {what}; copy the model again, or give one from before its training diverged"
        )
    _remove_dropout(model)
    return model


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars, and no report of new weights, because these are checked here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _check_none(
    where: str,
    model: nn.Module,
    weights: Sequence[str],
    reason: str,
) -> None:
    """Raise ConfigError if there are such weights."""
    if weights:
        what = f"weights of a {type(model).__name__} {reason} ({first_few(weights, 3)})"
        fix = "give such a model with all its weights; override_config must not change its shape"
        raise ConfigError(f"{where}: {what}, so they would be random; {fix}")


def _without_weights(
    config: Config,
    section: str,
    auto: AutoClass,
    dtype: torch.dtype,
    packed: bool,
    **entries: object,
) -> transformers.PreTrainedModel:
    """The model of a section, of which no weight is read or drawn. Buffers that are not saved have
    their values."""
    model_config = read_model_config(config, section, **entries)
    path = config.at(section).path
    has_new_head = auto is transformers.AutoModelForTokenClassification
    model_class = _token_classifier(model_config) if has_new_head else auto
    # A class of `transformers.Auto...` chooses the class of the model, which has a private method.
    make = getattr(model_class, "from_config", None) or model_class._from_config
    settings: dict[str, object] = {
        "dtype": dtype,
        "attn_implementation": PACKED if packed else None,
    }
    if make.__name__ == "from_config":
        settings["trust_remote_code"] = _is_trusted(config, section)
    with explained(f"{section}.path={path}: cannot be loaded", FIX, *UNREADABLE), no_init_weights():
        model: transformers.PreTrainedModel = make(model_config, **settings)
    model.tie_weights()  # without initialization transformers leaves it out
    model.eval()  # as `from_pretrained` does
    _remove_dropout(model)
    return model


def _remove_dropout(model: nn.Module) -> None:
    """With dropout, old and new log-probs of the same weights would differ."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _token_classifier(config: transformers.PretrainedConfig) -> AutoClass:
    """The class of a critic. Some models of transformers have none; theirs has the same parts as
    those of others."""
    kind = type(config)
    has_classifier = kind in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if has_classifier or kind not in transformers.MODEL_MAPPING:
        return transformers.AutoModelForTokenClassification
    trunk: Any = transformers.MODEL_MAPPING[kind]
    # The class of all models of this family, such as `LlamaPreTrainedModel`.
    bases = trunk.__mro__[1:]
    family = next(base for base in bases if issubclass(base, transformers.PreTrainedModel))
    name = f"{trunk.__name__}ForTokenClassification"
    return type(name, (GenericForTokenClassification, family), {})


def _is_finite(weight: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite. Takes no memory of the weight's size."""
    if weight.numel() == 0:
        return True
    # NaN is both the smallest and the largest number of a tensor that has one.
    smallest, largest = weight.detach().aminmax()
    return bool(smallest.isfinite()) and bool(largest.isfinite())
