"""The tokenizer of a model folder or hub id.

Owns loading it, and that it has a token to pad with. Does not know rows or batches.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rolepool.errors import ConfigError


def load_tokenizer(
    path: str | None, *, trust_remote_code: bool = False, key: str = "actor_rollout_ref.model.path"
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, the value of `key`. One without a pad token pads with its end-of-sequence token."""
    if path is None:
        raise ConfigError(f"{key}=null: no model is set; give a folder or a hub id")
    folder = Path(path).expanduser()
    place = str(folder) if folder.exists() else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:  # files are missing or not its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{key}={path}: no tokenizer can be loaded from there: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"{key}={path}: holds a {type(tokenizer).__name__}, which is not a tokenizer")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}={path}: its tokenizer has no end-of-sequence token, so no response could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
