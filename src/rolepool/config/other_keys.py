"""Keys of verl that rolepool does not have: other names of its own keys, keys without effect, keys that it refuses.

Owns the decision about one key and its value. The table of these keys is `other_keys.yaml`. Does not load a config.
"""

import re
from pathlib import Path
from typing import Any, Literal

from rolepool.config.base import Items, Section, read_table

NULL_IS_UNSET = ("reward_model.", "custom_reward_function.")
"""Sections in which null in a file means that the key is not set: newer files of verl have these sections twice."""


class OtherKey(Section):
    """Keys, or sections, of another trainer that are treated in the same way."""

    keys: Items[str]
    """Their names, as patterns. A section stands for all keys below it."""
    works: Literal["any", "warned", "if_off"]
    """Which values are accepted: any value; any value, and the user is warned unless it is off; or off alone."""
    reason: str
    """Why they have no effect, or why they are refused and what to write instead."""
    same: Items[Any] = ()
    """Values that mean what rolepool does in any case. They count as off."""

    def is_off(self, value: Any) -> bool:
        """Whether the value asks for nothing that rolepool does not do."""
        return value in (None, False, "", "???") or value in ([], {}, *self.same)


class OtherKeys(Section):
    """The table."""

    renamed: dict[str, str]
    """Other names of keys and sections, as patterns. A new name may be renamed again by a later pattern."""
    same_values: dict[str, dict[Any, Any]]
    """Other ways to write a value, by key. false is 0."""
    other_keys: Items[OtherKey]
    """The first entry with a pattern that matches decides."""


VERL_KEYS = read_table(Path(__file__).with_suffix(".yaml"), OtherKeys)


def renamed(path: str) -> str:
    """The name that rolepool has for this key; the same name if it has no other."""
    for pattern, name in VERL_KEYS.renamed.items():
        path = re.sub(rf"^{pattern}(?=\.|$)", name, path)
    return path


def find_other(path: str) -> OtherKey | None:
    """The entry for a key that rolepool does not have."""
    for other in VERL_KEYS.other_keys:
        if any(re.fullmatch(rf"(?:{pattern})(\..*)?", path) for pattern in other.keys):
            return other
    return None
