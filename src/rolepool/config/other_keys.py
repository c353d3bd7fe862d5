"""Keys of verl that rolepool does not have: other names of its own keys, keys without effect, and
keys that it refuses.

Owns the table `other_keys.yaml`, and the decision about each such key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from rolepool.config.base import Items, Section, read_table
from rolepool.config.values import show


class OtherKey(Section):
    """Keys, or sections, of another trainer that are treated in the same way."""

    keys: Items[str]
    """Their names, as patterns. A section stands for all keys below it."""
    works: Literal["any", "warned", "if_off"]
    """Which values are accepted: any value; any value, and the user is warned unless it is off; or
    off alone."""
    reason: str
    """Why they have no effect, or why they are refused and what to write instead."""
    same: Items[Any] = ()
    """Values that mean what rolepool does in any case. They count as off."""
    same_as: str | None = None
    """A key of rolepool whose value counts as off, because it says the same."""

    def is_off(self, value: object, tree: DictConfig) -> bool:
        """Whether the value asks for nothing that rolepool does not do. `tree` has the values of
        rolepool's own keys."""
        if value in (None, False, "", "???") or value in ([], {}, *self.same):
            return True
        return self.same_as is not None and value == OmegaConf.select(tree, self.same_as)


class OtherKeys(Section):
    """The table."""

    renamed: dict[str, str]
    """Other names of keys and sections, as patterns. A new name may be renamed again by a later
    pattern."""
    same_values: dict[str, dict[Any, Any]]
    """Other ways to write a value, by key. false is 0."""
    other_keys: Items[OtherKey]
    """The first entry with a pattern that matches decides."""


VERL_KEYS = read_table(Path(__file__).with_name("other_keys.yaml"), OtherKeys)


@dataclass(frozen=True)
class Judgement:
    """What became of the keys that rolepool does not have."""

    without_effect: dict[str, str]
    """Why each accepted setting changes nothing."""
    warnings: list[str]
    """A line for each accepted setting that asks for something that rolepool does not do."""
    problems: list[str]
    """A line for each setting that is refused."""


def renamed(path: str) -> str:
    """The name that rolepool has for this key; the same name if it has no other."""
    for pattern, name in VERL_KEYS.renamed.items():
        path = re.sub(rf"^{pattern}(?=\.|$)", name, path)
    return path


def in_own_words(path: str, value: object) -> object:
    """The value of a key as rolepool writes it."""
    if not isinstance(value, str | int | None):
        return value  # it cannot be looked up
    return VERL_KEYS.same_values.get(path, {}).get(value, value)


def find_other(path: str) -> OtherKey | None:
    """The entry for a key that rolepool does not have."""
    for other in VERL_KEYS.other_keys:
        if any(re.fullmatch(rf"(?:{pattern})(\..*)?", path) for pattern in other.keys):
            return other
    return None


def judge(others: Mapping[str, Any], tree: DictConfig) -> Judgement:
    """Decide about keys that rolepool does not have. `tree` has the values of its own keys."""
    judgement = Judgement({}, [], [])
    for path, value in others.items():
        other = find_other(path)
        assert other is not None
        setting = f"{path}={show(value)}"
        is_off = other.is_off(value, tree)
        if other.works == "if_off" and not is_off:
            judgement.problems.append(f"{setting}: not supported: {other.reason}")
            continue
        judgement.without_effect[setting] = other.reason
        if other.works == "warned" and not is_off:
            judgement.warnings.append(f"{setting}: no effect: {other.reason}")
    return judgement
