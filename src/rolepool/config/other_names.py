"""The keys of rolepool for names of other trainers, for hints in error messages.

Owns the table `other_names.yaml`. A hint is only text: no name of the table can be used as a key.
"""

import re
from pathlib import Path
from typing import NamedTuple

from rolepool.config.base import Section, read_table


class Hint(NamedTuple):
    """A key, and a remark that follows it in a sentence; it may be empty."""

    key: str
    remark: str


class OtherNames(Section):
    """The content of `other_names.yaml`."""

    first_tries: dict[str, str]
    trl: dict[str, str]
    openrlhf: dict[str, str]


TABLE = read_table(Path(__file__).with_suffix(".yaml"), OtherNames)
AS_KEYS = {**TABLE.openrlhf, **TABLE.trl, **TABLE.first_tries}
"""The names that are written as `name=value`. If two trainers have the same name, the more usual
meaning counts."""
AS_OPTIONS = {**TABLE.first_tries, **TABLE.trl, **TABLE.openrlhf}
"""The names that are written as `--name value`, as OpenRLHF's are."""


def hint_for_key(name: str) -> Hint | None:
    """What the user most likely means by a name that is written as a key; dots count as `_`."""
    return _hint(AS_KEYS, name)


def hint_for_option(name: str) -> Hint | None:
    """What the user most likely means by an option; the name has no hyphens before it."""
    return _hint(AS_OPTIONS, name)


def _hint(names: dict[str, str], name: str) -> Hint | None:
    meaning = names.get(re.sub(r"[-.]", "_", name.lower()))
    if meaning is None:
        return None
    key, _, remark = meaning.partition(" ")
    return Hint(key, f" {remark}" if remark else "")
