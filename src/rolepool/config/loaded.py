"""A config that was read: its values, which keys the user set, and what is to be said about them."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from typing import Any

from rolepool.config.not_trained import why_not_trained
from rolepool.config.schema import Config, all_keys
from rolepool.config.unknown_keys import keys_below, unknown_key
from rolepool.config.values import show, to_yaml
from rolepool.errors import ConfigError, first_few

READ_AS_A_WHOLE = ("placement.split", "placement.roles", "roles")
"""Sections that are not read key by key."""


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and which keys the user set in files or overrides."""

    config: Config
    """The values, such as `config.trainer.save_freq`."""
    set_keys: frozenset[str]
    """The keys that files or overrides set; all others have their defaults."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Why a setting (`key=value`) that was accepted changes nothing."""
    warnings: Sequence[str] = ()
    """A line for each accepted setting that asks for something that training does not do."""
    unknown_names: Sequence[str] = ()
    """Keys and names in plain values that only an extension has, and that extension was not
    imported."""

    def value_of(self, path: str) -> Any:
        """The value of a key as plain data."""
        return reduce(getitem, path.split("."), self.config.model_dump(mode="json"))

    def to_yaml(self) -> str:
        """Every key with its value, in a form that can be used as a config file."""
        return to_yaml(self.config.model_dump(mode="json"))

    def why_not_trained(self) -> list[str]:
        """A line for each key that can be planned, but not trained."""
        return why_not_trained(self.config)

    def notes(self) -> list[str]:
        """A line that lists the settings that were accepted and change nothing, if there are
        any."""
        keys = [setting.partition("=")[0] for setting in self.without_effect]
        if not keys:
            return []
        reasons = "`rolepool config` with the same arguments says why"
        return [f"no effect here: {first_few(keys, 3)}; {reasons}"]

    def explain(self, path: str) -> str:
        """Meaning, type, default and current value of a key; for a section, one entry for each of
        its keys."""
        entries: list[str] = []
        for name in keys_below(path):
            entries.append(f"{self._setting_of(name)}\n  {all_keys()[name].doc}")
        if entries:
            return "\n".join(entries)
        if path not in all_keys():
            raise ConfigError(f"{show(path)}: {unknown_key(path)}")
        key = all_keys()[path]
        lines = [
            self._setting_of(path),
            key.doc,
            f"type: {key.type_text}",
            f"default: {show(key.default)}",
        ]
        return "\n  ".join(lines)

    def _setting_of(self, path: str) -> str:
        return f"{path} = {show(self.value_of(path))}"


@dataclass(frozen=True)
class Draft:
    """A config as it was read, and the problems that were found so far.

    Keys with a wrong value have no value here: reading one raises UnknownValue, which ends the
    check that needs it.
    """

    loaded: LoadedConfig
    problems: Sequence[str]

    def with_problems(self, problems: Iterable[str], wrong_keys: Iterable[str] = ()) -> "Draft":
        """This draft with further problems. `wrong_keys` are those that have no value because of
        them."""
        config = without_values(self.loaded.config, frozenset(wrong_keys))
        return Draft(replace(self.loaded, config=config), (*self.problems, *problems))

    def checked(self, *more: str) -> LoadedConfig:
        """The config. Raises ConfigError if there are problems, with `more` problems after them."""
        ConfigError.raise_if_any(dict.fromkeys([*self.problems, *more]))
        return self.loaded


def without_values(config: Config, paths: Set[str]) -> Config:
    """The config without the values of these keys. Some sections are only read as a whole, and are
    removed as such."""
    for name in sorted({_read_together(path) for path in paths}):
        config = config.without_value(name)
    return config


def _read_together(path: str) -> str:
    """The section that is read as a whole and has this key, or the key itself."""
    for section in READ_AS_A_WHOLE:
        if path.startswith(f"{section}."):
            return section
    return path
