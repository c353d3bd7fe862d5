"""Write docs/config.md from the schema."""

from __future__ import annotations

import re
from pathlib import Path

from rolepool.config import show
from rolepool.config.schema import Key, all_keys

SHORTER = {
    "true or false": "boolean",
    "an integer": "integer",
    "a number": "number",
    "a mapping, such as {name: value}": "mapping",
    "a list, each ": "list of ",
    "a pair, each number,": "pair of numbers,",
    "one of ": "",
    "integer, at least 1": "count",
    ", at least ": " ≥ ",
    ", greater than ": " > ",
    ", at most ": ", ≤ ",
    ", less than ": ", < ",
    "≥ 0, ≤ 1": "from 0 to 1",
    " or null": ", null",
}
"""Types are written with symbols here, because the page repeats them in every row."""


def markdown() -> str:
    """The page."""
    lines = [
        "# Config keys",
        "",
        "Generated from the schema by `python scripts/write_config_docs.py`; do not edit by hand.",
        "",
        "Write keys in YAML files, as `key=value` on the command line, or both: files are merged from left to right,",
        "then overrides in their order. `${a.b}` stands for the value of another key. `+key=value` means the same as",
        "`key=value`. `rolepool config` prints every key with its value, `rolepool config KEY` explains one.",
        "",
        "`rolepool plan` and `rolepool config` accept keys that are not implemented yet; `rolepool train` stops with",
        "an error if one of them is set to another value than the one that works.",
        "",
        "A count is an integer that is at least 1. A type is left out if default or meaning show it.",
    ]
    heading = None
    first_with: dict[str, str] = {}
    for key in all_keys().values():
        section = _heading_of(key)
        if section != heading:
            heading = section
            lines.extend(
                [
                    "",
                    f"## {section}",
                    "",
                    "| key | default (type) | meaning |",
                    "| --- | --- | --- |",
                ]
            )
        same = first_with.setdefault(key.doc, key.path)
        lines.append(_row(key, key.doc if same == key.path else f"see `{same}`"))
    return "\n".join(lines) + "\n"


def _heading_of(key: Key) -> str:
    first, second = key.path.split(".")[:2]
    return f"{first}.{second}" if first == "actor_rollout_ref" else first


def _row(key: Key, meaning: str) -> str:
    cells = [f"`{key.path}`", f"`{show(key.default)}`{_type_in_brackets(key)}", meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type_in_brackets(key: Key) -> str:
    """The type, unless the default or the meaning show it."""
    text = key.type_text
    if text == "true or false" and key.default in (True, False):
        return ""
    if text == "text" and key.default:
        return ""
    choices = text.removeprefix("one of ").split(", ")
    if text.startswith("one of ") and all(
        re.search(rf"\b{re.escape(choice)}\b", key.doc) for choice in choices
    ):
        return ""
    for words, symbols in SHORTER.items():
        text = text.replace(words, symbols)
    if key.default is None:
        text = text.removesuffix(", null")
    return f" ({text})"


if __name__ == "__main__":
    file = Path(__file__).parent.parent / "docs" / "config.md"
    file.write_text(markdown(), encoding="utf-8")
    print(f"wrote {file}")
