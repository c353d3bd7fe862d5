"""Explaining keys: what a key means, and which keys `rolepool train` does not implement yet."""

from __future__ import annotations

from typing import Any

from rolepool.config.loading import LoadedConfig, show, unknown_key
from rolepool.config.schema import all_keys, all_sections
from rolepool.errors import ConfigError

ONLY_VALUES: dict[str, Any] = {
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16,
}
"""Keys that training does not implement yet, with the one value that works. Another value is an error."""


def check_implemented(loaded: LoadedConfig) -> None:
    """Raise ConfigError if the user set a key to a value that training does not implement."""
    values = {path: loaded.value_of(path) for path in ONLY_VALUES if path in loaded.set_keys}
    wrong = {path: value for path, value in values.items() if value != ONLY_VALUES[path]}
    problems = [f"{path}={show(value)}: {status(path)}; leave it out" for path, value in wrong.items()]
    if loaded.config.actor_rollout_ref.rollout.name == "vllm":
        problems.append(
            "actor_rollout_ref.rollout.name=vllm: not implemented yet; use native, or your own module:class"
        )
    if problems:
        raise ConfigError(problems)


def status(path: str) -> str:
    """What a key that is not implemented can be set to."""
    return f"not implemented yet, only {show(ONLY_VALUES[path])} works"


def explain(path: str, loaded: LoadedConfig) -> str:
    """Meaning, type, default and current value of a key; for a section, one entry for each of its keys."""
    if path in all_sections():
        below = [key for key in all_keys().values() if key.path.startswith(f"{path}.")]
        return "\n".join(f"{key.path} = {show(loaded.value_of(key.path))}\n  {key.doc}" for key in below)
    if path not in all_keys():
        raise ConfigError(f"{show(path)}: {unknown_key(path)}")
    key = all_keys()[path]
    lines = [
        f"{path} = {show(loaded.value_of(path))}",
        key.doc,
        f"type: {key.type_text}",
        f"default: {show(key.default)}",
    ]
    return "\n  ".join([*lines, *([status(path)] if path in ONLY_VALUES else [])])
