"""A saved role as a plain Hugging Face folder, by one process that holds one output file at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rolepool.errors import ConfigError
from rolepool.models.checkpoint.folders import publish, temporary_folder
from rolepool.models.checkpoint.index import SavedRole, SavedTensor, read_saved
from rolepool.models.checkpoint.shards import by_bytes, dtype_called, dtype_name, header_problems, read_whole

_COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
"""Files beside a model's weights: configurations, tokenizers, chat templates, code of the model."""


def export_hf(
    folder: Path,
    model_config_dir: Path,
    out_dir: Path,
    dtype: torch.dtype | None = None,
    *,
    file_bytes: int = 4 * 2**30,
) -> None:
    """Write a folder that `from_pretrained` loads: the saved weights (floats as `dtype` where given), in files of at
    most `file_bytes`, and what lies beside the weights in the folder the model came from.

    config.json is that of the saved model, which knows the user's overrides and the head; `dtype` in it is what the
    weights are written as. The folder appears under its name when it is whole.
    """
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir}: is there already; export into a new folder")
    if not (model_config_dir / "config.json").is_file():
        raise ConfigError(f"{model_config_dir}: not a model folder; no config.json is in it")
    saved = read_saved(folder)
    tensors = saved.tensors("model")
    if problems := list(header_problems(saved, "model")):
        raise ConfigError(problems)
    out_dir = out_dir.absolute()
    temporary = temporary_folder(out_dir)
    try:
        for path in sorted(model_config_dir.iterdir()):
            if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, temporary / path.name)
        _write_weights(saved, tensors, temporary, dtype, file_bytes)
        _write_config(saved, tensors, temporary, dtype)
        publish(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(
    saved: SavedRole,
    tensors: Mapping[str, SavedTensor],
    out_dir: Path,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> None:
    sizes = {name: prod(tensor.shape) * _written_as(tensor, dtype).itemsize for name, tensor in tensors.items()}
    groups = list(by_bytes(sizes, file_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = "model" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}"
        whole: dict[str, Tensor] = {}
        for name in names:
            whole[name] = read_whole(saved, name, tensors[name]).to(_written_as(tensors[name], dtype))
            files[name] = f"{file}.safetensors"
        save_file(whole, out_dir / f"{file}.safetensors", metadata={"format": "pt"})
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        _write_json(out_dir / "model.safetensors.index.json", index)


def _written_as(tensor: SavedTensor, dtype: torch.dtype | None) -> torch.dtype:
    saved_as = dtype_called(tensor.dtype)
    return saved_as if dtype is None or not saved_as.is_floating_point else dtype


def _write_config(
    saved: SavedRole, tensors: Mapping[str, SavedTensor], out_dir: Path, dtype: torch.dtype | None
) -> None:
    own = saved.folder / "config.json"
    path = out_dir / "config.json"
    config: dict[str, Any] = json.loads((own if own.is_file() else path).read_text(encoding="utf-8"))
    written = {_written_as(tensor, dtype) for tensor in tensors.values()}
    if len(floats := [dtype for dtype in written if dtype.is_floating_point]) == 1:
        config.pop("torch_dtype", None)  # its name in older releases of transformers
        config["dtype"] = dtype_name(floats[0])
    _write_json(path, config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
