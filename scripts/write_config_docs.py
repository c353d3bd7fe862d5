"""Write docs/config.md from the schema."""

from __future__ import annotations

from pathlib import Path

from rolepool.config.loading import show
from rolepool.config.schema import Key, all_keys


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


def _row(key: Key) -> str:
    cells = [f"`{key.path}`", key.type_text, f"`{show(key.default)}`", key.doc]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    file = Path(__file__).parent.parent / "docs" / "config.md"
    file.write_text(markdown(), encoding="utf-8")
    print(f"wrote {file}")
