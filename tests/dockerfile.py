"""The Dockerfile and .dockerignore, read as docker reads them, as far as our files need it."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction of a stage, such as RUN with its command."""

    name: str
    words: str


def read_stages(file: Path) -> dict[str, list[Instruction]]:
    """The instructions of each stage, those of the stages before it included. The first is always
    FROM an image."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    stages: dict[str, list[Instruction]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, words = line.split(maxsplit=1)
        if name == "FROM":
            parent, _, stage = words.split()
            stages[stage] = list(stages.get(parent, [Instruction(name, parent)]))
        else:
            stages[stage].append(Instruction(name, words.strip()))
    return stages


def is_ignored(path: str, ignore_file: Path) -> bool:
    """Whether docker does not send this path to the builder: the last rule that matches it or a
    folder above it."""
    ignored = False
    folders = [path, *(str(parent) for parent in Path(path).parents)]
    for rule in ignore_file.read_text(encoding="utf-8").splitlines():
        pattern = rule.lstrip("!").removeprefix("**/")
        names = [Path(folder).name for folder in folders] if "**/" in rule else folders
        if rule and not rule.startswith("#") and any(fnmatch(name, pattern) for name in names):
            ignored = not rule.startswith("!")
    return ignored
