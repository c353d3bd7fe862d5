"""The config in words: one key explained, from the schema alone."""

from __future__ import annotations

from rolepool.config.built import VALUES_IN_FORCE, is_built
from rolepool.config.loading import LoadedConfig, show, unknown_key
from rolepool.config.schema import all_keys, all_sections
from rolepool.errors import ConfigError


def explain(path: str, loaded: LoadedConfig) -> str:
    """What a key means, may hold, is by default and is now; of a group, its keys in a line each."""
    if path in all_keys():
        key = all_keys()[path]
        lines = [
            f"{path} = {show(loaded.value_of(path))}",
            f"  {key.doc}",
            f"  type: {key.type_text}",
            f"  default: {show(key.default)}",
        ]
        if not is_built(path):
            lines.append(f"  {status(path)}")
        return "\n".join(lines)
    if path in all_sections():
        below = [key for key in all_keys().values() if key.path.startswith(f"{path}.")]
        return "\n".join(f"{key.path} = {show(loaded.value_of(key.path))}\n  {key.doc}" for key in below)
    raise ConfigError(f"{show(path)}: {unknown_key(path)}")


def status(path: str) -> str:
    """What of a key that is not built is in force."""
    values = ", ".join(show(value) for value in VALUES_IN_FORCE[path])
    return f"not built yet; in force: {values}" if values else "not built yet"
