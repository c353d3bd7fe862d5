"""What the user most likely means by a name that no key has."""

import difflib

from rolepool.config.other_names import Hint, hint_for_key
from rolepool.config.schema import all_keys, all_sections

MIN_SIMILARITY = 0.9
"""How similar a key must be to the one that the user wrote. 1.0 is equal."""


def unknown_key(path: str) -> str:
    """Why this name cannot be set, and the keys of the section, or the key that the user most
    likely means."""
    if path in all_sections():
        examples = ", ".join(keys_below(path)[:2])
        return f"is a section; set one of its keys, such as {examples}"
    hints = _hints_for(path)
    if not hints:
        return "unknown key; `rolepool config` lists all keys"
    best = hints[0]
    return f"unknown key; did you mean {best.key}{best.remark}?"


def keys_meant_by(path: str) -> list[str]:
    """The keys that the user may mean by a name that does not exist, the most likely one first."""
    return [hint.key for hint in _hints_for(path)]


def _hints_for(path: str) -> list[Hint]:
    """The hints of the first rule that has some."""
    named = hint_for_key(path)
    if named is not None:
        return [named]
    without_first_sections = _keys_ending_with(path)
    if without_first_sections:
        return _without_remarks(without_first_sections)
    similar = difflib.get_close_matches(path, list(all_keys()), n=1, cutoff=MIN_SIMILARITY)
    if similar:
        return _without_remarks(similar)
    return _hints_for_end_of(path) or _only_key_with_last_name_of(path)


def _without_remarks(keys: list[str]) -> list[Hint]:
    return [Hint(key, "") for key in keys]


def _hints_for_end_of(path: str) -> list[Hint]:
    """The key for the end of a dotted name that begins with a section: `trainer.max_steps` is
    `max_steps`. A key of the same section is preferred: `critic.learning_rate` is
    `critic.optim.lr`, and not that of the actor."""
    words = path.split(".")
    for first in range(1, len(words)):
        section = ".".join(words[:first])
        end = ".".join(words[first:])
        hint = hint_for_key(end)
        if hint is None or section not in all_sections():
            continue
        _, _, last_name = hint.key.rpartition(".")
        keys_of_section = keys_below(section)
        in_section = [key for key in _keys_ending_with(last_name) if key in keys_of_section]
        if not in_section or hint.key in in_section:
            return [hint]
        return _without_remarks(in_section)
    return []


def keys_below(section: str) -> list[str]:
    """The keys of a section and of the sections in it."""
    return [key for key in all_keys() if key.startswith(f"{section}.")]


def _keys_ending_with(name: str) -> list[str]:
    return [key for key in all_keys() if key.endswith(f".{name}")]


def _only_key_with_last_name_of(path: str) -> list[Hint]:
    """The key of another section with the same last name, if there is only one. A name without an
    underscore, such as `path`, says too little."""
    _, _, last_name = path.rpartition(".")
    if "_" not in last_name:
        return []
    keys = _keys_ending_with(last_name)
    if len(keys) != 1:
        return []
    return _without_remarks(keys)
