"""The tokenizer of a model folder or hub id.

Owns loading it, and makes sure that it has a pad token. Does not know rows or batches.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rolepool.errors import ConfigError, one_line


def load_tokenizer(
    path: str | None, *, trust_remote_code: bool = False, key: str = "actor_rollout_ref.model.path"
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, the value of `key`. If it has no pad token, its end-of-sequence token is used."""
    if path is None:
        raise ConfigError(f"{key}=null: no model is set; give a folder or a hub id")
    folder = Path(path).expanduser()
    place = str(folder) if folder.exists() else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:  # files are missing or belong to something else
        raise ConfigError(f"{key}={path}: no tokenizer can be loaded from there: {one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"{key}={path}: contains a {type(tokenizer).__name__}, which is not a tokenizer")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}={path}: its tokenizer has no end-of-sequence token, which responses need to end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
