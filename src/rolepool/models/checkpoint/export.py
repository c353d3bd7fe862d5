"""A saved role as a plain Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from rolepool.errors import ConfigError
from rolepool.models.checkpoint.folders import publish, temporary_folder
from rolepool.models.checkpoint.state import OPTIMIZER_STATES, read_saved, read_tensors

_COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
"""Suffixes of files that are copied: configurations, tokenizers, chat templates, model code."""


def export_hf(folder: Path, model_config_dir: Path, out_dir: Path, *, file_bytes: int = 4 * 2**30) -> None:
    """Write a folder that `from_pretrained` loads: the saved weights, in files of at most `file_bytes`, and the other
    files (such as the tokenizer) of the original model folder. The folder appears under its name when it is complete.

    config.json is that of the saved model, which includes the user's overrides and the head; its `dtype` is that of the
    saved weights.
    """
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir}: already exists; export into a new folder")
    if not (model_config_dir / "config.json").is_file():
        raise ConfigError(f"{model_config_dir}: not a model folder; it has no config.json")
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in read_saved(folder).tensors.items()
        if not name.endswith(tuple(f"/{state}" for state in OPTIMIZER_STATES))
    }
    read_tensors(folder, weights)
    out_dir = out_dir.absolute()
    temporary = temporary_folder(out_dir)
    try:
        for path in sorted(model_config_dir.iterdir()):
            if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, temporary / path.name)
        save_torch_state_dict(weights, temporary, max_shard_size=file_bytes)
        own = folder / "config.json"
        config = json.loads((own if own.is_file() else temporary / "config.json").read_text(encoding="utf-8"))
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values() if tensor.is_floating_point()}
        if len(dtypes) == 1:
            config.pop("torch_dtype", None)  # its name in older releases of transformers
            (config["dtype"],) = dtypes
        (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        publish(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
