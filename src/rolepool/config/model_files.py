"""What a model's config.json says, without torch.

Owns finding the file (in a folder, or in the local Hugging Face cache; nothing is ever downloaded), reading single
entries of it, and the messages for a folder that is missing or incomplete.
"""

import difflib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rolepool.errors import RolepoolError, first_few, one_line


class ShapeUnknown(RolepoolError, ValueError):
    """The model's shape is not known; the message says why."""


def read_model_file(path: str | None, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of a model's config.json, with entries replaced. `path` is a folder, or a hub id in the local cache.

    Raises ShapeUnknown with the reason.
    """
    if path is None:
        raise ShapeUnknown("no model path is set")
    try:
        files = [Path(path).expanduser() / "config.json"]
        if not files[0].parent.is_dir():
            hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
            snapshots = (hub / f"models--{path.replace('/', '--')}" / "snapshots").glob("*/config.json")
            files = sorted(snapshots, key=lambda snapshot: snapshot.stat().st_mtime)
        content = json.loads(files[-1].read_text(encoding="utf-8")) if files else None
    except (OSError, ValueError, RuntimeError) as error:
        raise ShapeUnknown(f"config.json of {path} cannot be read ({one_line(error)})") from error
    if not files:
        raise ShapeUnknown(f"{path} is not on disk, and plan never downloads")
    if not isinstance(content, dict):
        raise ShapeUnknown(f"config.json of {path} is not a JSON object")
    return {**content, **(overrides or {})}


def why_no_model(key: str, path: str | None) -> str | None:
    """Why the value of `key` cannot be a model; None if it can, or if only the hub knows."""
    if path is None:
        return f"{key}=null: no model is set; give a folder or a hub id"
    try:
        folder = Path(path).expanduser()
        if folder.is_dir():
            has_weights = any([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
            missing = [] if has_weights else ["weights"]
            missing += [] if (folder / "config.json").is_file() else ["config.json"]
            fix = "give a folder with a config.json and *.safetensors files"
            return f"{key}={path}: has no {' and no '.join(missing)}; {fix}" if missing else None
        is_hub_id = path.count("/") < 2 and not path.startswith(("/", ".", "~"))
        if is_hub_id and not (path.count("/") == 1 and folder.parent.is_dir()):
            return None
        with suppress(ShapeUnknown):
            read_model_file(path)
            return None  # a hub id in the local cache
        return f"{key}={path}: there is no such folder; {_nearest_folder(folder)}"
    except (OSError, ValueError, RuntimeError) as error:  # a home folder that does not exist, or a name that cannot be
        return f"{key}={path}: cannot be read ({one_line(error)}); give a folder or a hub id"


def _nearest_folder(missing: Path) -> str:
    """The folder that the user most likely means, or what is in the deepest folder of the path that exists."""
    parent = next(folder for folder in missing.parents if folder.is_dir())
    name, *below = missing.relative_to(parent).parts
    there = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    if close := difflib.get_close_matches(name, there, n=1, cutoff=0.5):
        found = parent.joinpath(close[0], *below)
        return f"did you mean {found if found.is_dir() else parent / close[0]}?"
    return f"the folders in {parent} are {first_few(there, 5)}" if there else f"{parent} contains no folder"


def num_positions(content: Mapping[str, Any]) -> int:
    """Most tokens in a sequence of a model with this config.json: its own number, or what its rotary embeddings are
    scaled to. Raises ValueError or TypeError if the file does not say."""
    written = entry_of(content, "max_position_embeddings", "n_positions")
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    scaled = rope.get("original_max_position_embeddings", written) * rope.get("factor", 1)
    return max(written, int(scaled))


def entry_of(content: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of the entries that is not missing, null or 0; models use all three for "there are none"."""
    name, value = next(((name, content[name]) for name in names if content.get(name)), (names[-1], default))
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{name}={value} must be an integer over 0")
    return value
