"""The config in words: one key explained, and the page docs/config.md. Both come from the schema alone."""

from __future__ import annotations

from rolepool.config.built import VALUES_IN_FORCE, is_built
from rolepool.config.loading import LoadedConfig, show, unknown_key
from rolepool.config.schema import Key, all_keys, all_sections
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
            lines.append(f"  {_status(path)}")
        return "\n".join(lines)
    if path in all_sections():
        below = [key for key in all_keys().values() if key.path.startswith(f"{path}.")]
        return "\n".join(f"{key.path} = {show(loaded.value_of(key.path))}\n  {key.doc}" for key in below)
    raise ConfigError(f"{show(path)}: {unknown_key(path)}")


def markdown() -> str:
    """docs/config.md."""
    lines = [
        "# Config keys",
        "",
        "Generated from the schema by `python scripts/write_config_docs.py`; do not edit by hand.",
        "",
        "Write keys in YAML files, as `key=value` on the command line, or both: files are merged from left to right,",
        "then overrides in their order. `${a.b}` stands for the value of another key. `+key=value` means the same as",
        "`key=value`. `rolepool config` prints every key with its value in force, `rolepool config KEY` explains one.",
        "",
        "Keys marked *not built yet* are checked by `rolepool plan` and `rolepool config`; `rolepool train` refuses",
        "those of their values that are not in force.",
    ]
    heading = None
    for key in all_keys().values():
        section = _heading_of(key)
        if section != heading:
            heading = section
            lines.extend(["", f"## {section}", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"])
        lines.append(_row(key))
    return "\n".join(lines) + "\n"


def _heading_of(key: Key) -> str:
    first, second = key.path.split(".")[:2]
    return f"{first}.{second}" if first == "actor_rollout_ref" else first


def _status(path: str) -> str:
    values = ", ".join(show(value) for value in VALUES_IN_FORCE[path])
    return f"not built yet; in force: {values}" if values else "not built yet"


def _row(key: Key) -> str:
    status = "" if is_built(key.path) else f" *{_status(key.path)}.*"
    cells = [f"`{key.path}`", key.type_text, f"`{show(key.default)}`", key.doc + status]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
