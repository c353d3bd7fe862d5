"""How values are written: on one line in a message, and as YAML that OmegaConf reads back unchanged."""

import re
from collections.abc import Callable
from contextlib import suppress

import yaml

MAX_SHOWN = 80
"""The longest text of a value in a message."""
_REFERENCE_START = re.compile(r"(\\*)\$\{")
_MISSING = "???"
"""OmegaConf's mark of a value that is missing."""


def show(value: object) -> str:
    """A value on one line, as a user would type it."""
    text = _as_typed(value)
    if not text.isprintable():
        text = repr(text)
    if len(text) > MAX_SHOWN:
        return text[: MAX_SHOWN - 3] + "..."
    return text


def _as_typed(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        items = ",".join(show(item) for item in value)
        return f"[{items}]"
    if isinstance(value, dict):
        items = ",".join(f"{show(name)}:{show(item)}" for name, item in value.items())
        return f"{{{items}}}"
    return str(value)


# Text with references in it


def escaped(value: object) -> object:
    """The value, with texts such as `${x}` written so that they stay text when they are read as a
    config."""
    return _with_texts_changed(value, _with_references_escaped)


def fully_escaped(value: object) -> object:
    """The value, with texts such as `${x}`, and texts that look like OmegaConf's mark of a missing
    value, written so that they stay text when they are read as a config."""
    return _with_texts_changed(escaped(value), _with_missing_escaped)


def _with_references_escaped(text: str) -> str:
    # A backslash before `${` escapes it, and one that was there before must be doubled.
    return _REFERENCE_START.sub(lambda match: f"{match[1]}{match[1]}\\${{", text)


def _with_missing_escaped(text: str) -> str:
    before = text.removesuffix(_MISSING)
    is_only_backslashes = not before.strip("\\")
    if text.endswith(_MISSING) and is_only_backslashes:
        return f"\\{text}"
    return text


def _with_texts_changed(value: object, change: Callable[[str], str]) -> object:
    """The value with each text in it changed."""
    if isinstance(value, dict):
        return {name: _with_texts_changed(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts_changed(item, change) for item in value]
    if isinstance(value, str):
        return change(value)
    return value


# YAML


def to_yaml(values: object) -> str:
    """Plain data as the text of a config file."""
    return yaml.dump(escaped(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes YAML that OmegaConf reads as the same values. OmegaConf takes more words for numbers
    than PyYAML does."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Texts that look like numbers are quoted, and those with line breaks are escaped, because YAML
    would fold some of them."""
    style = None if text.isprintable() else '"'
    with suppress(ValueError):
        float(text.replace("_", ""))
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)
